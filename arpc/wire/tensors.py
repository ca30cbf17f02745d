"""Tensors as memory: the way out. `wire.rebuilding` is the way back.

Small tensors lie inside the message (*inline*), which copies them. Large ones are *buffers*: the transport writes them from
the tensor's own memory, so what is written to such a tensor before its bytes have gone out is sent, and its storage must
not be resized meanwhile.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage

from arpc.errors import SerializationError
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS
from arpc.wire.memory import MEMORY, allocate, view_of
from arpc.wire.rebuilding import unpack
from arpc.wire.sharing import Span, extent, shared_spans
from arpc.wire.table import COMPLEX_CODES, DTYPE_CODES, Code, Entry, Flag, Kind, encode_table

__all__ = ["PackedTensors", "Slot", "allocate", "pack", "unpack"]

Slot = Tensor | PickleBuffer
"""What fills a hole of a pickle: a tensor, or another object's memory (a numpy array's, say)."""

_PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))
_ROW_COMPRESSED: Final = {torch.sparse_csr, torch.sparse_bsr}
_COMPRESSED: Final = {*_ROW_COMPRESSED, torch.sparse_csc, torch.sparse_bsc}
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD
_NO_SPANS: Final[Mapping[int, Span]] = {}


class PackedTensors:
    """The tensors of one message, ready to be put into a frame, and the memory that follows it."""

    __slots__ = ("buffer_sizes", "buffers", "inline", "table")

    def __init__(self, table: bytes, inline: bytes, buffers: list[memoryview]) -> None:
        self.table = table
        self.inline = inline
        self.buffers = buffers
        self.buffer_sizes = tuple([buffer.nbytes for buffer in buffers])


def pack(slots: Sequence[Slot], inline_limit: int) -> PackedTensors:
    """Describe the slots of one message and collect their memory, without copying what is larger than the limit.

    Raises `SerializationError` for a tensor that cannot travel.
    """
    storages = _storages(slots)
    spans = _NO_SPANS
    if len(slots) > 1:
        keys = {storage._cdata for storage in storages if storage is not None}
        if len(keys) + storages.count(None) < len(slots):
            spans = shared_spans([slot if _can_share(slot) else None for slot in slots], storages)
    codes: list[int] = []
    sources: list[int] = []
    shapes: list[Sequence[int]] = []
    packer = _Packer(inline_limit)
    inline = packer.inline
    position = 0
    # This loop is the price of a small tensor: each look at one costs 30 to 70 ns
    slot: Any
    for slot, storage in zip(slots, storages, strict=True):
        if (
            storage is not None
            and (code := DTYPE_CODES.get(slot.dtype)) is not None
            and slot.is_cpu
            and slot.is_contiguous()
            and not slot.is_neg()
            and not slot.is_nested
            and storage.data_ptr()
            and not (code in COMPLEX_CODES and slot.is_conj())
            and not (spans and len(codes) in spans)
        ):
            size = slot.nbytes
            if size <= inline_limit:
                # the one copy a small tensor makes on its way out
                address = slot.data_ptr()
                inline.append(MEMORY[address : address + size])
                sources.append(position)
                position += size
                if padding := -size & (ALIGNMENT - 1):
                    inline.append(_PADDING[padding])
                    position += padding
            else:
                sources.append(packer.add_buffer(view_of(storage, slot.data_ptr(), size)))
            codes.append(code | _REQUIRES_GRAD if slot.requires_grad else code)
            shapes.append(slot.shape)
        else:
            packer.inline_bytes = position
            if type(slot) is PickleBuffer:
                memory = slot.raw()
                sources.append(packer.add(memory))
                shapes.append((memory.nbytes,))
                codes.append(Code.BYTES)
            else:
                packer.describe(slot, spans.get(len(codes)))
                sources.append(0)
                shapes.append(())
                codes.append(Code.ENTRY)
            position = packer.inline_bytes
    table = encode_table((position, bytes(codes), sources, shapes, packer.entries))
    return PackedTensors(table, b"".join(inline), packer.buffers)


def _storages(slots: Sequence[Slot]) -> list[UntypedStorage | None]:
    """The storage of each slot, None for what has no such thing."""
    try:
        return [slot.untyped_storage() for slot in slots]  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return [_storage(slot) for slot in slots]


def _storage(slot: Slot) -> UntypedStorage | None:
    try:
        return slot.untyped_storage()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # memory of another object; a sparse tensor
        return None


def _can_share(slot: Slot) -> bool:
    return isinstance(slot, Tensor) and slot.is_cpu and slot.dtype in DTYPE_CODES and not slot.is_nested


class _Packer:
    """Describes the tensors that are not simply contiguous memory of their own, and collects memory."""

    def __init__(self, inline_limit: int) -> None:
        self.entries: list[Entry] = []
        self.inline: list[bytes] = []
        self.inline_bytes = 0
        self.buffers: list[memoryview] = []
        self._inline_limit = inline_limit

    # -- memory; all of these return the source of what was added

    def add(self, memory: memoryview) -> int:
        return self._add_inline(bytes(memory)) if memory.nbytes <= self._inline_limit else self.add_buffer(memory)

    def add_buffer(self, memory: memoryview) -> int:
        if len(self.buffers) == MAX_BUFFERS:
            raise SerializationError(f"a message may have at most {MAX_BUFFERS} large tensors: send it in parts")
        self.buffers.append(memory)
        return -len(self.buffers)

    def _add_inline(self, data: bytes) -> int:
        offset = self.inline_bytes
        padding = -len(data) % ALIGNMENT
        self.inline += (data, _PADDING[padding])
        self.inline_bytes = offset + len(data) + padding
        return offset

    def _add_span(self, storage: UntypedStorage, start: int, end: int) -> int:
        if start == end:
            return self._add_inline(b"")
        base = storage.data_ptr()
        if not base:
            raise SerializationError("a tensor whose memory was freed cannot be sent")
        if end - start <= self._inline_limit:
            return self._add_inline(MEMORY[base + start : base + end])
        return self.add_buffer(view_of(storage, base + start, end - start))

    # -- tensors

    def describe(self, tensor: Tensor, span: Span | None) -> None:
        """Add the entry of a tensor. ``span``: what it shares with others."""
        try:
            entry = self._shared(tensor, span) if span is not None else self._entry(tensor)
        except SerializationError:
            raise
        except Exception as error:
            # a layout that hides its memory, a tensor of vmap or of torch.compile's tracing
            raise SerializationError(f"a tensor of type {type(tensor).__qualname__} cannot be sent: {error}") from error
        self.entries.append(entry)

    def _entry(self, tensor: Tensor) -> Entry:
        flags = _flags(tensor)
        if tensor.is_nested:
            return self._saved(tensor, flags)
        if tensor.layout is torch.sparse_coo:
            plain = tensor.detach()
            flags |= Flag.COALESCED if plain.is_coalesced() else 0
            parts = (self._entry(plain._indices()), self._entry(plain._values()))
            return Entry(Kind.COO, 0, flags, 0, tuple(tensor.shape), parts=parts)
        if tensor.layout in _COMPRESSED:
            return self._compressed(tensor.detach(), flags)
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_CODES:
            return self._saved(tensor, flags)
        if tensor.is_meta:
            code = DTYPE_CODES[tensor.dtype]
            return Entry(Kind.META, code, flags, 0, tuple(tensor.shape), tuple(tensor.stride()))
        if not tensor.is_cpu:
            raise SerializationError(
                f"a tensor on device {tensor.device} cannot be sent: move it to the CPU first, or give the worker a "
                f"device map that says where on the peer it belongs"
            )
        return self._strided(tensor, flags)

    def _strided(self, tensor: Tensor, flags: int) -> Entry:
        """A view, sent without what it skips over, and what it repeats only once."""
        core = _undecorated(tensor)
        shape, strides = tuple(core.shape), tuple(core.stride())
        if 0 in strides:
            once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
            core = core.as_strided(once, strides)
        start, end = extent(core)
        if end - start > core.nbytes:
            core = core.contiguous()
            start, end = extent(core)
            strides = tuple(0 if old == 0 else new for old, new in zip(strides, core.stride(), strict=True))
        if not core.numel():
            start = end
        source = self._add_span(core.untyped_storage(), start, end)
        code = DTYPE_CODES[tensor.dtype]
        return Entry(Kind.STRIDED, code, flags, source, shape, strides, span_bytes=end - start)

    def _shared(self, tensor: Tensor, span: Span) -> Entry:
        if span.source is None:
            span.source = self._add_span(tensor.untyped_storage(), span.start, span.end)
        return Entry(
            Kind.SHARED,
            DTYPE_CODES[tensor.dtype],
            _flags(tensor),
            span.source,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset() * tensor.element_size() - span.start,
            span.end - span.start,
        )

    def _compressed(self, tensor: Tensor, flags: int) -> Entry:
        if tensor.layout in _ROW_COMPRESSED:
            compressed, plain = tensor.crow_indices(), tensor.col_indices()
        else:
            compressed, plain = tensor.ccol_indices(), tensor.row_indices()
        parts = (self._entry(compressed), self._entry(plain), self._entry(tensor.values()))
        return Entry(Kind.COMPRESSED, 0, flags, 0, tuple(tensor.shape), layout=str(tensor.layout), parts=parts)

    def _saved(self, tensor: Tensor, flags: int) -> Entry:
        file = io.BytesIO()
        torch.save(tensor.detach(), file)
        memory = file.getbuffer()
        return Entry(Kind.SAVED, 0, flags, self.add(memory), (), span_bytes=memory.nbytes)


def _flags(tensor: Tensor) -> int:
    flags = Flag.REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= Flag.CONJUGATE if tensor.is_conj() else 0
    flags |= Flag.NEGATIVE if tensor.is_neg() else 0
    return flags


def _undecorated(tensor: Tensor) -> Tensor:
    """The same memory without the lazy conjugate and negative bits, which travel as flags."""
    plain = tensor.detach()
    if plain._is_zerotensor():
        return torch.zeros(plain.shape, dtype=plain.dtype)  # it has no memory until it is written to
    if plain.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if plain.is_neg() else plain
