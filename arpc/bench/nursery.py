"""Starts the processes of all systems: with one supervisor, and one process that has imported their modules.

They are forked from that process, whichever system they belong to. Processes of a pair then have the same code at the
same addresses, which makes those that share a CPU faster, and no system gets that advantage by chance.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self, assert_never

from arpc.launch.supervisor_process import Exited, News, NotForked, Started, SupervisorLost, SupervisorProcess

__all__ = ["Nursery", "Offspring"]


class Offspring:
    """One process, with a socket that is its stdin and stdout."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.pid = 0
        """The process id; 0 until the process is started."""
        self.returncode: int | None = None
        self.problem = ""
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await self._ended.wait()

    async def wait_until_started(self) -> None:
        """Wait until it has a process id, or will never have one."""
        await self._started.wait()

    def start_nowait(self, pid: int) -> None:
        self.pid = pid
        self._started.set()

    def end_nowait(self, returncode: int, problem: str = "") -> None:
        self.returncode = returncode
        self.problem = problem
        self._started.set()
        self._ended.set()
        self.writer.close()


class Nursery:
    """Starts processes and receives their exit codes. `open` makes one; after `aclose` no process is left."""

    def __init__(self) -> None:
        self._supervisor: SupervisorProcess | None = None
        self._all: dict[int, Offspring] = {}
        self._count = 0
        self._is_lost = False

    @classmethod
    async def open(cls, *, warm: bool = True) -> Self:
        """Start the supervisor. Without `warm` no process is forked, and each imports its modules itself."""
        nursery = cls()
        nursery._supervisor = await SupervisorProcess.open(nursery._hear)
        if warm:
            await nursery._supervisor.warm(command_of("arpc.bench.serve", ()), environment_of({}))
        return nursery

    async def start(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str], log: BinaryIO, *, fork: bool
    ) -> Offspring:
        """Run a module in a session of its own, with these environment variables added. Its stderr goes to the log."""
        assert self._supervisor is not None
        ours, theirs = socket.socketpair()
        with theirs:
            child = Offspring(*await asyncio.open_unix_connection(sock=ours))
            number = self._count = self._count + 1
            self._all[number] = child
            if self._is_lost:
                self._hear(SupervisorLost())
            await self._supervisor.start(
                number,
                command_of(module, arguments),
                environment=environment_of(variables),
                directory=None,
                stdin=theirs.fileno(),
                output=(theirs.fileno(), log.fileno()),
                session=True,
                fork=fork,
            )
        await child.wait_until_started()
        return child

    async def aclose(self) -> None:
        """End all processes. Tasks that wait for one resume."""
        if self._supervisor is not None:
            try:
                await self._supervisor.aclose()
            finally:
                self._end_all("it was ended with all others")

    def _hear(self, news: News) -> None:
        match news:
            case Started(number, pid):
                self._all[number].start_nowait(pid)
            case Exited(number, exit_code, problem):
                self._all.pop(number).end_nowait(exit_code, problem)
            case NotForked(problem):
                warnings.warn(
                    f"{problem}: figures will be worse than those of processes that were forked", stacklevel=1
                )
            case SupervisorLost():
                self._end_all("the process that keeps all others was killed")
            case _:
                assert_never(news)

    def _end_all(self, problem: str) -> None:
        self._is_lost = True
        while self._all:
            self._all.popitem()[1].end_nowait(-9, problem)


def command_of(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which processes find the same packages in the same order as this one."""
    path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
    return {**os.environ, **variables, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
