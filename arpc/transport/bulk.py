"""Large tensors on their way, in chunks: all messages take turns, and small ones have every second turn."""

from __future__ import annotations

from collections import deque
from typing import Final

from arpc.wire.frames import CHUNK_BYTES

__all__ = ["SMALL_MESSAGE_BYTES", "BulkQueue", "BulkSend"]

SMALL_MESSAGE_BYTES: Final = 1 << 16
"""A message with at most this many bytes to send in chunks is small, and does not wait for large ones."""


class BulkSend:
    """A message whose large tensors are on their way."""

    __slots__ = ("buffers", "id", "index", "position", "size_bytes")

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers
        self.id = -1
        self.index = 0
        self.position = 0
        self.size_bytes = sum(buffer.nbytes for buffer in buffers)

    @property
    def is_sent(self) -> bool:
        return self.index == len(self.buffers)

    @property
    def unsent_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers[self.index :]) - self.position

    def next_chunk(self) -> memoryview:
        """The next bytes to be sent; they count as sent."""
        buffer = self.buffers[self.index]
        chunk = buffer[self.position : self.position + CHUNK_BYTES]
        self.position += chunk.nbytes
        if self.position == buffer.nbytes:
            self.index += 1
            self.position = 0
        return chunk


class BulkQueue:
    """The messages that one connection sends in chunks."""

    __slots__ = ("_is_turn_of_small", "_large", "_small", "small_bytes")

    def __init__(self) -> None:
        self._large: deque[BulkSend] = deque()
        self._small: deque[BulkSend] = deque()
        self._is_turn_of_small = True
        self.small_bytes = 0
        """What is unsent of small messages."""

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def append(self, bulk: BulkSend) -> None:
        if bulk.size_bytes <= SMALL_MESSAGE_BYTES:
            self._small.append(bulk)
            self.small_bytes += bulk.size_bytes
        else:
            self._large.append(bulk)

    def remove(self, bulk: BulkSend) -> bool:
        """Send no more of a message; False if none of it is left here."""
        if bulk in self._large:
            self._large.remove(bulk)
        elif bulk in self._small:
            self._small.remove(bulk)
            self.small_bytes -= bulk.unsent_bytes
        else:
            return False
        return True

    def next_chunk(self) -> tuple[int, memoryview]:
        """The number of a message and its next bytes, which count as sent. There must be one."""
        is_small = bool(self._small) and (self._is_turn_of_small or not self._large)
        self._is_turn_of_small = not is_small
        bulks = self._small if is_small else self._large
        bulk = bulks.popleft()
        chunk = bulk.next_chunk()
        if is_small:
            self.small_bytes -= chunk.nbytes
        if not bulk.is_sent:
            bulks.append(bulk)
        return bulk.id, chunk

    def clear(self) -> None:
        self._small.clear()
        self._large.clear()
        self.small_bytes = 0
