from __future__ import annotations

import gc
import pickle
import weakref
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from arpc.errors import ProtocolError, SerializationError
from arpc.wire.frames import ALIGNMENT, MAX_BUFFERS
from arpc.wire.values.packing import LITTLE_BYTES
from arpc.wire.values.table import DTYPE_CODES, DTYPES, MAX_ROWS, encode_table
from tests.wire.exchange import (
    BUFFERS,
    INLINE,
    assert_same,
    bits,
    body_of,
    both_ways,
    pack,
    sent_bytes,
    travel,
    travel_alone,
    unpack,
)

SHAPES: Final = [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 2, 2)]
# what torch says of features it still works on is not what is tested here
quietly = pytest.mark.filterwarnings("ignore::UserWarning")


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of which every byte is different, as far as bytes go."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = bytes(index % 251 for index in range(size))
    if dtype is torch.bool:
        data = bytes(index % 2 for index in range(size))
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def complex_tensor(dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.complex(torch.arange(6.0), torch.arange(6.0) + 10).to(dtype)


# -- dense tensors


@quietly
@both_ways
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape_arrives(dtype, shape, limit):
    sent = filled(shape, dtype)

    arrived = travel_alone(sent, limit)

    assert_same(arrived, sent)
    assert arrived.is_contiguous()
    assert arrived._base is None
    if arrived.numel():
        assert arrived.data_ptr() % ALIGNMENT == 0
        assert arrived.data_ptr() != sent.data_ptr()
        arrived.view(-1).view(torch.uint8)[:] = 1  # it may be written to
        assert bits(arrived) == [1] * sent.nbytes


@quietly
@both_ways
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_may_be_strided(dtype, limit):
    base = filled((6, 6), dtype)
    sent = [base.t(), base[::2, 1::3], base[3].expand(4, 6), base[:, 2].expand(3, 6)]

    for tensor in sent:
        assert_same(travel_alone(tensor, limit), tensor)
    for arrived, tensor in zip(travel(sent, limit), sent, strict=True):
        assert_same(arrived, tensor)


@both_ways
def test_in_place_operators_and_autograd_work_on_what_arrives(limit):
    arrived = travel_alone(torch.arange(4.0), limit)
    arrived += 1
    arrived.mul_(2).clamp_(max=6)
    assert arrived.tolist() == [2.0, 4.0, 6.0, 6.0]

    arrived.requires_grad_()
    (arrived * 3).sum().backward()
    assert arrived.grad.tolist() == [3.0] * 4


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2], ids=str)
def test_requires_grad_is_kept(dtype, limit):
    sent = filled((3,), dtype).requires_grad_()

    arrived = travel_alone(sent, limit)

    assert_same(arrived, sent)


@both_ways
def test_a_result_of_autograd_arrives_as_a_leaf(limit):
    weight = torch.ones(3, requires_grad=True)
    sent = weight * 2

    arrived = travel_alone(sent, limit)

    assert arrived.requires_grad
    assert arrived.is_leaf
    assert bits(arrived) == bits(sent)


@both_ways
@pytest.mark.parametrize("requires_grad", [False, True])
def test_inference_tensors_arrive_as_ordinary_ones(requires_grad, limit):
    with torch.inference_mode():
        sent = torch.arange(4.0)
        view = torch.arange(12.0).view(3, 4).t()
        if requires_grad:
            sent.requires_grad_()
        inside = travel([sent, view], limit)
    outside = travel([sent, view], limit)

    for arrived in (inside, outside):
        assert [bits(tensor) for tensor in arrived] == [bits(sent), bits(view)]
        assert arrived[0].requires_grad == requires_grad
    assert not any(tensor.is_inference() for tensor in outside)
    assert outside[1].add_(1)[0, 0] == 1


@both_ways
def test_tensors_of_one_message_do_not_share_what_they_did_not_share(limit):
    sent = [filled((size,), torch.int32) for size in (1, 2, 3, 4, 5, 0, 100)]

    arrived = travel(sent, limit)

    for index, tensor in enumerate(arrived):
        tensor.fill_(index)
    for index, tensor in enumerate(arrived):
        assert tensor.tolist() == [index] * tensor.numel()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0


def test_a_thousand_tensors_around_the_limit_arrive():
    sent = [torch.full((size,), float(size)) for size in range(1000)]
    packed = pack(sent, 2000)
    assert len(packed.buffers) == 499

    for arrived, tensor in zip(travel(sent, 2000), sent, strict=True):
        assert_same(arrived, tensor)
    assert sent_bytes(sent, 2000) >= sum(tensor.nbytes for tensor in sent)


