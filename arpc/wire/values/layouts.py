"""Builds tensors from the memory of a received message. They use the bytes in the place that they were read to."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from arpc.errors import ProtocolError, SerializationError
from arpc.private.torch import nested_places, rebuild_nested
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS
from arpc.wire.values.bounds import check_contiguous, check_range, check_sizes, check_strided
from arpc.wire.values.table import (
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

__all__ = ["Buffer", "Layout", "Misplaced", "read_layout"]

_from_numpy = torch.from_numpy
_ndarray: Final[Callable[..., Any]] = np.ndarray
_FIRST_STAND_IN: Final = Code.FIRST_STAND_IN
_UNALIGNED: Final = ALIGNMENT - 1
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
    """Stands in for a buffer that could not be copied to its device; a tensor that needs it fails with ``reason``."""

    __slots__ = ("reason",)

    nbytes: Final = 0

    def __init__(self, reason: str) -> None:
        self.reason = reason


Buffer = memoryview | Tensor | Misplaced
"""A received buffer: host memory; or the tensor on the device that it belongs on; or a `Misplaced`."""

_Row: TypeAlias = "tuple[np.dtype[Any] | None, int, int, tuple[int, ...]]"
"""A dense tensor's dtype, code, source and shape. Without a dtype: the memory of another object."""


class Layout:
    """The table of a schema, read and checked once. `build` makes the tensors of each message by it."""

    __slots__ = ("_inline", "_is_restricted", "_requiring_grad", "_rows", "inline_bytes", "n_buffers", "placements")

    def __init__(self, table: Table, *, is_restricted: bool) -> None:
        """Check everything that can be checked without memory. Raises `ProtocolError`, or any error of a bad table."""
        self.inline_bytes: Final = table.inline_bytes
        """The size of the inline tensors: the first bytes of a body."""
        self._is_restricted = is_restricted
        self._rows = rows = _checked_rows(table)
        entries = [*_with_parts(table.entries)]
        sources = [row.source if isinstance(row, Entry) else row[2] for row in (*rows, *entries)]
        self.n_buffers: Final = max(0, -min(sources, default=0))
        """The number of buffers that it refers to."""
        if self.n_buffers > MAX_BUFFERS:
            raise ProtocolError(f"a tensor in buffer {self.n_buffers - 1}, and at most {MAX_BUFFERS} are taken")
        self.placements: Final = {
            ~entry.parts[0].source: entry.layout
            for entry in entries
            if entry.kind == Kind.PLACED and entry.parts and entry.parts[0].source < 0
        }
        """The device names of the buffers that belong on devices, by the number of the buffer."""
        self._inline: tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]] | None = None
        """Shapes, dtypes, offsets, and strides of the tensors, if all are inline and built in one step; else None."""
        self._requiring_grad: Sequence[int] = ()
        """The positions of the tensors among these that require grad."""
        simple = [_simple(row, table.inline_bytes) for row in rows]
        if None not in simple:
            shapes, dtypes, offsets, strides = zip(*simple, strict=True) if rows else ((), (), (), ())
            self._inline = shapes, dtypes, offsets, strides
            self._requiring_grad = [number for number, row in enumerate(rows) if _requires_grad(row)]

    def build(self, memory: bytes | bytearray | memoryview, buffers: Sequence[Buffer]) -> list[Any]:
        """Return the tensors of a message, and the memory of other objects. They refer to ``memory`` and ``buffers``.

        ``memory`` may go on after the tensors. Raises `ProtocolError` if it does not fit the layout, and
        `SerializationError` for a tensor that is refused, or cannot be on the device that it belongs on.
        """
        if len(memory) < self.inline_bytes:
            raise ProtocolError("the inline tensors of a message are larger than the message")
        try:
            if self._inline is not None:
                shapes, dtypes, offsets, strides = self._inline
                tensors = [*map(_from_numpy, map(_ndarray, shapes, dtypes, repeat(memory), offsets, strides))]
                for number in self._requiring_grad:
                    tensors[number].requires_grad_()
                return tensors
            if len(buffers) < self.n_buffers:
                raise ProtocolError(f"a tensor in buffer {self.n_buffers - 1} of {len(buffers)}")
            builder = _Builder(memoryview(memory)[: self.inline_bytes], buffers, is_restricted=self._is_restricted)
            return [builder.build(row) if isinstance(row, Entry) else builder.dense(*row) for row in self._rows]
        except (ProtocolError, SerializationError):
            raise
        except Exception as error:
            raise ProtocolError(f"tensors that cannot be built: {error}") from error


