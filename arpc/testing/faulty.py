"""A network that loses, delays, repeats and reorders messages, or cuts connections, as told and always the same way.

Faults act on whole messages of a type, on the sending side, after the handshake. Counts are per `FaultyTransport`, so that a test can say "the
first three".
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from arpc.errors import WireError
from arpc.transport.base import Accept, BulkSend, Connection, Listener, Receiver, Transport
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol

__all__ = ["Fault", "FaultyTransport"]

_TYPE_BYTE = 4


@dataclass
class Fault:
    """What happens to messages of a type: the ``count`` next ones (None: all), each with a probability.

    ``drop``: never arrives. ``delay``: arrives ``delay_s`` later, others overtake it. ``duplicate``: arrives twice. ``reorder``: arrives after the
    next message, or ``delay_s`` later. ``cut``: the connection breaks instead.
    """

    type: MessageType
    action: Literal["drop", "delay", "duplicate", "reorder", "cut"]
    count: int | None = None
    probability: float = 1.0
    delay_s: float = 0.01


class FaultyTransport(Transport):
    """Another transport, with faults. ``seed`` decides which messages they hit when they hit by chance."""

    def __init__(self, inner: Transport, faults: list[Fault] | None = None, *, seed: int = 0) -> None:
        self.faults = list(faults or [])
        self.injected: Counter[tuple[MessageType, str]] = Counter()
        """How often each fault has happened."""
        self.seen: Counter[MessageType] = Counter()
        """How many messages of each type were sent, with or without a fault."""
        self._inner = inner
        self._random = random.Random(seed)  # noqa: S311 - chance, not secrecy

    def inject(self, fault: Fault) -> Fault:
        """Add a fault from now on."""
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults; what is delayed still arrives."""
        self.faults.clear()

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        return await self._inner.connect(address, protocol, _FaultyReceiver(receiver, self))

    async def listen(self, address: str, accept: Accept) -> Listener:
        def accept_faulty() -> tuple[Protocol, Receiver]:
            protocol, receiver = accept()
            return protocol, _FaultyReceiver(receiver, self)

        return await self._inner.listen(address, accept_faulty)

    def choose(self, type_: MessageType) -> Fault | None:
        """The fault that hits the next message of a type, if any."""
        self.seen[type_] += 1
        for fault in self.faults:
            if fault.type is not type_ or fault.count == 0 or self._random.random() >= fault.probability:
                continue
            if fault.count is not None:
                fault.count -= 1
            self.injected[type_, fault.action] += 1
            return fault
        return None


class _FaultyReceiver:
    """Puts faults into a connection as soon as it is open."""

    def __init__(self, receiver: Receiver, transport: FaultyTransport) -> None:
        self._receiver = receiver
        self._transport = transport

    def connection_opened(self, connection: Connection) -> None:
        faults = _ConnectionFaults(connection, self._transport)
        connection.send = faults.send  # type: ignore[method-assign]
        connection.send_bulk = faults.send_bulk  # type: ignore[method-assign]
        self._receiver.connection_opened(connection)

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        self._receiver.messages_received(connection, messages)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._receiver.connection_lost(connection, error)

    def output_drained(self, connection: Connection) -> None:
        self._receiver.output_drained(connection)


class _ConnectionFaults:
    """Stands in for the sending methods of one connection."""

    def __init__(self, connection: Connection, transport: FaultyTransport) -> None:
        self._connection = connection
        self._transport = transport
        self._send = connection.send
        self._send_bulk = connection.send_bulk
        self._held: list[tuple[Callable[[], object], asyncio.TimerHandle]] = []

    def send(self, data: bytes) -> None:
        self._apply(data[_TYPE_BYTE], lambda: self._send(data))

    def send_bulk(self, data: bytes, buffers: list[memoryview]) -> BulkSend:
        sent: list[BulkSend] = []
        self._apply(data[_TYPE_BYTE], lambda: sent.append(self._send_bulk(data, buffers)))
        # one that is under way belongs to nobody: it cannot be dropped any more
        return sent[0] if sent else BulkSend(buffers)

    def _apply(self, type_byte: int, send: Callable[[], object]) -> None:
        fault = self._transport.choose(MessageType(type_byte))
        if fault is None:
            send()
            self._let_go()
        elif fault.action == "duplicate":
            send()
            send()
            self._let_go()
        elif fault.action == "delay":
            self._connection.loop.call_later(fault.delay_s, self._send_late, send)
        elif fault.action == "reorder":
            timer = self._connection.loop.call_later(fault.delay_s, self._let_go)
            self._held.append((send, timer))
        elif fault.action == "cut":
            self._connection.abort(WireError("the connection was cut"))

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for send, timer in held:
            timer.cancel()
            self._send_late(send)

    def _send_late(self, send: Callable[[], object]) -> None:
        if self._connection.is_open:
            send()
