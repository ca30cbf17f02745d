"""Tensors as memory: what a message says of its tensors, and how they are built again from it.

A tensor is never pickled. The pickle of a message has a numbered hole where the tensor was; the `TensorEntry` of that number
says which bytes it is made of. Small tensors lie inside the message (*inline*), large ones in buffers of their own that the
transport writes from, and reads into, their final memory.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from arpc.errors import ProtocolError, SerializationError
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS

__all__ = ["PackedTensors", "Slot", "TensorEntry", "allocate", "pack", "unpack"]

Slot = Tensor | PickleBuffer
"""What fills a hole of a pickle: a tensor, or another object's memory (a numpy array's, say)."""

# The position in this tuple is part of the wire format: append only.
_DTYPES: Final[tuple[torch.dtype, ...]] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_COMPLEX: Final = frozenset((torch.complex32, torch.complex64, torch.complex128))

# numpy has no name for these, so they are read as integers of their size and then viewed
_STAND_INS: Final = {
    torch.bfloat16: np.dtype(np.int16),
    torch.complex32: np.dtype(np.int32),
    torch.float8_e4m3fn: np.dtype(np.uint8),
    torch.float8_e5m2: np.dtype(np.uint8),
    torch.float8_e4m3fnuz: np.dtype(np.uint8),
    torch.float8_e5m2fnuz: np.dtype(np.uint8),
}
_NUMPY: Final = tuple(_STAND_INS.get(d) or np.dtype(str(d).removeprefix("torch.")) for d in _DTYPES)
_IS_STAND_IN: Final = tuple(d in _STAND_INS for d in _DTYPES)
_COMPRESSED: Final = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_LAYOUT_NAMES: Final = {str(layout): layout for layout in _COMPRESSED}

_strided = torch.strided
_from_numpy = torch.from_numpy
_ndarray = np.ndarray


class Kind(IntEnum):
    DENSE = 0
    """Contiguous, in memory of its own: the common case."""
    STRIDED = 1
    """Part of a span of bytes, with strides; several tensors may name the same span and then share it."""
    BYTES = 2
    """Not a tensor: the memory of another object, out of band."""
    META = 3
    """A tensor with no memory at all."""
    COO = 4
    """Sparse: the parts are indices and values."""
    COMPRESSED = 5
    """Sparse, CSR and its like: the parts are compressed indices, plain indices and values."""
    SAVED = 6
    """A layout of its own (quantized, nested): in the bytes of torch.save."""


class Flag:
    REQUIRES_GRAD: Final = 1
    CONJUGATE: Final = 2
    NEGATIVE: Final = 4
    COALESCED: Final = 8


class TensorEntry(msgspec.Struct, array_like=True, gc=False):
    """How to build one tensor. ``source``: the offset of inline bytes, or -1 - n for buffer n."""

    kind: int
    dtype: int
    flags: int
    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    offset: int = 0
    span_bytes: int = 0
    layout: str = ""
    parts: tuple[TensorEntry, ...] = ()


class Table(msgspec.Struct, array_like=True, gc=False):
    inline_bytes: int
    entries: list[TensorEntry]


_encode_table = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(Table).decode


class PackedTensors:
    """The tensors of one message, ready to be put into a frame."""

    __slots__ = ("_inline", "buffer_sizes", "buffers", "entries", "inline_bytes")

    def __init__(self) -> None:
        self.entries: list[TensorEntry | tuple[Any, ...]] = []
        self._inline: list[bytes] = []
        self.inline_bytes = 0
        self.buffers: list[memoryview] = []
        self.buffer_sizes: tuple[int, ...] = ()

    @property
    def table(self) -> bytes:
        return _encode_table((self.inline_bytes, self.entries))

    @property
    def inline(self) -> bytes:
        return b"".join(self._inline)

    def add_inline(self, data: bytes) -> int:
        offset = self.inline_bytes
        self._inline.append(data)
        size = len(data)
        padding = -size % ALIGNMENT
        if padding:
            self._inline.append(bytes(padding))
        self.inline_bytes = offset + size + padding
        return offset

    def add_buffer(self, buffer: memoryview) -> int:
        if len(self.buffers) == MAX_BUFFERS:
            raise SerializationError(f"a message may have at most {MAX_BUFFERS} large tensors")
        self.buffers.append(buffer)
        return -len(self.buffers)


def allocate(size_bytes: int) -> memoryview:
    """Memory for a large tensor to be read into. numpy asks the kernel for huge pages where that helps."""
    return memoryview(np.empty(size_bytes, np.uint8))


@lru_cache(1024)
def _char_array(size_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size_bytes


# -- packing


def pack(slots: Sequence[Slot], inline_limit: int) -> PackedTensors:
    """Describe the slots of one message and collect their memory, without copying what is larger than the limit."""
    packed = PackedTensors()
    shared = _shared_storages(slots) if len(slots) > 1 else None
    spans: dict[int, tuple[int, int, int]] = {}
    entries = packed.entries
    for slot in slots:
        if isinstance(slot, PickleBuffer):
            raw = slot.raw()
            size = raw.nbytes
            source = packed.add_inline(bytes(raw)) if size <= inline_limit else packed.add_buffer(raw)
            entries.append((Kind.BYTES, 0, 0, source, (size,)))
            continue
        dtype = _DTYPE_CODES.get(slot.dtype)
        if (
            dtype is not None
            and slot.is_cpu
            and slot.layout is _strided
            and slot.is_contiguous()
            and not slot.is_neg()
            and (shared is None or slot.untyped_storage()._cdata not in shared)
            and not slot.is_nested
            and not (slot.dtype in _COMPLEX and slot.is_conj())
        ):
            size = slot.nbytes
            if size <= inline_limit:
                # the one copy a small tensor makes on its way out
                data = _char_array(size).from_address(slot.data_ptr()).raw if size else b""
                source = packed.add_inline(data)
            else:
                source = packed.add_buffer(_memory(slot, slot.data_ptr(), size))
            entries.append((0, dtype, 1 if slot.requires_grad else 0, source, slot.shape))
        else:
            entries.append(_describe(slot, packed, inline_limit, spans, shared))
    packed.buffer_sizes = tuple([buffer.nbytes for buffer in packed.buffers])
    return packed


def _memory(tensor: Tensor, address: int, size_bytes: int) -> memoryview:
    """The tensor's bytes, which stay alive as long as the view does."""
    array = _char_array(size_bytes).from_address(address)
    array.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _shared_storages(slots: Sequence[Slot]) -> dict[int, list[Tensor]] | None:
    """Storages that several dense tensors of a message look at, if any."""
    seen: dict[int, Tensor] = {}
    shared: dict[int, list[Tensor]] = {}
    for slot in slots:
        if not isinstance(slot, Tensor) or slot.layout is not _strided or not slot.is_cpu or slot.is_nested:
            continue
        key = slot.untyped_storage()._cdata
        first = seen.setdefault(key, slot)
        if first is not slot:
            shared.setdefault(key, [first]).append(slot)
    return shared or None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and one-past-last byte in its storage that a strided tensor touches."""
    item = tensor.element_size()
    start = tensor.storage_offset() * item
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * item


def _describe(
    tensor: Tensor,
    packed: PackedTensors,
    inline_limit: int,
    spans: dict[int, tuple[int, int, int]],
    shared: dict[int, list[Tensor]] | None,
) -> TensorEntry:
    """The entry of a tensor that is not simply contiguous memory of its own."""
    flags = Flag.REQUIRES_GRAD if tensor.requires_grad else 0
    shape = () if tensor.is_nested else tuple(tensor.shape)

    def part(inner: Tensor) -> TensorEntry:
        return _describe(inner.detach(), packed, inline_limit, spans, None)

    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        flags |= Flag.COALESCED if plain.is_coalesced() else 0
        parts = (part(plain._indices()), part(plain._values()))
        return TensorEntry(Kind.COO, 0, flags, 0, shape, parts=parts)
    if tensor.layout in _COMPRESSED:
        plain = tensor.detach()
        if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
            compressed, indices = plain.crow_indices(), plain.col_indices()
        else:
            compressed, indices = plain.ccol_indices(), plain.row_indices()
        parts = (part(compressed), part(indices), part(plain.values()))
        return TensorEntry(Kind.COMPRESSED, 0, flags, 0, shape, layout=str(tensor.layout), parts=parts)
    dtype = _DTYPE_CODES.get(tensor.dtype)
    if dtype is None or tensor.is_nested or tensor.layout is not _strided:
        return _saved(tensor, flags, shape, packed, inline_limit)
    if tensor.is_meta:
        return TensorEntry(Kind.META, dtype, flags, 0, shape, tuple(tensor.stride()))
    if not tensor.is_cpu:
        raise SerializationError(
            f"a tensor on device {tensor.device} cannot be sent: move it to the CPU first, or give the worker a "
            f"device map that says where on the peer it belongs"
        )
    flags |= Flag.CONJUGATE if tensor.is_conj() else 0
    flags |= Flag.NEGATIVE if tensor.is_neg() else 0
    group = shared.get(tensor.untyped_storage()._cdata) if shared else None
    if group is None or not _worth_sharing(group):
        start, end = _extent(tensor)
        if end - start > tensor.nbytes:
            # a view that skips over memory: send its own part only
            tensor = _undecorated(tensor).contiguous()
            start, end = _extent(tensor)
        source = _add_span(tensor, start, end, packed, inline_limit)
        return TensorEntry(Kind.STRIDED, dtype, flags, source, shape, tuple(tensor.stride()), 0, end - start)
    key = tensor.untyped_storage()._cdata
    if key not in spans:
        extents = [_extent(member) for member in group]
        start = min(extent[0] for extent in extents)
        end = max(extent[1] for extent in extents)
        spans[key] = (_add_span(tensor, start, end, packed, inline_limit), start, end)
    source, start, end = spans[key]
    offset = tensor.storage_offset() * tensor.element_size() - start
    return TensorEntry(Kind.STRIDED, dtype, flags, source, shape, tuple(tensor.stride()), offset, end - start)


def _undecorated(tensor: Tensor) -> Tensor:
    """The same memory without the lazy conjugate and negative bits, which travel as flags."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if plain.is_neg() else plain


