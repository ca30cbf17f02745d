"""A network that loses, delays, repeats and reorders messages, or cuts connections, on demand and reproducibly.

Faults act on whole messages of a type, on the sending side, after the handshake. Counts are per `FaultyTransport`, so
that a test can say "the first three"; chance depends on the seed and on how many messages of the type went before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast, get_args

from arpc.errors import ConfigurationError, WireError
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.transport.contract import Accept, Listener, Receiver, Transport
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol
from arpc.wire.values.content import Content

__all__ = ["Action", "Fault", "FaultyTransport"]

T = TypeVar("T")

Action = Literal["drop", "delay", "duplicate", "reorder", "cut"]

_TYPE_BYTE: Final = 4
_TYPES: Final = {int(type_): type_ for type_ in MessageType}
# The handshake, and the messages that keep the two ends of a connection in step: with faults in these, a peer would
# report a protocol error instead of a bad network
_UNTOUCHABLE: Final = frozenset(
    type_ for type_ in MessageType if type_ < MessageType.FUNCTION and type_ is not MessageType.PING
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that hits messages of a type.

    ``drop``: never arrives. ``delay``: arrives ``delay_s`` later, others overtake it. ``duplicate``: arrives twice.
    ``reorder``: arrives after the next message of its connection, or ``delay_s`` later if none follows. ``cut``: the
    connection breaks instead.
    """

    type: MessageType
    action: Action
    count: int | None = None
    """The number of messages that it hits; None for no limit."""
    probability: float = 1.0
    """The probability with which each is hit."""
    delay_s: float = 0.01
    after: int = 0
    """The number of messages of the type that pass before the first hit."""

    def __post_init__(self) -> None:
        if self.type in _UNTOUCHABLE:
            raise ConfigurationError(f"{self.type.name} belongs to the connection itself: no fault can hit it")
        if self.action not in get_args(Action):
            raise ConfigurationError(f"a fault is one of {', '.join(get_args(Action))}, not {self.action!r}")
        if not 0 <= self.probability <= 1:
            raise ConfigurationError(f"a probability is between 0 and 1, not {self.probability!r}")
        if self.delay_s < 0 or self.after < 0 or (self.count is not None and self.count < 0):
            raise ConfigurationError("count, after and delay_s are 0 or more")


class _Active:
    """An active fault. Its random numbers are its own: other faults, and when they are injected, do not change them."""

    def __init__(self, fault: Fault, seed: str) -> None:
        self.fault = fault
        self.hits = 0
        self._seen = 0
        self._random = random.Random(seed)

    def would_hit(self) -> bool:
        """Whether it hits the next message of its type."""
        self._seen += 1
        chance = self._random.random()
        fault = self.fault
        return (
            self._seen > fault.after and (fault.count is None or self.hits < fault.count) and chance < fault.probability
        )


