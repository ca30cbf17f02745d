"""Describes any tensors of a message. `wire.values.schemas` recognizes plain ones faster, and caches descriptions.

Small tensors lie inside the message (*inline*), which copies them. Large ones are *buffers*: the transport sends them
from the tensor's own memory. So what is written to such a tensor before its bytes have gone out is sent, and its
storage must not be resized meanwhile. `wire.values.layouts` is the way back.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor, UntypedStorage

from arpc.errors import SerializationError
from arpc.private.torch import is_zero_tensor
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS, PADDING
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.raw_memory import MEMORY, view_of
from arpc.wire.values.sharing import Span, extent, shared_spans
from arpc.wire.values.table import (
    COMPLEX_CODES,
    DTYPE_CODES,
    MAX_DIMENSIONS,
    MAX_ROWS,
    Code,
    Entry,
    Flag,
    Kind,
    encode_table,
)

__all__ = ["LITTLE_BYTES", "Description", "Slot", "describe"]

Slot = Tensor | PickleBuffer
"""What fills a hole of a pickle: a tensor, or another object's memory (a numpy array's, say)."""

_ROW_COMPRESSED: Final = {torch.sparse_csr, torch.sparse_bsr}
_COMPRESSED: Final = {*_ROW_COMPRESSED, torch.sparse_csc, torch.sparse_bsc}
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD


class Description(NamedTuple):
    """The tensors of one message: the table that describes them, and their memory."""

    table: bytes
    inline_bytes: int
    parts: list[bytes]
    """Memory and padding of the inline tensors, in order."""
    buffers: list[memoryview]
    waits: Sequence[Callable[[], None]]
    """To be called, in a thread, before the buffers are read: they are being filled from devices."""


def describe(slots: Sequence[Slot], inline_limit: int, stager: Stager | None = None) -> Description:
    """Describe the slots of one message and collect their memory, without copying what is larger than the limit.

    The stager takes care of tensors that are not in host memory, here or there. Without one they cannot travel.

    Raises `SerializationError` for a tensor that cannot travel.
    """
    if len(slots) > MAX_ROWS:
        raise SerializationError(f"a message may have at most {MAX_ROWS} tensors: send them in parts, or stack them")
    codes: list[int] = []
    sources: list[int] = []
    shapes: list[Sequence[int]] = []
    inline: list[bytes] = []
    buffers: list[memoryview] = []
    describer: _Describer | None = None
    position = 0
    if stager is None or not stager.moves_host_memory:
        storages = _storages(slots)
        spans = _shared_spans(slots, storages) if len(slots) > 1 else None
    else:
        storages, spans = [None] * len(slots), None  # the stager is to see them all
    dtype_codes = DTYPE_CODES
    slot: Any
    for slot, storage in zip(slots, storages):  # noqa: B905 - `strict` takes as long as a tensor
        if (
            storage is not None
            and (code := dtype_codes.get(slot.dtype)) is not None
            and slot.is_cpu
            and slot.is_contiguous()
            and not slot.is_neg()
            and not slot.is_nested
            and storage.nbytes()  # it may have been freed
            and (address := slot.data_ptr())
            and (spans is None or len(codes) not in spans)
            and not (code in COMPLEX_CODES and slot.is_conj())
        ):
            size = slot.nbytes
            if size <= inline_limit:
                inline.append(MEMORY[address : address + size])
                sources.append(position)
                if padding := -size & (ALIGNMENT - 1):
                    inline.append(PADDING[padding])
                    size += padding
                position += size
            else:
                buffers.append(view_of(storage, address, size))
                sources.append(-len(buffers))
            codes.append(code | _REQUIRES_GRAD if slot.requires_grad else code)
            shapes.append(slot.shape)
        else:
            if describer is None:
                describer = _Describer(inline, buffers, inline_limit, stager)
            describer.inline_bytes = position
            code, source, shape = describer.describe(slot, spans.get(len(codes)) if spans is not None else None)
            position = describer.inline_bytes
            codes.append(code)
            sources.append(source)
            shapes.append(shape)
    if len(buffers) > MAX_BUFFERS:
        raise SerializationError(f"a message may have at most {MAX_BUFFERS} large tensors: send it in parts")
    entries = describer.entries if describer is not None else ()
    waits = describer.waits if describer is not None else ()
    if (most := max(map(len, [*shapes, *(entry.shape for entry in entries)]), default=0)) > MAX_DIMENSIONS:
        raise SerializationError(f"a tensor of {most} dimensions cannot be sent: it may have at most {MAX_DIMENSIONS}")
    table = encode_table((position, bytes(codes), sources, shapes, entries))
    return Description(table, position, inline, buffers, waits)


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


def _shared_spans(slots: Sequence[Slot], storages: Sequence[UntypedStorage | None]) -> dict[int, Span] | None:
    """By position, what tensors share with others. None if no two of them have a storage in common."""
    keys = {storage._cdata for storage in storages if storage is not None}
    if len(keys) == len(slots) or len(keys) == sum(storage is not None for storage in storages):
        return None
    return shared_spans([slot if _can_share(slot) else None for slot in slots], storages)


def _can_share(slot: Slot) -> TypeGuard[Tensor]:
    return isinstance(slot, Tensor) and slot.is_cpu and slot.dtype in DTYPE_CODES and not slot.is_nested


LITTLE_BYTES: Final = 8 * 1024
"""To send so many bytes that nobody asked for costs less than to copy those that somebody did."""


class _Describer:
    """Describes what is not simply contiguous memory of its own. Adds to the memory of a message."""

    def __init__(
        self, inline: list[bytes], buffers: list[memoryview], inline_limit: int, stager: Stager | None
    ) -> None:
        self.entries: list[Entry] = []
        self.waits: list[Callable[[], None]] = []
        self._stager = stager
        self.inline_bytes = 0
        self._inline = inline
        self._buffers = buffers
        self._inline_limit = inline_limit

    def describe(self, slot: Slot, span: Span | None) -> tuple[int, int, tuple[int, ...]]:
        """A slot's place in the columns. ``span``: what it shares with others."""
        if isinstance(slot, PickleBuffer):
            memory = slot.raw()
            return Code.BYTES, self._add(memory), (memory.nbytes,)
        try:
            entry = self._shared(slot, span) if span is not None else self._entry(slot)
        except SerializationError:
            raise
        except Exception as error:
            # a layout that hides its memory, a tensor of vmap or of a compiler's tracing
            raise SerializationError(f"a tensor of type {type(slot).__qualname__} cannot be sent: {error}") from error
        self.entries.append(entry)
        return Code.ENTRY, 0, ()

    # -- memory; each returns the source of what was added

    def _add(self, memory: memoryview) -> int:
        if memory.nbytes <= self._inline_limit:
            return self._add_inline(bytes(memory))
        return self._add_buffer(memory)

    def _add_inline(self, data: bytes) -> int:
        offset = self.inline_bytes
        padding = -len(data) % ALIGNMENT
        self._inline += (data, PADDING[padding])
        self.inline_bytes = offset + len(data) + padding
        return offset

    def _add_buffer(self, memory: memoryview) -> int:
        self._buffers.append(memory)
        return -len(self._buffers)

    def _add_span(self, storage: UntypedStorage, start: int, end: int) -> int:
        _require_memory(storage, end)
        base = storage.data_ptr()
        if end - start <= self._inline_limit:
            return self._add_inline(MEMORY[base + start : base + end])
        return self._add_buffer(view_of(storage, base + start, end - start))

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
        """A tensor whose bytes may still be on their way to host memory: never inline, therefore. None: it stays here.

        It travels contiguous, but for one that repeats its elements: that is not to take more memory than it has.
        """
        repeated = _repeated(tensor)
        staged = stager.stage(tensor if repeated is None else repeated)
        if staged is None:
            return None
        host = staged.host
        if staged.wait is not None:
            self.waits.append(staged.wait)
        # A buffer says which device an empty one belongs on, too, so it has at least one element
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
        """A view, sent without what it skips over if that is much, and what it repeats only once.

        One that skips little stays the view it is: at the other end, too, it is not contiguous.
        """
        code = DTYPE_CODES[tensor.dtype]
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if 0 in shape:
            return Entry(Kind.STRIDED, code, flags, 0, shape, strides)
        core = _undecorated(tensor)
        if 0 in strides:
            once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
            core = core.as_strided(once, strides)
        start, end = extent(core)
        if end - start > max(2 * core.nbytes, LITTLE_BYTES):
            _require_memory(core.untyped_storage(), end)
            core = core.contiguous()
            start, end = extent(core)
            strides = tuple([0 if old == 0 else new for old, new in zip(strides, core.stride(), strict=True)])
        source = self._add_span(core.untyped_storage(), start, end)
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


