"""Describes tensors of any kind for a message. `wire.values.schemas` is faster for plain ones, and caches descriptions.

Small tensors are copied into the message (*inline*). Large ones are *buffers*: the transport sends them from the
tensor's own memory. So a write to such a tensor before its bytes have left changes what is sent, and its storage must
not be resized meanwhile. `wire.values.layouts` builds the tensors again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Final

import torch
from torch import Tensor

from arpc.errors import SerializationError
from arpc.private.torch import is_zero_tensor
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.raw_memory import MEMORY, view_of
from arpc.wire.values.sharing import Span, extent, shared_spans
from arpc.wire.values.table import (
    DTYPE_CODES,
    MAX_DIMENSIONS,
    MAX_ROWS,
    Code,
    Entry,
    Flag,
    Kind,
    encode_table,
)

__all__ = ["LITTLE_BYTES", "Description", "Slot"]

Slot = Tensor | PickleBuffer
"""The content of a hole in a pickle: a tensor, or another object's memory (a numpy array's, say)."""

_ROW_COMPRESSED: Final = {torch.sparse_csr, torch.sparse_bsr}
_COMPRESSED: Final = {*_ROW_COMPRESSED, torch.sparse_csc, torch.sparse_bsc}

LITTLE_BYTES: Final = 8 * 1024
"""Sending this many unneeded bytes costs less than copying the needed ones."""


class Description:
    """The tensors of one message: the table that describes them, and their memory.

    Memory of more than ``inline_limit`` bytes is not copied. The stager handles tensors that are not in host memory, on
    this worker or at the receiver; without a stager they cannot be sent.

    Raises `SerializationError` for a tensor that cannot be sent, or for too many tensors.
    """

    def __init__(self, slots: Sequence[Slot], inline_limit: int, stager: Stager | None = None) -> None:
        if len(slots) > MAX_ROWS:
            raise SerializationError(
                f"a message may have at most {MAX_ROWS} tensors: send them in parts, or stack them"
            )
        self.inline_bytes = 0
        self.parts: list[bytes] = []
        """Memory of the inline tensors, in order, each padded."""
        self.buffers: list[memoryview] = []
        self.waits: list[Callable[[], None]] = []
        """Functions to call, in a thread, before the buffers are read: each waits for a copy from a device."""
        self._spans: list[int] = []
        self._entries: list[Entry] = []
        self._stager = stager
        self._inline_limit = inline_limit
        stays = stager is None or not stager.moves_host_memory
        shared = shared_spans(slots) if stays and len(slots) > 1 else {}
        rows = [self._row(slot, shared.get(position), stays) for position, slot in enumerate(slots)]
        codes, sources, shapes = zip(*rows, strict=True) if rows else ((), (), ())
        entries = self._entries
        if len(self.buffers) > MAX_BUFFERS:
            raise SerializationError(f"a message may have at most {MAX_BUFFERS} large tensors: send it in parts")
        if (most := max(map(len, [*shapes, *(entry.shape for entry in entries)]), default=0)) > MAX_DIMENSIONS:
            raise SerializationError(
                f"a tensor of {most} dimensions cannot be sent: it may have at most {MAX_DIMENSIONS}"
            )
        self.table: Final = encode_table((self.inline_bytes, bytes(codes), sources, shapes, entries))
        is_repeatable = len(self._spans) == len(slots) and all(entry.kind == Kind.STRIDED for entry in entries)
        self.size_bytes: Final = self.inline_bytes + len(self.table) + 8 * len(self.buffers)
        """The description's share of a body: the inline tensors, the table, and the sizes of the large tensors."""
        self.spans: Final = self._spans if is_repeatable else None
        """The size of each slot in bytes, from its own address on; None if some are taken from elsewhere, or shared."""

    def _row(self, slot: Slot, span: Span | None, stays: bool) -> tuple[int, int, Sequence[int]]:
        """Return a slot's row in the columns: its code, source and shape.

        ``span``: the span that it shares with other slots. ``stays``: host memory stays host memory at the receiver.
        """
        if isinstance(slot, PickleBuffer):
            memory = slot.raw()
            if memory.nbytes > self._inline_limit:
                self._spans.append(memory.nbytes)
            return Code.BYTES, self._add(memory), (memory.nbytes,)
        try:
            if span is None and stays and (row := self._plain(slot)) is not None:
                return row
            self._entries.append(self._shared(slot, span) if span is not None else self._entry(slot))
        except SerializationError:
            raise
        except Exception as error:
            # a layout that hides its memory, a tensor of vmap or of a compiler's tracing
            raise SerializationError(f"a tensor of type {type(slot).__qualname__} cannot be sent: {error}") from error
        return Code.ENTRY, 0, ()

    def _plain(self, tensor: Tensor) -> tuple[int, int, Sequence[int]] | None:
        """Return the row of a dense tensor in host memory, None for any other tensor."""
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None or not tensor.is_cpu or tensor.is_nested or not _is_dense(tensor):
            return None
        source = 0
        if size := tensor.nbytes:
            start = tensor.storage_offset() * tensor.itemsize
            address = tensor.data_ptr()
            if address == start:
                return None  # it was freed, or never had any memory
            _require_memory(tensor, int(start) + size)
            source = self._add_memory(tensor, address, size)
        self._spans.append(size)
        return code | Code.REQUIRES_GRAD if tensor.requires_grad else code, source, tensor.shape

    # -- memory; each method returns the source of the bytes that it added

    def _add(self, memory: memoryview) -> int:
        if memory.nbytes <= self._inline_limit:
            return self._add_inline(bytes(memory))
        return self._add_buffer(memory)

    def _add_inline(self, data: bytes) -> int:
        offset = self.inline_bytes
        padded = data.ljust(-(-len(data) // ALIGNMENT) * ALIGNMENT, b"\0")
        self.parts.append(padded)
        self.inline_bytes += len(padded)
        return offset

    def _add_buffer(self, memory: memoryview) -> int:
        self.buffers.append(memory)
        return -len(self.buffers)

    def _add_memory(self, owner: Tensor, address: int, size_bytes: int) -> int:
        if size_bytes <= self._inline_limit:
            return self._add_inline(MEMORY[address : address + size_bytes])
        return self._add_buffer(view_of(owner.untyped_storage(), address, size_bytes))

    def _add_span(self, tensor: Tensor, start: int, end: int) -> int:
        """Add part of the storage of a tensor."""
        _require_memory(tensor, end)
        return self._add_memory(tensor, tensor.untyped_storage().data_ptr() + start, end - start)

    # -- tensors

    def _entry(self, tensor: Tensor) -> Entry:
        flags = _flags(tensor)
        if tensor.is_nested:
            return self._saved(tensor, flags)
        if tensor.layout is torch.sparse_coo:
            plain = tensor.detach()
            flags |= Flag.COALESCED if plain.is_coalesced() else 0
            values = plain._values().resolve_conj().resolve_neg()
            values = values if plain.sparse_dim() else _unrepeated(values)
            parts = (self._entry(_unrepeated(plain._indices())), self._entry(values))
            return Entry(Kind.COO, 0, flags, 0, tuple(tensor.shape), parts=parts)
        if tensor.layout in _COMPRESSED:
            return self._compressed(tensor.detach(), flags)
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_CODES:
            return self._saved(tensor, flags)
        if self._stager is not None and (entry := self._staged(_undecorated(tensor), self._stager, flags)) is not None:
            return entry
        if tensor.is_meta:
            code = DTYPE_CODES[tensor.dtype]
            return Entry(Kind.META, code, flags, 0, tuple(tensor.shape), tuple(tensor.stride()))
        if not tensor.is_cpu:
            raise SerializationError(f"a tensor on device {tensor.device} cannot be sent: move it to the CPU first")
        return self._strided(tensor, flags)

    def _staged(self, tensor: Tensor, stager: Stager, flags: int) -> Entry | None:
        """Describe a tensor whose bytes the stager copies to host memory; None if the stager leaves the tensor alone.

        The bytes may not have arrived yet, so they are never inline. The tensor is sent contiguous, unless it repeats
        elements: then only the memory that it has is sent.
        """
        if tensor.is_cpu and tensor.numel():
            _require_memory(tensor, extent(tensor)[1])
        repeated = _repeated(tensor)
        staged = stager.stage(tensor if repeated is None else repeated)
        if staged is None:
            return None
        host = staged.host
        if staged.wait is not None:
            self.waits.append(staged.wait)
        # An empty tensor, too, needs a buffer to be placed on its device, so that has at least one element
        memory = host if host.numel() else host.new_empty(1)
        source = self._add_buffer(view_of(memory.untyped_storage(), memory.data_ptr(), memory.nbytes))
        code = DTYPE_CODES[host.dtype]
        is_placed = bool(staged.device)
        described = host if repeated is None else tensor
        part = Entry(
            Kind.STRIDED,
            code,
            0 if is_placed else flags,
            source,
            tuple(described.shape),
            tuple(described.stride()),
            span_bytes=memory.nbytes,
        )
        return Entry(Kind.PLACED, 0, flags, 0, (), layout=staged.device, parts=(part,)) if is_placed else part

    def _strided(self, tensor: Tensor, flags: int) -> Entry:
        """Describe a view. Elements that it repeats are sent once; memory that it skips is left out if that is much.

        A view that skips little keeps its strides, so it is not contiguous at the receiver either.
        """
        code = DTYPE_CODES[tensor.dtype]
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if 0 in shape:
            self._spans.append(0)
            return Entry(Kind.STRIDED, code, flags, 0, shape, strides)
        core = _undecorated(tensor)
        if 0 in strides:
            once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
            core = core.as_strided(once, strides)
        start, end = extent(core)
        if end - start > max(2 * core.nbytes, LITTLE_BYTES):
            _require_memory(core, end)
            core = core.contiguous()
            start, end = extent(core)
            strides = tuple([0 if old == 0 else new for old, new in zip(strides, core.stride(), strict=True)])
        source = self._add_span(core, start, end)
        if core.data_ptr() == tensor.data_ptr():
            self._spans.append(end - start)
        return Entry(Kind.STRIDED, code, flags, source, shape, strides, span_bytes=end - start)

    def _shared(self, tensor: Tensor, span: Span) -> Entry:
        if span.source is None:
            span.source = self._add_span(tensor, span.start, span.end)
        return Entry(
            Kind.SHARED,
            DTYPE_CODES[tensor.dtype],
            _flags(tensor),
            span.source,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()) * tensor.element_size() - span.start,
            span.end - span.start,
        )

    def _compressed(self, tensor: Tensor, flags: int) -> Entry:
        if tensor.layout in _ROW_COMPRESSED:
            compressed, plain = tensor.crow_indices(), tensor.col_indices()
        else:
            compressed, plain = tensor.ccol_indices(), tensor.row_indices()
        indices = self._entry(_unrepeated(compressed)), self._entry(_unrepeated(plain))
        parts = (*indices, self._entry(tensor.values().resolve_conj().resolve_neg()))
        return Entry(Kind.COMPRESSED, 0, flags, 0, tuple(tensor.shape), layout=str(tensor.layout), parts=parts)

    def _saved(self, tensor: Tensor, flags: int) -> Entry:
        if not tensor.is_cpu and not tensor.is_meta:
            raise SerializationError(
                f"a tensor with layout {tensor.layout} and dtype {tensor.dtype} on device {tensor.device} cannot be "
                f"sent: move it to the CPU first"
            )
        file = io.BytesIO()
        torch.save(tensor.detach(), file)
        memory = file.getbuffer()
        return Entry(Kind.SAVED, 0, flags, self._add(memory), (), span_bytes=memory.nbytes)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds the values of its elements, one after the other."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.is_complex() and tensor.is_conj())
    )


def _flags(tensor: Tensor) -> int:
    flags = Flag.REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= Flag.CONJUGATE if tensor.is_conj() else 0
    flags |= Flag.NEGATIVE if tensor.is_neg() else 0
    return flags


def _require_memory(tensor: Tensor, end: int) -> None:
    if end > tensor.untyped_storage().nbytes():
        raise SerializationError("a tensor whose memory was freed cannot be sent")


def _repeated(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor that repeats elements, as `Tensor.expand` makes it, once; None for any other."""
    if not tensor.numel():
        return None
    start, end = extent(tensor)
    if end - start >= tensor.nbytes:
        return None
    return tensor.as_strided(((end - start) // tensor.element_size(),), (1,))


def _unrepeated(indices: Tensor) -> Tensor:
    """Return indices of a sparse tensor with memory for each of them: a peer accepts no others."""
    return indices if _repeated(indices) is None else indices.contiguous()


def _undecorated(tensor: Tensor) -> Tensor:
    """Return a tensor as it is in memory: without the lazy conjugate and negative bits, which are sent as flags."""
    plain = tensor.detach()
    if is_zero_tensor(plain):
        return torch.zeros(plain.shape, dtype=plain.dtype, device=plain.device)
    if plain.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if plain.is_neg() else plain
