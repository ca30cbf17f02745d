"""Packs the tensors of messages. What all messages with such tensors have in common is a *schema*.

A schema says of each tensor its dtype, shape and place in the message: everything but its bytes. A connection announces
a schema to its peer once and refers to it by number afterwards, so tensors of shapes that were sent before cost little
more than a copy of their memory.

The tensors of a message are recognized by the cheapest check that does:

1. They look like those of the last message with as many tensors, and the same first and last shape: one call for all
of them, see `arpc.private.torch`. 2. They have the same attributes as those of a message before. Torch without its
private APIs always goes this way. 3. `wire.values.packing.describe`: tensors of new shapes, arrays, and tensors that
share memory, are sparse, not contiguous, on other devices, and so on. Equal descriptions have one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from operator import add, attrgetter, mul, sub
from typing import Any, Final

import msgspec
from torch import Tensor
from torch.nn import Parameter

from arpc.private.torch import fits_like, fits_nothing
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.packing import Slot, describe, is_dense
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
_looks_of: Final = attrgetter("__class__", "is_cpu", "dtype", "shape", "requires_grad")
"""What tells one dense tensor from another. Raises for a nested tensor."""
_NOT_PLAIN: Final = (AttributeError, LookupError, RuntimeError, TypeError)
"""What torch raises for tensors that hide their memory or shape, and for slots that are no tensors."""


class Schema:
    """What the tensors of a message are, but for their bytes. Two schemas of one packer have different tables."""

    __slots__ = (
        "__weakref__",
        "body_bytes",
        "fits",
        "inline_bytes",
        "item_sizes",
        "large",
        "padded",
        "sizes",
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
        """How many messages were packed by it."""
        self.fits: Callable[..., bool] = fits_nothing
        """Whether tensors look like those this was made for; True only if they do."""

    def learn(self, tensors: Sequence[Any], inline_limit: int) -> None:
        """Note how to take the memory of plain tensors that this was made for."""
        every = [tensor.nbytes for tensor in tensors]
        self.item_sizes = [tensor.itemsize for tensor in tensors]
        self.large = [(index, size) for index, size in enumerate(every) if size > inline_limit]
        """Position and size of those that are buffers."""
        self.sizes = [0 if size > inline_limit else size for size in every]
        """How many bytes of each tensor are inline."""
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        self.padded: Sequence[int] | None = padded if padded != self.sizes else None
        """These sizes with their padding, if there is any."""


class PackedTensors(msgspec.Struct):
    """The tensors of one message: the schema, the bytes a body begins with, and the memory that follows the frame."""

    schema: Schema
    parts: list[bytes]
    """Memory of the inline tensors, in order, each padded: ``schema.inline_bytes`` in total."""
    buffers: list[memoryview]
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
        self._by_looks: dict[tuple[Any, ...], Schema] = {}
        """By `_looks_of` each tensor."""
        self._by_table: dict[bytes, Schema] = {}
        self._table_bytes = 0

    def pack(
        self, slots: Sequence[Slot], stager: Stager | None = None, inline_limit: int | None = None
    ) -> PackedTensors:
        """Find the schema of a message's slots, and collect their memory: inline tensors are copied now.

        The stager takes care of tensors that are not in host memory, here or there; without one they cannot travel.
        ``inline_limit`` replaces that of the packer.

        Raises `SerializationError` for a tensor that cannot travel, or for too many of them.
        """
        may_be_plain = inline_limit is None and (stager is None or not stager.moves_host_memory)
        if may_be_plain:
            try:
                if (packed := self._pack_plain(slots)) is not None:
                    return packed
            except _NOT_PLAIN:
                pass  # they are described
        described = describe(slots, self._inline_limit if inline_limit is None else inline_limit, stager)
        schema = self._by_table.get(described.table)
        if schema is None:
            schema = self._remember(Schema(described.table, described.inline_bytes))
        if may_be_plain and described.is_plain:
            looks = tuple(map(_looks_of, slots))
            if all(look[0] in _PLAIN for look in looks):
                schema.learn(slots, self._inline_limit)
                self._by_looks[looks] = schema
        schema.uses += 1
        return PackedTensors(schema, described.parts, described.buffers, described.waits)

    def _pack_plain(self, slots: Sequence[Any]) -> PackedTensors | None:
        """Pack dense tensors that look like some that came before.

        None if they do not, share memory or have lost it. Raises for other slots.
        """
        # What a small tensor costs: each look at one takes 30 to 60 ns. What has no memory or no shape raises here and
        # must get no further: torch would abort the process if it compared a nested tensor.
        count = len(slots)
        addresses = [*map(_address_of, slots)]
        schema = self._recent.get((count, slots[0].shape, slots[-1].shape))
        if schema is None or (count > 2 and True in map(_is_nested, slots)) or not schema.fits(*slots):
            schema = self._find(slots)
            if schema is None:
                return None
        bases = addresses
        if any(map(_offset_of, slots)):
            bases = [*map(sub, addresses, map(mul, map(_offset_of, slots), schema.item_sizes))]
        # tensors of one storage have one base, and that of a storage without memory is 0
        if 0 in bases or (count > 1 and len(set(bases)) < count):
            return None
        parts: Iterable[bytes] = map(_copy_of, map(slice, addresses, map(add, addresses, schema.sizes)))
        if schema.padded is not None:
            parts = map(bytes.ljust, parts, schema.padded, repeat(b"\0"))
        buffers: list[memoryview] = []
        for at, size in schema.large:
            buffers.append(view_of(slots[at].untyped_storage(), addresses[at], size))
        schema.uses += 1
        return PackedTensors(schema, [*parts], buffers)

    def _find(self, slots: Sequence[Any]) -> Schema | None:
        """The schema of dense tensors with the same attributes. None if there were none before."""
        if len(set(map(id, slots))) < len(slots) or not all(map(is_dense, slots)):
            return None
        schema = self._by_looks.get(tuple(map(_looks_of, slots)))
        if schema is not None:
            # TensorGuards are made when such tensors come again: shapes that come once need none. If there are some
            # already, the tensors before were made in another mode of torch
            if not schema.fits(*slots):
                schema.fits = fits_like(slots)
            self._recent[len(slots), slots[0].shape, slots[-1].shape] = schema
        return schema

    def _remember(self, schema: Schema) -> Schema:
        if len(self._by_table) >= MAX_SCHEMAS or self._table_bytes > MAX_TABLE_BYTES:
            self._recent.clear()
            self._by_looks.clear()
            self._by_table.clear()
            self._table_bytes = 0
        self._by_table[schema.table] = schema
        self._table_bytes += len(schema.table)
        return schema