def _flags(tensor: Tensor) -> int:
    flags = Flag.REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= Flag.CONJUGATE if tensor.is_conj() else 0
    flags |= Flag.NEGATIVE if tensor.is_neg() else 0
    return flags


def _require_memory(storage: UntypedStorage, end: int) -> None:
    if end > storage.nbytes():
        raise SerializationError("a tensor whose memory was freed cannot be sent")


def _repeated(tensor: Tensor) -> Tensor | None:
    """The memory of a tensor that has more elements than memory, as `Tensor.expand` makes it. None for any other."""
    if not tensor.numel():
        return None
    start, end = extent(tensor)
    if end - start >= tensor.nbytes:
        return None
    return tensor.as_strided(((end - start) // tensor.element_size(),), (1,))


def _unrepeated(indices: Tensor) -> Tensor:
    """Indices of a sparse tensor. A peer takes only those that have memory of their own."""
    return indices if _repeated(indices) is None else indices.contiguous()


def _undecorated(tensor: Tensor) -> Tensor:
    """The memory of a tensor without the lazy conjugate and negative bits, which travel as flags."""
    plain = tensor.detach()
    if is_zero_tensor(plain):
        return torch.zeros(plain.shape, dtype=plain.dtype, device=plain.device)
    if plain.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if plain.is_neg() else plain