# -- views


def views() -> dict[str, Tensor]:
    base = torch.arange(240.0).view(4, 5, 12)
    image = torch.arange(120.0).view(2, 3, 4, 5)
    return {
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "rows": base[1:3],
        "columns": base[:, :, 3:5],
        "every third": torch.arange(30)[::3],
        "diagonal": torch.arange(25).view(5, 5).diagonal(),
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 1000),
        "expanded scalar": torch.tensor(7.0).expand(10, 10),
        "expanded view": base[0, :, 0].expand(7, 5),
        "expanded in the middle": base[0, :2, :3].unsqueeze(1).expand(2, 9, 3),
        "windows": torch.arange(10).unfold(0, 4, 1),
        "empty view": base[:, :0],
        "empty view, transposed": base[0, :0].t(),
        "one element": base[3, 4, 11],
        "one element, strided": base[3:, 4:, 11:],
        "odd bytes": torch.arange(30, dtype=torch.uint8)[7:20:2],
        "half, transposed": base[0].t().to(torch.bfloat16),
        "real part": complex_tensor().real,
        "imaginary part": complex_tensor().imag,
    }


@both_ways
@pytest.mark.parametrize("name", views())
def test_views_arrive(name, limit):
    sent = views()[name]

    arrived = travel_alone(sent, limit)

    assert_same(arrived, sent)
    assert arrived._base is None
    if arrived.numel():
        assert arrived.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("name", ["transposed", "permuted", "channels last", "expanded", "expanded scalar", "windows"])
def test_the_strides_of_dense_and_of_expanded_tensors_are_kept(name):
    sent = views()[name]

    assert travel_alone(sent).stride() == sent.stride()


def test_a_small_part_of_a_large_tensor_is_sent_alone():
    large = torch.zeros(1000, 1000)

    assert sent_bytes([large[5]]) == 4000
    assert sent_bytes([large[:, 5]]) == 4000
    assert sent_bytes([large[::100, ::100]]) == 400
    assert sent_bytes([large[1, 2]]) == 16
    assert sent_bytes([large[:, :0]]) == 0
    assert sent_bytes([large.t()], BUFFERS) == large.nbytes


def test_what_is_expanded_is_sent_once():
    assert sent_bytes([torch.zeros(1).expand(1000, 1000)]) == 16
    assert sent_bytes([torch.zeros(100, 1).expand(100, 1000)]) == 400
    # and without what it skips over
    assert sent_bytes([torch.zeros(1000, 1000)[:, 0].expand(50, 1000)]) == 4000
    assert sent_bytes([torch.zeros(1000, 1000)[::10, :1].expand(100, 1000)]) == 400


@both_ways
def test_an_expanded_tensor_arrives_expanded(limit):
    arrived = travel_alone(torch.zeros(1000, 1000)[:, 0].expand(50, 1000), limit)

    assert arrived.shape == (50, 1000)
    assert arrived.stride() == (0, 1)
    arrived[0, 7] = 1
    assert arrived[49, 7] == 1


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Any tensor that views of a small storage can make."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 9))
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return filled((offset + reach + 1 + draw(st.integers(0, 9)),), dtype).as_strided(shape, strides, offset)


@given(st.lists(strided(), min_size=1, max_size=4), st.sampled_from([BUFFERS, 64, INLINE]))
@settings(max_examples=300)
def test_any_strided_tensors_arrive(tensors, limit):
    arrived = travel(tensors, limit)

    for tensor, sent in zip(arrived, tensors, strict=True):
        assert_same(tensor, sent)
        # what a view skips over goes with it if it is little: it arrives as the view it is
        assert sent_bytes([sent]) <= max(2 * sent.nbytes, LITTLE_BYTES) + ALIGNMENT - 1
        assert tensor.is_contiguous() or tensor.stride() == sent.stride()


# -- lazy bits


@quietly
@both_ways
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_bits_are_kept(dtype, limit):
    sent = complex_tensor(dtype)
    for view in (sent.conj(), sent.conj()[::2], sent.view(2, 3).conj().t(), sent[2].conj()):
        assert view.is_conj()
        assert_same(travel_alone(view, limit), view)
    if dtype is torch.complex32:
        return
    negative = sent.conj().imag
    assert negative.is_neg()
    for view in (negative, negative[::2], negative[3], torch._neg_view(sent), torch._neg_view(torch.arange(3.0))):
        arrived = travel_alone(view, limit)
        assert_same(arrived, view)
        assert arrived._base is None


