"""The tensor table: the description of a message's tensors, from which the receiver builds them again.

A tensor is never pickled. The pickle of a message has a hole in its place, and the table describes what fills the hole:
`wire.values.packing` writes the table, `wire.values.layouts` reads it. Nearly all tensors are contiguous. These take
one place in each of three columns: a code for dtype and ``requires_grad``, the source of the bytes, and the shape.
Other tensors have an `Entry` as well.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec
import numpy as np
import torch
from msgspec import Meta

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "MAX_DIMENSIONS",
    "MAX_ROWS",
    "NUMPY_DTYPES",
    "Code",
    "Entry",
    "Flag",
    "Kind",
    "Table",
    "decode_table",
    "encode_table",
]

MAX_DIMENSIONS: Final = 64
"""The most dimensions of a tensor. No version of numpy's arrays or of torch's operators takes more."""
MAX_ROWS: Final = 1 << 17
"""The most tensors in one message. A row of a table takes a few bytes, the tensor made from it some hundred."""

# -- dtypes. The position of a name, counted from its group's first code, is part of the wire format: append only.

_KNOWN_TO_NUMPY: Final = (
    "float32",
    "float64",
    "float16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
)
_UNKNOWN_TO_NUMPY: Final = (
    "bfloat16",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)


class Code:
    """Values of the first column: a dtype's code, plus `REQUIRES_GRAD` if that is set; or `BYTES`; or `ENTRY`."""

    FIRST_STAND_IN: Final = 32
    """The first code of a dtype that numpy lacks: the bytes are read as integers of its size, then viewed."""
    REQUIRES_GRAD: Final = 64
    BYTES: Final = 128
    """Not a tensor: the memory of another object, out of band."""
    ENTRY: Final = 129
    """A tensor that the next of the entries describes."""


def _dtypes() -> dict[int, torch.dtype]:
    names = {
        **dict(enumerate(_KNOWN_TO_NUMPY)),
        **dict(enumerate(_UNKNOWN_TO_NUMPY, Code.FIRST_STAND_IN)),
    }
    # an older torch lacks the newest dtypes
    return {code: getattr(torch, name) for code, name in names.items() if hasattr(torch, name)}


def _numpy_dtype(code: int, dtype: torch.dtype) -> np.dtype[np.generic]:
    if code < Code.FIRST_STAND_IN:
        return np.dtype(_KNOWN_TO_NUMPY[code])
    return np.dtype(f"i{dtype.itemsize}")


DTYPES: Final = _dtypes()
DTYPE_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
NUMPY_DTYPES: Final = {
    code | bit: _numpy_dtype(code, dtype) for code, dtype in DTYPES.items() for bit in (0, Code.REQUIRES_GRAD)
}


# -- entries


class Kind(IntEnum):
    """The kind of tensor that an `Entry` describes. Values are part of the wire format."""

    STRIDED = 1
    """In memory of its own, with strides."""
    SHARED = 2
    """Part of a span of bytes that it shares with other tensors of the message, also at the receiver."""
    META = 3
    """A tensor with no memory at all."""
    COO = 4
    """Sparse: the parts are indices and values."""
    COMPRESSED = 5
    """Sparse, CSR and its like: the parts are compressed indices, plain indices and values."""
    SAVED = 6
    """A layout that hides its memory (quantized, nested): as the bytes of torch.save."""
    PLACED = 7
    """Not in host memory: ``layout`` names the device, and the only part describes the bytes, which are in a buffer."""


class Flag:
    """Bits of ``flags`` in an `Entry`."""

    REQUIRES_GRAD: Final = 1
    CONJUGATE: Final = 2
    NEGATIVE: Final = 4
    COALESCED: Final = 8


# negative sizes are refused here: numpy takes a size of -1 for as many elements as fit into the memory
_Natural = Annotated[int, Meta(ge=0)]
_Sizes = Annotated[tuple[_Natural, ...], Meta(max_length=MAX_DIMENSIONS)]


class Entry(msgspec.Struct, array_like=True, gc=False):
    """The description of one tensor.

    ``source`` is the offset of its inline bytes, or -1 - n for buffer n; ``span_bytes`` is their number. ``strides``
    are in elements, ``offset`` is in bytes. ``layout`` names one of the compressed sparse layouts, or a device.
    """

    kind: int
    dtype: int
    flags: int
    source: int
    shape: _Sizes
    strides: _Sizes = ()
    offset: _Natural = 0
    span_bytes: _Natural = 0
    layout: str = ""
    parts: tuple[Entry, ...] = ()


class Table(msgspec.Struct, array_like=True, gc=False):
    """The tensors of one message. The columns have equal lengths; sources are as in an `Entry`."""

    inline_bytes: _Natural
    codes: bytes
    sources: list[int]
    shapes: list[_Sizes]
    entries: list[Entry]


encode_table = msgspec.msgpack.Encoder().encode
"""Encodes the fields of a `Table`, as a tuple."""
decode_table = msgspec.msgpack.Decoder(Table).decode
