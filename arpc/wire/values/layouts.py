"""Tensors out of the memory of a message that was received. They lie where their bytes were read to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from arpc.errors import ProtocolError, SerializationError
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS
from arpc.wire.values.bounds import check_contiguous, check_range, check_sizes, check_strided
from arpc.wire.values.device_staging import placements
from arpc.wire.values.saved_tensors import load_saved
from arpc.wire.values.table import (
    DTYPE_CODES,
    DTYPES,
    MAX_ROWS,
    NUMPY_DTYPES,
    Code,
    Entry,
    Flag,
    Kind,
    Table,
    decode_table,
)

__all__ = ["Buffer", "Layout", "Misplaced", "finished", "read_layout"]


_from_numpy = torch.from_numpy
_ndarray = np.ndarray
_FIRST_STAND_IN: Final = Code.FIRST_STAND_IN
_UNALIGNED: Final = ALIGNMENT - 1
_UINT8: Final = DTYPE_CODES[torch.uint8]
_FLAGS: Final = Flag.REQUIRES_GRAD | Flag.CONJUGATE | Flag.NEGATIVE | Flag.COALESCED
_DECORATIONS: Final = Flag.CONJUGATE | Flag.NEGATIVE
_DECORATED: Final = frozenset((Kind.STRIDED, Kind.SHARED, Kind.META, Kind.PLACED))
_PARTS: Final = frozenset((Kind.STRIDED, Kind.META, Kind.PLACED))
_INDEX_DTYPES: Final = frozenset((torch.int32, torch.int64))
_BLOCKED: Final = frozenset((torch.sparse_bsr, torch.sparse_bsc))
_LAYOUTS: Final = {
    str(layout): layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


class Misplaced:
    """Stands in the place of a buffer that could not be taken to its device; says why when a tensor needs it."""

    __slots__ = ("reason",)

    nbytes: Final = 0

    def __init__(self, reason: str) -> None:
        self.reason = reason


Buffer = memoryview | Tensor | Misplaced
"""Host memory; or what has been made of it, because it belongs on a device."""

_Row: TypeAlias = "tuple[np.dtype[Any] | None, int, int, tuple[int, ...], Entry | None]"
"""A tensor: dtype (None if it takes more than one step to build), code, source and shape; or what an entry says."""


class Layout:
    """What the table of a schema says, read and checked once. `build` makes the tensors of each message out of it."""

    __slots__ = ("_inline", "_is_restricted", "_rows", "inline_bytes", "n_buffers", "placements")

    def __init__(self, table: Table, *, is_restricted: bool) -> None:
        """Check everything that can be checked without memory. Raises `ProtocolError`, or whatever is wrong with it."""
        self.inline_bytes: Final = table.inline_bytes
        """The size of the inline tensors: the first bytes of a body."""
        self._is_restricted = is_restricted
        self._rows = _checked_rows(table)
        self.n_buffers: Final = 1 + max(map(_last_buffer, self._rows), default=-1)
        """How many buffers it refers to."""
        if self.n_buffers > MAX_BUFFERS:
            raise ProtocolError(f"a tensor in buffer {self.n_buffers - 1}, and at most {MAX_BUFFERS} are taken")
        self.placements: Final = placements(table) if table.entries else {}
        """Which buffers belong on a device: its name there, by the number of the buffer."""
        self._inline: list[tuple[tuple[int, ...], np.dtype[Any], int]] | None = []
        """Shape, dtype and offset of each tensor, if all of them are inline and built in one step."""
        for dtype, code, source, shape, _ in self._rows:
            if dtype is None or source < 0 or code >= _FIRST_STAND_IN:
                self._inline = None
                break
            self._inline.append((shape, dtype, source))

    def build(self, body: bytearray | memoryview, buffers: Sequence[Buffer]) -> list[Any]:
        """The tensors of a message, and the memory of other objects. They lie in the body and the buffers.

        More may follow the tensors in the body. Raises `ProtocolError` when the memory does not fit the layout,
        `SerializationError` for a tensor that belongs on a device where it cannot be.
        """
        if len(body) < self.inline_bytes:
            raise ProtocolError("the inline tensors of a message are larger than the message")
        try:
            if (rows := self._inline) is not None:
                return [_from_numpy(_ndarray(shape, dtype, body, offset)) for shape, dtype, offset in rows]
            return self._build_rows(body, buffers)
        except (ProtocolError, SerializationError):
            raise
        except Exception as error:
            raise ProtocolError(f"tensors that cannot be built: {error}") from error

    def _build_rows(self, body: bytearray | memoryview, buffers: Sequence[Buffer]) -> list[Any]:
        if len(buffers) < self.n_buffers:
            raise ProtocolError(f"a tensor in buffer {self.n_buffers - 1} of {len(buffers)}")
        slots: list[Any] = []
        rebuilder: _Rebuilder | None = None
        for dtype, code, source, shape, entry in self._rows:
            if dtype is None:
                if rebuilder is None:
                    inline = memoryview(body)[: self.inline_bytes]
                    rebuilder = _Rebuilder(inline, buffers, is_restricted=self._is_restricted)
                slots.append(rebuilder.memory(source, shape[0]) if entry is None else rebuilder.build(entry))
                continue
            if source >= 0:
                tensor = _from_numpy(_ndarray(shape, dtype, body, source))
            else:
                memory = buffers[~source]
                check_contiguous(shape, dtype.itemsize, memory.nbytes)
                tensor = _from_numpy(_ndarray(shape, dtype, memory))  # type: ignore[arg-type]
            slots.append(tensor if code < _FIRST_STAND_IN else finished(tensor, code))
        return slots


def read_layout(table: bytes | bytearray | memoryview, *, is_restricted: bool = False) -> Layout:
    """Read and check a table that a peer has sent. Restricted: the layout builds nothing that torch.load would read.

    Raises `ProtocolError`.
    """
    try:
        return Layout(decode_table(table), is_restricted=is_restricted)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error


def _checked_rows(table: Table) -> list[_Row]:
    inline_bytes, codes = table.inline_bytes, table.codes
    if not len(codes) == len(table.sources) == len(table.shapes):
        raise ProtocolError("a table of tensors with columns of different lengths")
    if len(codes) > MAX_ROWS:
        raise ProtocolError(f"a message of {len(codes)} tensors, and at most {MAX_ROWS} are taken")
    if codes.count(Code.ENTRY) != len(table.entries):
        raise ProtocolError(f"a table with {codes.count(Code.ENTRY)} places for {len(table.entries)} entries")
    entries = iter(table.entries)
    rows: list[_Row] = []
    for code, source, shape in zip(codes, table.sources, table.shapes, strict=True):
        if code == Code.ENTRY:
            rows.append((None, code, 0, (), next(entries)))
            continue
        if code == Code.BYTES:
            if len(shape) != 1:
                raise ProtocolError(f"the memory of an object with {len(shape)} sizes")
            dtype, item_bytes = None, 1
        else:
            dtype = NUMPY_DTYPES[code]
            item_bytes = dtype.itemsize
            if code & Code.REQUIRES_GRAD and not _can_require_grad(code & ~Code.REQUIRES_GRAD):
                raise ProtocolError(f"a tensor of {DTYPES[code & ~Code.REQUIRES_GRAD]} that requires grad")
        if source >= 0:
            if source & _UNALIGNED:
                raise ProtocolError("an inline tensor is not aligned")  # torch's operators would crash
            # the first condition holds for nearly all tensors; the others are looked at more closely
            if not 0 < prod(shape) * item_bytes <= inline_bytes - source:
                check_range(source, 0, inline_bytes)
                check_contiguous(shape, item_bytes, inline_bytes - source)
        rows.append((dtype, code, source, shape, None))
    return rows


def _can_require_grad(code: int) -> bool:
    dtype = DTYPES[code]
    return dtype.is_floating_point or dtype.is_complex


def _last_buffer(row: _Row) -> int:
    """The highest buffer that a row refers to, -1 for none."""
    _, _, source, _, entry = row
    return max(-1, ~source) if entry is None else _last_buffer_of(entry)


def _last_buffer_of(entry: Entry) -> int:
    return max(-1, ~entry.source, *map(_last_buffer_of, entry.parts))


def finished(tensor: Tensor, code: int) -> Tensor:
    """What numpy could not say of a tensor."""
    if code & _FIRST_STAND_IN:
        tensor = _as_dtype(tensor, code & ~Code.REQUIRES_GRAD)
    return tensor.requires_grad_() if code & Code.REQUIRES_GRAD else tensor


def _check_apart(tensor: Tensor) -> None:
    """Refuse a tensor that has more elements than there are in its memory."""
    check_range(0, tensor.nbytes, tensor.untyped_storage().nbytes())


def _as_dtype(tensor: Tensor, code: int) -> Tensor:
    # `data`: a tensor of its own, and not a view of one that nobody has
    return tensor.view(DTYPES[code]).data


class _Rebuilder:
    """Builds what takes more than one step."""

    def __init__(self, inline: memoryview, buffers: Sequence[Buffer], *, is_restricted: bool) -> None:
        self._inline = inline
        self._buffers = buffers
        self._is_restricted = is_restricted
        self._spans: dict[tuple[int, int, int], Tensor] = {}

    def build(self, entry: Entry) -> Tensor:
        """The tensor that an entry describes."""
        flags = entry.flags
        if flags & ~_FLAGS:
            raise ProtocolError(f"a tensor with the unknown flags {flags}")
        if flags & _DECORATIONS and entry.kind not in _DECORATED:
            # torch would crash on a quantized one
            raise ProtocolError("the conjugate or negative of a tensor that has no strides")
        tensor = self._BUILDERS[entry.kind](self, entry)
        if flags & Flag.CONJUGATE:
            tensor = torch._conj(tensor).data
        if flags & Flag.NEGATIVE:
            tensor = torch._neg_view(tensor).data
        return tensor.requires_grad_() if flags & Flag.REQUIRES_GRAD else tensor

    def memory(self, source: int, size_bytes: int) -> memoryview:
        """Bytes of the message: all of a buffer, or part of the inline memory."""
        if source < 0:
            memory = self._buffer(source)
            if not isinstance(memory, memoryview):
                raise ProtocolError("a buffer that belongs on a device, and in host memory as well")
            if memory.nbytes != size_bytes:
                raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {size_bytes}")
            return memory
        if source & _UNALIGNED:
            raise ProtocolError("an inline tensor is not aligned")
        check_range(source, size_bytes, self._inline.nbytes)
        return self._inline[source : source + size_bytes]

    def _buffer(self, source: int) -> Buffer:
        if not 0 <= ~source < len(self._buffers):
            raise ProtocolError(f"a tensor in buffer {~source} of {len(self._buffers)}")
        return self._buffers[~source]

    # -- one for each kind

    def _strided(self, entry: Entry) -> Tensor:
        numpy_dtype = NUMPY_DTYPES[entry.dtype]
        item_bytes = numpy_dtype.itemsize
        memory = self.memory(entry.source, entry.span_bytes)
        check_strided(entry.shape, entry.strides, item_bytes, memory.nbytes)
        strides = tuple([stride * item_bytes for stride in entry.strides])
        tensor = _from_numpy(_ndarray(entry.shape, numpy_dtype, memory, 0, strides))
        return tensor if entry.dtype < _FIRST_STAND_IN else _as_dtype(tensor, entry.dtype)

    def _shared(self, entry: Entry) -> Tensor:
        dtype = DTYPES[entry.dtype]
        offset, rest = divmod(entry.offset, dtype.itemsize)
        if rest:
            raise ProtocolError("a tensor that begins within an item")
        span = entry.source, entry.span_bytes, entry.dtype
        whole = self._spans.get(span)
        if whole is None:
            whole = self._spans[span] = self._span(*span)
        check_strided(entry.shape, entry.strides, dtype.itemsize, entry.span_bytes, entry.offset)
        return whole.as_strided(entry.shape, entry.strides, offset).data

    def _span(self, source: int, size_bytes: int, dtype_code: int) -> Tensor:
        """All of a span as one tensor of a dtype. Tensors of all dtypes have one storage in common."""
        if dtype_code == _UINT8:
            memory = self.memory(source, size_bytes)
            array: np.ndarray[tuple[int], np.dtype[np.uint8]] = _ndarray((size_bytes,), np.uint8, memory)
            return _from_numpy(array)
        key = source, size_bytes, _UINT8
        whole = self._spans.get(key)
        if whole is None:
            whole = self._spans[key] = self._span(*key)
        dtype = DTYPES[dtype_code]
        return whole[: size_bytes - size_bytes % dtype.itemsize].view(dtype)

    def _placed(self, entry: Entry) -> Tensor:
        (part,) = entry.parts
        memory = self._buffer(part.source)
        if isinstance(memory, Misplaced):
            raise SerializationError(memory.reason)
        if not isinstance(memory, Tensor):
            raise SerializationError(f"a tensor for device {entry.layout} came to a worker that has no such device")
        if memory.nbytes != part.span_bytes:
            raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {part.span_bytes}")
        dtype = DTYPES[part.dtype]
        check_strided(part.shape, part.strides, dtype.itemsize, memory.nbytes)
        return memory.view(dtype).as_strided(part.shape, part.strides).data

    def _meta(self, entry: Entry) -> Tensor:
        dtype = DTYPES[entry.dtype]
        # it has no memory, but operators compute how much it would have
        check_strided(entry.shape, entry.strides, dtype.itemsize, sys.maxsize)
        return torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device="meta")

    def _coo(self, entry: Entry) -> Tensor:
        check_sizes(entry.shape)
        first, second = entry.parts
        indices, values = self._indices(first), self._part(second)
        if not indices.numel():
            _check_apart(values)  # no index stands for each of them
        return torch.sparse_coo_tensor(
            indices, values, entry.shape, check_invariants=True, is_coalesced=bool(entry.flags & Flag.COALESCED)
        )

    def _compressed(self, entry: Entry) -> Tensor:
        check_sizes(entry.shape)
        layout = _LAYOUTS[entry.layout]
        first, second, third = entry.parts
        compressed, plain, values = self._indices(first), self._indices(second), self._part(third)
        if layout in _BLOCKED and 0 in values.shape[compressed.dim() :]:
            raise ProtocolError("a sparse tensor with blocks of no size")  # torch would divide by it
        return torch.sparse_compressed_tensor(
            compressed, plain, values, entry.shape, layout=layout, check_invariants=True
        )

    def _part(self, entry: Entry) -> Tensor:
        """A part of a sparse tensor. Torch would resolve a lazy negative, and so take memory that did not come."""
        if entry.kind not in _PARTS or entry.flags:
            raise ProtocolError(f"a sparse tensor with a part of kind {entry.kind} and flags {entry.flags}")
        return self.build(entry)

    def _indices(self, entry: Entry) -> Tensor:
        """Indices of a sparse tensor. Torch looks at each of them, so each of them must have come.

        They are copied: the memory that a peer shares can change after it was checked.
        """
        indices = self._part(entry)
        if indices.dtype not in _INDEX_DTYPES:
            raise ProtocolError(f"a sparse tensor with indices of dtype {indices.dtype}")
        _check_apart(indices)
        return indices.clone() if indices.is_cpu else indices

    def _saved(self, entry: Entry) -> Tensor:
        if self._is_restricted:
            raise SerializationError("a quantized or nested tensor is not taken in allow-list mode")
        return load_saved(self.memory(entry.source, entry.span_bytes))

    _BUILDERS: Final[dict[int, Callable[[_Rebuilder, Entry], Tensor]]] = {
        Kind.STRIDED: _strided,
        Kind.SHARED: _shared,
        Kind.META: _meta,
        Kind.COO: _coo,
        Kind.COMPRESSED: _compressed,
        Kind.SAVED: _saved,
        Kind.PLACED: _placed,
    }
