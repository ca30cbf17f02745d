"""Workers in processes of their own, started fast, always reaped, and heard of when a test fails.

They are forked off a server that has imported torch once: a test has its processes within milliseconds. The test itself
joins their group, as the worker ``test``, and tells them what to do by calling them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import arpc

__all__ = ["Processes", "Start", "WorkerProcess", "impatience", "run_scripts"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch", "arpc._public", "tests.integration.functions"])

QUICK = arpc.RpcOptions(gc_freeze=False, heartbeat_interval=0.2, heartbeat_timeout=30.0, init_timeout=30.0)
"""How workers of tests behave when the test does not say: one that gets no CPU for a while is not taken for dead."""

END_LIMIT_S = 30.0


@dataclass(frozen=True)
class Start:
    """What a worker needs to know to join."""

    name: str
    init_method: str
    rank: int | None = None
    world_size: int | None = None
    options: arpc.RpcOptions = QUICK

    def join(self) -> Any:
        return arpc.init_rpc(
            self.name,
            rank=self.rank,
            world_size=self.world_size,
            init_method=self.init_method,
            options=self.options,
        )


@contextmanager
def impatience(worker: arpc.Worker) -> Iterator[None]:
    """Within the block a worker gives up soon who is silent, as the test has made somebody.

    Not before and not after it: on a busy machine a process may get no CPU for longer than a test cares to wait.
    """
    heartbeat = worker.agent.heartbeat
    patience_s, heartbeat._timeout_s = heartbeat._timeout_s, 1.0
    try:
        yield
    finally:
        heartbeat._timeout_s = patience_s


Main = Callable[[Start, Callable[[Any], None]], Coroutine[Any, Any, None]]
"""Runs in the process; its second argument tells the test something, see `WorkerProcess.told`."""


def _run(main: Main, start: Start, log: str, runtime_directory: str, pipe: Connection) -> None:
    os.environ["XDG_RUNTIME_DIR"] = runtime_directory
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
    arpc.run(lambda: main(start, pipe.send), debug=True)


class WorkerProcess:
    """One process, from outside."""

    def __init__(self, start: Start, main: Main, log: Path, runtime_directory: str) -> None:
        self.name = start.name
        self.log = log
        self._pipe, their_pipe = CONTEXT.Pipe(duplex=False)
        arguments = (main, start, str(log), runtime_directory, their_pipe)
        self._process = CONTEXT.Process(target=_run, args=arguments, name=start.name)
        self._process.start()
        their_pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """No chance to say goodbye."""
        if self.is_alive:
            self.signal(signal.SIGKILL)
        self._process.join(END_LIMIT_S)

    async def ended(self, limit_s: float = END_LIMIT_S) -> int:
        """Its exit code, once it has ended by itself: negative for a signal."""
        await asyncio.to_thread(self._process.join, limit_s)
        assert self._process.exitcode is not None, f"{self.name} has not ended in {limit_s} s\n{self.output}"
        return self._process.exitcode

    async def told(self, limit_s: float = END_LIMIT_S) -> Any:
        """The next thing the process has to tell."""
        assert await asyncio.to_thread(self._pipe.poll, limit_s), f"{self.name} says nothing\n{self.output}"
        return self._pipe.recv()

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        self._process.close()


def run_scripts(
    *commands: list[str], limit_s: float = 110.0, within: Sequence[list[str]] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python with each list of arguments, all at the same time, to their ends; none outlives this.

    ``within``: for each of them a command that runs it, such as ``ip netns exec there``.
    """
    # modules of the project, not of the script's folder alone
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with ExitStack() as stack:
        running = []
        for command, runner in zip_longest(commands, within, fillvalue=[]):
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [*runner, sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
            stack.callback(_end, process)
            running.append((process, output))
        deadline = time.monotonic() + limit_s
        with suppress(subprocess.TimeoutExpired):
            for process, _ in running:
                process.wait(max(0.0, deadline - time.monotonic()))
        ended = []
        for process, output in running:
            code = process.poll()
            output.seek(0)
            ended.append(subprocess.CompletedProcess(process.args, -1 if code is None else code, output.read()))
    for one in ended:
        print(f"---- {one.args} ended with {one.returncode} ----\n{one.stdout}")  # noqa: T201
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Processes:
    """All processes of one test. Their unix sockets are below the runtime directory, and nobody else's."""

    def __init__(self, directory: Path, runtime_directory: Path) -> None:
        self.directory = directory
        self.runtime_directory = runtime_directory
        self.started: dict[str, WorkerProcess] = {}

    def __getitem__(self, name: str) -> WorkerProcess:
        return self.started[name]

    @property
    def init_method(self) -> str:
        return f"file://{self.directory / 'store'}"

    def start(self, start: Start, main: Main) -> WorkerProcess:
        """A process that runs ``main``. One of the same name that was started before must have ended."""
        earlier = self.started.pop(start.name, None)
        if earlier is not None:
            assert not earlier.is_alive
            earlier.close()
        log = self.directory / f"{start.name}.log"
        process = self.started[start.name] = WorkerProcess(start, main, log, str(self.runtime_directory))
        return process

    def sockets(self) -> list[str]:
        """The names of the unix sockets there are."""
        return sorted(path.name for path in self.runtime_directory.glob("*/*.sock"))

    @asynccontextmanager
    async def group(self, *names: str, main: Main, options: arpc.RpcOptions = QUICK) -> AsyncIterator[arpc.Worker]:
        """A group of fixed size: worker ``test``, which is this one, and a process for each name.

        It ends without waiting for anybody: a test that wants a graceful end makes one itself.
        """
        size = len(names) + 1
        for rank, name in enumerate(names, start=1):
            self.start(Start(name, self.init_method, rank, size, options), main)
        worker = await Start("test", self.init_method, 0, size, options).join()
        try:
            yield worker
        finally:
            await worker.shutdown(graceful=False)

    def close(self) -> None:
        """End all of them, and print what they said: pytest shows it if the test has failed."""
        with ExitStack() as ends:  # of each one, whatever becomes of the others
            for process in self.started.values():
                ends.callback(process.close)
        for process in self.started.values():
            print(f"---- {process.name} ----\n{process.output}")  # noqa: T201
