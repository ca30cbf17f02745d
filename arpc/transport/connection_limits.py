"""How many may come in at once, and how long those may take who have not proven who they are.

A stranger costs a socket, a few kilobytes and a timer. When there are too many of them, the one that has taken longest
is sent away: whoever belongs here is done within a few round trips, while those that only sit there make room. So a
flood keeps no member out, and costs no more than the limit.
"""

from __future__ import annotations

from typing import Final, Protocol

from arpc.errors import HandshakeError

__all__ = ["ConnectionLimits", "Visitor"]

HANDSHAKE_S: Final = 30.0
"""A stranger who says nothing must not keep a socket for ever. A worker that connects waits less: connect_timeout."""


class Visitor(Protocol):
    """A connection that others made."""

    handshake_s: float

    def abort(self, error: Exception | None = None) -> None: ...


class ConnectionLimits:
    """Counts the connections of all listeners of a worker."""

    def __init__(
        self, *, max_connections: int = 1 << 16, max_strangers: int = 1 << 10, handshake_s: float = HANDSHAKE_S
    ) -> None:
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        # in the order in which they came
        self._strangers: dict[Visitor, None] = {}
        self._members: set[Visitor] = set()
        self.sent_away = 0

    def came(self, visitor: Visitor) -> None:
        """Somebody connected; it, or another, may be sent away at once."""
        visitor.handshake_s = self._handshake_s
        is_full = len(self._strangers) + len(self._members) >= self._max_connections
        if is_full and not self._strangers:
            self._send_away(visitor, f"this worker has {self._max_connections} connections already (max_connections)")
            return
        self._strangers[visitor] = None
        if is_full or len(self._strangers) > self._max_strangers:
            longest = next(iter(self._strangers))
            del self._strangers[longest]
            self._send_away(longest, "its handshake took longer than that of others, and there are too many of them")

    def opened(self, visitor: Visitor) -> None:
        """It has proven itself."""
        if visitor in self._strangers:
            del self._strangers[visitor]
            self._members.add(visitor)

    def left(self, visitor: Visitor) -> None:
        self._strangers.pop(visitor, None)
        self._members.discard(visitor)

    def _send_away(self, visitor: Visitor, reason: str) -> None:
        self.sent_away += 1
        visitor.abort(HandshakeError(reason))

    def statistics(self) -> dict[str, int]:
        return {"members": len(self._members), "strangers": len(self._strangers), "sent_away": self.sent_away}
