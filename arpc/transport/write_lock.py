"""One socket, written by the loop and by threads.

The transport of a loop is for that loop alone. But a thread that has an answer need not wake the loop to get it sent:
the system takes bytes from any thread. A lock keeps one from writing in the middle of what another writes. The loop
waits for it, which takes as long as a system call that does not block. A thread that has it may send only if the
transport holds nothing back. Bytes that the system did not take then are the *rest*: the loop writes them before
anything else, and until then no thread sends.

A connection has a lock from when a thread first wants to send on it. Before, it costs nothing.
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
"""The system has no memory, which does not end a connection."""


def write_pieces(transport: asyncio.Transport, pieces: Iterable[bytes | memoryview]) -> None:
    """``transport.writelines``, after which it has told if it holds anything back."""
    transport.writelines(pieces)
    if transport.get_write_buffer_size():
        # That of asyncio does not tell before 3.12.9 and 3.13.2 (CVE-2024-12254), but looks whether it should have when
        # it is given limits
        transport.set_write_buffer_limits(high=0)


class WriteLock:
    """Stands in front of a transport: the loop writes through it.

    ``sock`` is another descriptor of the transport's socket. It is closed by `end`, which must be called before the
    transport closes its own: until then the peer would not see the end.
    """

    def __init__(self, transport: asyncio.Transport, sock: socket.socket, connection: Connection) -> None:
        # A lock that its holder may take again: whatever a transport calls back in the middle of a write, the loop
        # must not wait for itself
        self.lock = RLock()
        # What threads have sent, beside what the loop counts
        self.frames_sent = self.bytes_sent = self.writes = 0
        self._transport = transport
        self._socket = sock
        self._send = sock.send
        self._connection = connection
        self._rest = b""
        self._is_over = False

    # -- for threads

    def send(self, frames: list[bytes]) -> bool:
        """Send whole frames; False if they have to wait, or are too late: then none of them was sent.

        What the system does not take at once, the loop writes soon.
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
                    return True  # the connection is lost, and the loop is about to hear of it
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
        """No thread may send any more."""
        with self.lock:
            self._is_over = True

    def end(self) -> None:
        """The connection has ended."""
        with self.lock:
            self._is_over = True
            self._rest = b""
            self._socket.close()
