"""A handful of small tensors, with or without a pickle around them, and what rides on the message: all in one payload.

Like a lone tensor (`wire.lone`), such a message needs no table, and is as plain as one with a number in it: it takes
the same short way through the agents. Calls that autograd records are like this, and so are the gradients that come
back.

::

    0      1       2           4              8                    aligned
    +------+-------+-----------+--------------+--------------------+----------------------------+------+---------+
    | kind | count | meta_size | content_size | a label per tensor | tensors, each to the next  | meta | content |
    +------+-------+-----------+--------------+--------------------+----------------------------+------+---------+

A label is 8 bytes: the dtype's code as in `wire.table`, the number of dimensions, and up to three of them. ``meta`` is
what interceptors add. ``content`` is a pickle in which the tensors are holes, or, for a *parcel*, just bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class, whatever it is called
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT, PADDING
from arpc.wire.lone import LONE_RESULT
from arpc.wire.memory import MEMORY
from arpc.wire.rebuilding import finished
from arpc.wire.table import COMPLEX_CODES, DTYPE_CODES, DTYPES, NUMPY_DTYPES, Code

__all__ = [
    "HANDFUL_ARGUMENTS",
    "HANDFUL_RESULT",
    "LAST_HANDFUL",
    "MAX_TENSORS",
    "PARCEL_ARGUMENT",
    "PARCEL_RESULT",
    "Handful",
    "handful_payload",
    "unpack_handful",
]

# The first byte of a payload; no pickle begins with one this small
HANDFUL_ARGUMENTS: Final = LONE_RESULT + 1
"""The arguments of a call. Without a content they are just the tensors."""
HANDFUL_RESULT: Final = LONE_RESULT + 2
"""An object. Without a content it is just the tensor."""
PARCEL_ARGUMENT: Final = LONE_RESULT + 3
"""The one argument of a call is a list of bytes and of tensors after it."""
PARCEL_RESULT: Final = LONE_RESULT + 4
"""The object is such a list."""
LAST_HANDFUL: Final = PARCEL_RESULT

MAX_TENSORS: Final = 8
"""For more of them a table is as fast."""
_MAX_META_BYTES: Final = (1 << 16) - 1
_MAX_DIMENSION: Final = (1 << 16) - 1
_HEADER: Final = Struct("<BBHI")
_LABEL: Final = Struct("<BB3H")
_HEADER_BYTES: Final = _HEADER.size
_LABEL_BYTES: Final = _LABEL.size
_HALF: Final = PADDING[ALIGNMENT // 2]
_REST: Final = ((0, 0, 0), (0, 0), (0,), ())
_MAX_DIMENSIONS: Final = 3
_UNALIGNED: Final = ALIGNMENT - 1
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD
# What was freed lies at its own offset. Where memory is really this low, a table does as well.
_LOWEST_ADDRESS: Final = 1 << 32
_PLAIN: Final = frozenset((Tensor, Parameter))
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_from_buffer = torch.frombuffer
_from_numpy = torch.from_numpy
_ndarray = np.ndarray

# Tensors of the same kind come again and again: what is to be said of one is made once
_REMEMBERED: Final = 1024
_labels: Final[dict[tuple[torch.dtype, Sequence[int], bool], tuple[bytes, int, bytes, int]]] = {}
"""The label of a kind of tensor, its size, what follows it, and the size of an element."""


class _Kind(NamedTuple):
    """What a label says."""

    code: int
    dtype: torch.dtype
    requires_grad: bool
    elements: int
    shape: tuple[int, ...] | None
    """None for one dimension."""
    offset: int
    """Where it begins."""


_layouts: Final[dict[bytes, tuple[tuple[_Kind, ...], int]]] = {}
"""By all labels of a message: what they say, and where the last tensor ends."""
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long


class Handful(NamedTuple):
    """What is in such a payload."""

    kind: int
    slots: list[Any]
    meta: bytes | bytearray
    content: bytes | bytearray


def handful_payload(
    kind: int, slots: Sequence[Any], limit_bytes: int, meta: bytes = b"", content: bytes = b""
) -> bytes | None:
    """The payload of a message with tensors of at most ``limit_bytes`` each; None if it needs a table.

    A parcel does not keep what its tensors have in common; anything else that has some needs a table.
    """
    count = len(slots)
    if count > MAX_TENSORS or len(meta) > _MAX_META_BYTES:
        return None
    head = _pack_header(kind, count, len(meta), len(content))
    memory: list[bytes] = []
    storages: set[int] = set()
    try:
        for slot in slots:
            if slot.__class__ not in _PLAIN or not slot.is_cpu:
                return None
            label, size, padding, item_bytes = _labels.get((slot.dtype, slot.shape, slot.requires_grad)) or _label_of(
                slot
            )
            if (
                not label
                or size > limit_bytes
                or not slot.is_contiguous()
                or slot.is_neg()
                or (address := slot.data_ptr()) < _LOWEST_ADDRESS
            ):
                return None
            storages.add(address - slot.storage_offset() * item_bytes)
            head += label
            # the one copy it makes on its way out
            memory.append(MEMORY[address : address + size])
            if padding:
                memory.append(padding)
    except (RuntimeError, AttributeError):
        return None  # it hides its memory or its shape: a sparse, a nested one, one of vmap; or it is no tensor
    if len(storages) < count and kind < PARCEL_ARGUMENT:
        return None
    if not count & 1:  # header and labels are half as long as what is aligned
        head += _HALF
    return b"".join((head, *memory, meta, content))


def _label_of(slot: Tensor) -> tuple[bytes, int, bytes, int]:
    """Make what is to be said of tensors like this one; an empty label if they need a table."""
    code = DTYPE_CODES.get(slot.dtype)
    shape = tuple(slot.shape)
    if code is None or code in COMPLEX_CODES or len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_DIMENSION:
        return b"", 0, b"", 0
    if len(_labels) >= _REMEMBERED:
        _labels.clear()
    code |= _REQUIRES_GRAD if slot.requires_grad else 0
    label = _LABEL.pack(code, len(shape), *shape, *_REST[len(shape)])
    made = label, slot.nbytes, PADDING[-slot.nbytes & _UNALIGNED], slot.itemsize
    _labels[slot.dtype, slot.shape, slot.requires_grad] = made
    return made


def unpack_handful(payload: bytes | bytearray) -> Handful:
    """What is in such a payload. Raises `ProtocolError`.

    The tensors lie in the bytes given, if they are a bytearray: that must not be used for anything else.
    """
    body = payload if payload.__class__ is bytearray else bytearray(payload)
    slots: list[Any] = []
    try:
        kind, count, meta_size, content_size = _unpack_header(body)
        labels = bytes(body[_HEADER_BYTES : _HEADER_BYTES + _LABEL_BYTES * count])
        kinds, position = _layouts.get(labels) or _layout_of(labels, count)
        for code, dtype, requires_grad, elements, shape, offset in kinds:
            if shape is None:
                slots.append(
                    _from_buffer(body, dtype=dtype, count=elements, offset=offset, requires_grad=requires_grad)
                )
            else:
                slots.append(finished(_from_numpy(_ndarray(shape, NUMPY_DTYPES[code], body, offset)), code))
        end = position + meta_size
        if end + content_size != len(body):
            raise ProtocolError("a handful of tensors of another size than it says")
    except (StructError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ProtocolError(f"a handful of tensors that cannot be built: {error}") from error
    made: Handful = _new_tuple(
        Handful, (kind, slots, body[position:end] if meta_size else b"", body[end:] if content_size else b"")
    )
    return made


def _layout_of(labels: bytes, count: int) -> tuple[tuple[_Kind, ...], int]:
    """What labels say, and where the last tensor ends."""
    if count > MAX_TENSORS:  # layouts are kept: they are to be small, whoever sends them
        raise ValueError(f"{count} tensors")
    position = (_HEADER_BYTES + _LABEL_BYTES * count + _UNALIGNED) & ~_UNALIGNED
    kinds: list[_Kind] = []
    for code, dimensions, *sizes in _LABEL.iter_unpack(labels):
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{dimensions} dimensions")
        shape = tuple(sizes[:dimensions])
        dtype = DTYPES[code & ~_REQUIRES_GRAD]
        elements = prod(shape)
        kinds.append(
            _Kind(code, dtype, code & _REQUIRES_GRAD != 0, elements, None if dimensions == 1 else shape, position)
        )
        position += (elements * dtype.itemsize + _UNALIGNED) & ~_UNALIGNED
    if len(kinds) != count:
        raise ValueError(f"{count} tensors, and labels for {len(kinds)}")
    if len(_layouts) >= _REMEMBERED:
        _layouts.clear()
    made = _layouts[labels] = tuple(kinds), position
    return made