def read_layout(table: bytes | bytearray | memoryview, *, is_restricted: bool = False) -> Layout:
    """Read and check a table that a peer has sent. Raises `ProtocolError`.

    ``is_restricted``: the layout refuses to build tensors that torch.load would have to read.
    """
    try:
        return Layout(decode_table(table), is_restricted=is_restricted)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error


def _checked_rows(table: Table) -> list[_Row | Entry]:
    inline_bytes, codes = table.inline_bytes, table.codes
    if not len(codes) == len(table.sources) == len(table.shapes):
        raise ProtocolError("a table of tensors with columns of different lengths")
    if len(codes) > MAX_ROWS:
        raise ProtocolError(f"a message of {len(codes)} tensors, and at most {MAX_ROWS} are taken")
    if codes.count(Code.ENTRY) != len(table.entries):
        raise ProtocolError(f"a table with {codes.count(Code.ENTRY)} places for {len(table.entries)} entries")
    entries = iter(table.entries)
    rows: list[_Row | Entry] = []
    for code, source, shape in zip(codes, table.sources, table.shapes, strict=True):
        if code == Code.ENTRY:
            rows.append(next(entries))
            continue
        if code == Code.BYTES:
            if len(shape) != 1:
                raise ProtocolError(f"the memory of an object with {len(shape)} sizes")
            dtype, item_bytes = None, 1
        else:
            dtype = NUMPY_DTYPES[code]
            item_bytes = dtype.itemsize
            described = DTYPES[code & ~Code.REQUIRES_GRAD]
            if code & Code.REQUIRES_GRAD and not (described.is_floating_point or described.is_complex):
                raise ProtocolError(f"a tensor of {described} that requires grad")
        if source >= 0:
            if source & _UNALIGNED:
                raise ProtocolError("an inline tensor is not aligned")  # torch's operators would crash
            # the first condition holds for nearly all tensors; only the others get the exact checks
            if not 0 < prod(shape) * item_bytes <= inline_bytes - source:
                check_range(source, 0, inline_bytes)
                check_contiguous(shape, item_bytes, inline_bytes - source)
        rows.append((dtype, code, source, shape))
    return rows


def _simple(row: _Row | Entry, inline_bytes: int) -> tuple[Any, ...] | None:
    """Return shape, dtype, offset and strides of an inline tensor of a dtype that numpy has; None for any other row."""
    if not isinstance(row, Entry):
        dtype, code, source, shape = row
        is_simple = dtype is not None and code & ~Code.REQUIRES_GRAD < _FIRST_STAND_IN and source >= 0
        return (shape, dtype, source, None) if is_simple else None
    # An entry that cannot be is left to `_Builder`, which refuses it when the message is read: that fails one call, and
    # does not close the connection
    dtype = NUMPY_DTYPES.get(row.dtype)
    if (
        dtype is None
        or row.kind != Kind.STRIDED
        or row.dtype >= _FIRST_STAND_IN
        or row.source < 0
        or row.flags & ~Flag.REQUIRES_GRAD
        or (row.flags and not DTYPES[row.dtype].is_floating_point)
    ):
        return None
    try:
        _check_inline(row.source, row.span_bytes, inline_bytes)
        check_strided(row.shape, row.strides, dtype.itemsize, row.span_bytes)
    except ProtocolError:
        return None
    return row.shape, dtype, row.source, tuple([stride * dtype.itemsize for stride in row.strides])


def _requires_grad(row: _Row | Entry) -> bool:
    return bool(row.flags & Flag.REQUIRES_GRAD if isinstance(row, Entry) else row[1] & Code.REQUIRES_GRAD)


def _check_inline(source: int, size_bytes: int, inline_bytes: int) -> None:
    """Refuse inline bytes that are not aligned, or not among the inline tensors."""
    if source & _UNALIGNED:
        raise ProtocolError("an inline tensor is not aligned")  # torch's operators would crash
    check_range(source, size_bytes, inline_bytes)


