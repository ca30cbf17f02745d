"""Workers that are forked, next to the same that are started: nobody shall see a difference."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from arpc import launch
from arpc.launch import supervisor, supervisor_process, template
from arpc.launch.output import reading
from arpc.launch.supervisor_process import Exited, News, Started, SupervisorProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

IS_FORKED = "print('torch' in sys.modules)"


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a worker."""

    exit_code: int
    out: str
    err: str


class Group:
    """A supervisor, and programs that it runs."""

    def __init__(self) -> None:
        self.supervisor: SupervisorProcess
        self._count = 0
        self._pids: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}

    def hear(self, news: News) -> None:
        match news:
            case Started(rank, pid):
                self._pids[rank].set_result(pid)
            case Exited(rank, exit_code):
                self._exits[rank].set_result(exit_code)

    async def run(self, *words: str, then: Callable[[int], None] | None = None, **environment: str) -> Ended:
        """Run a program to its end. Once it has a process, ``then`` is called with the id of that."""
        loop = asyncio.get_running_loop()
        rank = self._count = self._count + 1
        self._pids[rank], self._exits[rank] = loop.create_future(), loop.create_future()
        pipes = [os.pipe(), os.pipe()]
        readers = [asyncio.create_task(_read(reader)) for reader, _ in pipes]
        command = [sys.executable, *words]
        output = (pipes[0][1], pipes[1][1])
        await self.supervisor.start(rank, command, environment=environment, directory=None, output=output)
        for descriptor in output:
            os.close(descriptor)
        if then is not None:
            then(await self._pids[rank])
        exit_code = await self._exits[rank]
        return Ended(exit_code, *[await reader for reader in readers])

    @staticmethod
    def process() -> psutil.Process:
        (found,) = (child for child in psutil.Process().children() if str(supervisor_process.SCRIPT) in child.cmdline())
        return found


async def _read(descriptor: int) -> str:
    async with reading(descriptor) as reader:
        return re.sub(r" at 0x\w+", "", (await reader.read()).decode())  # of objects, and each run has others


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    made = Group()
    made.supervisor = await SupervisorProcess.open(made.hear)
    yield made
    await made.supervisor.aclose()


# With ctypes, as both have it then: where Python uses the system's libffi, that keeps a descriptor of its own file
FACTS = """
    import ctypes, json, os, signal, sys, threading
    def about(stream):
        names = "name mode encoding errors line_buffering write_through newlines".split()
        return [getattr(stream, name) for name in names] + [type(stream.buffer).__name__, stream.seekable()]
    print(json.dumps({
        "globals": {name: str(value) for name, value in globals().items() if name.startswith("__")},
        "main": vars(sys.modules["__main__"]) is globals(),
        "interpreter": [sys.argv, sys.orig_argv, sys.path, str(sys.flags), sys.executable],
        "streams": [about(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "originals": [sys.stdout is sys.__stdout__, sys.stdin.read()],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(number)) for number in signal.Signals],
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "environment": sorted(os.environ.items()),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "place": [os.getcwd(), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getppid()],
        "command": open("/proc/self/cmdline").read().rstrip(chr(0)),
        "hook": sys.excepthook is sys.__excepthook__,
    }, indent=1, default=str))
"""

PROGRAMS = {
    "facts": FACTS,
    "an error": "def fail():\n    raise ValueError('on purpose')\nfail()",
    "a chain of errors": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "no Python": "print('never seen')\ndef (:\n",
    "a status": "import sys\nsys.exit(3)",
    "a text": "import sys\nsys.exit('some words')",
    "an interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(100)",
    "a kill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "a hasty end": "import os\nprint('seen')\nos._exit(5)",
    "a hook": "import sys\nsys.excepthook = lambda kind, error, _: print('hooked', kind, error)\nraise KeyError(1)",
    "last words": """
        import atexit, threading
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("from a thread"))).start()
        class Last:
            def __del__(self):
                print("collected")
        last = Last()
        print("the end")
    """,
    "a child": """
        import multiprocessing
        def work(queue):
            queue.put(__name__)
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            print(queue.get(), process.join(), process.exitcode)
    """,
}


