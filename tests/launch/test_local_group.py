"""Groups of small scripts, which import nothing slow, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import signal
import stat
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import arpc
from arpc.launch import Launched, Module
from arpc.launch.life import Failure
from arpc.launch.local_group import LocalGroup, Settings
from arpc.launch.meeting import StoreServer
from arpc.launch.output import Screen
from arpc.launch.plan import as_group
from arpc.launch.supervisor_process import SCRIPT as SUPERVISOR

MakeScript = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> MakeScript:
    def make(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, subprocess, sys, time\n" + textwrap.dedent(text))
        return path

    return make


@pytest.fixture(autouse=True)
def nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ARPC_LAUNCH_TEST", mark)
    before = set(psutil.Process().children(recursive=True))
    yield
    # what daemonized is no child any more, so it is looked for by what it inherited
    left = [process for process in psutil.process_iter() if _has(process, mark)]
    assert left == []
    assert set(psutil.Process().children(recursive=True)) <= before


def _has(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.environ().get("ARPC_LAUNCH_TEST") == mark and process.environ().get("ARPC_NAME"))
    return False


class Launch:
    """One launch of a script, with what it printed."""

    def __init__(self, program: Path | Module, *args: str, **settings) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        settings.setdefault("workers", 2)
        settings.setdefault("fork", False)  # which would import torch first
        self.task = asyncio.create_task(arpc.launch.local(program, args, out=self.out, err=self.err, **settings))

    async def result(self) -> Launched[None]:
        return await self.task

    async def fails(self) -> arpc.LaunchError:
        with pytest.raises(arpc.LaunchError) as raised:
            await self.task
        return raised.value

    async def printed(self, text: str, times: int = 1) -> None:
        """Wait for a text. If the launch ends without it, its error says why."""
        while self.out.getvalue().count(text) < times:
            assert not self.task.done(), (self.task, self.out.getvalue(), self.err.getvalue())
            await asyncio.sleep(0.01)


async def test_every_worker_runs_with_its_arguments_and_its_place(script: MakeScript):
    path = script(
        """
        print(os.environ["ARPC_NAME"], os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:])
        print("complaint", file=sys.stderr)
        """
    )
    launch = Launch(path, "--size", "3", workers={"ps": 1, "trainer": 2})
    launched = await launch.result()
    assert sorted(launch.out.getvalue().splitlines()) == [
        "[ps0] ps0 0 3 ['--size', '3']",
        "[trainer0] trainer0 1 3 ['--size', '3']",
        "[trainer1] trainer1 2 3 ['--size', '3']",
    ]
    assert sorted(launch.err.getvalue().splitlines()) == [
        "[ps0] complaint",
        "[trainer0] complaint",
        "[trainer1] complaint",
    ]
    assert launched.values == {"ps0": None, "trainer0": None, "trainer1": None}
    assert launched.restarts == 0


async def test_a_module_runs_as_python_would_run_it():
    launch = Launch(Module("platform"), workers=1)
    await launch.result()
    assert launch.out.getvalue().startswith("[worker0] ")


async def test_the_secret_is_in_a_file_of_this_user_alone(script: MakeScript, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ARPC_SECRET", raising=False)
    path = script(
        """
        path = os.environ["ARPC_SECRET_FILE"]
        print(path, oct(os.stat(path).st_mode), oct(os.stat(os.path.dirname(path)).st_mode), open(path).read())
        assert "ARPC_SECRET" not in os.environ
        """
    )
    secrets = set()
    for _ in range(2):
        launch = Launch(path, workers=1)
        await launch.result()
        _, file, file_mode, directory_mode, secret = launch.out.getvalue().split()
        assert stat.S_IMODE(int(file_mode, 8)) == 0o600
        assert stat.S_IMODE(int(directory_mode, 8)) == 0o700
        assert len(secret) >= 64
        assert not Path(file).exists()
        secrets.add(secret)
    assert len(secrets) == 2


async def test_a_secret_of_the_users_own_is_kept(script: MakeScript, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARPC_SECRET", "mine")
    launch = Launch(script("print(os.environ['ARPC_SECRET'], 'ARPC_SECRET_FILE' in os.environ)"), workers=1)
    await launch.result()
    assert launch.out.getvalue() == "[worker0] mine False\n"


async def test_the_first_failure_ends_the_group(script: MakeScript):
    path = script(
        """
        if os.environ["RANK"] == "1":
            raise ValueError("on purpose")
        print("waiting")
        time.sleep(1000)
        """
    )
    error = await Launch(path, workers={"ps": 1, "trainer": 2}).fails()
    assert (error.worker, error.exit_code) == ("trainer0", 1)
    assert str(error) == "worker 'trainer0' (rank 1) ended with exit code 1"
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert error.traceback.endswith("ValueError: on purpose")


async def test_the_worker_that_others_lost_is_to_blame(script: MakeScript):
    path = script(
        """
        class WorkerLostError(Exception):
            __module__ = "arpc.errors"
        if os.environ["RANK"] == "0":
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.001)
            raise WorkerLostError("worker 'worker1' was lost")
        open(sys.argv[1], "w").close()
        raise KeyError("the cause")
        """
    )
    error = await Launch(path, str(path.with_name("go"))).fails()
    assert error.worker == "worker1"
    assert error.traceback.endswith("KeyError: 'the cause'")


async def test_a_worker_that_was_killed(script: MakeScript):
    path = script("os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(1000)")
    error = await Launch(path).fails()
    assert str(error) == "worker 'worker1' (rank 1) was killed by SIGKILL"
    assert error.exit_code == -9


async def test_who_does_not_listen_is_killed(script: MakeScript):
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf")
        if os.environ["RANK"] == "1":
            sys.stdin.read()
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            sys.exit(3)
        time.sleep(1000)
        """
    )
    go = path.with_name("go")
    launch = Launch(path, str(go), grace_s=0.1)
    await launch.printed("deaf", times=2)
    go.touch()
    assert (await launch.fails()).exit_code == 3