def _with_parts(entries: Iterable[Entry]) -> Iterator[Entry]:
    for entry in entries:
        yield entry
        yield from _with_parts(entry.parts)


def _check_apart(tensor: Tensor) -> None:
    """Refuse a tensor that has more elements than memory for them."""
    check_range(0, tensor.nbytes, tensor.untyped_storage().nbytes())


def _as_dtype(tensor: Tensor, code: int) -> Tensor:
    """View a tensor as the dtype of a code that numpy lacks; return other tensors unchanged."""
    # `data`: a tensor of its own, not a view of a hidden one
    return tensor if code < _FIRST_STAND_IN else tensor.view(DTYPES[code]).data


class _Builder:
    """Builds the tensors of one message, of any kind."""

    def __init__(self, inline: memoryview, buffers: Sequence[Buffer], *, is_restricted: bool) -> None:
        self._inline = inline
        self._buffers = buffers
        self._is_restricted = is_restricted
        self._spans: dict[tuple[int, int], Tensor] = {}

    def dense(self, dtype: np.dtype[Any] | None, code: int, source: int, shape: tuple[int, ...]) -> Any:
        """Return the tensor that a row describes, or the memory of another object."""
        if dtype is None:
            return self.memory(source, shape[0])
        if source < 0:
            memory: Any = self._buffers[~source]
            check_contiguous(shape, dtype.itemsize, memory.nbytes)
            array = _ndarray(shape, dtype, memory)
        else:
            array = _ndarray(shape, dtype, self._inline, source)
        tensor = _as_dtype(_from_numpy(array), code & ~Code.REQUIRES_GRAD)
        return tensor.requires_grad_() if code & Code.REQUIRES_GRAD else tensor

    def build(self, entry: Entry) -> Tensor:
        """Build the tensor that an entry describes."""
        flags = entry.flags
        if flags & ~_FLAGS:
            raise ProtocolError(f"a tensor with the unknown flags {flags}")
        if flags & _DECORATIONS and entry.kind not in _DECORATED:
            # torch would crash on a quantized tensor
            raise ProtocolError("the conjugate or negative of a tensor that has no strides")
        tensor = self._BUILDERS[entry.kind](self, entry)
        if flags & Flag.CONJUGATE:
            tensor = torch._conj(tensor).data
        if flags & Flag.NEGATIVE:
            tensor = torch._neg_view(tensor).data
        return tensor.requires_grad_() if flags & Flag.REQUIRES_GRAD else tensor

    def memory(self, source: int, size_bytes: int) -> memoryview:
        """Return bytes of the message: all of a buffer, or part of the inline memory. Raises `ProtocolError`."""
        if source < 0:
            memory = self._buffers[~source]
            if not isinstance(memory, memoryview):
                raise ProtocolError("a buffer that belongs on a device, and in host memory as well")
            if memory.nbytes != size_bytes:
                raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {size_bytes}")
            return memory
        _check_inline(source, size_bytes, self._inline.nbytes)
        return self._inline[source : source + size_bytes]

    # -- one method for each kind

    def _strided(self, entry: Entry) -> Tensor:
        numpy_dtype = NUMPY_DTYPES[entry.dtype]
        item_bytes = numpy_dtype.itemsize
        memory = self.memory(entry.source, entry.span_bytes)
        check_strided(entry.shape, entry.strides, item_bytes, memory.nbytes)
        strides = tuple([stride * item_bytes for stride in entry.strides])
        return _as_dtype(_from_numpy(_ndarray(entry.shape, numpy_dtype, memory, 0, strides)), entry.dtype)

    def _shared(self, entry: Entry) -> Tensor:
        dtype = DTYPES[entry.dtype]
        offset, rest = divmod(entry.offset, dtype.itemsize)
        if rest:
            raise ProtocolError("a tensor that begins within an item")
        check_strided(entry.shape, entry.strides, dtype.itemsize, entry.span_bytes, entry.offset)
        whole = self._span(entry.source, entry.span_bytes)
        items = whole[: entry.span_bytes - entry.span_bytes % dtype.itemsize].view(dtype)
        return items.as_strided(entry.shape, entry.strides, offset).data

    def _span(self, source: int, size_bytes: int) -> Tensor:
        """Return a span of bytes that several tensors are part of, as one tensor, so that they share its storage."""
        whole = self._spans.get((source, size_bytes))
        if whole is None:
            array = _ndarray((size_bytes,), np.uint8, self.memory(source, size_bytes))
            whole = self._spans[source, size_bytes] = _from_numpy(array)
        return whole

    def _placed(self, entry: Entry) -> Tensor:
        (part,) = entry.parts
        if part.source >= 0:
            raise ProtocolError("a tensor for a device that is inline")
        memory = self._buffers[~part.source]
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
            _check_apart(values)  # there are no indices to bound the number of values
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
        """Build a part of a sparse tensor. Flags are refused: torch would resolve a lazy negative, in more memory."""
        if entry.kind not in _PARTS or entry.flags:
            raise ProtocolError(f"a sparse tensor with a part of kind {entry.kind} and flags {entry.flags}")
        return self.build(entry)

    def _indices(self, entry: Entry) -> Tensor:
        """Build the indices of a sparse tensor. Torch reads each of them, so each must have been sent.

        They are copied, because memory that a peer shares can change after the check.
        """
        indices = self._part(entry)
        if indices.dtype not in _INDEX_DTYPES:
            raise ProtocolError(f"a sparse tensor with indices of dtype {indices.dtype}")
        _check_apart(indices)
        return indices.clone() if indices.is_cpu else indices

    def _saved(self, entry: Entry) -> Tensor:
        if self._is_restricted:
            raise SerializationError("a quantized or nested tensor is not taken in allow-list mode")
        return _load_saved(self.memory(entry.source, entry.span_bytes))

    _BUILDERS: Final[dict[int, Callable[[_Builder, Entry], Tensor]]] = {
        Kind.STRIDED: _strided,
        Kind.SHARED: _shared,
        Kind.META: _meta,
        Kind.COO: _coo,
        Kind.COMPRESSED: _compressed,
        Kind.SAVED: _saved,
        Kind.PLACED: _placed,
    }


