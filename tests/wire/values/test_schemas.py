"""Tensors that look alike have one schema, however it is found; nothing is kept alive to find it."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError, SerializationError
from arpc.private import torch as private
from arpc.wire.frames import HEADER_BYTES, ONE_OFF
from arpc.wire.values import schemas
from arpc.wire.values.layouts import read_layout
from arpc.wire.values.raw_memory import MEMORY, address_of
from arpc.wire.values.schemas import Packer
from tests.wire.exchange import assert_same, body_of, unpacked


@pytest.fixture(params=["guards", "attributes"])
def packer(request, monkeypatch):
    """A packer that recognizes tensors in one call, and one that compares their attributes."""
    if request.param == "attributes":
        monkeypatch.setattr(private, "_uses_guards", False)
    elif private.PUBLIC_ONLY:
        pytest.skip("the private APIs are turned off")
    return Packer(1000)


def state(offset: float = 0) -> list[Tensor]:
    return [
        torch.arange(5.0) + offset,
        torch.ones(3, 4, dtype=torch.int64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.full((400,), offset),
        torch.ones(2, requires_grad=True),
        torch.tensor(1j),
        torch.zeros(0, 3),
        torch.ones(10)[3:],
    ]


def test_tensors_that_look_alike_have_one_schema(packer):
    seen = set()
    for round_ in range(5):
        sent = state(round_)
        packed = packer.pack(sent)
        seen.add(packed.schema)
        for arrived, tensor in zip(unpacked(packed), sent, strict=True):
            assert_same(arrived, tensor)
        assert packed.schema.uses >= min(round_ + 1, 2)
        assert len(packed.buffers) == 1
    assert len(seen) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.double(),
        lambda tensor: tensor.detach().requires_grad_(),
        lambda tensor: tensor.t(),
        torch._neg_view,
        lambda tensor: torch.cat([tensor, tensor])[::2],
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
        lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1]]),
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        lambda tensor: tensor[0].expand(2, 2),
        lambda _: pickle.PickleBuffer(np.ones((2, 2))),
    ],
    ids=["dtype", "grad", "t", "neg", "strided", "sparse", "meta", "nested", "quantized", "expanded", "array"],
)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_other_tensors_have_another_schema_wherever_they_are(packer, change: Callable[[Tensor], Any], place):
    plain = [torch.rand(2, 2) for _ in range(3)]
    for _ in range(3):
        schema = packer.pack(plain).schema
    other: list[Any] = [*plain]
    other[place] = change(plain[place])
    for _ in range(3):
        packed = packer.pack(other)
        arrived = unpacked(packed)
        for index in {0, 1, 2} - {place}:
            assert_same(arrived[index], plain[index])
        if place == 1:
            assert str(arrived[1]) == str(other[1]) or isinstance(other[1], pickle.PickleBuffer)
        assert packed.schema is not schema
    assert packer.pack(plain).schema is schema


def test_alternating_shapes_keep_their_schemas(packer):
    middle = [[torch.ones(2), torch.ones(size), torch.ones(2)] for size in (3, 4, 5)]
    first = [packer.pack(tensors).schema for tensors in middle]
    assert len(set(first)) == 3
    for _ in range(3):
        assert [packer.pack(tensors).schema for tensors in middle] == first


def test_parameters_and_tensors_alternate(packer):
    for _ in range(3):
        for tensor in (Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)):
            (arrived,) = unpacked(packer.pack([tensor]))
            assert arrived.requires_grad
            assert arrived.tolist() == [1.0] * 3


def test_modes_of_torch_do_not_matter(packer):
    with torch.inference_mode():
        made_there = torch.ones(3)
    for _ in range(3):
        for tensor in (made_there, torch.ones(3)):
            assert unpacked(packer.pack([tensor]))[0].tolist() == [1.0] * 3
            with torch.inference_mode():
                assert unpacked(packer.pack([tensor]))[0].tolist() == [1.0] * 3
            with torch.no_grad():
                assert unpacked(packer.pack([tensor]))[0].tolist() == [1.0] * 3


def test_tensors_that_share_memory_share_it_again_although_such_tensors_did_not_before(packer):
    for _ in range(3):
        packer.pack([torch.ones(4), torch.ones(4)])
    whole = torch.zeros(8)
    for views in ([whole[:4], whole[4:]], [whole[:4], whole[:4].view(4)]):
        first, second = unpacked(packer.pack(views))
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata


def test_freed_memory_is_refused_although_such_a_tensor_was_sent_before(packer):
    for whole in (torch.ones(4), torch.ones(8)):
        tensor = whole[-4:]
        for _ in range(3):
            packer.pack([tensor])
        size = whole.untyped_storage().nbytes()
        whole.untyped_storage().resize_(0)
        with pytest.raises(SerializationError, match="memory was freed"):
            packer.pack([tensor])
        with pytest.raises(SerializationError, match="memory was freed"):
            packer.pack([torch.ones(3), tensor])
        whole.untyped_storage().resize_(size)


def test_addresses_do_not_matter(packer, monkeypatch):
    """A Python that is not position-independent has its heap below 4 GiB."""
    tensor = torch.arange(4.0)
    packer.pack([tensor])
    base = tensor.data_ptr() - 64
    monkeypatch.setattr(schemas, "_address_of", lambda tensor: tensor.data_ptr() - base)
    taken = []

    def copy_of(place: slice) -> bytes:
        taken.append(place.start)
        return MEMORY[place.start + base : place.stop + base]

    monkeypatch.setattr(schemas, "_copy_of", copy_of)
    for _ in range(3):
        assert unpacked(packer.pack([tensor]))[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert taken == [64] * 3


def test_arrays_travel_beside_tensors(packer):
    array = np.arange(20, dtype=np.int32)
    for _ in range(3):
        packed = packer.pack([torch.ones(2), pickle.PickleBuffer(array), pickle.PickleBuffer(np.ones(1000))])
        tensor, memory, large = unpacked(packed)
        assert tensor.tolist() == [1.0, 1.0]
        assert bytes(memory) == array.tobytes()
        assert bytes(large) == np.ones(1000).tobytes()
        assert len(packed.buffers) == 1
        assert address_of(memory) % 16 == 0
    assert packed.schema.uses >= 2


def test_no_tensor_is_kept_alive(packer):
    tensors = state()
    for _ in range(4):
        packer.pack(tensors)
        packer.pack([tensors[0], tensors[0][:2], torch.eye(2).to_sparse()])
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_the_memory_of_a_packer_is_bounded(packer, monkeypatch):
    monkeypatch.setattr(schemas, "MAX_SCHEMAS", 10)
    for size in range(100):
        for _ in range(2):
            packer.pack([torch.ones(size)])
            packer.pack([torch.ones(2, size + 2)[:, :2]])
            packer.pack([pickle.PickleBuffer(bytes(size))])
        assert max(len(packer._recent), len(packer._by_looks), len(packer._by_table)) <= 10
    monkeypatch.setattr(schemas, "MAX_TABLE_BYTES", 100)
    for size in range(100):
        packer.pack([torch.ones(size)] * 1)
        assert sum(map(len, packer._by_table)) <= 200


EXPANDED = torch.arange(4.0).expand(3, 4)
NARROW = torch.arange(12.0).view(3, 4)[:, 1:3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [pickle.PickleBuffer(np.arange(2000.0))],
        lambda: [pickle.PickleBuffer(np.ones(500)), torch.ones(3), pickle.PickleBuffer(np.ones(1000))],
        lambda: [torch.zeros(0)],
        lambda: [torch.zeros(0, 3), torch.ones(2), torch.zeros(0, 3).t(), torch.ones(5)[5:]],
        lambda: [torch.arange(6.0).view(2, 3).t()],
        lambda: [torch.rand(4, 1).t(), torch.rand(1, 4)],
        lambda: [EXPANDED, NARROW, torch.arange(6).view(2, 3).t()],
        lambda: [torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()],
        lambda: [torch.zeros(0), pickle.PickleBuffer(np.ones(1000)), torch.arange(6).view(2, 3).t(), torch.rand(2000)],
        list,
    ],
    ids=["array", "arrays", "empty", "empties", "t", "one-column", "views", "lazy", "mixed", "none"],
)
def test_what_came_before_is_not_described_again(packer, monkeypatch, make):
    packer.pack(make())
    monkeypatch.setattr(schemas, "Description", None)  # would fail if it were called
    for _ in range(3):
        sent = make()
        for arrived, slot in zip(unpacked(packer.pack(sent)), sent, strict=True):
            if isinstance(slot, pickle.PickleBuffer):
                assert bytes(arrived) == bytes(slot)
            else:
                assert_same(arrived, slot)


def test_views_and_dense_tensors_of_one_shape_alternate(packer):
    for number in range(6):
        dense = torch.arange(6.0).view(3, 2) + number
        for tensor in (dense, (torch.arange(6.0) + number).view(2, 3).t(), torch.cat([dense, dense], 1)[:, :2]):
            (arrived,) = unpacked(packer.pack([tensor]))
            assert_same(arrived, tensor)
            assert arrived.stride() == tensor.stride()


def test_a_view_whose_memory_was_cut_short_is_refused_although_such_a_view_was_sent_before(packer):
    view = torch.arange(12.0).view(3, 4)[:, 1:3]
    for _ in range(3):
        packer.pack([view])
    view.untyped_storage().resize_(16)
    with pytest.raises(SerializationError, match="memory was freed"):
        packer.pack([view])


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [6, 4000], ids=["inline", "large"])
def test_a_tensor_whose_memory_was_cut_short_is_not_read_beyond_it(packer, size, rounds):
    for tensor in (torch.arange(float(size)), torch.arange(float(2 * size))[size:], torch.rand(size, 2)[:, 0]):
        for _ in range(rounds):
            packer.pack([tensor])
            packer.pack([tensor, torch.ones(3)])
        last = tensor.storage_offset() + (size - 1) * tensor.stride(0)
        tensor.untyped_storage().resize_(4 * last + 3)
        with pytest.raises(SerializationError, match="memory was freed"):
            packer.pack([tensor])
        with pytest.raises(SerializationError, match="memory was freed"):
            packer.pack([tensor, torch.ones(3)])


def test_zeros_without_memory_are_sent_although_such_tensors_were_sent_before(packer):
    for rounds in range(4):
        for _ in range(rounds):
            packer.pack([torch.ones(2, 2)])
            packer.pack([torch.ones(2, 2), torch.ones(3)])
        zeros = torch._efficientzerotensor(2, 2)
        for sent in ([zeros], [zeros, torch.ones(3)], [zeros[1:], torch.ones(3)]):
            arrived, *_ = unpacked(packer.pack(sent))
            assert arrived.shape == sent[0].shape
            assert not arrived.any()


def test_fortran_order_arrays_keep_their_memory(packer):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    for _ in range(3):
        (memory,) = unpacked(packer.pack([pickle.PickleBuffer(array)]))
        assert bytes(memory) == array.tobytes("F")


def test_a_message_without_tensors_has_a_schema(packer):
    packed = packer.pack([])
    assert unpacked(packed) == []
    assert packed.schema.inline_bytes == 0


def test_a_layout_says_how_much_it_takes(packer):
    packed = packer.pack(state())
    layout = read_layout(packed.schema.table)
    assert layout.inline_bytes == packed.schema.inline_bytes
    assert layout.n_buffers == 1
    assert layout.placements == {}
    with pytest.raises(ProtocolError, match="larger than the message"):
        layout.build(body_of(packed, b"")[:-1], packed.buffers)
    with pytest.raises(ProtocolError, match="buffer 0 of 0"):
        layout.build(body_of(packed), [])


@pytest.mark.parametrize(
    ("count", "pickle_bytes", "are_inline"), [(2000, 0, True), (2000, 1_250_000, False), (70_000, 0, True)]
)
def test_small_tensors_are_inline_as_long_as_the_body_has_room(count, pickle_bytes, are_inline):
    """And more of them can be sent than a message can have buffers."""
    packer = Packer(1 << 16, max_body_bytes=1100 * max(count, 1000))
    content = packer.pack([torch.zeros(128) for _ in range(count)], bytes(pickle_bytes))
    assert content.schema is not None
    assert (content.schema.inline_bytes > 0) is are_inline
    assert (len(content.buffers) == 0) is are_inline
    assert content.size_bytes() > count * 512


def test_tensors_that_were_inline_leave_room_for_a_large_pickle_and_metadata():
    max_body_bytes = 1 << 20
    packer = Packer(8192, max_body_bytes)
    tensors = [torch.zeros(4000, dtype=torch.uint8) for _ in range(32)]
    for _ in range(3):
        assert not packer.pack(tensors).buffers
    content = packer.pack(tensors, bytes(max_body_bytes * 7 // 8), bytes(5000))
    assert content.schema is not None
    for number in (1, ONE_OFF):
        assert len(content.framed(1, 0, 1, 1, 0, number)) - HEADER_BYTES <= max_body_bytes
