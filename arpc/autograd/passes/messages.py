"""What workers tell each other in a pass, and how it travels: numbers in one piece, and the gradients beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

from arpc.errors import ProtocolError

__all__ = ["NOTHING_LIVE", "PackedParcel", "Parcel", "PassHeading", "pack_parcel", "unpack_parcel"]

PackedParcel: TypeAlias = list[Any]
"""A parcel as it travels: bytes with all numbers, then the gradients. It is flat, so that it pickles quickly."""

_strided: Final = torch.strided
_SMALL: Final = 1024
"""Elements that are copied in less time than their strides are packed and unpacked."""


class PassHeading(msgspec.Struct, array_like=True, gc=False):
    """What every request of a pass says of the pass itself."""

    context_id: int
    pass_id: int
    retain_graph: bool
    cutoff: int = 0
    """See `Plan.cutoff`."""
    failed: list[int] = []
    """Passes of the context that failed, as far as the sender knows: the receiver may not have heard of that."""


class Parcel(msgspec.Struct):
    """What one worker tells another in a pass."""

    gradients: list[tuple[int, Sequence[Any]]] = []
    """By message id of a send of the receiver: a gradient for each of its tensors, None where there is none."""
    is_first: bool = False
    """``ids`` are the receiver's sends that may still get gradients from here. Otherwise they get none."""
    ids: list[int] = []
    asks: tuple[int, int] | None = None
    """The sender waits for gradients of so many of its own messages to the receiver, this the latest of them."""
    leaves: bool = False
    """The receiver may forget the context if it is left with nothing of it; or, of an answer, its sender has."""


NOTHING_LIVE: Final = Parcel(is_first=True)
"""What a worker says where no gradient can go."""


_Numbers: TypeAlias = tuple[list[tuple[int, int]], bool, list[int], tuple[int, int] | None, bool, PassHeading | None]
"""All of a parcel but its gradients: ids of the messages that have some, and how many; then what `Parcel` has.

Requests have a heading, answers have none.
"""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Numbers).decode


def pack_parcel(parcel: Parcel, heading: PassHeading | None = None) -> PackedParcel:
    """Make a parcel ready to travel; a request has a heading."""
    sends: list[tuple[int, int]] = []
    packed: PackedParcel = [b""]
    for send, tensors in parcel.gradients:
        sends.append((send, len(tensors)))
        packed += map(_compact, tensors)
    packed[0] = _encode((sends, parcel.is_first, parcel.ids, parcel.asks, parcel.leaves, heading))
    return packed


def unpack_parcel(packed: PackedParcel) -> tuple[Parcel, PassHeading | None]:
    """The parcel that was packed, and its heading if it has one. Raises `ProtocolError` if it is malformed.

    The list is emptied: the one that takes the gradients shall be the only one that has them.
    """
    try:
        head, *tensors = packed
        packed.clear()
        sends, is_first, ids, asks, leaves, heading = _decode(head)
        gradients: list[tuple[int, Sequence[Any]]] = []
        place = 0
        for send, count in sends:
            gradients.append((send, tensors[place : place + count]))
            place += count
        if place != len(tensors):
            raise ValueError(f"{len(tensors)} gradients, and {place} were announced")
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"a malformed parcel of gradients: {error}") from error
    return Parcel(gradients, is_first, ids, asks, leaves), heading


def _compact(gradient: Any) -> Any:
    """Lay out a small gradient contiguously. Of a large one that was expanded little travels as it is."""
    if (
        gradient.__class__ is Tensor
        and gradient.layout is _strided
        and not gradient.is_contiguous()
        and gradient.numel() <= _SMALL
    ):
        return gradient.contiguous()
    return gradient
