"""Packs the tensors of messages. What all messages with such tensors have in common is a *schema*.

A schema says of each tensor its dtype, shape and place in the message: everything but its bytes. A connection announces
a schema to its peer once and refers to it by number afterwards, so tensors of shapes that were sent before cost little
more than a copy of their memory.

The tensors of a message are recognized by the cheapest check that does:

1. They look like those of the last message with as many tensors, and the same first and last shape: one call for all
of them, see `arpc.private.torch`. 2. They look like those of a message before, arrays included. Torch without its
private APIs always goes this way. 3. `wire.values.packing.Description`: what has not come before, and what must be
looked at each time (tensors that share memory, are sparse, leave out much of their memory, or are on other devices).
Equal descriptions have one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import compress, repeat
from operator import add, attrgetter, mul, sub
from pickle import PickleBuffer
from typing import Any, Final

import msgspec
from torch import Tensor
from torch.nn import Parameter

from arpc.private.torch import fits_like, fits_nothing
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.packing import Description
from arpc.wire.values.raw_memory import MEMORY, view_of

__all__ = ["PackedTensors", "Packer", "Schema"]

MAX_SCHEMAS: Final = 1024
"""Schemas that a packer remembers. When there are more, or their tables are larger than the next, it starts anew."""
MAX_TABLE_BYTES: Final = 4 << 20

_PLAIN: Final = frozenset((Tensor, Parameter))
_address_of: Final[Callable[[Any], int]] = Tensor.data_ptr
_offset_of: Final[Callable[[Any], Any]] = Tensor.storage_offset
_copy_of: Final = MEMORY.__getitem__
_is_nested: Final = attrgetter("is_nested")
_LOOKS: Final[tuple[Callable[[Any], Any], ...]] = (
    attrgetter("__class__", "is_cpu", "layout", "dtype", "shape", "requires_grad"),
    Tensor.stride,
    Tensor.is_neg,
    Tensor.is_conj,
)
"""What tells one strided tensor from another. Raises for a nested tensor."""
_NOT_STRIDED: Final = (AttributeError, LookupError, RuntimeError, TypeError)
"""What torch raises for tensors that hide their memory or shape, and for slots that are no tensors."""


def _looks_of(slots: Sequence[Any]) -> Hashable | None:
    """Slots that look the same have the same description, unless they share memory. None: nothing is known of them."""
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
    """What the tensors of a message are, but for their bytes. Two schemas of one packer have different tables."""

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_has_empty",
        "_is_mixed",
        "_item_sizes",
        "_large",
        "_padded",
        "_sizes",
        "_spans",
        "_views",
        "body_bytes",
        "fits",
        "inline_bytes",
        "table",
        "uses",
    )

    def __init__(self, table: bytes, inline_bytes: int) -> None:
        self.table: Final = table
        """What the peer needs to know, see `wire.values.table`."""
        self.inline_bytes: Final = inline_bytes
        """The size of the inline tensors, each padded: the first bytes of a body."""
        self.body_bytes: Final = inline_bytes + len(table)
        """The most that tensors take of a body: with the table."""
        self.uses = 0
        """How many messages were packed by it, without those that were recognized by `fits`: these came before."""
        self.fits: Callable[..., bool] = fits_nothing
        """Whether tensors look like those this was made for; True only if they do."""

    def learn(self, slots: Sequence[Any], spans: Sequence[int], inline_limit: int) -> None:
        """Note how to take the memory of slots that this was made for, see `Description.spans`."""
        sizes = [0 if size > inline_limit else size for size in spans]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        are_tensors = [type(slot) is not PickleBuffer for slot in slots]
        tensors = [*compress(slots, are_tensors)]
        self._item_sizes = [tensor.itemsize for tensor in tensors]
        self._spans = [*compress(spans, are_tensors)]
        self._sizes = [*compress(sizes, are_tensors)]
        """How many bytes of each tensor are inline."""
        self._padded = [*compress(padded, are_tensors)] if padded != sizes else None
        """These sizes with their padding, if there is any."""
        self._has_empty = 0 in self._spans
        self._arrays = [(at, padded[at]) for at, is_tensor in enumerate(are_tensors) if not is_tensor]
        """Position of the memory of each other object, and how many bytes of it are inline, padded."""
        self._large = [(at, size) for at, size in enumerate(spans) if size > inline_limit]
        """Position and size of those that are buffers."""
        self._views = [(at, spans[at]) for at, slot in enumerate(slots) if are_tensors[at] and not slot.is_contiguous()]
        """Position and size of those that leave out some of their memory."""
        self._is_mixed = bool(self._arrays or self._large or self._views)

    def take(self, slots: Sequence[Any]) -> PackedTensors | None:
        """Pack slots that look like those this was made for. None if they share memory or have lost it."""
        # What a small tensor costs: each look at one takes 30 to 60 ns
        tensors = _tensors_in(slots) if self._is_mixed and self._arrays else slots
        addresses = bases = [*map(_address_of, tensors)]
        if any(map(_offset_of, tensors)):
            bases = [*map(sub, addresses, map(mul, map(_offset_of, tensors), self._item_sizes))]
        if self._has_empty:
            bases = [*compress(bases, self._spans)]
        # tensors of one storage have one base, and that of a storage without memory is 0
        if 0 in bases or (len(bases) > 1 and len(set(bases)) < len(bases)):
            return None
        parts: Iterable[bytes] = map(_copy_of, map(slice, addresses, map(add, addresses, self._sizes)))
        if self._padded is not None:
            parts = map(bytes.ljust, parts, self._padded, repeat(b"\0"))
        packed = PackedTensors(self, [*parts])
        return self._with_others(packed, slots) if self._is_mixed else packed

    def _with_others(self, packed: PackedTensors, slots: Sequence[Any]) -> PackedTensors | None:
        """Add what is not a small tensor."""
        for at, size in self._views:
            view = slots[at]
            if view.storage_offset() * view.itemsize + size > view.untyped_storage().nbytes():
                return None
        for at, padded in self._arrays:
            packed.parts.insert(at, bytes(slots[at].raw()).ljust(padded, b"\0") if padded else b"")
        for at, size in self._large:
            slot = slots[at]
            is_array = type(slot) is PickleBuffer
            packed.buffers.append(slot.raw() if is_array else view_of(slot.untyped_storage(), slot.data_ptr(), size))
        return packed


class PackedTensors(msgspec.Struct, gc=False):
    """The tensors of one message: the schema, the bytes a body begins with, and the memory that follows the frame."""

    schema: Schema
    parts: list[bytes]
    """Memory of the inline tensors, in order, each padded: ``schema.inline_bytes`` in total."""
    buffers: list[memoryview] = msgspec.field(default_factory=list)
    """Large tensors, sent from their own memory."""
    waits: Sequence[Callable[[], None]] = ()
    """To be called, in a thread, before the buffers are read: they are being filled from devices."""

    @property
    def size_bytes(self) -> int:
        """Bytes they take on their way."""
        size = self.schema.inline_bytes
        return size + sum([buffer.nbytes for buffer in self.buffers]) if self.buffers else size


class Packer:
    """Packs the tensors of a worker's messages, and remembers their schemas. It keeps no tensor alive."""

    def __init__(self, inline_limit: int) -> None:
        """Tensors of more than ``inline_limit`` bytes are buffers."""
        self._inline_limit = inline_limit
        self._recent: dict[Hashable, Schema] = {}
        """By the number of tensors, and the shapes of the first and the last."""
        self._by_looks: dict[Hashable, Schema] = {}
        self._by_table: dict[bytes, Schema] = {}
        self._table_bytes = 0

    def pack(self, slots: Sequence[Any], stager: Stager | None = None) -> PackedTensors:
        """Find the schema of a message's slots, and collect their memory: inline tensors are copied now.

        The stager takes care of tensors that are not in host memory, here or there; without one they cannot travel.

        Raises `SerializationError` for a tensor that cannot travel, or for too many of them.
        """
        if stager is not None and stager.moves_host_memory:
            return self._describe(slots, stager, None)
        try:
            schema = self._recent.get((len(slots), slots[0].shape, slots[-1].shape))
            # What has no shape has raised: torch would abort the process if it compared a nested tensor
            if schema is not None and not (len(slots) > 2 and True in map(_is_nested, slots)) and schema.fits(*slots):
                packed = schema.take(slots)
                if packed is not None:
                    return packed
        except _NOT_STRIDED:
            pass  # there are arrays, or none
        return self._pack_by_looks(slots, stager)

    def _pack_by_looks(self, slots: Sequence[Any], stager: Stager | None) -> PackedTensors:
        looks = None
        try:
            looks = _looks_of(slots)
            schema = self._by_looks.get(looks)
            packed = schema.take(slots) if schema is not None else None
        except _NOT_STRIDED:
            schema = packed = None
        if schema is None or packed is None:
            return self._describe(slots, stager, looks)
        schema.uses += 1
        if slots and PickleBuffer not in map(type, slots):
            # TensorGuards are made when such tensors come again: shapes that come once need none. If there are some
            # already, the tensors before were made in another mode of torch
            if not schema.fits(*slots):
                schema.fits = fits_like(slots)
            self._recent[len(slots), slots[0].shape, slots[-1].shape] = schema
        return packed

    def _describe(self, slots: Sequence[Any], stager: Stager | None, looks: Hashable | None) -> PackedTensors:
        described = Description(slots, self._inline_limit, stager)
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
            schema.learn(slots, described.spans, self._inline_limit)
            self._by_looks[looks] = schema
        schema.uses += 1
        return PackedTensors(schema, described.parts, described.buffers, described.waits)
