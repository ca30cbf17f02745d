"""Limits on the number of connections that a worker accepts, and on the time of their handshakes.

A *stranger*, an incoming connection whose handshake is not done, costs a socket, a few kilobytes and a timer. When
there are too many strangers, the one that has taken longest is aborted: a member is done within a few round trips. So
a flood keeps no member out, and costs no more than the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from arpc.errors import HandshakeError

if TYPE_CHECKING:
    from arpc.transport.connection import Connection

__all__ = ["HANDSHAKE_S", "ConnectionLimits"]

HANDSHAKE_S: Final = 30.0
"""A stranger that sends nothing must not keep a socket for ever. A worker that connects waits less: connect_timeout."""


class ConnectionLimits:
    """Counts and limits the connections of all listeners of a worker."""

    def __init__(
        self, *, max_connections: int = 1 << 16, max_strangers: int = 1 << 10, handshake_s: float = HANDSHAKE_S
    ) -> None:
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        # in the order in which they came
        self._strangers: dict[Connection, None] = {}
        self._members: set[Connection] = set()
        self.sent_away = 0

    def accepted(self, connection: Connection) -> None:
        """Count an incoming connection; it, or another one, may be aborted at once."""
        connection.handshake_s = self._handshake_s
        is_full = len(self._strangers) + len(self._members) >= self._max_connections
        if is_full and not self._strangers:
            self._send_away(
                connection, f"this worker has {self._max_connections} connections already (max_connections)"
            )
            return
        self._strangers[connection] = None
        if is_full or len(self._strangers) > self._max_strangers:
            longest = next(iter(self._strangers))
            del self._strangers[longest]
            self._send_away(longest, "its handshake took longer than that of others, and there are too many of them")

    def opened(self, connection: Connection) -> None:
        """Count a connection as a member's: its handshake is done."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._members.add(connection)

    def left(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._members.discard(connection)

    def _send_away(self, connection: Connection, reason: str) -> None:
        self.sent_away += 1
        connection.abort(HandshakeError(reason))

    def statistics(self) -> dict[str, int]:
        return {"members": len(self._members), "strangers": len(self._strangers), "sent_away": self.sent_away}
