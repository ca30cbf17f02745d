"""Groups as users launch them: from Python, from a shell, and with torchrun."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest
from torch.distributed import TCPStore

import arpc
from arpc import cli
from tests.integration import launching
from tests.integration.processes import CONTEXT, run_scripts

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = pytest.mark.usefixtures("runtime_directory")


async def test_a_function_returns_from_every_worker(capfd: pytest.CaptureFixture[str]):
    launched = await arpc.launch.local(launching.main_of_each, args=("hello",), workers={"ps": 1, "trainer": 1})
    heard = ["hello from ps0", "hello from trainer0"]
    assert launched.values == {"ps0": heard, "trainer0": heard}
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(180)  # four imports of torch, one after the other
def test_torchrun_starts_a_group_again_over_two_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # of this test, and not of the agent that comes first: it may end first, too, and the other waits for minutes
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "restarting"]
    agent += ["--rdzv-conf", "is_host=0", "--monitor-interval", "0.1"]
    agent += [str(SCRIPTS / "restarting.py"), str(tmp_path / "marker")]
    ended = run_scripts(agent, agent, limit_s=150.0)
    assert [one.returncode for one in ended] == [0, 0]
    printed = "".join(one.stdout for one in ended)
    for rank in (0, 1):
        assert f"worker{rank} of ['worker0', 'worker1'] heard 2 processes" in printed


def _run_in_files(arguments: list[str], out: str, err: str) -> None:
    for descriptor, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_TRUNC), descriptor)
    sys.exit(cli.main(arguments))


class Command:
    """``arpc`` in a process of its own, forked from one that has imported it."""

    def __init__(self, arguments: list[str], out: IO[str], err: IO[str]) -> None:
        self._files = (out, err)
        self.process = CONTEXT.Process(target=_run_in_files, args=(arguments, out.name, err.name))
        self.process.start()

    @property
    def out(self) -> str:
        return Path(self._files[0].name).read_text()

    @property
    def err(self) -> str:
        return Path(self._files[1].name).read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        while self.out.count(text) < times:
            assert self.process.is_alive(), (self.out, self.err)
            self.process.join(0.01)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def status(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode


@contextmanager
def command(*arguments: str) -> Iterator[Command]:
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        made = Command(["launch", *arguments], out, err)
        try:
            yield made
        finally:
            made.process.kill()
            made.process.join()


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """A script that sleeps, next to a process of its own that does so in another session."""
    path = tmp_path / "sleeper.py"
    path.write_text(
        "import os, subprocess, sys, time\n"
        "code = \"import time; print('awake', flush=True); time.sleep(1000)\"\n"
        "subprocess.Popen([sys.executable, '-S', '-c', code], start_new_session=True)\n"
        "print('awake', os.environ['ARPC_SECRET_FILE'])\n"
        "time.sleep(1000)\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ["--no-fork"]),
        (signal.SIGTERM, ["--no-fork"]),
        (signal.SIGHUP, ["--no-fork"]),
        (signal.SIGKILL, []),
    ],
)
def test_a_signal_to_the_launcher_ends_everything(sleeper: str, number: signal.Signals, options: list[str]):
    with command("-n", "2", *options, sleeper) as launch:
        launch.wait_for("awake", times=4)
        family = launch.family()
        # the supervisor, two workers, what they have started, and what they were forked from
        assert len(family) == 5 if options else 6
        assert launch.process.pid is not None
        os.kill(launch.process.pid, number)
        assert launch.status() == (-9 if number is signal.SIGKILL else 128 + number)
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert launch.err == ""
        (directory,) = {Path(line.split()[2]).parent for line in launch.out.splitlines() if len(line.split()) > 2}
        assert not directory.exists()


def test_the_command_returns_the_status_of_the_first_failure_and_shows_its_traceback_last(tmp_path: Path):
    path = tmp_path / "failing.py"
    path.write_text(
        "import os, sys, time\n"
        "if os.environ['ARPC_NAME'] == 'trainer1':\n"
        "    print('about to fail', sys.argv[1:], file=sys.stderr)\n"
        "    raise ValueError('on purpose')\n"
        "time.sleep(1000)\n"
    )
    with command("--role", "ps=1,trainer=2", "--no-fork", str(path), "--max-restarts", "is the script's") as launch:
        assert launch.status() == 1
        assert launch.out == ""
        said = launch.err
    assert "[trainer1] about to fail ['--max-restarts', \"is the script's\"]\n" in said
    last = said.rpartition("\nTraceback (most recent call last):\n")[2]
    assert last.endswith("ValueError: on purpose\n\narpc launch: worker 'trainer1' (rank 2) ended with exit code 1\n")
    assert "[trainer1]" not in last


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-n", "1", "/no/such/script.py"], "there is no script '/no/such/script.py'"),
        (["-n", "0", "x.py"], "one worker or more"),
        (["--role", "ps", "x.py"], "ps=1,trainer=3"),
    ],
)
def test_what_cannot_be_launched(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", *arguments]) == 2
    assert problem in capsys.readouterr().err
