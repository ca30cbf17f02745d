"""Large tensors being sent, most in chunks: all messages take turns, and small ones have every second turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from arpc.wire.frames import CHUNK_BYTES

__all__ = ["SMALL_MESSAGE_BYTES", "BulkQueue", "BulkSend"]

SMALL_MESSAGE_BYTES: Final = 1 << 16
"""A message with at most this many bytes to send in chunks is small, and does not wait for large ones."""


class BulkSend:
    """A message whose large tensors are being sent."""

    __slots__ = ("buffers", "id", "index", "position", "size_bytes", "unsent_bytes")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.id = -1
        self.index = 0
        self.position = 0
        self.size_bytes = self.unsent_bytes = sum(buffer.nbytes for buffer in buffers)

    @property
    def is_sent(self) -> bool:
        return self.index == len(self.buffers)

    def next_chunk(self) -> memoryview:
        """Return the next bytes to send, which count as sent from now on."""
        buffer = self.buffers[self.index]
        chunk = buffer[self.position : self.position + CHUNK_BYTES]
        self.position += chunk.nbytes
        self.unsent_bytes -= chunk.nbytes
        if self.position == buffer.nbytes:
            self.index += 1
            self.position = 0
            if self.is_sent:
                self.buffers, self.index = (), 0  # objects that still refer to the message must not keep their memory
        return chunk


class BulkQueue:
    """The messages of one connection whose large tensors have not all gone out."""

    __slots__ = ("_is_turn_of_small", "_large", "_parked", "_small", "small_bytes", "striped", "unsent_bytes")

    def __init__(self) -> None:
        self._large: deque[BulkSend] = deque()
        self._small: deque[BulkSend] = deque()
        self.striped: deque[BulkSend] = deque()
        """The messages whose chunks go to lanes."""
        self._parked: set[BulkSend] = set()
        """The messages that wait for the peer to map shared memory, or for a copy."""
        self._is_turn_of_small = True
        self.unsent_bytes = 0
        self.small_bytes = 0
        """The unsent bytes of small messages."""

    def __len__(self) -> int:
        return len(self._small) + len(self._large) + len(self.striped) + len(self._parked)

    @property
    def has_chunks(self) -> bool:
        """Whether there is a chunk for the connection itself, not for its lanes."""
        return bool(self._small or self._large)

    def append(self, bulk: BulkSend, *, is_striped: bool = False) -> None:
        """Send a message in chunks."""
        is_small = bulk.size_bytes <= SMALL_MESSAGE_BYTES
        queue = self.striped if is_striped else self._small if is_small else self._large
        queue.append(bulk)
        self._count(queue, bulk.size_bytes)

    def remove(self, bulk: BulkSend) -> bool:
        """Stop sending chunks of a message; returns False if none is left here."""
        for queue in (self._large, self._small, self.striped):
            if bulk in queue:
                queue.remove(bulk)
                self._count(queue, -bulk.unsent_bytes)
                return True
        return False

    def next_chunk(self) -> tuple[int, memoryview]:
        """Return the number of a message and its next bytes, which count as sent. There must be a chunk."""
        is_small = bool(self._small) and (self._is_turn_of_small or not self._large)
        self._is_turn_of_small = not is_small
        bulk, chunk = self._next_of(self._small if is_small else self._large)
        return bulk.id, chunk

    def next_stripe(self) -> tuple[int, int, int, memoryview]:
        """Return a striped message's number, and its next bytes with their buffer and position; they count as sent."""
        bulk = self.striped[0]
        index, position = bulk.index, bulk.position
        return bulk.id, index, position, self._next_of(self.striped)[1]

    def _next_of(self, queue: deque[BulkSend]) -> tuple[BulkSend, memoryview]:
        bulk = queue.popleft()
        chunk = bulk.next_chunk()
        self._count(queue, -chunk.nbytes)
        if not bulk.is_sent:
            queue.append(bulk)
        return bulk, chunk

    def _count(self, queue: deque[BulkSend], size_bytes: int) -> None:
        self.unsent_bytes += size_bytes
        if queue is self._small:
            self.small_bytes += size_bytes

    def park(self, bulk: BulkSend) -> None:
        """Let a message wait. It counts as unsent, and may be dropped."""
        self._parked.add(bulk)
        self.unsent_bytes += bulk.size_bytes

    def unpark(self, bulk: BulkSend) -> bool:
        """End the wait of a message; returns False if it was dropped meanwhile, or the connection has ended."""
        if bulk not in self._parked:
            return False
        self._parked.remove(bulk)
        self.unsent_bytes -= bulk.size_bytes
        return True

    def clear(self) -> None:
        for queue in (self._small, self._large, self.striped, self._parked):
            queue.clear()
        self.unsent_bytes = self.small_bytes = 0