def _worth_sharing(group: list[Tensor]) -> bool:
    """Whether to send what lies between the views too. They must overlap, or lie close to each other."""
    extents = sorted(_extent(member) for member in group)
    covered = sum(end - start for start, end in extents)
    overlap = any(right[0] < left[1] for left, right in zip(extents, extents[1:], strict=False))
    return overlap or extents[-1][1] - extents[0][0] <= 2 * covered


def _add_span(tensor: Tensor, start: int, end: int, packed: PackedTensors, inline_limit: int) -> int:
    size = end - start
    if size == 0:
        return packed.add_inline(b"")
    address = tensor.untyped_storage().data_ptr() + start
    if size <= inline_limit:
        return packed.add_inline(_char_array(size).from_address(address).raw)
    return packed.add_buffer(_memory(tensor, address, size))


def _saved(
    tensor: Tensor, flags: int, shape: tuple[int, ...], packed: PackedTensors, inline_limit: int
) -> TensorEntry:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    data = file.getvalue()
    source = packed.add_inline(data) if len(data) <= inline_limit else packed.add_buffer(memoryview(data))
    return TensorEntry(Kind.SAVED, 0, flags, source, shape, span_bytes=len(data))


# -- unpacking


def unpack(table: memoryview, body: bytearray, buffers: list[memoryview]) -> list[Any]:
    """Build what `pack` described. Raises `ProtocolError` when the description does not fit the memory."""
    try:
        decoded = _decode_table(table)
        base = len(body) - decoded.inline_bytes
        if not 0 <= base <= len(body):
            raise ProtocolError("the inline tensors of a message are larger than the message")  # noqa: TRY301
        slots: list[Any] = []
        spans: dict[int, torch.UntypedStorage] = {}
        for entry in decoded.entries:
            if entry.kind == 0:
                source = entry.source
                code = entry.dtype
                if source >= 0:
                    array = _ndarray(entry.shape, _NUMPY[code], body, base + source)
                else:
                    array = _ndarray(entry.shape, _NUMPY[code], buffers[-1 - source])
                tensor = _from_numpy(array)
                if _IS_STAND_IN[code]:
                    tensor = tensor.view(_DTYPES[code]).data
                if entry.flags:
                    tensor.requires_grad_()
                slots.append(tensor)
            else:
                slots.append(_BUILDERS[entry.kind](entry, body, base, buffers, spans))
    except ProtocolError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError, OverflowError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error
    return slots


