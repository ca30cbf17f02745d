"""Workers of one process: the same frames through the same protocol, with no socket between them.

An address is ``memory://name`` in a `MemoryNetwork`. Bytes are copied on their way, as a socket would: a callee must
not see the caller's memory change.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from typing import Final

from arpc.errors import ConnectionClosedError
from arpc.transport.base import Accept, Connection, Listener, Receiver, Transport
from arpc.wire.protocol import Protocol

__all__ = ["MemoryConnection", "MemoryNetwork", "connect_pair"]

_HIGH_WATER: Final = 1 << 20
_DELIVER_BYTES: Final = 1 << 20


class MemoryConnection(Connection):
    """One end of a pipe. What is written arrives at the other end in a later turn of the loop."""

    def __init__(self, protocol: Protocol, receiver: Receiver, name: str) -> None:
        super().__init__(protocol, receiver)
        self._name = name
        self._other: MemoryConnection | None = None
        self._incoming: deque[bytes | memoryview] = deque()
        self._incoming_bytes = 0
        self._delivery: asyncio.Handle | None = None
        self._eof = False

    @property
    def address(self) -> str:
        return f"memory://{self._name}"

    def attach(self, other: MemoryConnection) -> None:
        self._other = other

    def _write(self, data: bytes | memoryview) -> None:
        other = self._other
        if other is None or other._is_closed:
            return
        other._incoming.append(data)
        other._incoming_bytes += len(data)
        if other._incoming_bytes > _HIGH_WATER:
            self._congested()
        other._schedule()

    def _write_chunk(self, header: bytes, chunk: memoryview) -> None:
        self._write(header)
        self._write(chunk)

    def _unsent_bytes(self) -> int:
        return self._other._incoming_bytes if self._other is not None else 0

    def _schedule(self) -> None:
        if self._delivery is None and not self._is_closed:
            self._delivery = self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        budget = _DELIVER_BYTES
        while self._incoming and budget > 0 and not self._is_closed:
            data = memoryview(self._incoming.popleft())
            buffer = self.protocol.get_buffer()
            taken = min(data.nbytes, buffer.nbytes)
            buffer[:taken] = data[:taken]
            if taken < data.nbytes:
                self._incoming.appendleft(data[taken:])
            self._incoming_bytes -= taken
            budget -= taken
            self._received(taken)
        other = self._other
        if other is not None and other.is_congested and self._incoming_bytes <= _HIGH_WATER // 4:
            other._drained()
        if self._incoming:
            self._schedule()
        elif self._eof:
            self._end_both()

    def _shut(self) -> None:
        other = self._other
        if other is None or other._is_closed:
            self._abort()
            return
        # the other end reads what is on its way, then both are over
        other._eof = True
        other._schedule()

    def _abort(self) -> None:
        self.loop.call_soon(self._end_both)

    def _end_both(self) -> None:
        other = self._other
        self._drop()
        if other is not None:
            other._drop()

    def _drop(self) -> None:
        self._incoming.clear()
        self._incoming_bytes = 0
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        self._ended(None)
        self._other = None


def connect_pair(
    connector: tuple[Protocol, Receiver], acceptor: tuple[Protocol, Receiver], name: str = "pair"
) -> tuple[MemoryConnection, MemoryConnection]:
    """Two connected ends whose handshake has begun."""
    near = MemoryConnection(*connector, name)
    far = MemoryConnection(*acceptor, name)
    near.attach(far)
    far.attach(near)
    near.start()
    return near, far


class _MemoryListener(Listener):
    def __init__(self, network: MemoryNetwork, name: str, accept: Accept) -> None:
        self._network = network
        self._name = name
        self.accept = accept

    @property
    def address(self) -> str:
        return f"memory://{self._name}"

    async def aclose(self) -> None:
        self._network._listeners.pop(self._name, None)


class MemoryNetwork(Transport):
    """The workers that can reach each other in this process."""

    def __init__(self) -> None:
        self._listeners: dict[str, _MemoryListener] = {}
        self._numbers = count(1)

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        name = address.removeprefix("memory://")
        listener = self._listeners.get(name)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens on {address}")
        near, _ = connect_pair((protocol, receiver), listener.accept(), name)
        return near

    async def listen(self, address: str, accept: Accept) -> Listener:
        name = address.removeprefix("memory://") or f"worker-{next(self._numbers)}"
        if name in self._listeners:
            raise ConnectionClosedError(f"memory://{name} is taken")
        listener = self._listeners[name] = _MemoryListener(self, name, accept)
        return listener
