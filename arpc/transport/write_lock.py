"""One socket, written by the loop and by threads.

Only the loop may use its transport. But a thread that has a reply need not wake the loop to send it: the system takes
bytes from any thread. A lock keeps one writer from writing into the middle of what another writes. The loop
waits for the lock as long as a non-blocking system call takes. A thread that has it may send only if the transport
buffers nothing. Bytes that the system does not take then are the *rest*: the loop writes them before anything else, and
until then no thread sends.

A connection gets its lock when a thread first wants to send on it. Until then, it costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from arpc.transport.connection import Connection

__all__ = ["WriteLock", "write_pieces"]

_FOR_NOW: Final = frozenset((errno.ENOBUFS, errno.ENOMEM))
"""Errors of a system that has no memory at the moment, which do not end a connection."""


def write_pieces(transport: asyncio.Transport, pieces: Iterable[bytes | memoryview]) -> None:
    """Call ``transport.writelines``, and ensure that ``pause_writing`` was called if the transport buffers anything."""
    transport.writelines(pieces)
    if transport.get_write_buffer_size():
        # Before 3.12.9 and 3.13.2, asyncio's own does not call it (CVE-2024-12254), but setting the limits makes it
        # check whether it should have
        transport.set_write_buffer_limits(high=0)


class WriteLock:
    """Stands in front of a transport: the loop and threads write through it.

    ``sock`` is another descriptor of the transport's socket. `end` closes it, and must be called before the transport
    closes its own: while one of them is open, the peer does not see the end.
    """

    def __init__(self, transport: asyncio.Transport, sock: socket.socket, connection: Connection) -> None:
        # Reentrant: whatever a transport calls back in the middle of a write, the loop must not deadlock
        self.lock = RLock()
        # Sent by threads, in addition to what the connection counts
        self.frames_sent = self.bytes_sent = self.writes = 0
        self._transport = transport
        self._socket = sock
        self._send = sock.send
        self._connection = connection
        self._rest = b""
        self._is_over = False

    # -- for threads

    def send(self, frames: list[bytes]) -> bool:
        """Send whole frames; returns False, with none sent, if they have to wait or the connection is closed.

        Bytes that the system does not take at once are written by the loop soon.
        """
        data = b"".join(frames)
        size_bytes = len(data)
        with self.lock:
            if self._rest or self._is_over or self._connection.is_full:
                return False
            self.frames_sent += len(frames)
            self.bytes_sent += size_bytes
            self.writes += 1
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                if error.errno not in _FOR_NOW:
                    return True  # the connection is lost, and the loop is about to notice
                sent = 0
            if sent < size_bytes:
                self._rest = data[sent:]
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._connection.loop.call_soon_threadsafe(self.write_rest)
            return True

    # -- for the loop

    def write_rest(self) -> None:
        with self.lock:
            rest, self._rest = self._rest, b""
            if rest:
                self._transport.write(rest)
                # a transport that passes on all of it at once calls nothing back
                self._connection.notify_bulk_left()

    def write(self, data: bytes) -> None:
        with self.lock:
            if self._rest:
                self.write_rest()
            self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        with self.lock:
            if self._rest:
                self.write_rest()
            write_pieces(self._transport, pieces)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._rest)

    def shut(self) -> None:
        """Stop all sending by threads."""
        with self.lock:
            self._is_over = True

    def end(self) -> None:
        """Drop the rest and close ``sock``: the connection has ended."""
        with self.lock:
            self._is_over = True
            self._rest = b""
            self._socket.close()