async def test_a_failed_group_is_started_again_at_another_place(script: MakeScript):
    path = script(
        """
        print(os.environ["ARPC_INCARNATION"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"])
        sys.exit(os.environ["ARPC_INCARNATION"] != "2" and os.environ["RANK"] == "0")
        """
    )
    launch = Launch(path, max_restarts=3)
    launched = await launch.result()
    assert launched.restarts == 2
    lines = [line.split() for line in launch.out.getvalue().splitlines() if line.startswith("[worker0]")]
    assert [line[1:3] for line in lines] == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert launch.err.getvalue().count("worker 'worker0' ended with exit code 1: starting the group again") == 2


async def test_a_breakpoint_says_how_a_worker_can_be_debugged(script: MakeScript, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    launch = Launch(script("breakpoint()"), workers=1)
    assert (await launch.fails()).exit_code == 1
    assert "breakpoint() was called in worker 'worker0', which `arpc launch` started" in launch.err.getvalue()


async def test_a_restart_says_what_a_worker_raised(script: MakeScript):
    path = script("assert os.environ['ARPC_INCARNATION'] != '0', 'not at first'")
    launch = Launch(path, workers=1, max_restarts=1)
    await launch.result()
    reason = "worker 'worker0' ended with exit code 1 (AssertionError: not at first): starting the group again (1 of 1)"
    assert reason in launch.err.getvalue()


async def test_a_worker_of_an_elastic_group_comes_back_to_the_others(script: MakeScript, tmp_path: Path):
    path = script(
        f"""
        print(os.getpid(), os.environ["ARPC_INCARNATION"], os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "1" and os.environ["ARPC_INCARNATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["RANK"] == "1":
            open({str(tmp_path / "back")!r}, "w").close()
        while not os.path.exists({str(tmp_path / "back")!r}):
            time.sleep(0.01)
        """
    )
    launch = Launch(path, max_restarts=1, elastic=True)
    launched = await launch.result()
    assert launched.restarts == 1
    assert launch.err.getvalue() == "worker 'worker1' was killed by SIGKILL: starting it again (1 of 1)\n"
    ran = [line.split() for line in launch.out.getvalue().splitlines()]
    incarnations = sorted((name, incarnation) for name, _, incarnation, _ in ran)
    assert incarnations == [("[worker0]", "0"), ("[worker1]", "0"), ("[worker1]", "1")]
    assert len({port for *_, port in ran}) == 1


async def test_restarts_come_to_an_end(script: MakeScript):
    error = await Launch(script("sys.exit(4)"), workers=1, max_restarts=1).fails()
    assert error.exit_code == 4
    assert "started again 1 time" in str(error)


GRANDCHILDREN = """
    sleeper = [sys.executable, "-S", "-c", "import time; print('asleep', flush=True); time.sleep(1000)"]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    print("ready")
"""


async def test_what_workers_started_and_left_ends_with_the_group(script: MakeScript):
    launch = Launch(script(GRANDCHILDREN))
    await launch.result()
    assert launch.out.getvalue().count("ready") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
async def test_names_of_processes_may_be_any_bytes(script: MakeScript):
    path = script(
        r"""
        code = "import time; open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(1, flush=True); time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        print("ready")
        """
    )
    launch = Launch(path, workers=1)
    await launch.result()
    assert launch.err.getvalue() == ""


async def test_cancelling_ends_everything(script: MakeScript):
    launch = Launch(script(textwrap.dedent(GRANDCHILDREN) + "time.sleep(1000)"))
    await launch.printed("asleep", times=4)
    launch.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launch.task


async def test_workers_are_asked_first(script: MakeScript):
    path = script(
        """
        def bye(*_):
            print("bye")
            sys.exit(0)
        signal.signal(signal.SIGTERM, bye)
        print("ready")
        time.sleep(1000)
        """
    )
    launch = Launch(path)
    await launch.printed("ready", times=2)
    launch.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launch.task
    assert launch.out.getvalue().count("bye") == 2


async def test_killing_the_supervisor_ends_everything(script: MakeScript):
    launch = Launch(script(textwrap.dedent(GRANDCHILDREN).replace(", start_new_session=True", "") + "time.sleep(1000)"))
    await launch.printed("asleep", times=4)
    (supervisor,) = (child for child in psutil.Process().children() if str(SUPERVISOR) in child.cmdline())
    family = supervisor.children(recursive=True)
    supervisor.kill()
    with pytest.raises(arpc.LaunchError, match="was killed"):
        await launch.task
    assert psutil.wait_procs(family, timeout=60)[1] == []


async def test_the_last_line_needs_no_end(script: MakeScript):
    launch = Launch(script("sys.stdout.write('no newline'); sys.stderr.write('here either')"), workers=1)
    await launch.result()
    assert launch.out.getvalue() == "[worker0] no newline\n"
    assert launch.err.getvalue() == "[worker0] here either\n"


async def test_much_output_is_complete_and_in_order(script: MakeScript):
    launch = Launch(script("for n in range(20000): sys.stdout.write(f'{n}\\n')"))
    await launch.result()
    for name in ("worker0", "worker1"):
        lines = [line.split()[1] for line in launch.out.getvalue().splitlines() if line.startswith(f"[{name}]")]
        assert lines == [str(n) for n in range(20000)]


async def test_a_script_that_is_not_there(tmp_path: Path):
    with pytest.raises(arpc.ConfigurationError, match="no script"):
        await arpc.launch.local(tmp_path / "none.py", workers=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_restarts": -1},
        {"grace_s": -1},
        {"environment": {"OMP_NUM_THREADS": 1}},
        {"environment": {"A=B": "1"}},
        {"environment": {"": "1"}},
        {"environment": {"A": "1\0"}},
    ],
)
async def test_settings_that_cannot_be(settings: dict, script: MakeScript):
    with pytest.raises(arpc.ConfigurationError):
        await arpc.launch.local(script(""), workers=1, **settings)


