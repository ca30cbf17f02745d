"""The contract of a transport: how it connects and listens, and what it reports.

Errors. `Transport.connect`, or `Connection.wait_opened` after it, raises `OSError` (no such address, refused),
`ConfigurationError` (a malformed address), `HandshakeError` or `ProtocolError` (the peer is not a worker of this
group), or `ConnectionClosedError`; timeouts are left to the caller. `Connection.send` raises `ConnectionClosedError`
once the connection is closed; nothing else. `Transport.listen` raises `OSError` (the address is taken, or not
permitted) and `ConfigurationError`. The end of a connection is reported once, to `Receiver.connection_lost`; if
`connect` raises, the receiver may get no call at all.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from arpc.errors import ConnectionClosedError
from arpc.transport.connection_limits import ConnectionLimits
from arpc.wire.messages import Message
from arpc.wire.protocol import Protocol as WireProtocol
from arpc.wire.protocol import State

if TYPE_CHECKING:
    from arpc.transport.connection import Connection

__all__ = ["Accept", "Listener", "Receiver", "Transport"]


class Receiver(Protocol):
    """The callbacks of a connection.

    They are called on the loop. An exception in one ends the connection, and is logged unless it is a `WireError` or an
    `OSError`.
    """

    def connection_opened(self, connection: Connection) -> None:
        """Called when the handshake is done: ``connection.peer`` is the peer's identity."""

    def messages_received(self, connection: Connection, messages: list[Message]) -> None: ...

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        """The last callback of a connection, called exactly once, whether it was ever open or not.

        ``error`` is None if it was closed on purpose, by this side or by a GOODBYE of the peer.
        """

    def output_drained(self, connection: Connection) -> None:
        """Called when there is room again, after `Connection.is_congested` or `Connection.is_behind` was true."""


Accept = Callable[[], tuple[WireProtocol, Receiver]]
"""Called for each incoming connection; returns its protocol and its receiver."""

C = TypeVar("C", bound="Connection")


class Listener(ABC):
    """An address that peers can connect to."""

    address: str
    """The address to connect to, with the port or path that was really taken."""

    def __init__(self, accept: Accept, limits: ConnectionLimits | None = None) -> None:
        self._accept = accept
        self._limits = limits
        self._accepted: weakref.WeakSet[Connection] = weakref.WeakSet()

    @abstractmethod
    async def aclose(self) -> None:
        """Stop accepting, and abort the connections that are not open yet. The open ones have owners of their own."""

    # -- for kinds of listeners

    def _track(self, connection: C) -> C:
        """Register an incoming connection."""
        self._accepted.add(connection)
        if self._limits is not None:
            connection.limits = self._limits
            self._limits.accepted(connection)
        return connection

    def _abort_handshakes(self) -> None:
        for connection in [each for each in self._accepted if each.protocol.state is State.HANDSHAKE]:
            connection.abort(ConnectionClosedError(f"{self.address} is no longer listened on"))


class Transport(ABC):
    """A way to reach peers, named by the scheme of its addresses."""

    @abstractmethod
    async def connect(self, address: str, protocol: WireProtocol, receiver: Receiver) -> Connection:
        """Return a connection whose handshake has begun; `Connection.wait_opened` waits for its outcome."""

    @abstractmethod
    async def listen(self, address: str, accept: Accept) -> Listener:
        """Listen on an address, which may leave the choice of the port or path to the transport."""
