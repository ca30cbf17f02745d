"""The launcher's end of the keeper: start workers, signal them, hear of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from arpc.errors import ConfigurationError
from arpc.launch.forking import can_fork, makes_no_difference, shared_environment, template_command

__all__ = ["Exited", "Keeper", "KeeperLost", "News", "NotForked", "Started"]

SCRIPT: Final = Path(__file__).with_name("keeper.py")


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended, or could not be started: then there is a `problem`."""

    rank: int
    exit_code: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KeeperLost:
    """Somebody killed the keeper, and with it the workers."""


@dataclass(frozen=True, slots=True)
class NotForked:
    """From now on workers are started by themselves, and not forked, because of a problem."""

    problem: str


News: TypeAlias = Started | Exited | KeeperLost | NotForked


class Keeper:
    """The parent of the workers, a process of its own. `open` it, and `aclose` it: then nobody is left."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, listener: Callable[[News], None]
    ) -> None:
        self._process = process
        self._control = control
        self._listener = listener
        self._ended = asyncio.Event()
        self._ordering = asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None
        """What holds the lock until all of an order is sent. `aclose` gives one more, and so waits for it."""
        self._template_environment: Mapping[str, str | None] | None = None
        self._pids: dict[int, int] = {}
        self._reading = asyncio.create_task(self._read(), name="arpc-launch-keeper")

    @classmethod
    async def open(cls, listener: Callable[[News], None], directory: Path | None = None) -> Self:
        """Start a keeper. The listener is called with what happens; after `KeeperLost` nothing will.

        The keeper removes the directory, in which are only files, if this process dies before it could `aclose`.
        """
        if not hasattr(socket, "send_fds"):
            raise ConfigurationError(
                f"launching takes unix sockets, which {sys.platform} lacks: start the workers by hand"
            )
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(SCRIPT),
                str(theirs.fileno()),
                *([] if directory is None else [str(directory)]),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher, which decides what it means
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours, listener)

    async def warm(self, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
        """From now on fork workers, where that makes no difference to them, from a process that has imported torch.

        The command and the environment are those of a worker, and workers may differ in what `arpc launch` sets for
        each. If they cannot be forked, this does nothing.
        """
        shared = shared_environment(environment)
        if can_fork() and makes_no_difference(command, environment, shared):
            self._template_environment = shared
            await self._order({"template": template_command(command), "environment": dict(self._template_environment)})

    async def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str | None],
        directory: str | None,
        output: tuple[int, int],
        stdin: int | None = None,
        session: bool = False,
        fork: bool = True,
    ) -> None:
        """Start a worker. The descriptors, for its stdout, stderr and perhaps stdin, are the caller's to close.

        It leads a process group, or a ``session``. Unless ``fork`` forbids it, it may be forked, see `warm`.
        """
        shared = self._template_environment
        order = {
            "start": rank,
            "command": list(command),
            "environment": dict(environment),
            "directory": directory,
            "input": stdin is not None,
            "session": session,
            "fork": fork
            and directory is None
            and shared is not None
            and makes_no_difference(command, environment, shared),
        }
        await self._order(order, output if stdin is None else (stdin, *output))

    async def signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Signal workers and the processes that they started; those that have ended are left alone."""
        await self._order({"signal": int(number), "ranks": list(ranks)})

    async def end_all(self) -> None:
        """End every process that workers have left behind. Returns when there is none."""
        if self._reading.done():
            return  # the keeper is no more, nor is anybody whom it kept
        self._ended.clear()
        await self._order({"end": True})
        await self._ended.wait()

    async def aclose(self) -> None:
        """End all there is, the keeper last. Being cancelled meanwhile is put off: it takes moments."""
        closing = asyncio.ensure_future(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._order({"dismiss": True})
        self._control.close()  # not before: the loop still watched it
        await self._process.wait()

    async def _order(self, order: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        data = json.dumps(order).encode() + b"\n"
        await self._ordering.acquire()  # an order is sent in parts
        try:
            if descriptors:
                # descriptors go with the first byte, which is sent apart: a full socket needs no second attempt
                await self._writable()
                socket.send_fds(self._control, [data[:1]], descriptors)
                data = data[1:]
        except BaseException as error:
            self._ordering.release()
            if isinstance(error, OSError):
                return  # the keeper is no more, and `_read` says so
            raise
        # Who is cancelled from here on has given the order all the same: half of one would spoil the next
        self._sending = asyncio.create_task(self._send(data))
        await asyncio.shield(self._sending)

    async def _send(self, data: bytes) -> None:
        try:
            with contextlib.suppress(OSError):  # as above
                await asyncio.get_running_loop().sock_sendall(self._control, data)
        finally:
            self._ordering.release()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._control, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._control)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        received = b""
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._control, 1 << 16):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
        for pid in self._pids.values():
            # the kernel has killed the workers along with their keeper; what they had started it has not
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._pids.clear()
        self._ended.set()
        self._listener(KeeperLost())

    def _hear(self, news: Mapping[str, object]) -> None:
        match news:
            case {"started": int(rank), "pid": int(pid)}:
                self._pids[rank] = pid
                self._listener(Started(rank, pid))
            case {"exited": int(rank), "code": int(code)}:
                self._pids.pop(rank, None)
                self._listener(Exited(rank, code, str(news.get("problem", ""))))
            case {"unforked": str(problem)}:
                self._listener(NotForked(problem))
            case {"ended": True}:
                self._ended.set()
