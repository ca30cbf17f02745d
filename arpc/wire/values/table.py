"""The tensor table: what a message says of its tensors, so that they can be built again.

A tensor is never pickled. The pickle of a message has a hole where the tensor was, and the table says what fills it:
`wire.values.packing` writes the table, `wire.values.layouts` reads it. Contiguous tensors, nearly all there are, take
one place in each of three columns: a code of dtype and ``requires_grad``, where the bytes are, and the shape.
Whatever needs more words has an `Entry`.
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
"""Of a tensor. Arrays of numpy and torch's operators have no more, in any version."""
MAX_ROWS: Final = 1 << 17
"""Tensors in one message. A row of a table takes a few bytes, and the tensor that is made of it some hundred."""

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
    """The first column: a dtype's code, with `REQUIRES_GRAD` added if it does; or one of the others."""

    FIRST_STAND_IN: Final = 32
    """From here on numpy has no such dtype: the bytes are read as integers of the same size, then viewed."""
    REQUIRES_GRAD: Final = 64
    BYTES: Final = 128
    """Not a tensor: the memory of another object, out of band."""
    ENTRY: Final = 129
    """The next of the entries says more."""


def _dtypes() -> dict[int, torch.dtype]:
    names = {
        **dict(enumerate(_KNOWN_TO_NUMPY)),
        **dict(enumerate(_UNKNOWN_TO_NUMPY, Code.FIRST_STAND_IN)),
    }
    # an older torch lacks the newest
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
    """What an `Entry` describes. Values are part of the wire format."""

    STRIDED = 1
    """In memory of its own, with strides."""
    SHARED = 2
    """Part of a span of bytes that other tensors of the message are part of too: they share it again."""
    META = 3
    """A tensor with no memory at all."""
    COO = 4
    """Sparse: the parts are indices and values."""
    COMPRESSED = 5
    """Sparse, CSR and its like: the parts are compressed indices, plain indices and values."""
    SAVED = 6
    """A layout of its own (quantized, nested): in the bytes of torch.save."""
    PLACED = 7
    """Not in host memory: ``layout`` names the device, the part says what its bytes are. They are in a buffer."""


class Flag:
    """Bits of ``flags`` in an `Entry`."""

    REQUIRES_GRAD: Final = 1
    CONJUGATE: Final = 2
    NEGATIVE: Final = 4
    COALESCED: Final = 8


# numpy takes a negative size for one that is checked already, so it must not get that far
_Natural = Annotated[int, Meta(ge=0)]
_Sizes = Annotated[tuple[_Natural, ...], Meta(max_length=MAX_DIMENSIONS)]


class Entry(msgspec.Struct, array_like=True, gc=False):
    """How to build one tensor.

    ``source``: the offset of inline bytes, or -1 - n for buffer n; ``span_bytes`` of them count. ``strides`` are in
    elements, ``offset`` is in bytes. ``layout`` names one of the compressed sparse layouts, or a device.
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
    """The tensors of one message. The columns are of one length; sources are as in an `Entry`."""

    inline_bytes: _Natural
    codes: bytes
    sources: list[int]
    shapes: list[_Sizes]
    entries: list[Entry]


encode_table = msgspec.msgpack.Encoder().encode
"""Encodes the fields of a `Table`, as a tuple."""
decode_table = msgspec.msgpack.Decoder(Table).decode