async def test_a_program_that_cannot_run(tmp_path: Path):
    slots = as_group(1)
    err = io.StringIO()
    group = LocalGroup(slots, lambda _: ["/no/such/program"], Settings(), tmp_path, Screen(slots, io.StringIO(), err))
    outcome = await group.run()
    assert outcome.failure == Failure(0, 127)
    assert "worker 'worker0': cannot run /no/such/program" in err.getvalue()


async def test_without_a_store_nobody_waits(script: MakeScript, monkeypatch: pytest.MonkeyPatch):
    def serve(_: StoreServer) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(StoreServer, "serve_blocking", serve)
    error = await Launch(script("time.sleep(1000)")).fails()
    assert str(error) == "the group has no store to meet in: no room"
    assert error.worker is None


@pytest.mark.parametrize("problem", [errno.EPIPE, errno.EIO, errno.ENOSPC])  # a terminal that is gone, a disk full
async def test_when_nobody_reads_any_more_workers_are_asked_to_end(script: MakeScript, tmp_path: Path, problem: int):
    class Reader(io.StringIO):
        def write(self, text: str) -> int:
            if "enough" in text:
                raise OSError(problem, os.strerror(problem))
            return super().write(text)

    path = script(
        """
        def bye(*_):
            open(sys.argv[1], "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, bye)
        while True:
            print("enough")
        """
    )
    slots = as_group(1)
    screen = Screen(slots, Reader(), io.StringIO())
    command = [sys.executable, str(path), str(tmp_path / "said goodbye")]
    outcome = await LocalGroup(slots, lambda _: command, Settings(), tmp_path, screen).run()
    assert outcome.interrupted_by is signal.SIGPIPE
    assert (tmp_path / "said goodbye").exists()
