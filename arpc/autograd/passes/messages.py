"""The messages of a pass, and their encoding: all numbers in one piece, and the gradients beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

from arpc.errors import ProtocolError

__all__ = ["NOTHING_LIVE", "PackedParcel", "Parcel", "PassHeading", "pack_parcel", "unpack_parcel"]

PackedParcel: TypeAlias = list[Any]
"""A parcel as it is sent: bytes with all numbers, then the gradients. It is flat, so that it pickles quickly."""

_strided: Final = torch.strided
_SMALL: Final = 1024
"""The number of elements that are copied in less time than their strides are packed and unpacked."""


class PassHeading(msgspec.Struct, array_like=True, gc=False):
    """The header of every request of a pass: the data of the pass itself."""

    context_id: int
    pass_id: int
    retain_graph: bool
    cutoff: int = 0
    """See `Plan.cutoff`."""
    failed: list[int] = []
    """The failed passes of the context, as far as the sender knows: the receiver may not have got their aborts."""


class Parcel(msgspec.Struct):
    """The data of one message of a pass, a request or a reply."""

    gradients: list[tuple[int, Sequence[Any]]] = []
    """For sends of the receiver, by message id: a gradient for each of the tensors, None where there is none."""
    is_first: bool = False
    """Whether ``ids`` are the receiver's sends that may still get gradients from here. Otherwise they get none."""
    ids: list[int] = []
    asks: tuple[int, int] | None = None
    """The number of messages to the receiver whose gradients the sender waits for, and the latest id; else None."""
    leaves: bool = False
    """In a request: the receiver may forget the context if nothing of it remains there. In a reply: the sender has."""


NOTHING_LIVE: Final = Parcel(is_first=True)
"""The parcel of a worker that will send no gradients to the receiver."""


_Numbers: TypeAlias = tuple[list[tuple[int, int]], bool, list[int], tuple[int, int] | None, bool, PassHeading | None]
"""A parcel without its gradients: the ids of the messages that have some, and how many; then the fields of `Parcel`.

Requests have a heading, replies have none.
"""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Numbers).decode


def pack_parcel(parcel: Parcel, heading: PassHeading | None = None) -> PackedParcel:
    """Encode a parcel; a request has a heading."""
    sends: list[tuple[int, int]] = []
    packed: PackedParcel = [b""]
    for send, tensors in parcel.gradients:
        sends.append((send, len(tensors)))
        packed += map(_compact, tensors)
    packed[0] = _encode((sends, parcel.is_first, parcel.ids, parcel.asks, parcel.leaves, heading))
    return packed


def unpack_parcel(packed: PackedParcel) -> tuple[Parcel, PassHeading | None]:
    """Return the decoded parcel, and its heading if it has one. Raises `ProtocolError` if it is malformed.

    The list is emptied, so that the caller has the only references to the gradients.
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
    """Lay out a small gradient contiguously. A large one is sent as it is: if it was expanded, that is little."""
    if (
        gradient.__class__ is Tensor
        and gradient.layout is _strided
        and not gradient.is_contiguous()
        and gradient.numel() <= _SMALL
    ):
        return gradient.contiguous()
    return gradient