async def test_a_forked_worker_differs_in_nothing_from_one_that_was_started(group: Group, tmp_path: Path):
    paths = [tmp_path / f"{name}.py" for name in PROGRAMS]
    for path in paths:
        path.write_text(textwrap.dedent(PROGRAMS[path.stem]))
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'a warning\\n')")
    (tmp_path / "module.py").write_text("import sys\nprint(__spec__, __file__, sys.argv)\nraise ValueError('there')")
    show = tmp_path / "show.py"
    show.write_text("import random, numpy, sys, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1))")
    forked = tmp_path / "forked.py"
    forked.write_text(f"import sys\n{IS_FORKED}")
    programs = [[str(path), "a word"] for path in paths]
    programs += [["-m", "module", "a word"], ["-m", "no.such.module"], ["-m", "platform"]]
    # where everybody looks, so that the directory of the tests need not be left
    found = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONUNBUFFERED": "1"}

    started = [await group.run(*words, RANK="0", **found) for words in programs]
    assert (await group.run(str(forked), **found)).out == "False\n"
    await group.supervisor.warm([sys.executable, str(forked)], found)
    for words, ended in zip(programs, started, strict=True):
        assert await group.run(*words, RANK="0", **found) == ended

    assert (await group.run(str(forked), **found)).out == "True\n"
    assert (await group.run(str(forked), **found, OMP_NUM_THREADS="7")).out == "False\n"
    assert len({(await group.run(str(show), **found)).out for _ in range(2)}) == 2
    await group.supervisor.end_all()  # as before a restart
    assert (await group.run(str(forked), **found)).out == "True\n"
    (tmp_path / "queue.py").touch()  # which was imported from elsewhere
    assert (await group.run(str(forked), **found)).out == "False\n"
    (tmp_path / "queue.py").unlink()

    def kill_template(worker: int) -> None:
        # the worker shows the command of the template, whose memory it has, until it has come to show its own
        children = [child for child in group.process().children() if child.pid != worker]
        (killed,) = (child for child in children if template.BOOT in child.cmdline())
        killed.kill()
        go.touch()

    go = tmp_path / "go"
    waiting = tmp_path / "waiting.py"
    waiting.write_text(
        f"import os, sys, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n{IS_FORKED}"
    )
    assert (await group.run(str(waiting), then=kill_template, **found)).out == "True\n"
    assert (await group.run(str(forked), **found)).out == "False\n"


@pytest.mark.parametrize(
    ("module", "is_hidden"),
    [
        ("queue.py", True),
        ("queue/__init__.py", True),
        ("queue.cpython-311.so", True),
        ("queue/data.txt", False),
        ("queue.txt", False),
        ("no_such_module.py", False),
        ("__main__.py", False),
    ],
)
def test_modules_that_hide_what_is_imported(tmp_path: Path, module: str, is_hidden: bool):
    path = tmp_path / module
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert template.hides_imported(tmp_path) is is_hidden


def test_a_directory_does_not_hide_what_was_imported_from_there():
    assert not template.hides_imported(Path(__file__).parents[2])
    assert not template.hides_imported(Path("/no/such/directory"))


# what the supervisor makes of a process to fork from that does not do its work: each of these is one
ASKED = """
    import json, os, socket, sys, time
    line = socket.socket(fileno=int(sys.argv[1]))
    line.sendall(b'{"warm": true}\\n')
    data, descriptors, _, _ = socket.recv_fds(line, 1, 4)
    while not data.endswith(b"\\n"):
        data += line.recv(1 << 16)
"""
BAD = {
    "ends": "",
    "ends when it is asked": ASKED,
    "refuses": ASKED + '    line.sendall(b\'{"refused": "no"}\\n\')\n    line.recv(1)\n',
    "forks, and ends before it can tell": ASKED
    + "    if os.fork() == 0:\n"
    + "        line.close()\n"
    + "        os.write(descriptors[1], b'forked' if os.read(descriptors[3], 1) else b'')\n",
}


