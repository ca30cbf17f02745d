"""Connections between workers of one process: the frames and the protocol of a socket connection, without a socket.

An address is ``memory://name`` in a `MemoryNetwork`. Bytes are copied on their way, as by a socket: a callee must not
see the caller's memory change.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from arpc.errors import ConfigurationError
from arpc.transport.connection import Connection, Phase
from arpc.transport.contract import Accept, Listener, Receiver, Transport
from arpc.wire.protocol import Protocol

__all__ = ["MemoryConnection", "MemoryNetwork", "connect_pair"]

_HIGH_WATER: Final = 1 << 20
_LOW_WATER: Final = _HIGH_WATER // 4
_DELIVER_BYTES: Final = 1 << 20


class MemoryConnection(Connection):
    """One end of a pair. Bytes written here arrive at the other end in a later turn of the loop."""

    far: MemoryConnection | None = None
    """The other end; None before `join`, and once this end has ended."""
    _write: Callable[[bytes | memoryview], None]

    def __init__(self, protocol: Protocol, receiver: Receiver, name: str) -> None:
        super().__init__(protocol, receiver)
        self.address = f"memory://{name}"
        self._parts: deque[bytes | memoryview] = deque()
        """The bytes that the other end has written and this end has not read yet."""
        self.unread_bytes = 0
        self._delivery: asyncio.Handle | None = None
        self._has_eof = False

    def join(self, far: MemoryConnection) -> None:
        """Write to another connection from now on, which must join this one too."""
        self.far = far
        self._write = far.arrived

    # -- called by the other end

    def arrived(self, data: bytes | memoryview) -> None:
        """Take bytes that the other end has written."""
        far = self.far
        if far is None:
            return
        self._parts.append(data)
        self.unread_bytes += len(data)
        if self.unread_bytes > _HIGH_WATER:
            far.pause_writing()
        self._schedule()

    def eof_received(self, *, is_aborted: bool = False) -> None:
        """Handle the end of the other end's output. If it was aborted, the bytes that were not read yet are lost."""
        self._has_eof = True
        if is_aborted:
            self._forget_input()
        self._schedule()

    def _schedule(self) -> None:
        if self._delivery is None:
            self._delivery = self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        parts = self._parts
        budget = _DELIVER_BYTES
        while parts and budget > 0:
            part = parts.popleft()
            buffer = self.protocol.get_buffer(-1)
            size = len(part)
            if size > len(buffer):
                size = len(buffer)
                view = memoryview(part)
                part = view[:size]
                parts.appendleft(view[size:])
            buffer[:size] = part
            self.unread_bytes -= size
            budget -= size
            self._received(size)
        far = self.far
        if far is not None and not far.is_full:
            far.notify_bulk_left()
        elif far is not None and self.unread_bytes <= _LOW_WATER:
            far.resume_writing()
        if parts:
            self._schedule()
        elif self._has_eof and not (self._phase is Phase.CLOSING and self.bulk):
            self._end()

    # -- called by Connection

    def _write_pieces(self, pieces: tuple[bytes, memoryview]) -> None:
        for piece in pieces:
            self._write(piece)

    def _unsent_bytes(self) -> int:
        return 0 if self.far is None else self.far.unread_bytes

    def _shut(self) -> None:
        if self.far is not None:
            self.far.eof_received()
        if self._has_eof:
            self.loop.call_soon(self._end)

    def _abort(self) -> None:
        self._forget_input()
        self.loop.call_soon(self._end)

    def _end(self) -> None:
        """End this end. The other one ends too, once it has read all that was written before."""
        far, self.far = self.far, None
        if far is None:
            return
        self._forget_input()
        far.eof_received(is_aborted=self._phase is Phase.ABORTED)
        self._ended(None)

    def _forget_input(self) -> None:
        self._parts.clear()
        self.unread_bytes = 0


def connect_pair(
    connector: tuple[Protocol, Receiver], acceptor: tuple[Protocol, Receiver], name: str = "pair"
) -> tuple[MemoryConnection, MemoryConnection]:
    """Return two connected ends whose handshake has begun."""
    near, far = MemoryConnection(*connector, name), MemoryConnection(*acceptor, name)
    near.join(far)
    far.join(near)
    near.start()
    far.start()
    return near, far


class _MemoryListener(Listener):
    def __init__(self, name: str, accept: Accept, listeners: dict[str, _MemoryListener]) -> None:
        super().__init__(accept)
        self._name = name
        self._listeners = listeners
        self.address = f"memory://{name}"

    def connect(self, protocol: Protocol, receiver: Receiver) -> Connection:
        near, far = connect_pair((protocol, receiver), self._accept(), self._name)
        self._track(far)
        return near

    async def aclose(self) -> None:
        if self._listeners.get(self._name) is self:
            del self._listeners[self._name]
        self._abort_handshakes()


class MemoryNetwork(Transport):
    """The transport between those workers of this process that share this object."""

    def __init__(self) -> None:
        self._listeners: dict[str, _MemoryListener] = {}
        self._numbers = count(1)

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        listener = self._listeners.get(_name_in(address))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no worker listens on {address}")
        return listener.connect(protocol, receiver)

    async def listen(self, address: str, accept: Accept) -> Listener:
        name = _name_in(address) or f"worker-{next(self._numbers)}"
        if name in self._listeners:
            raise OSError(errno.EADDRINUSE, f"memory://{name} is taken")
        listener = self._listeners[name] = _MemoryListener(name, accept, self._listeners)
        return listener


def _name_in(address: str) -> str:
    scheme, separator, name = address.partition("://")
    if scheme != "memory" or not separator:
        raise ConfigurationError(f"{address!r} is not an address like memory://name")
    return name
