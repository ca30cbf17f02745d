"""Checks whether a tensor that a peer describes fits the memory that came for it.

Torch and numpy compute with integers of 64 bits. A forged description may overflow them: then their own checks pass,
and the process reads memory outside of the message, or is aborted. So every description from a peer is checked here
first, in Python's integers, which do not overflow.

All functions take plain integers and raise `ProtocolError`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Final

from arpc.errors import ProtocolError
from arpc.wire.values.table import MAX_DIMENSIONS

__all__ = ["check_contiguous", "check_range", "check_sizes", "check_strided"]

_MOST: Final = sys.maxsize


def check_range(start: int, size_bytes: int, available_bytes: int) -> None:
    """Refuse bytes that do not lie within the available memory."""
    if start < 0 or size_bytes < 0 or start + size_bytes > available_bytes:
        raise ProtocolError(f"{size_bytes} bytes from {start} on were announced, and there are {available_bytes}")


def check_sizes(shape: Sequence[int], item_bytes: int = 1) -> None:
    """Refuse a shape whose number of elements, or bytes, torch cannot count, whether or not there is memory for them.

    A size of 0 is left out of the product: torch multiplies the other sizes all the same.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"a tensor of {len(shape)} dimensions")
    if shape and min(shape) < 0:
        raise ProtocolError(f"a tensor of shape {tuple(shape)}")
    count = prod(shape) if 0 not in shape else prod([size for size in shape if size])
    if count * item_bytes > _MOST:
        raise ProtocolError(f"a tensor of shape {tuple(shape)} has more elements than can be counted")


def check_contiguous(shape: Sequence[int], item_bytes: int, available_bytes: int) -> None:
    """Refuse a contiguous tensor that is larger than the available memory."""
    check_sizes(shape, item_bytes)
    check_range(0, prod(shape) * item_bytes, available_bytes)


def check_strided(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int, available_bytes: int, offset_bytes: int = 0
) -> None:
    """Refuse a tensor with an element outside of the available memory. Strides are counted in elements.

    Several elements may lie in the same place: such a tensor, as `Tensor.expand` makes it, takes no more memory than
    came for it.
    """
    if len(shape) != len(strides):
        raise ProtocolError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    check_sizes(shape, item_bytes)
    if strides and not 0 <= min(strides) <= max(strides) * item_bytes <= _MOST:
        raise ProtocolError(f"a tensor with strides {tuple(strides)}")
    if 0 in shape:
        check_range(offset_bytes, 0, available_bytes)
        return
    last = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    check_range(offset_bytes, (last + 1) * item_bytes, available_bytes)
