"""Both ends of connections, watched: what a transport tells each of them can be waited for and looked at afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from arpc.transport.connection import Connection, Listener, Transport
from arpc.wire.frames import Limits, frame
from arpc.wire.handshake import Handshake, Identity, Role
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol
from arpc.wire.values.raw_memory import allocate as allocate_memory

__all__ = ["Endpoint", "Endpoints", "Pair", "bulk_frame", "small_frame", "turns_until"]

NEAR: Final = Identity("near", 1, 101, features=("shm",))
FAR: Final = Identity("far", 2, 202, features=("shm",))
LIMITS: Final = Limits(1 << 28, 1 << 36)


async def turns_until(condition: Callable[[], Any]) -> None:
    """Let the loop turn until something is true that nobody announces, such as a number of bytes having arrived."""
    while not condition():  # noqa: ASYNC110 - nobody sets an event
        await asyncio.sleep(0)


def small_frame(number: int, payload: bytes = b"") -> bytes:
    """A request that carries its content in itself."""
    return frame(MessageType.REQUEST, 0, number, 0, 0, payload)


def bulk_frame(number: int, buffers: list[memoryview]) -> bytes:
    """A request whose content is sent after it, see `Connection.send_bulk`."""
    sizes = tuple(buffer.nbytes for buffer in buffers)
    return frame(MessageType.REQUEST, 0, number, 0, 0, b"", buffer_sizes=sizes)


class Endpoint:
    """Hears of one connection (it is a `Receiver`), and remembers all of it."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.messages: list[Message] = []
        self.lost: list[Exception | None] = []
        self.drained = 0
        self.fail_in = ""
        """The name of the method that is to raise."""
        self._connection: Connection | None = None

    @property
    def has_connection(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "there is no connection yet"
        return self._connection

    @connection.setter
    def connection(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def numbers(self) -> list[int]:
        """The ids of the requests that came, in their order."""
        return [message.id for message in self.messages if message.type is MessageType.REQUEST]

    # -- called by the connection

    def connection_opened(self, connection: Connection) -> None:
        self._note(connection, "connection_opened", lambda: self.opened.append(connection))

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        self._note(connection, "messages_received", lambda: self.messages.extend(messages))

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._note(connection, "connection_lost", lambda: self.lost.append(error))

    def output_drained(self, connection: Connection) -> None:
        self.drained += 1
        self._note(connection, "output_drained", lambda: None)

    def _note(self, connection: Connection, name: str, note: Callable[[], object]) -> None:
        assert self._connection in {None, connection}, "an endpoint was told of two connections"
        assert not self.lost, f"{name} was called after connection_lost"
        self._connection = connection
        note()
        if self.fail_in == name:
            raise ZeroDivisionError(f"{name} was told to fail")

    # -- called by the one who watches

    async def until(self, condition: Callable[[], Any]) -> None:
        """Return when the condition holds; it is looked at in every turn of the loop."""
        await turns_until(condition)

    async def received(self, count: int) -> list[Message]:
        """The messages, once there are that many."""
        await self.until(lambda: len(self.messages) >= count)
        return self.messages

    async def ended(self) -> Exception | None:
        """How the connection ended, once it has."""
        await self.until(lambda: self.lost)
        return self.lost[0]


class Pair(NamedTuple):
    """The two ends of an open connection; the near one made it."""

    near: Endpoint
    far: Endpoint


class Endpoints:
    """A listener of a transport, and connections to it. At the end of its ``async with`` all of them are closed.

    ``unhandled`` holds what the loop had to tell its exception handler: a transport never lets it come to that.
    """

    def __init__(self, transport: Transport, address: str, *, secret: bytes | None = None) -> None:
        self.transport = transport
        self.accepted: list[Endpoint] = []
        self.unhandled: list[dict[str, Any]] = []
        self.listener: Listener
        self.allocate: Callable[[int], memoryview] = allocate_memory
        """Makes the memory that far ends receive large buffers in."""
        self.admit: Callable[[Identity], None] = lambda _: None
        """What far ends say to a peer that proved itself."""
        self.accept_failing_in = ""
        self._address = address
        self._secret = secret
        self._made: list[Endpoint] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self.listener = await self.transport.listen(self._address, self.accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.listener.aclose()
        for endpoint in [*self._made, *self.accepted]:
            if endpoint.has_connection and not endpoint.lost:
                endpoint.connection.abort()
                await endpoint.ended()
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_exception_handler(None)
        if error is None:
            assert not self.unhandled, f"errors nobody handled: {self.unhandled}"

    def accept(self) -> tuple[Protocol, Endpoint]:
        """What the listener is given: a far end for each connection that comes in."""
        endpoint = Endpoint()
        endpoint.fail_in = self.accept_failing_in
        self.accepted.append(endpoint)
        handshake = Handshake(Role.ACCEPTOR, FAR, self._secret, self.admit)
        return Protocol(handshake, LIMITS, self.allocate), endpoint

    def connector(self, secret: bytes | None = None) -> Protocol:
        """What a near end speaks."""
        return Protocol(Handshake(Role.CONNECTOR, NEAR, secret or self._secret), LIMITS)

    async def start(self, protocol: Protocol | None = None, address: str | None = None) -> Endpoint:
        """A near end whose handshake has begun."""
        near = Endpoint()
        protocol = protocol or self.connector()
        near.connection = await self.transport.connect(address or self.listener.address, protocol, near)
        self._made.append(near)
        return near

    async def next_accepted(self, index: int = -1) -> Endpoint:
        """The far end of that number, once it is there."""
        await turns_until(lambda: len(self.accepted) >= max(1, index + 1))
        return self.accepted[index]

    async def pair(self) -> Pair:
        """An open connection."""
        number = len(self.accepted)
        near = await self.start()
        await near.connection.wait_opened()
        await turns_until(lambda: any(far.opened for far in self.accepted[number:]))
        return Pair(near, next(far for far in self.accepted[number:] if far.opened))