BUSY = """
    import time
    while True:  # until it is ended: whoever does something is waited for
        open("/proc/self/stat").read()
        time.sleep(0.01)
"""


def use_instead(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    command = [sys.executable, "-S", "-c", textwrap.dedent(source), "{descriptor}"]
    monkeypatch.setattr(supervisor_process, "template_command", lambda _: command)


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
async def test_without_a_process_to_fork_from_workers_are_started(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    use_instead(monkeypatch, source)
    path = tmp_path / "script.py"
    path.write_text("import sys; print('started')")
    await group.supervisor.warm([sys.executable, str(path)], {})
    ends = await asyncio.gather(group.run(str(path)), group.run(str(path)))
    assert ends == [Ended(0, "started\n", "")] * 2


async def test_nobody_waits_long_for_one_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_instead(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    path = tmp_path / "script.py"
    path.write_text("print('started')")
    out, err = io.StringIO(), io.StringIO()
    await launch.local(path, workers=2, out=out, err=err)
    assert sorted(out.getvalue().splitlines()) == ["[worker0] started", "[worker1] started"]
    said = r"the process that workers are forked from, \d+, is stopped: an interpreter is started for each worker\n"
    assert re.fullmatch(said, err.getvalue())  # once


async def test_who_waits_to_be_forked_can_be_ended(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_instead(monkeypatch, BUSY)
    path = tmp_path / "script.py"
    path.touch()
    await group.supervisor.warm([sys.executable, str(path)], {})
    first, second = asyncio.create_task(group.run(str(path))), asyncio.create_task(group.run(str(path)))
    await asyncio.sleep(0)
    await group.supervisor.signal([1], signal.SIGINT)
    assert (await first).exit_code == -signal.SIGINT
    await group.supervisor.end_all()
    assert (await second).exit_code == -signal.SIGTERM


async def test_a_signal_reaches_one_that_is_just_being_forked(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_instead(
        monkeypatch,
        ASKED
        + f"    open({str(tmp_path / 'asked')!r}, 'w').close()\n"
        + f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        + "        time.sleep(0.01)\n"
        + "    if os.fork() == 0:\n"
        + "        worker = os.fork()\n"
        + "        if worker == 0:\n"
        + "            os.read(descriptors[3], 1)\n"
        + "            time.sleep(1000)\n"
        + "        line.sendall(json.dumps({'forked': worker}).encode() + b'\\n')\n"
        + "        os._exit(0)\n"
        + "    for descriptor in descriptors:\n"
        + "        os.close(descriptor)\n"
        + "    line.recv(1)\n",
    )
    path = tmp_path / "script.py"
    path.touch()
    await group.supervisor.warm([sys.executable, str(path)], {})
    running = asyncio.create_task(group.run(str(path)))
    while not (tmp_path / "asked").exists():  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.01)
    await group.supervisor.signal([1], signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert (await running).exit_code == -signal.SIGUSR1


async def test_a_signal_is_for_nobody_if_the_forked_one_has_ended(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_instead(
        monkeypatch,
        ASKED
        + "    reader, writer = os.pipe()\n"
        + "    if os.fork() == 0:\n"
        + "        worker = os.fork()\n"
        + "        if worker != 0:\n"
        + "            os.write(writer, str(worker).encode())\n"
        + "        os._exit(9)\n"
        + "    os.wait()\n"
        + "    worker = int(os.read(reader, 100))\n"
        + "    while os.path.exists(f'/proc/{worker}'):\n"  # until the supervisor has reaped it
        + "        time.sleep(0.01)\n"
        + f"    open({str(tmp_path / 'ended')!r}, 'w').close()\n"
        + f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        + "        time.sleep(0.01)\n"
        + "    for descriptor in descriptors:\n"
        + "        os.close(descriptor)\n"
        + "    line.sendall(json.dumps({'forked': worker}).encode() + b'\\n')\n"
        + "    line.recv(1)\n",
    )
    path = tmp_path / "script.py"
    path.touch()
    await group.supervisor.warm([sys.executable, str(path)], {})
    running = asyncio.create_task(group.run(str(path)))
    while not (tmp_path / "ended").exists():  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.01)
    await group.supervisor.signal([1], signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert (await running).exit_code == 9
    assert (await group.run("-c", "pass")).exit_code == 0  # the supervisor is well


async def test_no_more_wait_to_be_forked_than_there_are_descriptors_for(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_instead(monkeypatch, BUSY)
    path = tmp_path / "script.py"
    path.touch()
    group.process().rlimit(psutil.RLIMIT_NOFILE, (supervisor.SPARE_DESCRIPTORS + 4, 1024))
    await group.supervisor.warm([sys.executable, str(path)], {})
    running = [asyncio.create_task(group.run(str(path))) for _ in range(4)]
    await asyncio.wait(running[2:])
    assert [task.done() and task.result().exit_code for task in running] == [False, False, 0, 0]
    await group.supervisor.signal([1, 2], signal.SIGTERM)
    assert {(await task).exit_code for task in running[:2]} == {-signal.SIGTERM}


async def test_an_order_that_is_cancelled_halfway_spoils_no_other():
    heard: asyncio.Queue[News] = asyncio.Queue()
    supervisor = await SupervisorProcess.open(heard.put_nowait)
    try:
        with Path(os.devnull).open("w") as nothing:

            async def start(rank: int) -> None:
                large = {f"LARGE{number}": "x" * 100_000 for number in range(5)}  # more than a socket holds
                output = (nothing.fileno(), nothing.fileno())
                await supervisor.start(rank, ["true"], environment=large, directory=None, output=output)

            process = Group.process()
            process.suspend()
            try:
                orders = [asyncio.create_task(start(rank)) for rank in range(2)]
                _, waiting = await asyncio.wait(orders, timeout=0.1)
                assert waiting  # one of them for the rest of it to be taken
                for order in waiting:
                    order.cancel()
                await asyncio.wait(waiting)
            finally:
                process.resume()
            await start(2)
        while (news := await heard.get()) != Exited(2, 0):
            assert isinstance(news, Started | Exited)
    finally:
        await supervisor.aclose()


async def test_many_are_started_at_once(group: Group, tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text("import sys; print(sys.argv[1])")
    ends = await asyncio.gather(*(group.run(str(path), str(number)) for number in range(4)))
    assert [ended.out for ended in ends] == ["0\n", "1\n", "2\n", "3\n"]


async def test_nobody_is_left_when_the_supervisor_is_killed(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_instead(monkeypatch, BUSY)
    await group.supervisor.warm([sys.executable, str(tmp_path / "script.py")], {})
    while not (family := group.process().children()):  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.01)
    group.process().kill()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def looks_until_problem(pid: int, most: int) -> tuple[int, str]:
    """How many looks at a process it takes to find something wrong, and what."""
    activity = supervisor.ActivityMonitor(pid)
    for number in range(1, most + 1):
        if problem := activity.problem(number * supervisor.LOOK_S):
            return number, problem
    return most, ""


@pytest.mark.parametrize(
    ("source", "state", "looks", "expected"),
    [
        ("import time; time.sleep(1000)", psutil.STATUS_SLEEPING, supervisor.SILENT_LOOKS, "does nothing"),
        ("import os; os.kill(os.getpid(), 19)", psutil.STATUS_STOPPED, supervisor.STOPPED_LOOKS, "is stopped"),
        ("while True: pass", psutil.STATUS_RUNNING, 100, ""),
    ],
)
def test_who_does_nothing_is_found_out(source: str, state: str, looks: int, expected: str):
    process = psutil.Popen([sys.executable, "-S", "-c", f"print(flush=True)\n{source}"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        while process.status() != state:
            time.sleep(0.001)
        number, problem = looks_until_problem(process.pid, 100)
    finally:
        process.kill()
        process.communicate()
    assert problem == expected
    assert number >= looks
    assert looks_until_problem(process.pid, 100) == (100, "")  # its end is told by other means


def test_looks_that_follow_too_soon_do_not_count():
    activity = supervisor.ActivityMonitor(os.getppid())
    assert {activity.problem(1.0 + number * supervisor.LOOK_S / 1000) for number in range(900)} == {""}
