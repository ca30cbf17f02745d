"""Packs the tensors of messages. What all messages with such tensors have in common is a *schema*.

A schema says of each tensor its dtype, shape and place in the message: everything but its bytes. A connection announces
a schema to its peer once and refers to it by number afterwards, so tensors of shapes that were sent before cost little
more than a copy of their memory.

The tensors of a message are found by the cheapest check that recognizes them:

1. The schema of the last message with as many tensors, and the same first and last shape: one call for all tensors,
see `arpc.private.torch`. 2. The schema of tensors with the same attributes. Arrays, and torch without its private
APIs, always go this way. 3. `wire.values.packing.describe`: tensors that share memory, are sparse, not contiguous, on
other devices, and so on. Equal descriptions have one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.private.torch import fits_like, fits_nothing
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS, PADDING
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.packing import Slot, describe
from arpc.wire.values.raw_memory import MEMORY, view_of
from arpc.wire.values.table import DTYPE_CODES, MAX_DIMENSIONS, MAX_ROWS, Code, encode_table

__all__ = ["PackedTensors", "Packer", "Schema"]

MAX_SCHEMAS: Final = 1024
"""Schemas that a packer remembers. When there are more, or their tables are larger than the next, it starts anew."""
MAX_TABLE_BYTES: Final = 4 << 20

_PLAIN: Final = frozenset((Tensor, Parameter))
_address_of: Final[Callable[[Any], int]] = Tensor.data_ptr
_offset_of: Final[Callable[[Any], Any]] = Tensor.storage_offset
_is_nested: Final = attrgetter("is_nested")
_looks_of: Final = attrgetter("__class__", "is_cpu", "dtype", "shape", "requires_grad")
"""What tells one plain tensor from another. Raises for a nested tensor."""
_NOT_PLAIN: Final = (AttributeError, LookupError, RuntimeError, TypeError)
"""What torch raises for tensors that hide their memory or shape, and for slots that are no tensors."""

_Place: TypeAlias = "tuple[int, int, bytes, bool]"
"""Of a plain tensor: its size, the size of an element, the padding, and whether it is inline."""
_Memory: TypeAlias = "tuple[list[bytes], list[memoryview]]"
"""Inline memory with its padding, and buffers."""


class Schema:
    """What the tensors of a message are, but for their bytes. Two schemas of one packer have different tables."""

    __slots__ = ("__weakref__", "body_bytes", "fits", "inline_bytes", "places", "table", "uses")

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
        self.places: Sequence[_Place] = ()
        """Of each tensor, if all are plain: how to take its memory."""

    def bases_of(self, slots: Sequence[Any], addresses: Sequence[int]) -> list[int]:
        """Where the storages of plain tensors begin, given where the tensors do."""
        offsets = [*map(_offset_of, slots)]
        return [address - offset * place[1] for address, offset, place in zip(addresses, offsets, self.places)]  # noqa: B905 - `strict` takes long

    def memory_of(self, slots: Sequence[Any], memories: Sequence[memoryview | None]) -> _Memory | None:
        """Inline parts and buffers of plain tensors, and of other objects of which the memory is given.

        None if tensors share memory, or their memory was freed.
        """
        parts: list[bytes] = []
        buffers: list[memoryview] = []
        bases = set()
        for slot, memory, (size, item_bytes, padding, is_inline) in zip(slots, memories, self.places, strict=True):
            if not size:
                continue
            if memory is None:
                address = slot.data_ptr()
                base = address - slot.storage_offset() * item_bytes
                if not base or base in bases:
                    return None
                bases.add(base)
                if not is_inline:
                    buffers.append(view_of(slot.untyped_storage(), address, size))
                else:
                    parts.append(MEMORY[address : address + size])
            elif is_inline:
                parts.append(bytes(memory))
            else:
                buffers.append(memory)
            if is_inline and padding:
                parts.append(padding)
        return parts, buffers


class PackedTensors(msgspec.Struct):
    """The tensors of one message: the schema, the bytes a body begins with, and the memory that follows the frame."""

    schema: Schema
    parts: list[bytes]
    """Memory and padding of the inline tensors, in order: ``schema.inline_bytes`` in total."""
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
        """By `_looks_of` each tensor, or the size of an object's memory."""
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
        if (stager is None or not stager.moves_host_memory) and inline_limit is None:
            try:
                packed = self._pack_plain(slots)
            except _NOT_PLAIN:
                packed = self._pack_mixed(slots)
            if packed is not None:
                return packed
        return self._pack_any(slots, self._inline_limit if inline_limit is None else inline_limit, stager)

    def _pack_plain(self, slots: Sequence[Any]) -> PackedTensors | None:
        """Pack plain tensors. None if some are not plain, share memory or have lost it. Raises for other slots."""
        # What a small tensor costs: each look at one takes 30 to 60 ns. What has no memory or no shape raises here and
        # must get no further: torch would abort the process if it compared a nested tensor.
        count = len(slots)
        addresses = [*map(_address_of, slots)]
        schema = self._recent.get((count, slots[0].shape, slots[-1].shape))
        if schema is None or (count > 2 and True in map(_is_nested, slots)) or not schema.fits(*slots):
            schema = self._find(slots)
            if schema is None:
                return None
        # tensors of one storage have one base, and that of a storage without memory is 0
        bases = schema.bases_of(slots, addresses) if any(map(_offset_of, slots)) else addresses
        if 0 in bases or (count > 1 and len(set(bases)) < count):
            return self._pack_mixed(slots)
        parts: list[bytes] = []
        buffers: list[memoryview] = []
        for slot, address, (size, _, padding, is_inline) in zip(slots, addresses, schema.places):  # noqa: B905
            if is_inline:
                parts += (MEMORY[address : address + size], padding)
            else:
                buffers.append(view_of(slot.untyped_storage(), address, size))
        schema.uses += 1
        return PackedTensors(schema, parts, buffers)

    def _find(self, slots: Sequence[Any]) -> Schema | None:
        """The schema of tensors by their attributes. None if one of them is not plain."""
        if len(set(map(id, slots))) < len(slots) or not all(map(_is_dense, slots)):
            return None
        looks = tuple(map(_looks_of, slots))
        schema = self._by_looks.get(looks)
        if schema is None:
            # TensorGuards are made when such tensors come again: shapes that come once need none
            schema = self._learn(looks)
            if schema is None:
                return None
        elif not schema.fits(*slots):
            # the tensors before were made in another mode of torch
            schema.fits = fits_like(slots)
        self._recent[len(slots), slots[0].shape, slots[-1].shape] = schema
        return schema

    def _pack_mixed(self, slots: Sequence[Any]) -> PackedTensors | None:
        """Pack empty and other plain tensors, and objects' memory, by their attributes. None as for plain tensors."""
        try:
            memories = [slot.raw() if type(slot) is PickleBuffer else None for slot in slots]
            looks = tuple(
                [
                    (_looks_of(slot) if _is_dense(slot) else None) if memory is None else memory.nbytes
                    for slot, memory in zip(slots, memories, strict=True)
                ]
            )
            if not looks or None in looks:
                return None
            schema = self._by_looks.get(looks) or self._learn(looks)
            memory = None if schema is None else schema.memory_of(slots, memories)
        except _NOT_PLAIN:
            return None
        if schema is None or memory is None:
            return None
        schema.uses += 1
        return PackedTensors(schema, *memory)

    def _learn(self, looks: tuple[Any, ...]) -> Schema | None:
        """A schema for what looks like this. None if something is not plain, or if there is too much of it."""
        places: list[_Place] = []
        codes: list[int] = []
        sources: list[int] = []
        shapes: list[Sequence[int]] = []
        position = n_buffers = 0
        for look in looks:
            if type(look) is int:
                code, shape, item_bytes, size = Code.BYTES, (look,), 1, look
            else:
                cls, is_cpu, dtype, shape, requires_grad = look
                code = DTYPE_CODES.get(dtype, Code.ENTRY)
                if code == Code.ENTRY or cls not in _PLAIN or not is_cpu or len(shape) > MAX_DIMENSIONS:
                    return None
                item_bytes = dtype.itemsize
                size = shape.numel() * item_bytes
                if requires_grad:
                    code |= Code.REQUIRES_GRAD
            is_inline = size <= self._inline_limit
            padding = PADDING[-size % ALIGNMENT]
            places.append((size, item_bytes, padding, is_inline))
            codes.append(code)
            shapes.append(shape)
            if is_inline:
                sources.append(position)
                position += size + len(padding)
            else:
                n_buffers += 1
                sources.append(-n_buffers)
        if len(looks) > MAX_ROWS or n_buffers > MAX_BUFFERS:
            return None
        table = encode_table((position, bytes(codes), sources, shapes, ()))
        schema = self._by_table.get(table)
        if schema is None:
            schema = self._remember(Schema(table, position))
        schema.places = places
        self._by_looks[looks] = schema
        return schema

    def _pack_any(self, slots: Sequence[Slot], inline_limit: int, stager: Stager | None) -> PackedTensors:
        described = describe(slots, inline_limit, stager)
        schema = self._by_table.get(described.table)
        if schema is None:
            schema = self._remember(Schema(described.table, described.inline_bytes))
        schema.uses += 1
        return PackedTensors(schema, described.parts, described.buffers, described.waits)

    def _remember(self, schema: Schema) -> Schema:
        if len(self._by_table) >= MAX_SCHEMAS or self._table_bytes > MAX_TABLE_BYTES:
            self._recent.clear()
            self._by_looks.clear()
            self._by_table.clear()
            self._table_bytes = 0
        self._by_table[schema.table] = schema
        self._table_bytes += len(schema.table)
        return schema


def _is_dense(tensor: Any) -> bool:
    """Whether the memory of a tensor is what it stands for, element by element."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.is_complex() and tensor.is_conj())
    )