def test_bits_and_requires_grad_go_together():
    sent = complex_tensor().requires_grad_().conj()

    arrived = travel_alone(sent)

    assert arrived.is_conj()
    assert arrived.requires_grad
    assert arrived.is_leaf


def test_what_arrived_can_be_sent_on():
    sent = [*views().values(), complex_tensor().conj(), complex_tensor().conj().imag, torch._neg_view(torch.ones(3))]

    for arrived, tensor in zip(travel(travel(travel(sent), BUFFERS)), sent, strict=True):
        assert_same(arrived, tensor)


def test_zeros_without_memory_arrive_as_zeros():
    sent = torch._efficientzerotensor((3, 2))
    assert sent.data_ptr() == 0

    arrived = travel_alone(sent)

    assert arrived.tolist() == [[0.0, 0.0]] * 3
    assert arrived.add_(1).sum() == 6


# -- other objects' memory


@both_ways
def test_memory_of_other_objects_arrives(limit):
    array = np.arange(10, dtype=np.int64)

    memory, tensor, nothing = travel([pickle.PickleBuffer(array), torch.ones(2), pickle.PickleBuffer(b"")], limit)

    assert bytes(memory) == array.tobytes()
    assert not memory.readonly
    assert tensor.tolist() == [1.0, 1.0]
    assert bytes(nothing) == b""


# -- who owns which memory


def test_small_tensors_are_copied_and_large_ones_are_not():
    small, large = torch.zeros(4), torch.zeros(100)
    packed = pack([small, large], 16)
    small.fill_(1)
    large.fill_(1)

    assert body_of(packed, b"") == bytes(16)
    assert bytes(packed.buffers[0]) == large.numpy().tobytes()
    assert packed.buffers[0].nbytes == 400


def test_the_memory_of_a_large_tensor_lives_as_long_as_it_is_needed():
    tensor = torch.arange(1000.0)
    content = tensor.numpy().tobytes()
    storage = weakref.ref(tensor.untyped_storage())
    packed = pack([tensor, torch.arange(6000.0).view(60, 100)[:, ::2]], BUFFERS)
    chunk = packed.buffers[0][100:200]

    del tensor
    gc.collect()
    torch.full((1000,), 7.0)  # would take the memory if it were free
    assert bytes(packed.buffers[0]) == content
    del packed
    gc.collect()
    assert bytes(chunk) == content[100:200]
    del chunk
    gc.collect()
    assert storage() is None


def test_a_received_tensor_keeps_its_memory_alive():
    (first, second) = travel([torch.arange(1000.0), torch.arange(4.0)], 100)
    gc.collect()

    assert first.sum() == 499500
    assert second.sum() == 6


# -- what cannot travel


def test_a_tensor_whose_memory_was_freed_is_an_error_and_no_crash():
    flat = torch.zeros(1000)
    view, skipping = flat[500:600], flat[::7]
    flat.untyped_storage().resize_(0)

    for tensor in (flat, view, skipping):
        for slots in ([tensor], [tensor, torch.ones(1)], [flat, view]):
            with pytest.raises(SerializationError, match="memory was freed"):
                pack(slots, INLINE)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # which stands for one of a real device
def test_a_tensor_of_another_device_says_what_to_do():
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.empty(3, device="cuda:1")
        with pytest.raises(SerializationError, match="device cuda:1 cannot be sent: move it to the CPU"):
            pack([tensor], INLINE)


def test_a_tensor_without_memory_to_read_says_what_it_is():
    def send(tensor: Tensor) -> Tensor:
        with pytest.raises(SerializationError, match="a tensor of type Tensor cannot be sent: "):
            pack([tensor], INLINE)
        return tensor

    torch.vmap(send)(torch.ones(2, 3))


def test_more_large_tensors_than_a_frame_can_have_is_an_error():
    tensors = [torch.ones(1)] * (MAX_BUFFERS + 1)
    with pytest.raises(SerializationError, match="at most 65535 large tensors"):
        pack([tensor.clone() for tensor in tensors], BUFFERS)


def test_too_many_tensors_are_refused_by_both_sides():
    x = torch.ones(())
    with pytest.raises(SerializationError, match="at most 131072 tensors"):
        pack([x] * (MAX_ROWS + 1), 1 << 16, None)
    count = MAX_ROWS + 1
    table = encode_table((64, bytes([DTYPE_CODES[torch.float32]]) * count, [0] * count, [()] * count, []))
    with pytest.raises(ProtocolError, match="at most 131072"):
        unpack(table, bytearray(64), [])
