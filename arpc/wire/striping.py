"""Large tensors in stripes: chunks of one message that come over several connections, in any order.

Beside its main connection a pair of workers may have *lanes*, which carry DATA and nothing else. A chunk on a lane says
where it belongs, because others may overtake it: ``arg`` is the number of the buffer, ``timeout_ms`` that of the chunk
in it. The frame that owns it comes over the main connection, and a chunk may even overtake that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from arpc.errors import ProtocolError
from arpc.wire.frames import CHUNK_BYTES

__all__ = ["LaneInbox", "Stripe"]

# A sender stops before its frames are held up for long, see transport.striping
_MAX_EARLY_BYTES: Final = 1 << 30


class Stripe(NamedTuple):
    """A chunk on a lane, and the memory that its bytes are read into."""

    id: int
    buffer_index: int
    number: int
    memory: memoryview
    is_in_place: bool
    """Else it has overtaken its frame, and nobody knows yet where its place is."""


class _Message:
    """The buffers of one message, filled in any order."""

    def __init__(self, sizes: Sequence[int], allocate: Callable[[int], memoryview]) -> None:
        self.sizes = sizes
        self.missing_bytes = sum(sizes)
        self._allocate = allocate
        self._buffers: dict[int, memoryview] = {}
        self._begun: set[tuple[int, int]] = set()

    @property
    def buffers(self) -> list[memoryview]:
        return [self._buffers[index] for index in range(len(self.sizes))]

    def place(self, index: int, number: int, length: int) -> memoryview:
        """Where a chunk belongs. Each comes once, and all but the last of a buffer have the same size."""
        start = number * CHUNK_BYTES
        if index >= len(self.sizes) or length != min(CHUNK_BYTES, self.sizes[index] - start):
            raise ProtocolError("DATA on a lane that does not fit what was announced")
        if (index, number) in self._begun:
            raise ProtocolError("the same DATA on a lane twice")
        self._begun.add((index, number))
        buffer = self._buffers.get(index)
        if buffer is None:
            buffer = self._buffers[index] = self._allocate(self.sizes[index])
        return buffer[start : start + length]


class LaneInbox:
    """Puts together what comes over the lanes of one main connection."""

    def __init__(self, allocate: Callable[[int], memoryview], frames: int = 0) -> None:
        """``frames`` with buffers the main connection has brought before there were lanes."""
        self._allocate = allocate
        self._messages: dict[int, _Message] = {}
        self._early: dict[int, list[Stripe]] = {}
        self._early_bytes = 0
        self._frames = frames

    def begun(self, id_: int, sizes: Sequence[int]) -> list[memoryview] | None:
        """A frame with buffers came over the main connection. Returns them if all has overtaken it."""
        self._frames = id_ + 1
        self._messages[id_] = message = _Message(sizes, self._allocate)
        for stripe in self._no_longer_early(id_):
            message.place(stripe.buffer_index, stripe.number, stripe.memory.nbytes)[:] = stripe.memory
            message.missing_bytes -= stripe.memory.nbytes
        return self._buffers_if_complete(id_)

    def _no_longer_early(self, id_: int) -> list[Stripe]:
        stripes = self._early.pop(id_, [])
        self._early_bytes -= sum(stripe.memory.nbytes for stripe in stripes)
        return stripes

    def forget(self, id_: int) -> None:
        """A message will not come in full over lanes: it was dropped, or came another way."""
        self._messages.pop(id_, None)
        self._no_longer_early(id_)

    def stripe(self, id_: int, index: int, number: int, length: int) -> Stripe:
        """A chunk begins to arrive on a lane. Raises `ProtocolError`."""
        if not 0 < length <= CHUNK_BYTES:
            raise ProtocolError(f"DATA of {length} bytes on a lane")
        message = self._messages.get(id_)
        is_in_place = message is not None
        memory = message.place(index, number, length) if message is not None else memoryview(bytearray(length))
        return Stripe(id_, index, number, memory, is_in_place)

    def arrived(self, stripe: Stripe) -> list[memoryview] | None:
        """A chunk has arrived in full. Returns the buffers of its message if that is now complete."""
        message = self._messages.get(stripe.id)
        if message is None:
            if stripe.id >= self._frames:
                self._early_bytes += stripe.memory.nbytes
                if self._early_bytes > _MAX_EARLY_BYTES:
                    raise ProtocolError("too much DATA on lanes whose frames have not come")
                self._early.setdefault(stripe.id, []).append(stripe)
            return None  # else its message was dropped
        size_bytes = stripe.memory.nbytes
        if not stripe.is_in_place:
            message.place(stripe.buffer_index, stripe.number, size_bytes)[:] = stripe.memory
        message.missing_bytes -= size_bytes
        return self._buffers_if_complete(stripe.id)

    def _buffers_if_complete(self, id_: int) -> list[memoryview] | None:
        message = self._messages[id_]
        if message.missing_bytes:
            return None
        del self._messages[id_]
        return message.buffers
