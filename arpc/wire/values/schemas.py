"""Packs the tensors of messages. What all messages with such tensors have in common is a *schema*.

A schema says of each tensor its dtype, shape and place in the message: everything but its bytes. A connection announces
a schema to its peer once and refers to it by number afterwards, so tensors of shapes that were sent before cost little
more than a copy of their memory.

The tensors of a message are recognized by the cheapest check that does:

1. They look like those of the last message with these shapes: one call for all of them, see `arpc.private.torch`.
2. They look like those of a message before, arrays included. Torch without its private APIs always goes this way.
3. `wire.values.packing.Description`: what has not come before, and what must be looked at each time (tensors that share
memory, are sparse, leave out much of their memory, or are on other devices). Equal descriptions have one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, compress, repeat
from operator import add, and_, attrgetter, lt, mul, sub
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
"""Schemas that a packer remembers. When there are more, or their tables are larger than the next, it starts anew."""
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
        "_are_inline",
        "_arrays",
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
        """What the peer needs to know, see `wire.values.table`."""
        self.inline_bytes: Final = inline_bytes
        """The size of the inline tensors, each padded: the first bytes of a body."""
        self.uses = 0
        """How many messages were packed by it, without those that were recognized by `fits`: these came before."""
        self.fits: Callable[..., bool] = fits_nothing
        """Whether tensors look like those this was made for; True only if they do."""

    def learn(self, slots: Sequence[Any], spans: Sequence[int], inline_limit: int) -> None:
        """Note how to take the memory of slots that this was made for, see `Description.spans`."""
        are_tensors = [type(slot) is not PickleBuffer for slot in slots]
        are_inline = [size <= inline_limit for size in spans]
        self._filled = [is_tensor and size > 0 for is_tensor, size in zip(are_tensors, spans, strict=True)]
        """Which are tensors with some memory."""
        self._spans = [*compress(spans, self._filled)]
        """How many bytes each of these is, from its own address on."""
        self._item_sizes = [slot.itemsize for slot in compress(slots, self._filled)]
        self._are_inline = [*compress(are_inline, self._filled)]
        sizes = [*compress(self._spans, self._are_inline)]
        padded = [*map(_padded, sizes)]
        self._padded = padded if padded != sizes else None
        """The sizes of those that are inline with their padding, if there is any."""
        places = [*accumulate(map(and_, self._filled, are_inline), initial=0)]
        self._arrays = [(places[at], at) for at in range(len(slots)) if are_inline[at] and not are_tensors[at]]
        """Of each other object that is inline: how many tensors are before it, and its position."""
        self._large = [(at, size) for at, size in enumerate(spans) if not are_inline[at]]
        """Position and size of those that are buffers."""
        self._is_mixed = not all(self._filled) or bool(self._large)
        """Not all are inline tensors with some memory."""

    def take(self, slots: Sequence[Any], pickle: bytes, meta: bytes) -> Content | None:
        """Pack slots that look like those this was made for. None if they share memory or have lost some of it."""
        # What a small tensor costs: each look at one takes 20 to 60 ns
        tensors = [*compress(slots, self._filled)] if self._is_mixed else slots
        addresses = bases = [*map(_address_of, tensors)]
        lengths: Iterable[int] = map(len, map(_storage_of, tensors))
        if any(map(_offset_of, tensors)):
            offsets = [*map(mul, map(_offset_of, tensors), self._item_sizes)]
            bases, lengths = [*map(sub, addresses, offsets)], map(sub, lengths, offsets)
        # tensors of one storage have one base, and that of autograd's zeros, which have no memory, is 0
        if 0 in bases or any(map(lt, lengths, self._spans)) or (len(bases) > 1 and len({*bases}) < len(bases)):
            return None
        places: Iterable[slice] = map(slice, addresses, map(add, addresses, self._spans))
        if self._is_mixed:
            places = compress(places, self._are_inline)
        parts: Iterable[bytes] = map(_copy_of, places)
        if self._padded is not None:
            parts = map(bytes.ljust, parts, self._padded, repeat(b"\0"))
        if self._is_mixed:
            return self._with_others([*parts], slots, pickle, meta)
        return Content(pickle, meta, self, [*parts])

    def _with_others(self, parts: list[bytes], slots: Sequence[Any], pickle: bytes, meta: bytes) -> Content:
        """Add what is not a small tensor."""
        for place, at in reversed(self._arrays):
            memory = bytes(slots[at].raw())
            parts.insert(place, memory.ljust(_padded(len(memory)), b"\0"))
        buffers = [_buffer_of(slots[at], size) for at, size in self._large]
        return Content(pickle, meta, self, parts, buffers)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _buffer_of(slot: Any, size_bytes: int) -> memoryview:
    if type(slot) is PickleBuffer:
        return slot.raw()
    return view_of(slot.untyped_storage(), slot.data_ptr(), size_bytes)


class Packer:
    """Packs the tensors of a worker's messages, and remembers their schemas. It keeps no tensor alive."""

    def __init__(self, inline_limit: int, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Tensors of more than ``inline_limit`` bytes are buffers.

        Small tensors, and what describes all of them, take up to an eighth of the largest body.
        """
        self._inline_limit = min(inline_limit, max_body_bytes // 64)
        self._max_body_bytes = max_body_bytes
        self._recent: dict[Hashable, Schema] = {}
        """By the shapes of the tensors."""
        self._by_looks: dict[Hashable, Schema] = {}
        self._by_table: dict[bytes, Schema] = {}
        self._table_bytes = 0

    def pack(
        self, slots: Sequence[Any], pickle: bytes = b"", meta: bytes = b"", stager: Stager | None = None
    ) -> Content:
        """The content of a message with tensors: finds their schema, and collects their memory.

        Inline tensors are copied now. The stager takes care of tensors that are not in host memory, here or there;
        without one they cannot travel.

        Raises `SerializationError` for a tensor that cannot travel, or for too many of them.
        """
        if stager is not None and stager.moves_host_memory:
            return self._describe(slots, pickle, meta, stager, None)
        try:
            schema = self._recent.get((*map(_shape_of, slots),))
            # What has no shape has raised: torch would abort the process if it compared a nested tensor
            if schema is not None and schema.fits(*slots):
                content = schema.take(slots, pickle, meta)
                if content is not None:
                    return content
        except _NOT_STRIDED:
            pass  # there are arrays, or none
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
            # TensorGuards are made when such tensors come again: shapes that come once need none. If there are some
            # already, the tensors before were made in another mode of torch
            if not schema.fits(*slots):
                schema.fits = fits_like(slots)
            self._recent[*map(_shape_of, slots)] = schema
        return content

    def _describe(
        self, slots: Sequence[Any], pickle: bytes, meta: bytes, stager: Stager | None, looks: Hashable | None
    ) -> Content:
        limit, max_bytes = self._inline_limit, self._max_body_bytes
        described = Description(slots, limit, stager)
        if described.inline_bytes + len(described.table) > max_bytes // 8:
            limit = 0  # more small tensors than a body may have: they follow as large ones do
            described = Description(slots, limit, stager)
            size = len(described.table) + 8 * len(described.buffers)
            if size > max_bytes // 8:
                looks = None  # each time it depends on the rest of the message whether there is room
            if size + len(meta) + len(pickle) > max_bytes:
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
