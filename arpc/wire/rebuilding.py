"""Tensors out of the memory of a message that was received. They lie where their bytes were read to."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from arpc.errors import ProtocolError, SerializationError
from arpc.wire.frames import ALIGNMENT
from arpc.wire.table import DTYPE_CODES, DTYPES, NUMPY_DTYPES, Code, Entry, Flag, Kind, decode_table

__all__ = ["Buffer", "Misplaced", "finished", "unpack"]


_from_numpy = torch.from_numpy
_ndarray = np.ndarray
_FIRST_STAND_IN: Final = Code.FIRST_STAND_IN
_FIRST_SPECIAL: Final = Code.BYTES
_UNALIGNED: Final = ALIGNMENT - 1
_UINT8: Final = DTYPE_CODES[torch.uint8]
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


def unpack(
    table: bytes | memoryview, body: bytearray, buffers: Sequence[Buffer], *, is_restricted: bool = False
) -> list[Any]:
    """Build what `wire.tensors.pack` described. Restricted: without what torch.load would have to read.

    Raises `ProtocolError` when the description does not fit the memory, `SerializationError` for a tensor that belongs
    on a device where it cannot be.
    """
    slots: list[Any] = []
    rebuilder: _Rebuilder | None = None
    numpy_dtypes = NUMPY_DTYPES
    try:
        decoded = decode_table(table)
        base = len(body) - decoded.inline_bytes
        if base < 0:
            raise ProtocolError("the inline tensors of a message are larger than the message")
        if base & _UNALIGNED and decoded.inline_bytes:
            raise ProtocolError("the inline tensors of a message are not aligned")
        codes, sources, shapes = decoded.codes, decoded.sources, decoded.shapes
        if not len(codes) == len(sources) == len(shapes):
            raise ProtocolError("a table of tensors with columns of different lengths")
        for code, source, shape in zip(codes, sources, shapes):  # noqa: B905 - `strict` takes as long as a small tensor
            if code < _FIRST_SPECIAL:
                if source >= 0:
                    if source & _UNALIGNED:
                        raise ProtocolError("an inline tensor is not aligned")  # torch's operators would crash
                    tensor = _from_numpy(_ndarray(shape, numpy_dtypes[code], body, base + source))
                else:
                    tensor = _from_numpy(_ndarray(shape, numpy_dtypes[code], buffers[~source]))  # type: ignore[arg-type]
                slots.append(tensor if code < _FIRST_STAND_IN else finished(tensor, code))
            else:
                if rebuilder is None:
                    rebuilder = _Rebuilder(body, base, buffers, decoded.entries, is_restricted=is_restricted)
                slots.append(rebuilder.build(code, source, shape))
    except (ProtocolError, SerializationError):
        raise
    except Exception as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error
    return slots


def finished(tensor: Tensor, code: int) -> Tensor:
    """What numpy could not say of a tensor."""
    if code & _FIRST_STAND_IN:
        tensor = _as_dtype(tensor, code & ~Code.REQUIRES_GRAD)
    return tensor.requires_grad_() if code & Code.REQUIRES_GRAD else tensor


def _as_dtype(tensor: Tensor, code: int) -> Tensor:
    # `data`: a tensor of its own, and not a view of one that nobody has
    return tensor.view(DTYPES[code]).data


class _Rebuilder:
    """Builds what takes more than one step."""

    def __init__(
        self,
        body: bytearray,
        base: int,
        buffers: Sequence[Buffer],
        entries: Sequence[Entry],
        *,
        is_restricted: bool,
    ) -> None:
        self._is_restricted = is_restricted
        self._body = memoryview(body)
        self._base = base
        self._buffers = buffers
        self._entries = iter(entries)
        self._spans: dict[tuple[int, int, int], Tensor] = {}

    def build(self, code: int, source: int, shape: tuple[int, ...]) -> Tensor | memoryview:
        """What one place of the columns says."""
        if code == Code.ENTRY:
            return self._build_entry(next(self._entries))
        if code == Code.BYTES:
            (size_bytes,) = shape
            return self._memory(source, size_bytes)
        raise ProtocolError(f"a tensor of the unknown kind {code}")

    def _build_entry(self, entry: Entry) -> Tensor:
        tensor = self._BUILDERS[entry.kind](self, entry)
        flags = entry.flags
        if flags & Flag.CONJUGATE:
            tensor = torch._conj(tensor).data
        if flags & Flag.NEGATIVE:
            tensor = torch._neg_view(tensor).data
        return tensor.requires_grad_() if flags & Flag.REQUIRES_GRAD else tensor

    def _memory(self, source: int, size_bytes: int) -> memoryview:
        if source < 0:
            memory = self._buffers[~source]
            if not isinstance(memory, memoryview):
                raise ProtocolError("a buffer that belongs on a device, and in host memory as well")
            if memory.nbytes != size_bytes:
                raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {size_bytes}")
            return memory
        start = self._base + source
        if source & _UNALIGNED or start + size_bytes > self._body.nbytes:
            raise ProtocolError("an inline tensor is not aligned, or lies outside of its message")
        return self._body[start : start + size_bytes]

    # -- one for each kind

    def _strided(self, entry: Entry) -> Tensor:
        numpy_dtype = NUMPY_DTYPES[entry.dtype]
        strides = tuple([stride * numpy_dtype.itemsize for stride in entry.strides])
        memory = self._memory(entry.source, entry.span_bytes)
        if not memory and 0 not in entry.shape:
            raise ProtocolError("a tensor without memory")  # numpy would take no size for any size
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
        # as_strided looks to it that nothing reaches beyond the storage
        return whole.as_strided(entry.shape, entry.strides, offset).data

    def _span(self, source: int, size_bytes: int, dtype_code: int) -> Tensor:
        """All of a span as one tensor of a dtype. Tensors of all dtypes have one storage in common."""
        if dtype_code == _UINT8:
            memory = self._memory(source, size_bytes)
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
        memory = self._buffers[~part.source]
        if isinstance(memory, Misplaced):
            raise SerializationError(memory.reason)
        if not isinstance(memory, Tensor):
            raise SerializationError(f"a tensor for device {entry.layout} came to a worker that has no such device")
        if memory.nbytes != part.span_bytes:
            raise ProtocolError(f"a buffer of {memory.nbytes} bytes was announced as {part.span_bytes}")
        # as_strided looks to it that nothing reaches beyond the storage
        return memory.view(DTYPES[part.dtype]).as_strided(part.shape, part.strides).data

    def _meta(self, entry: Entry) -> Tensor:
        return torch.empty_strided(entry.shape, entry.strides, dtype=DTYPES[entry.dtype], device="meta")

    def _coo(self, entry: Entry) -> Tensor:
        indices, values = map(self._build_entry, entry.parts)
        return torch.sparse_coo_tensor(
            indices, values, entry.shape, check_invariants=True, is_coalesced=bool(entry.flags & Flag.COALESCED)
        )

    def _compressed(self, entry: Entry) -> Tensor:
        compressed, plain, values = map(self._build_entry, entry.parts)
        return torch.sparse_compressed_tensor(
            compressed, plain, values, entry.shape, layout=_LAYOUTS[entry.layout], check_invariants=True
        )

    def _saved(self, entry: Entry) -> Tensor:
        if self._is_restricted:
            raise SerializationError("a quantized or nested tensor is not taken in allow-list mode")
        if entry.flags & (Flag.CONJUGATE | Flag.NEGATIVE):  # torch would crash on it
            raise ProtocolError("a quantized or nested tensor that is the conjugate or negative of its memory")
        memory = self._memory(entry.source, entry.span_bytes)
        loaded = torch.load(io.BytesIO(memory), weights_only=True)
        if not isinstance(loaded, Tensor):
            raise ProtocolError(f"a tensor was announced, and it is of type {type(loaded).__name__}")
        return loaded

    _BUILDERS: Final[dict[int, Callable[[_Rebuilder, Entry], Tensor]]] = {
        Kind.STRIDED: _strided,
        Kind.SHARED: _shared,
        Kind.META: _meta,
        Kind.COO: _coo,
        Kind.COMPRESSED: _compressed,
        Kind.SAVED: _saved,
        Kind.PLACED: _placed,
    }
