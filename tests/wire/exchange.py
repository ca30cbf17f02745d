"""Tensors and objects that travel: packed, received and built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from arpc.wire.values.content import Content
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.layouts import Buffer, read_layout
from arpc.wire.values.packing import Slot
from arpc.wire.values.pickler import Pickler, Reducer, loads
from arpc.wire.values.raw_memory import allocate
from arpc.wire.values.schemas import Packer

INLINE: Final = 1 << 20
BUFFERS: Final = 0
"""Limits under which all tensors travel in the message, or all that are not empty in buffers of their own."""
both_ways = pytest.mark.parametrize("limit", [pytest.param(INLINE, id="inline"), pytest.param(BUFFERS, id="buffer")])


def pack(slots: Sequence[Slot], inline_limit: int = INLINE, stager: Stager | None = None) -> Content:
    """What a worker packs that has not seen such tensors before."""
    return Packer(inline_limit).pack(slots, stager=stager)


def body_of(packed: Content, payload: bytes = b"payload") -> bytearray:
    """The body of a message: inline tensors first, the pickle last."""
    body = bytearray(b"".join(packed.inline))
    assert len(body) == packed.schema.inline_bytes
    return body + payload


def received(memory: memoryview) -> memoryview:
    """A buffer as a peer receives it."""
    arrived = allocate(memory.nbytes)
    arrived[:] = memory
    return arrived


def unpack(table: bytes, body: bytearray, buffers: Sequence[Buffer] = (), *, is_restricted: bool = False) -> list[Any]:
    """The tensors of a message with a schema that was not announced before."""
    return read_layout(table, is_restricted=is_restricted).build(body, buffers)


def unpacked(packed: Content, *, is_restricted: bool = False) -> list[Any]:
    """What a peer makes of packed tensors."""
    buffers = [*map(received, packed.buffers)]
    return unpack(packed.schema.table, body_of(packed), buffers, is_restricted=is_restricted)


def travel(slots: Sequence[Slot], inline_limit: int = INLINE) -> list[Any]:
    """Tensors, packed here and built there; and once more by a packer that has seen such tensors before."""
    packer = Packer(inline_limit)
    for _ in range(3):
        arrived = unpacked(packer.pack(slots))
    return arrived


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
    return loads(payload, travel(slots, inline_limit) if slots else [])


def sent_bytes(slots: Sequence[Slot], inline_limit: int = INLINE) -> int:
    """How many bytes of tensors go over the wire."""
    packed = pack(slots, inline_limit)
    return len(packed.pickle) + sum(map(len, packed.inline)) + sum([buffer.nbytes for buffer in packed.buffers])


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