def _bytes_of(entry: TensorEntry, size: int, body: bytearray, base: int, buffers: list[memoryview]) -> memoryview:
    if entry.source < 0:
        memory = buffers[-1 - entry.source]
        if memory.nbytes != size:
            raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {size}")
        return memory
    start = base + entry.source
    if size < 0 or start + size > len(body):
        raise ProtocolError("an inline tensor lies outside of its message")
    return memoryview(body)[start : start + size]


_Builder = Callable[[TensorEntry, bytearray, int, list[memoryview], dict[int, torch.UntypedStorage]], Any]


def _build_bytes(
    entry: TensorEntry,
    body: bytearray,
    base: int,
    buffers: list[memoryview],
    spans: dict[int, torch.UntypedStorage],  # noqa: ARG001 - one signature for all
) -> memoryview:
    return _bytes_of(entry, entry.shape[0], body, base, buffers)


def _build_strided(
    entry: TensorEntry,
    body: bytearray,
    base: int,
    buffers: list[memoryview],
    spans: dict[int, torch.UntypedStorage],
) -> Tensor:
    storage = spans.get(entry.source)
    if storage is None:
        memory = _bytes_of(entry, entry.span_bytes, body, base, buffers)
        storage = _from_numpy(_ndarray((entry.span_bytes,), np.uint8, memory)).untyped_storage()
        spans[entry.source] = storage
    dtype = _DTYPES[entry.dtype]
    item = dtype.itemsize
    if entry.offset % item or len(entry.strides) != len(entry.shape) or min((*entry.shape, *entry.strides), default=0) < 0:
        raise ProtocolError("a tensor with an impossible geometry")
    last = sum((size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True))
    if 0 not in entry.shape and entry.offset + (last + 1) * item > storage.nbytes():
        raise ProtocolError("a tensor that reaches beyond its memory")
    tensor = torch.empty(0, dtype=dtype).set_(storage, entry.offset // item, entry.shape, entry.strides)
    if entry.flags & Flag.CONJUGATE:
        tensor = torch._conj(tensor)
    if entry.flags & Flag.NEGATIVE:
        tensor = torch._neg_view(tensor)
    return _with_grad(tensor, entry)


def _build_meta(entry: TensorEntry, *_: object) -> Tensor:
    tensor = torch.empty_strided(entry.shape, entry.strides, dtype=_DTYPES[entry.dtype], device="meta")
    return _with_grad(tensor, entry)


def _build_coo(
    entry: TensorEntry,
    body: bytearray,
    base: int,
    buffers: list[memoryview],
    spans: dict[int, torch.UntypedStorage],
) -> Tensor:
    indices, values = (_build_strided(part, body, base, buffers, spans) for part in entry.parts)
    coalesced = bool(entry.flags & Flag.COALESCED)
    tensor = torch.sparse_coo_tensor(indices, values, entry.shape, check_invariants=True, is_coalesced=coalesced)
    return _with_grad(tensor, entry)


def _build_compressed(
    entry: TensorEntry,
    body: bytearray,
    base: int,
    buffers: list[memoryview],
    spans: dict[int, torch.UntypedStorage],
) -> Tensor:
    compressed, plain, values = (_build_strided(part, body, base, buffers, spans) for part in entry.parts)
    layout = _LAYOUT_NAMES[entry.layout]
    tensor = torch.sparse_compressed_tensor(
        compressed, plain, values, entry.shape, layout=layout, check_invariants=True
    )
    return _with_grad(tensor, entry)


def _build_saved(
    entry: TensorEntry,
    body: bytearray,
    base: int,
    buffers: list[memoryview],
    spans: dict[int, torch.UntypedStorage],  # noqa: ARG001 - one signature for all
) -> Tensor:
    data = _bytes_of(entry, entry.span_bytes, body, base, buffers)
    return _with_grad(torch.load(io.BytesIO(data), weights_only=True), entry)


def _with_grad(tensor: Tensor, entry: TensorEntry) -> Tensor:
    return tensor.requires_grad_() if entry.flags & Flag.REQUIRES_GRAD else tensor


_BUILDERS: Final[dict[int, _Builder]] = {
    Kind.STRIDED: _build_strided,
    Kind.BYTES: _build_bytes,
    Kind.META: _build_meta,
    Kind.COO: _build_coo,
    Kind.COMPRESSED: _build_compressed,
    Kind.SAVED: _build_saved,
}
