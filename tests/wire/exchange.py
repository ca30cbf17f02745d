"""Tensors and objects that travel: packed, framed, cut into chunks, received and built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from arpc.wire.frames import Limits, frame
from arpc.wire.messages import Message, MessageType
from arpc.wire.pickling import Pickler, Reducer, loads
from arpc.wire.tensors import PackedTensors, Slot, pack, unpack
from tests.wire.connections import chunks_of, feed, opened

INLINE: Final = 1 << 20
BUFFERS: Final = 0
"""Limits under which all tensors travel in the message, or all that are not empty in buffers of their own."""
both_ways = pytest.mark.parametrize("limit", [pytest.param(INLINE, id="inline"), pytest.param(BUFFERS, id="buffer")])


def carry(packed: PackedTensors, payload: bytes = b"payload") -> Message:
    """The message that a peer receives."""
    data = frame(MessageType.REQUEST, 0, 0, 0, 0, payload, b"", packed.table, packed.inline, packed.buffer_sizes)
    (message,) = feed(opened(limits=Limits(1 << 30, 1 << 30)), data + b"".join(chunks_of(0, packed.buffers, 100_000)))
    return message


def travel(slots: Sequence[Slot], inline_limit: int = INLINE) -> list[Any]:
    message = carry(pack(slots, inline_limit))
    return unpack(message.table, message.body, message.buffers)


def travel_alone(tensor: Tensor, inline_limit: int = INLINE) -> Tensor:
    (arrived,) = travel([tensor], inline_limit)
    return arrived


def exchange(
    value: Any,
    inline_limit: int = INLINE,
    *,
    reducers: Mapping[type, Reducer] | None = None,
    main_by_value: bool = False,
) -> Any:
    """An object, pickled here and unpickled there."""
    payload, slots = Pickler(reducers).dumps(value, main_by_value=main_by_value)
    if not slots:
        return loads(payload, [])
    message = carry(pack(slots, inline_limit), payload)
    arrived = unpack(message.table, message.body, message.buffers)
    return loads(memoryview(message.body)[message.table_end :], arrived)


def sent_bytes(slots: Sequence[Slot], inline_limit: int = INLINE) -> int:
    """How many bytes of tensors go over the wire."""
    packed = pack(slots, inline_limit)
    return len(packed.inline) + sum(packed.buffer_sizes)


def bits(tensor: Tensor) -> list[int]:
    """Every bit of a strided tensor, in order: NaN and -0.0 have theirs as well."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 1:
        plain = plain.view(torch.uint8)  # not every torch can copy every dtype
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).tolist() if plain.numel() else []


def assert_same(arrived: Tensor, sent: Tensor) -> None:
    """Everything a user can tell of a strided tensor is as it was, but for its memory, which is new."""
    assert type(arrived) is type(sent)
    assert arrived.dtype is sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.layout is sent.layout
    assert arrived.device == sent.device
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_conj() == sent.is_conj()
    assert arrived.is_neg() == sent.is_neg()
    assert arrived.is_leaf
    assert bits(arrived) == bits(sent)


def same_memory(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage()._cdata == right.untyped_storage()._cdata
