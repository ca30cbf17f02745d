"""The receiving side of large tensors: the chunks that follow a frame, in order or in stripes.

On the connection of their frame, chunks arrive in order. Beside this main connection, a pair of workers may have
*lanes*, which carry only DATA. Chunks on lanes may overtake each other, and even their frame, so each has its position
in the header: ``arg`` is the number of the buffer, ``timeout_ms`` that of the chunk in the buffer. The chunks of one
message use the main connection or the lanes, never both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from arpc.errors import ProtocolError
from arpc.wire.frames import CHUNK_BYTES
from arpc.wire.messages import Message

__all__ = ["Chunk", "Inbox"]

# No sender needs more: its lanes pause while frames wait on its main connection, see transport.striping
_MAX_EARLY_BYTES: Final = 1 << 30
# No sender has as many in flight: its window is full before, see RpcOptions.window_bytes
_MAX_INCOMPLETE: Final = 1 << 17


class _Assembly:
    """A message that waits for its large tensors. A tensor's memory is allocated when its first chunk begins."""

    __slots__ = ("_allocate", "_index", "_position", "_stripes", "buffers", "message", "missing_bytes", "sizes")

    def __init__(self, message: Message, sizes: Sequence[int], allocate: Callable[[int], memoryview]) -> None:
        self.message = message
        self.sizes = sizes
        self.missing_bytes = sum(sizes)
        self.buffers: dict[int, memoryview] = {}
        self._allocate = allocate
        self._index = self._position = 0
        """The buffer and the offset of the next chunk, if chunks arrive in order."""
        self._stripes: set[tuple[int, int]] = set()
        """The chunks that have arrived on lanes, as buffer and number."""

    def next_chunk(self, length: int) -> memoryview:
        """Return the memory for the next chunk, if chunks arrive in order."""
        if self._stripes:
            raise ProtocolError("DATA of one message on lanes and beside them")
        if self._position == self.sizes[self._index]:
            self._index += 1
            self._position = 0
        start = self._position
        self._position += length
        if self._position > self.sizes[self._index]:
            raise ProtocolError("more DATA than was announced")
        return self._place(self._index, start, length)

    def stripe(self, index: int, number: int, length: int) -> memoryview:
        """Return the memory for a chunk from a lane. Each arrives once; all but a buffer's last have the same size."""
        start = number * CHUNK_BYTES
        if index >= len(self.sizes) or length != min(CHUNK_BYTES, self.sizes[index] - start):
            raise ProtocolError("DATA on a lane that does not fit what was announced")
        if (index, number) in self._stripes:
            raise ProtocolError("the same DATA on a lane twice")
        if self.buffers and not self._stripes:
            raise ProtocolError("DATA of one message on lanes and beside them")
        self._stripes.add((index, number))
        return self._place(index, start, length)

    def _place(self, index: int, start: int, length: int) -> memoryview:
        buffer = self.buffers.get(index)
        if buffer is None:
            buffer = self.buffers[index] = self._allocate(self.sizes[index])
        return buffer[start : start + length]


class Chunk(NamedTuple):
    """A chunk that has begun to arrive, and the memory that its bytes are read into."""

    id: int
    memory: memoryview
    is_in_place: bool
    """Whether that memory is the tensor's. If not, the chunk has overtaken its frame: its place is not known yet."""
    buffer_index: int = 0
    number: int = 0


class Inbox:
    """The messages of a main connection and its lanes that wait for large tensors. Methods raise `ProtocolError`."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self.waiting: dict[int, _Assembly] = {}
        """The waiting messages by the number of their frame: frames with large tensors are counted from 0."""
        self._allocate = allocate
        self._frames = 0
        self._early: dict[int, list[Chunk]] = {}
        self._early_bytes = 0

    def begin(self, message: Message, sizes: Sequence[int]) -> Message | None:
        """Add a message with buffers from the main connection. Returns it if all its chunks have overtaken it."""
        if len(self.waiting) >= _MAX_INCOMPLETE:
            raise ProtocolError(f"more than {_MAX_INCOMPLETE} messages whose tensors have not come")
        id_ = self._frames
        self._frames += 1
        self.waiting[id_] = _Assembly(message, sizes, self._allocate)
        complete: Message | None = None
        for chunk in self._early.pop(id_, ()):
            self._early_bytes -= chunk.memory.nbytes
            complete = self.arrived(chunk) or complete
        return complete

    def chunk(self, id_: int, length: int) -> Chunk:
        """Begin the next chunk of a message, on the main connection."""
        assembly = self.waiting.get(id_)
        if assembly is None:
            raise ProtocolError(f"DATA for frame {id_}, which waits for none")
        return Chunk(id_, assembly.next_chunk(length), is_in_place=True)

    def stripe(self, id_: int, index: int, number: int, length: int) -> Chunk:
        """Begin a chunk on a lane."""
        if not 0 < length <= CHUNK_BYTES:
            raise ProtocolError(f"DATA of {length} bytes on a lane")
        assembly = self.waiting.get(id_)
        memory = memoryview(bytearray(length)) if assembly is None else assembly.stripe(index, number, length)
        return Chunk(id_, memory, assembly is not None, index, number)

    def arrived(self, chunk: Chunk) -> Message | None:
        """Take a chunk that has arrived in full. Returns its message if that is now complete."""
        size_bytes = chunk.memory.nbytes
        assembly = self.waiting.get(chunk.id)
        if assembly is None:
            if chunk.id >= self._frames:
                self._early_bytes += size_bytes
                if self._early_bytes > _MAX_EARLY_BYTES:
                    raise ProtocolError("too much DATA on lanes whose frames have not come")
                self._early.setdefault(chunk.id, []).append(chunk)
            return None  # otherwise its message was dropped
        if not chunk.is_in_place:
            assembly.stripe(chunk.buffer_index, chunk.number, size_bytes)[:] = chunk.memory
        assembly.missing_bytes -= size_bytes
        if assembly.missing_bytes:
            return None
        del self.waiting[chunk.id]
        assembly.message.buffers = [assembly.buffers[index] for index in range(len(assembly.sizes))]
        return assembly.message

    def clear(self) -> None:
        """Drop all messages and chunks that have not arrived in full."""
        self.waiting.clear()
        self._early.clear()
        self._early_bytes = 0
