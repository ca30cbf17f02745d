"""Packs the tensors of messages. Messages with similar tensors share a *schema*.

A schema has the dtype, shape and place in the message of each tensor: everything but its bytes. A connection announces
a schema to its peer once and refers to it by number afterwards, so tensors of shapes that were sent before cost little
more than a copy of their memory.

The schema of a message is found by the cheapest check that is enough:

1. The tensors look like those of the last message with these shapes: one call for all, see `arpc.private.torch`.
2. They look like those of an earlier message, arrays included. Without torch's private APIs, this check comes first.
3. Otherwise they are described, see `wire.values.packing.Description`: if they are new, or need a description each time
(tensors that share memory, are sparse, leave out much of their memory, or are on other devices, and small memory of
other objects). Equal descriptions have one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import compress, repeat
from operator import add, attrgetter, lt, mul, sub
from pickle import PickleBuffer
from typing import Any, Final

from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from arpc.errors import SerializationError
from arpc.private.torch import fits_like, fits_nothing
from arpc.wire.frames import ALIGNMENT, MAX_BODY_BYTES
from arpc.wire.values.content import Content
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.packing import Description
from arpc.wire.values.raw_memory import MEMORY, view_of

__all__ = ["Packer", "Schema"]

MAX_SCHEMAS: Final = 1024
"""The most schemas that a packer keeps. Beyond that, or beyond `MAX_TABLE_BYTES` of tables, it drops all of them."""
MAX_TABLE_BYTES: Final = 4 << 20

_PLAIN: Final = frozenset((Tensor, Parameter))
_address_of: Final[Callable[[Any], int]] = Tensor.data_ptr
_storage_of: Final[Callable[[Any], UntypedStorage]] = Tensor.untyped_storage
_offset_of: Final[Callable[[Any], Any]] = Tensor.storage_offset
_copy_of: Final = MEMORY.__getitem__
_shape_of: Final = attrgetter("shape")
_LOOKS: Final[tuple[Callable[[Any], Any], ...]] = (
    attrgetter("__class__", "is_cpu", "layout", "dtype", "shape", "requires_grad"),
    Tensor.stride,
    Tensor.is_neg,
    Tensor.is_conj,
)
"""The properties that tell one strided tensor from another. They raise errors for a nested tensor."""
_NOT_STRIDED: Final = (AttributeError, LookupError, RuntimeError, TypeError)
"""The errors of torch for tensors that hide their memory or shape, and for slots that are no tensors."""


def _looks_of(slots: Sequence[Any]) -> Hashable | None:
    """Return a key: slots with equal keys have equal descriptions, unless they share memory. None for subclasses."""
    kinds = set(map(type, slots))
    memories: list[int] = []
    if PickleBuffer in kinds:
        kinds.remove(PickleBuffer)
        memories = [slot.raw().nbytes if type(slot) is PickleBuffer else -1 for slot in slots]
        if not kinds:
            return tuple(memories)
        slots = _tensors_in(slots)
    return (*memories, *[tuple(map(look, slots)) for look in _LOOKS]) if kinds <= _PLAIN else None


def _tensors_in(slots: Sequence[Any]) -> list[Any]:
    return [slot for slot in slots if type(slot) is not PickleBuffer]


class Schema:
    """The description of a message's tensors, without their bytes. Two schemas of one packer have different tables."""

    __slots__ = (
        "__weakref__",
        "_are_inline",
        "_filled",
        "_is_mixed",
        "_item_sizes",
        "_large",
        "_padded",
        "_spans",
        "fits",
        "inline_bytes",
        "table",
        "uses",
    )

    def __init__(self, table: bytes, inline_bytes: int) -> None:
        self.table: Final = table
        """The description for the peer, see `wire.values.table`."""
        self.inline_bytes: Final = inline_bytes
        """The size of the inline tensors, each padded: the first bytes of a body."""
        self.uses = 0
        """The number of messages packed with it. Those that `fits` recognized do not count: others came before them."""
        self.fits: Callable[..., bool] = fits_nothing
        """Returns whether tensors look like those of this schema; False proves nothing, see `fits_like`."""

    def learn(self, slots: Sequence[Any], spans: Sequence[int], inline_limit: int) -> None:
        """Record how to take the memory of slots like these; ``spans`` are those of their `Description`."""
        are_tensors = [type(slot) is not PickleBuffer for slot in slots]
        are_inline = [size <= inline_limit for size in spans]
        self._filled = [is_tensor and size > 0 for is_tensor, size in zip(are_tensors, spans, strict=True)]
        """Whether each slot is a tensor with some memory."""
        self._spans = [*compress(spans, self._filled)]
        """The size of each of these tensors in bytes, from its own address on."""
        self._item_sizes = [slot.itemsize for slot in compress(slots, self._filled)]
        self._are_inline = [*compress(are_inline, self._filled)]
        sizes = [*compress(self._spans, self._are_inline)]
        padded = [*map(_padded, sizes)]
        self._padded = padded if padded != sizes else None
        """The sizes of the inline tensors with their padding; None if none is padded."""
        self._large = [(at, size) for at, size in enumerate(spans) if not are_inline[at]]
        """The position and size of each slot that is a buffer."""
        self._is_mixed = not all(self._filled) or bool(self._large)
        """Whether some slots are not inline tensors with some memory."""

    def take(self, slots: Sequence[Any], pickle: bytes, meta: bytes) -> Content | None:
        """Pack slots that look like those of this schema. None if they share memory, or some of it was freed."""
        # The cost of small tensors is here: each access to one takes 20 to 60 ns
        tensors = [*compress(slots, self._filled)] if self._is_mixed else slots
        addresses = bases = [*map(_address_of, tensors)]
        lengths: Iterable[int] = map(len, map(_storage_of, tensors))
        if any(map(_offset_of, tensors)):
            offsets = [*map(mul, map(_offset_of, tensors), self._item_sizes)]
            bases, lengths = [*map(sub, addresses, offsets)], map(sub, lengths, offsets)
        # tensors of one storage have the same base; that of autograd's zeros, which have no memory, is 0
        if 0 in bases or any(map(lt, lengths, self._spans)) or (len(bases) > 1 and len({*bases}) < len(bases)):
            return None
        places: Iterable[slice] = map(slice, addresses, map(add, addresses, self._spans))
        if self._is_mixed:
            places = compress(places, self._are_inline)
        parts: Iterable[bytes] = map(_copy_of, places)
        if self._padded is not None:
            parts = map(bytes.ljust, parts, self._padded, repeat(b"\0"))
        content = Content(pickle, meta, self, [*parts])
        if self._large:
            content.buffers = [_buffer_of(slots[at], size) for at, size in self._large]
        return content


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _buffer_of(slot: Any, size_bytes: int) -> memoryview:
    if type(slot) is PickleBuffer:
        return slot.raw()
    return view_of(slot.untyped_storage(), slot.data_ptr(), size_bytes)


