"""Workers of one process: the same frames through the same protocol, with no socket between them.

An address is ``memory://name`` in a `MemoryNetwork`. Bytes are copied on their way, as a socket would: a callee must
not see the caller's memory change.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from arpc.errors import ConfigurationError
from arpc.transport.connection import Accept, Connection, Listener, Receiver, Transport
from arpc.wire.protocol import Protocol

__all__ = ["MemoryConnection", "MemoryNetwork", "connect_pair"]

_HIGH_WATER: Final = 1 << 20
_LOW_WATER: Final = _HIGH_WATER // 4
_DELIVER_BYTES: Final = 1 << 20


def _nothing() -> None:
    """Called for an end that is not there yet, or not any more."""


class _Pipe:
    """One direction: what was written and is not read yet. Each end knows its two pipes, and not the other end."""

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()
        self.size_bytes = 0
        self.is_full = False
        self.is_ended = False
        """The writer has written its last."""
        self.is_abandoned = False
        """The reader will read no more."""
        self.readable: Callable[[], None] = _nothing
        self.writable: Callable[[], None] = _nothing

    def write(self, data: bytes | memoryview) -> None:
        if not self.is_abandoned:
            self.parts.append(memoryview(data))
            self.size_bytes += len(data)
            self.is_full = self.size_bytes > _HIGH_WATER
            self.readable()

    def read_into(self, buffer: memoryview) -> int:
        part = self.parts.popleft()
        size = min(part.nbytes, buffer.nbytes)
        buffer[:size] = part[:size]
        if size < part.nbytes:
            self.parts.appendleft(part[size:])
        self.size_bytes -= size
        return size

    def let_writer_go_on(self) -> None:
        if self.is_full and self.size_bytes <= _LOW_WATER:
            self.is_full = False
            self.writable()

    def end(self) -> None:
        self.is_ended = True
        self.writable = _nothing
        self.readable()

    def abandon(self) -> None:
        self.is_abandoned = True
        self.readable = _nothing
        self.clear()

    def clear(self) -> None:
        self.parts.clear()
        self.size_bytes = 0


class MemoryConnection(Connection):
    """One end of a pair of pipes. What is written arrives at the other end in a later turn of the loop."""

    def __init__(self, protocol: Protocol, receiver: Receiver, name: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        super().__init__(protocol, receiver)
        self._name = name
        self._incoming = incoming
        self._outgoing = outgoing
        self._delivery: asyncio.Handle | None = None
        incoming.readable = self._schedule
        outgoing.writable = self._drained

    @property
    def address(self) -> str:
        return f"memory://{self._name}"

    def _write(self, data: bytes | memoryview) -> None:
        self._outgoing.write(data)
        if self._outgoing.is_full:
            self._congested()

    def _write_pieces(self, pieces: tuple[bytes, memoryview]) -> None:
        header, chunk = pieces
        self._outgoing.write(header)
        self._write(chunk)

    def _unsent_bytes(self) -> int:
        return self._outgoing.size_bytes

    def _schedule(self) -> None:
        if self._delivery is None:
            self._delivery = self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        incoming = self._incoming
        budget = _DELIVER_BYTES
        while incoming.parts and budget > 0 and not self._is_aborted:
            size = incoming.read_into(self.protocol.get_buffer(-1))
            budget -= size
            self._received(size)
        incoming.let_writer_go_on()
        if incoming.parts:
            self._schedule()
        elif incoming.is_ended and not (self._is_mute and self._bulk):
            self._end()

    def _shut(self) -> None:
        self._outgoing.end()
        if self._incoming.is_ended:
            self.loop.call_soon(self._end)

    def _abort(self) -> None:
        self.loop.call_soon(self._end)

    def _end(self) -> None:
        """This end is over. The other one is, too, once it has read what was written before."""
        if self._incoming.is_abandoned:
            return
        self._incoming.abandon()
        if self._delivery is not None:
            self._delivery.cancel()
        if self._is_aborted:
            self._outgoing.clear()
        self._outgoing.end()
        self._ended(None)


def connect_pair(
    connector: tuple[Protocol, Receiver], acceptor: tuple[Protocol, Receiver], name: str = "pair"
) -> tuple[MemoryConnection, MemoryConnection]:
    """Two connected ends whose handshake has begun."""
    there, back = _Pipe(), _Pipe()
    near = MemoryConnection(*connector, name, back, there)
    far = MemoryConnection(*acceptor, name, there, back)
    near.start()
    far.start()
    return near, far


class _MemoryListener(Listener):
    def __init__(self, name: str, accept: Accept, forget: Callable[[], object]) -> None:
        super().__init__(accept)
        self._name = name
        self._forget = forget

    @property
    def address(self) -> str:
        return f"memory://{self._name}"

    def connect(self, protocol: Protocol, receiver: Receiver) -> Connection:
        near, far = connect_pair((protocol, receiver), self._accept(), self._name)
        self._track(far)
        return near

    async def aclose(self) -> None:
        self._forget()
        self._forget = _nothing
        self._abort_handshakes()


class MemoryNetwork(Transport):
    """The workers that can reach each other in this process."""

    def __init__(self) -> None:
        self._listeners: dict[str, _MemoryListener] = {}
        self._numbers = count(1)

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        listener = self._listeners.get(_name_in(address))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on {address}")
        return listener.connect(protocol, receiver)

    async def listen(self, address: str, accept: Accept) -> Listener:
        name = _name_in(address) or f"worker-{next(self._numbers)}"
        if name in self._listeners:
            raise OSError(errno.EADDRINUSE, f"memory://{name} is taken")
        listener = self._listeners[name] = _MemoryListener(name, accept, lambda: self._listeners.pop(name))
        return listener


def _name_in(address: str) -> str:
    scheme, separator, name = address.partition("://")
    if scheme != "memory" or not separator:
        raise ConfigurationError(f"{address!r} is not an address like memory://name")
    return name
