"""Both ends of connections, for tests: each records the transport's callbacks, so that a test can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from arpc.transport.connection import Connection
from arpc.transport.contract import Listener, Transport
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
    """Let the loop run until a condition without an event is true, such as a number of bytes having arrived."""
    while not condition():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


def small_frame(number: int, payload: bytes = b"") -> bytes:
    """Return a request that includes its content."""
    return frame(MessageType.REQUEST, 0, number, 0, 0, payload)


def bulk_frame(number: int, buffers: list[memoryview]) -> bytes:
    """Return a request whose content is sent after it, see `Connection.send_bulk`."""
    sizes = tuple(buffer.nbytes for buffer in buffers)
    return frame(MessageType.REQUEST, 0, number, 0, 0, b"", buffer_sizes=sizes)


class Endpoint:
    """A `Receiver` that records all callbacks of one connection."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.messages: list[Message] = []
        self.lost: list[Exception | None] = []
        self.drained = 0
        self.fail_in = ""
        """The name of the callback that shall raise; empty for none."""
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
        """The ids of the requests received, in their order."""
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

    # -- called by the test

    async def until(self, condition: Callable[[], Any]) -> None:
        """Return when the condition holds; it is checked in every turn of the loop."""
        await turns_until(condition)

    async def received(self, count: int) -> list[Message]:
        """Return the messages, once there are that many."""
        await self.until(lambda: len(self.messages) >= count)
        return self.messages

    async def ended(self) -> Exception | None:
        """Return the error that ended the connection, once it has ended; None if it was closed on purpose."""
        await self.until(lambda: self.lost)
        return self.lost[0]


class Pair(NamedTuple):
    """The two ends of an open connection; the near one made it."""

    near: Endpoint
    far: Endpoint


class Endpoints:
    """A listener of a transport, and connections to it. At the end of its ``async with`` all of them are closed.

    ``unhandled`` holds the calls of the loop's exception handler: a conformant transport causes none.
    """

    def __init__(self, transport: Transport, address: str, *, secret: bytes | None = None) -> None:
        self.transport = transport
        self.accepted: list[Endpoint] = []
        self.unhandled: list[dict[str, Any]] = []
        self.listener: Listener
        self.allocate: Callable[[int], memoryview] = allocate_memory
        """The function that allocates memory into which far ends receive large buffers."""
        self.admit: Callable[[Identity], None] = lambda _: None
        """The function with which far ends admit an authenticated peer; it may raise `Refused`."""
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
        """Make a far end for an incoming connection. The listener calls this."""
        endpoint = Endpoint()
        endpoint.fail_in = self.accept_failing_in
        self.accepted.append(endpoint)
        handshake = Handshake(Role.ACCEPTOR, FAR, self._secret, self.admit)
        return Protocol(handshake, LIMITS, self.allocate), endpoint

    def connector(self, secret: bytes | None = None) -> Protocol:
        """Make the protocol of a near end."""
        return Protocol(Handshake(Role.CONNECTOR, NEAR, secret or self._secret), LIMITS)

    async def start(self, protocol: Protocol | None = None, address: str | None = None) -> Endpoint:
        """Connect a near end, and begin its handshake."""
        near = Endpoint()
        protocol = protocol or self.connector()
        near.connection = await self.transport.connect(address or self.listener.address, protocol, near)
        self._made.append(near)
        return near

    async def next_accepted(self, index: int = -1) -> Endpoint:
        """Return the far end with that index, once it exists."""
        await turns_until(lambda: len(self.accepted) >= max(1, index + 1))
        return self.accepted[index]

    async def pair(self) -> Pair:
        """Open a connection, and return both of its ends."""
        number = len(self.accepted)
        near = await self.start()
        await near.connection.wait_opened()
        await turns_until(lambda: any(far.opened for far in self.accepted[number:]))
        return Pair(near, next(far for far in self.accepted[number:] if far.opened))
