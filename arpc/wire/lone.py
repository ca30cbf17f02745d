"""One small tensor and nothing else: the most frequent content of all has a way of its own, out and back.

A call with a tensor as its only argument, or a tensor as the result, needs no pickle and no table. In the place of the
pickle stands a *label* of 16 bytes: what it is (`LONE_ARGUMENT` or `LONE_RESULT`), the dtype's code as in `wire.table`,
the number of dimensions and up to three of them. The tensor's bytes follow at once, aligned because the label is. No
pickle begins with a byte this small. So such a message is as plain as one with a number in it, and takes the same short
way through the agents.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError  # noqa: N812 - a class, whatever it is called
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from arpc.errors import ProtocolError
from arpc.wire.memory import MEMORY
from arpc.wire.rebuilding import finished
from arpc.wire.table import COMPLEX_CODES, DTYPE_CODES, DTYPES, NUMPY_DTYPES, Code

__all__ = ["LONE_ARGUMENT", "LONE_RESULT", "lone_payload", "unpack_lone"]

LONE_ARGUMENT: Final = 1
"""The arguments of a call are this tensor alone."""
LONE_RESULT: Final = 2
"""The object is this tensor."""

_LABEL: Final = Struct("<BBBx3I")
_LABEL_BYTES: Final = _LABEL.size
_MAX_DIMENSIONS: Final = 3
_pack_label = _LABEL.pack
_unpack_label = _LABEL.unpack_from
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD
_REST: Final = ((0, 0, 0), (0, 0), (0,), ())
# What was freed lies at its own offset. Where memory is really this low, a table does as well.
_LOWEST_ADDRESS: Final = 1 << 32
_from_buffer = torch.frombuffer
_from_numpy = torch.from_numpy
_ndarray = np.ndarray
_dtype_code = DTYPE_CODES.get
_dtypes = DTYPES
_numpy_dtypes = NUMPY_DTYPES


def lone_payload(kind: int, slot: Any, limit_bytes: int) -> bytes | None:
    """The payload of a message whose content is a tensor of at most ``limit_bytes``; None if it needs a table."""
    # Each look at a tensor takes 20 to 150 ns, and three times that when other code has run since
    try:
        if (
            type(slot) is not Tensor
            or (size := slot.nbytes) > limit_bytes
            or (code := _dtype_code(slot.dtype)) is None
            or not slot.is_cpu
            or not slot.is_contiguous()
            or slot.is_neg()
            or (address := slot.data_ptr()) < _LOWEST_ADDRESS
            or (code in COMPLEX_CODES and slot.is_conj())
            or (dimensions := len(shape := slot.shape)) > _MAX_DIMENSIONS
        ):
            return None
    except RuntimeError:
        return None  # it hides its memory or its shape: a sparse, a nested one, one of vmap
    if slot.requires_grad:
        code |= _REQUIRES_GRAD
    # the one copy it makes on its way out
    return _pack_label(kind, code, dimensions, *shape, *_REST[dimensions]) + MEMORY[address : address + size]


def unpack_lone(body: bytes | bytearray) -> Any:
    """The content of such a message: the tensor, or a tuple of it. Raises `ProtocolError`.

    The tensor lies in the bytes given: they should be a bytearray, and must not be used for anything else.
    """
    try:
        kind, code, dimensions, first, second, third = _unpack_label(body)
        if dimensions == 1 and code < _REQUIRES_GRAD:
            tensor = _from_buffer(body, dtype=_dtypes[code], count=first, offset=_LABEL_BYTES)
        else:
            shape = (first, second, third)[:dimensions]
            tensor = finished(_from_numpy(_ndarray(shape, _numpy_dtypes[code], body, _LABEL_BYTES)), code)
    except (StructError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ProtocolError(f"a lone tensor that cannot be built: {error}") from error
    return (tensor,) if kind == LONE_ARGUMENT else tensor