class FaultyTransport(Transport):
    """Another transport, with faults. ``seed`` decides which messages a fault with a probability hits.

    ::

        network = FaultyTransport(MemoryNetwork(), [Fault(MessageType.REPLY, "drop", count=1)])
        async with arpc.testing.cluster(2, transports={"memory": network}) as group:
            ...
    """

    def __init__(self, inner: Transport, faults: list[Fault] | None = None, *, seed: int = 0) -> None:
        self.injected: Counter[tuple[MessageType, Action]] = Counter()
        """The number of times that each kind of fault has happened."""
        self.seen: Counter[MessageType] = Counter()
        """The number of messages of each type that were sent, with or without a fault."""
        self._inner = inner
        self._seed = seed
        self._active: list[_Active] = []
        self._made = 0
        for fault in faults or ():
            self.inject(fault)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The active faults. If several hit a message, the first one takes effect."""
        return tuple(active.fault for active in self._active)

    def inject(self, fault: Fault) -> Fault:
        """Add a fault from now on, and return it."""
        self._active.append(_Active(fault, f"{self._seed}/{self._made}"))
        self._made += 1
        return fault

    def heal(self) -> None:
        """Remove all faults; delayed messages still arrive."""
        self._active.clear()

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        faulty = _FaultyReceiver(receiver, self)
        return faulty.wrapped(await self._inner.connect(address, protocol, faulty))

    async def listen(self, address: str, accept: Accept) -> Listener:
        def accept_faulty() -> tuple[Protocol, Receiver]:
            protocol, receiver = accept()
            return protocol, _FaultyReceiver(receiver, self)

        return await self._inner.listen(address, accept_faulty)

    def choose(self, type_: MessageType) -> Fault | None:
        """Return the fault that hits the next message of a type, if any."""
        self.seen[type_] += 1
        # all are asked, so that each counts all messages of its type
        hitting = [active for active in self._active if active.fault.type is type_ and active.would_hit()]
        if not hitting:
            return None
        hitting[0].hits += 1
        fault = hitting[0].fault
        self.injected[type_, fault.action] += 1
        return fault


class _FaultyReceiver:
    """Passes the callbacks of a connection to another receiver, with the faulty connection in its place."""

    def __init__(self, receiver: Receiver, transport: FaultyTransport) -> None:
        self._receiver = receiver
        self._transport = transport
        self._faulty: _FaultyConnection | None = None

    def wrapped(self, connection: Connection) -> Connection:
        """Return the connection with faults, always the same object."""
        if self._faulty is None:
            self._faulty = _FaultyConnection(connection, self._transport)
        return cast("Connection", self._faulty)  # it has all members of a connection

    def connection_opened(self, connection: Connection) -> None:
        self._receiver.connection_opened(self.wrapped(connection))

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        self._receiver.messages_received(self.wrapped(connection), messages)

    def output_drained(self, connection: Connection) -> None:
        self._receiver.output_drained(self.wrapped(connection))

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        faulty = self.wrapped(connection)
        if self._faulty is not None:
            self._faulty.forget_all()
        self._receiver.connection_lost(faulty, error)


class _FaultyConnection:
    """A connection whose sent messages meet faults. All else is delegated to the inner connection."""

    _connection: Connection
    _transport: FaultyTransport
    _held: Callable[[], object] | None
    _timers: set[asyncio.TimerHandle]

    def __init__(self, connection: Connection, transport: FaultyTransport) -> None:
        vars(self).update(_connection=connection, _transport=transport, _held=None, _timers=set())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._connection, name, value)

    def redirect(self, messages_received: Callable[[Connection, list[Message]], None]) -> None:
        this = cast("Connection", self)
        self._connection.redirect(lambda _, messages: messages_received(this, messages))

    def share_writing(self) -> None:
        """Do nothing: messages that threads write themselves would meet no faults."""

    def send_message(
        self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content
    ) -> BulkSend | None:
        send = self._connection.send_message
        return self._apply(type_, lambda: send(type_, flags, id_, arg, timeout_ms, content))

    def send(self, data: bytes) -> None:
        self._apply(data[_TYPE_BYTE], lambda: self._connection.send(data))

    def send_bulk(self, data: bytes, buffers: list[memoryview]) -> BulkSend:
        sent = self._apply(data[_TYPE_BYTE], lambda: self._connection.send_bulk(data, buffers))
        # one that is delayed or lost cannot be dropped
        return sent or BulkSend(buffers)

    # -- faults

    def _apply(self, type_byte: int, send: Callable[[], T]) -> T | None:
        """Send a message, subject to faults; return the result of the send if it was sent now."""
        type_ = _TYPES.get(type_byte)
        fault = self._transport.choose(type_) if type_ is not None else None
        action = fault.action if fault is not None else None
        if fault is None or action == "duplicate" or (action == "reorder" and self._held is not None):
            sent = send()
            if action == "duplicate":
                send()
            self._let_go()
            return sent
        if action == "delay":
            self._later(fault.delay_s, lambda: self._send_late(send))
        elif action == "reorder":
            self._held = send
            self._later(fault.delay_s, lambda: self._let_go(send))
        elif action == "cut":
            self._connection.abort(WireError(f"the connection to {self._connection.address} was cut by a fault"))
        return None

    def _let_go(self, which: Callable[[], object] | None = None) -> None:
        held = self._held
        if held is not None and which in {None, held}:
            self._held = None
            self._send_late(held)

    def _send_late(self, send: Callable[[], object]) -> None:
        if self._connection.is_open:
            send()

    def _later(self, delay_s: float, act: Callable[[], object]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            act()

        timer = self._connection.loop.call_later(delay_s, run)
        self._timers.add(timer)

    def forget_all(self) -> None:
        """Drop all held and delayed messages: the connection has ended."""
        self._held = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