class Packer:
    """Packs the tensors of a worker's messages, and caches their schemas. It keeps no tensor alive."""

    def __init__(self, inline_limit: int, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Tensors of more than ``inline_limit`` bytes are buffers.

        If small tensors, their table and the pickle take more than ``max_body_bytes``, all tensors are buffers.
        """
        self._inline_limit = min(inline_limit, max_body_bytes // 64)
        self._max_body_bytes = max_body_bytes
        self._recent: dict[Hashable, Schema] = {}
        """The last schema used for tensors of these shapes."""
        self._by_looks: dict[Hashable, Schema] = {}
        self._by_table: dict[bytes, Schema] = {}
        self._table_bytes = 0

    def pack(
        self, slots: Sequence[Any], pickle: bytes = b"", meta: bytes = b"", stager: Stager | None = None
    ) -> Content:
        """Return the content of a message with tensors: find their schema, and collect their memory.

        Inline tensors are copied now. The stager handles tensors that are not in host memory, on this worker or at the
        receiver; without a stager they cannot be sent.

        Raises `SerializationError` for a tensor that cannot be sent, or for too many of them.
        """
        if stager is not None and stager.moves_host_memory:
            return self._describe(slots, pickle, meta, stager, None)
        try:
            schema = self._recent.get((*map(_shape_of, slots),))
            # Slots without a shape have raised here: torch would abort the process if `fits` got a nested tensor
            if schema is not None and schema.fits(*slots):
                content = schema.take(slots, pickle, meta)
                if content is not None:
                    return content
        except _NOT_STRIDED:
            pass  # some slot is not a strided tensor
        return self._pack_by_looks(slots, pickle, meta, stager)

    def _pack_by_looks(self, slots: Sequence[Any], pickle: bytes, meta: bytes, stager: Stager | None) -> Content:
        looks = None
        try:
            looks = _looks_of(slots)
            schema = self._by_looks.get(looks)
            content = schema.take(slots, pickle, meta) if schema is not None else None
        except _NOT_STRIDED:
            schema = content = None
        if schema is None or content is None:
            return self._describe(slots, pickle, meta, stager, looks)
        schema.uses += 1
        if slots and PickleBuffer not in map(type, slots):
            # TensorGuards are made when such tensors come again: shapes that come once need none. Guards that exist
            # already and do not fit were made in another mode of torch
            if not schema.fits(*slots):
                schema.fits = fits_like(slots)
            self._recent[*map(_shape_of, slots)] = schema
        return content

    def _describe(
        self, slots: Sequence[Any], pickle: bytes, meta: bytes, stager: Stager | None, looks: Hashable | None
    ) -> Content:
        limit, max_bytes = self._inline_limit, self._max_body_bytes
        described = Description(slots, limit, stager)
        size = described.size_bytes
        if size > max_bytes // 16:
            # not cached: whether there is room depends on the rest of each message, and a pickle may take 7/8 of it
            looks = None
        if size + len(meta) + len(pickle) > max_bytes:
            limit = 0  # more small tensors than a body may have: send them all as large ones
            described = Description(slots, limit, stager)
            if described.size_bytes + len(meta) + len(pickle) > max_bytes:
                raise SerializationError(
                    f"what describes {len(slots)} tensors and the objects around them takes more bytes than are taken, "
                    f"{max_bytes}: send them in parts, or raise RpcOptions.max_body_bytes"
                )
        if max(len(self._by_table), len(self._by_looks)) >= MAX_SCHEMAS or self._table_bytes > MAX_TABLE_BYTES:
            self._recent.clear()
            self._by_looks.clear()
            self._by_table.clear()
            self._table_bytes = 0
        schema = self._by_table.get(described.table)
        if schema is None:
            schema = self._by_table[described.table] = Schema(described.table, described.inline_bytes)
            self._table_bytes += len(described.table)
        if looks is not None and described.spans is not None:
            schema.learn(slots, described.spans, limit)
            self._by_looks[looks] = schema
        schema.uses += 1
        return Content(pickle, meta, schema, described.parts, described.buffers, described.waits)
