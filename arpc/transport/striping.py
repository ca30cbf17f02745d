"""*Lanes*: additional connections to a peer, which carry large tensors in stripes and nothing else.

Over a network with some latency one TCP connection does not fill the wire, and every small message on it waits for a
chunk of a large one. With lanes, large tensors do not use the main connection. A chunk goes to any lane that takes it,
and its header says where it belongs (`wire.striping`). If a lane is lost, the main connection is aborted: the chunks in
flight on the lane are lost, and neither side would notice.
"""

from __future__ import annotations

from typing import Final

from arpc.errors import ConnectionClosedError, WireError
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.wire.frames import CHUNK_BYTES, pack_header
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import State

__all__ = ["Lanes"]

_DATA: Final = int(MessageType.DATA)
# Smaller messages have gone out before a second connection would be of any help
_FROM_BYTES: Final = 2 * CHUNK_BYTES


class Lanes:
    """The lanes of one main connection, and the receiver of each of them."""

    def __init__(self, main: Connection) -> None:
        self._main = main
        self._lanes: list[Connection] = []
        self._next = 0
        self._is_pumping = False
        self.chunks_sent = 0

    @property
    def connections(self) -> list[Connection]:
        return list(self._lanes)

    def attach(self, lane: Connection) -> None:
        """Add an open connection as a lane. Its messages still go to its first receiver, with the main one's owner."""
        self._lanes.append(lane)
        lane.receiver = self
        lane.owner = self._main.owner

    # -- out

    @property
    def is_full(self) -> bool:
        return bool(self._main.bulk.striped) and all(lane.is_congested for lane in self._lanes)

    def take(self, bulk: BulkSend) -> bool:
        """Send the large tensors of a message whose frame has been sent; returns False if lanes are not worth it."""
        if not self._lanes or bulk.size_bytes < _FROM_BYTES:
            return False
        self._main.bulk.append(bulk, is_striped=True)
        # not before the frame, and the other frames of this turn, have been written
        self._main.loop.call_soon(self.pump)
        return True

    def pump(self) -> None:
        """Write chunks of the striped messages, in turns, to the lanes that take them."""
        striped = self._main.bulk.striped
        if self._is_pumping or not striped or self._main.protocol.state is State.CLOSED:
            return  # a lane was drained while it was written to, or all is sent, or the connection has ended
        self._is_pumping = True
        try:
            # While frames of the main connection wait, chunks would overtake them, and fill the peer's buffers
            for _ in self.connections:
                if not striped or self._main.is_full or (lane := self._free_lane()) is None:
                    break
                self._write_chunk(lane)
        finally:
            self._is_pumping = False
        if striped and not (self.is_full or self._main.is_full):
            # one for each lane in a turn: the kernel may take many of them, and small messages must not wait for all
            self._main.loop.call_soon(self.pump)
        if self._main.is_congested != self.is_full:
            self._main.look_for_room()
        if not striped:
            self._main.end_if_last()

    def _free_lane(self) -> Connection | None:
        lanes = self._lanes
        for _ in lanes:
            self._next = (self._next + 1) % len(lanes)
            lane = lanes[self._next]
            if not lane.is_congested and lane.is_open:
                return lane
        return None

    def _write_chunk(self, lane: Connection) -> None:
        number, index, position, chunk = self._main.bulk.next_stripe()
        self.chunks_sent += 1
        self._main.notify_bulk_left()
        header = pack_header(chunk.nbytes, _DATA, 0, 0, number, index, position // CHUNK_BYTES, 0, 0)
        lane.write_chunk(header, chunk)

    # -- callbacks of the lanes

    def connection_opened(self, connection: Connection) -> None:
        """Do nothing: lanes are open before they are attached."""

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        """Do nothing: a lane passes the messages that it completes to its first receiver, see `attach`."""

    def output_drained(self, connection: Connection) -> None:
        self.pump()

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        if connection in self._lanes:
            self._lanes.remove(connection)
        # None: it was closed on purpose, and so is the main connection, in a moment
        if error is not None and self._main.is_open:
            self._main.abort(WireError(f"one of its connections for large tensors was lost: {error}"))

    # -- the end

    def close(self, *, on_purpose: bool) -> None:
        """Close all lanes: the main connection has ended."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if on_purpose:
                lane.close()
            else:
                lane.abort(ConnectionClosedError("the connection that it belongs to has ended"))

    def statistics(self) -> dict[str, int]:
        """Return the counters of all lanes together."""
        return {
            "lanes": len(self._lanes),
            "lane_bytes_sent": sum(lane.bytes_sent for lane in self._lanes),
            "lane_bytes_received": sum(lane.bytes_received for lane in self._lanes),
            "lane_chunks_sent": self.chunks_sent,
        }
