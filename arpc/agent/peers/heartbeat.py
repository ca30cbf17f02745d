"""Heartbeats: a silent peer gets a ping, and a peer that does not reply is given up.

The ping may have to wait on its way behind large messages. While it does, a connection on which bytes reach the peer is
alive. Once the ping has arrived, only a reply shows that: the system accepts bytes for a peer that is gone.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from arpc.agent.peers.connector import Connector
from arpc.errors import WireError
from arpc.options import RpcOptions
from arpc.transport.connection import Connection
from arpc.transport.timerfd import Alarm, CallAt
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType

__all__ = ["Heartbeat"]

_PING: Final = int(MessageType.PING)
_SIGN_OF_LIFE: Final = frame(int(MessageType.PONG), 0, 0, 0, 0, b"")


class _Seen(NamedTuple):
    """The state of a connection at the last check."""

    received: int
    """The bytes received."""
    delivered: int
    """The bytes that have arrived at the peer."""
    silent_since: float
    pinged: int
    """The number of bytes that must have arrived for the peer to have the ping; 0 if none was sent."""


class Heartbeat:
    """One timer for all connections of a worker."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: RpcOptions, connector: Connector, call_at: CallAt
    ) -> None:
        self._loop = loop
        self._call_at = call_at
        self._connector = connector
        self._timeout_s = options.heartbeat_timeout
        self._interval_s = options.heartbeat_interval
        # often enough to notice soon that a silence has lasted too long
        self._period_s = min(self._interval_s, self._timeout_s - self._interval_s) / 2
        self._seen: dict[Connection, _Seen] = {}
        self._expected = 0.0
        self._timer: Alarm | None = None
        self.pings_sent = 0
        self.peers_given_up = 0
        if self._interval_s:
            self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._seen.clear()

    def _arm(self) -> None:
        self._expected = self._loop.time() + self._period_s
        self._timer = self._call_at(self._expected, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        stalled = now - self._expected > self._period_s
        self._arm()
        before, self._seen = self._seen, {}
        for connection in self._connector.open_connections():
            received, delivered = connection.bytes_received, connection.count_delivered()
            seen = before.get(connection)
            # If this loop was busy, or the process stopped, messages that came meanwhile have not been read yet
            is_active = seen is None or stalled or seen.received != received
            pinged = 0 if seen is None or is_active else seen.pinged
            if seen is None or is_active or seen.delivered < delivered < pinged:
                self._seen[connection] = _Seen(received, delivered, now, pinged)
                if not connection.protocol.is_between_frames:
                    # A large message is arriving, and until it is complete its sender gets no other sign of life
                    connection.send(_SIGN_OF_LIFE)
                continue
            silence = now - seen.silent_since
            if silence >= self._timeout_s:
                self.peers_given_up += 1
                connection.abort(WireError(f"it has not been heard of for {silence:.1f} s"))
                continue
            if silence >= self._interval_s:
                self.pings_sent += 1
                connection.send(frame(_PING, 0, self.pings_sent, 0, 0, b""))
                connection.flush()  # so that the ping is counted
                pinged = pinged or connection.count_sent()
            self._seen[connection] = _Seen(received, delivered, seen.silent_since, pinged)

    def statistics(self) -> dict[str, int]:
        return {"pings_sent": self.pings_sent, "peers_given_up": self.peers_given_up}
