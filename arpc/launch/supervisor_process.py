"""The launcher's end of the supervisor: starts workers, signals them and receives their exit codes."""

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
from arpc.launch.forking import can_fork, can_fork_worker, shared_environment, template_command

__all__ = ["Exited", "News", "NotForked", "Started", "SupervisorLost", "SupervisorProcess"]

SCRIPT: Final = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True)
class Started:
    """A worker was started."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended, or could not be started: then `problem` says why."""

    rank: int
    exit_code: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SupervisorLost:
    """The supervisor was killed, and with it the workers."""


@dataclass(frozen=True, slots=True)
class NotForked:
    """From now on each worker starts its own interpreter instead of being forked, because of a problem."""

    problem: str


News: TypeAlias = Started | Exited | SupervisorLost | NotForked


class SupervisorProcess:
    """The parent of the workers, a process of its own. `open` starts it; after `aclose` no process is left."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, listener: Callable[[News], None]
    ) -> None:
        self._process = process
        self._control = control
        self._listener = listener
        self._ended = asyncio.Event()
        self._ordering = asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None
        """The task that holds the lock until an order is sent. `aclose` sends one more order, and so waits for it."""
        self._template_environment: Mapping[str, str | None] | None = None
        self._pids: dict[int, int] = {}
        self._reading = asyncio.create_task(self._read(), name="arpc-launch-supervisor")

    @classmethod
    async def open(cls, listener: Callable[[News], None], directory: Path | None = None) -> Self:
        """Start a supervisor. The listener is called with each event; `SupervisorLost` is the last one.

        The supervisor removes the directory, which may contain only files, if this process dies before `aclose`.
        Raises `ConfigurationError` on a system without unix sockets.
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
                start_new_session=True,  # Ctrl-C is for the launcher, which decides what to do
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours, listener)

    async def warm(self, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
        """From now on fork workers from a process that has imported torch, where that makes no difference to them.

        The command and the environment are those of a worker; workers may differ in the variables that `arpc launch`
        sets for each. If they cannot be forked, this does nothing.
        """
        shared = shared_environment(environment)
        if can_fork() and can_fork_worker(command, environment, shared):
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
        """Start a worker. The caller closes the descriptors for its stdout, its stderr and perhaps its stdin.

        The worker leads a process group, or a ``session``. It may be forked, see `warm`, unless ``fork`` is False.
        """
        shared = self._template_environment
        order = {
            "start": rank,
            "command": list(command),
            "environment": dict(environment),
            "directory": directory,
            "input": stdin is not None,
            "session": session,
            "fork": fork and directory is None and shared is not None and can_fork_worker(command, environment, shared),
        }
        await self._order(order, output if stdin is None else (stdin, *output))

    async def signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Signal workers and the processes that they started; those that have ended are left alone."""
        await self._order({"signal": int(number), "ranks": list(ranks)})

    async def end_all(self) -> None:
        """End every process that workers have left behind. Returns when none is left."""
        if self._reading.done():
            return  # the supervisor is gone, and so are its processes
        self._ended.clear()
        await self._order({"end": True})
        await self._ended.wait()

    async def aclose(self) -> None:
        """End all processes, the supervisor last. A cancellation takes effect afterwards: closing takes moments."""
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
        self._control.close()  # not earlier: the loop was still watching it
        await self._process.wait()

    async def _order(self, order: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        data = json.dumps(order).encode() + b"\n"
        await self._ordering.acquire()  # an order is sent in several parts
        try:
            if descriptors:
                # the descriptors go with the first byte, sent separately: a full socket needs no second attempt
                await self._writable()
                socket.send_fds(self._control, [data[:1]], descriptors)
                data = data[1:]
        except BaseException as error:
            self._ordering.release()
            if isinstance(error, OSError):
                return  # the supervisor is gone, and `_read` reports it
            raise
        # A cancellation from here on does not stop the order: half an order would corrupt the next one
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
            # the kernel has killed the workers along with the supervisor, but not the processes that they started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._pids.clear()
        self._ended.set()
        self._listener(SupervisorLost())

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