# -- tensors in the bytes of torch.save: those of layouts that hide their memory (quantized, nested)

_SPARSE: Final = frozenset((torch.sparse_coo, *_LAYOUTS.values()))


def _load_saved(memory: memoryview) -> Tensor:
    """Load the tensor that was saved. Raises `ProtocolError` for anything else, and any error of torch.load.

    Torch.load, as it is called here, runs no code of the peer's, but it trusts what it reads. So the file must not be
    compressed, which bounds what is read by what came, and a nested tensor must lie in its own memory.
    """
    # a copy, so that nothing changes after the checks
    file = io.BytesIO(memory)
    _check_archive(file, memory.nbytes)
    loaded = _load(file)
    if type(loaded) is not Tensor:
        raise ProtocolError(f"a tensor was announced, and it is of type {type(loaded).__name__}")
    if loaded.layout in _SPARSE:
        raise ProtocolError(f"a tensor of layout {loaded.layout} that was saved")  # its indices were not checked
    if loaded.is_nested:
        _check_nested(loaded)
    return loaded


def _load(file: io.BytesIO) -> object:
    rebuild: Any = rebuild_nested()
    # torch 2.15 no longer lists it as safe, because it trusts the sizes that it reads; `_check_nested` checks these
    if rebuild in torch.serialization.get_safe_globals():
        return torch.load(file, weights_only=True)
    with torch.serialization.safe_globals([rebuild]):
        return torch.load(file, weights_only=True)


def _check_archive(file: io.BytesIO, size_bytes: int) -> None:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if is_compressed or sum([member.file_size for member in members]) > size_bytes:
        raise ProtocolError("a tensor was saved in a way that takes more memory than came")
    file.seek(0)


def _check_nested(tensor: Tensor) -> None:
    """Refuse a nested tensor with a part outside of its memory, which torch's operators do not check."""
    memory = tensor.values()
    item_bytes = memory.dtype.itemsize
    for shape, strides, offset in zip(*nested_places(tensor), strict=True):
        check_strided(shape, strides, item_bytes, memory.nbytes, offset * item_bytes)
