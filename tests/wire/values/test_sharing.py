from __future__ import annotations

import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arpc.wire.frames import ALIGNMENT
from arpc.wire.values import sharing
from tests.wire.exchange import BUFFERS, INLINE, assert_same, both_ways, pack, same_memory, sent_bytes, travel


def addresses(tensor: Tensor) -> set[int]:
    """Of every byte of a tensor."""
    item = tensor.element_size()
    found = {tensor.data_ptr()} if tensor.numel() else set()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = {address + index * stride * item for address in found for index in range(size)}
    return {address + byte for address in found for byte in range(item)}


# -- what keeps sharing


@both_ways
def test_views_that_overlap_share_memory_again(limit):
    base = torch.arange(100.0)
    left, right, whole = travel([base[:60], base[40:], base], limit)

    assert same_memory(left, right)
    assert same_memory(left, whole)
    left[50] = -1
    assert right[10] == whole[50] == -1
    assert all(tensor._base is None for tensor in (left, right, whole))


@both_ways
def test_a_tensor_and_its_detached_twin_share_memory_again(limit):
    weight = torch.ones(10, requires_grad=True)
    first, second = travel([weight, weight.detach()], limit)

    assert first.requires_grad
    assert not second.requires_grad
    second.fill_(5)
    assert first.tolist() == [5.0] * 10


@both_ways
def test_adjacent_views_share_their_storage_again(limit):
    halves = torch.arange(10.0).chunk(2)
    first, second = travel(halves, limit)

    assert same_memory(first, second)
    assert first.as_strided((10,), (1,)).tolist() == list(map(float, range(10)))


@both_ways
def test_rows_of_a_matrix_share_it_again_and_are_sent_once(limit):
    matrix = torch.arange(120.0).view(12, 10)
    rows = travel(list(matrix), limit)

    assert torch.equal(torch.stack(rows), matrix)
    assert len({row.untyped_storage()._cdata for row in rows}) == 1
    assert sent_bytes(list(matrix), limit) == matrix.nbytes
    assert len(pack(list(matrix), 0).buffers) == 1


@both_ways
def test_views_of_several_dtypes_share_memory_again(limit):
    data = torch.arange(64, dtype=torch.uint8)
    sent = [data[3:20], data[8:40].view(torch.float64), data[4:16].view(torch.int32), data[2:10].view(torch.bfloat16)]
    arrived = travel(sent, limit)

    for tensor, original in zip(arrived, sent, strict=True):
        assert_same(tensor, original)
        assert tensor.data_ptr() % tensor.element_size() == 0
    arrived[0].fill_(0)
    assert arrived[2].tolist()[:3] == [0, 0, 0]
    assert len({tensor.untyped_storage()._cdata for tensor in arrived}) == 1


@both_ways
def test_views_of_any_shape_share_memory_again(limit):
    base = torch.arange(24.0).view(4, 6)
    sent = [base.t(), base[1], base[:, 2], base[::2, ::3], base[0, 0], base[0, :1].expand(3, 1000)]
    arrived = travel(sent, limit)

    for tensor, original in zip(arrived, sent, strict=True):
        assert_same(tensor, original)
        assert tensor.stride() == original.stride()
    arrived[0].fill_(9)
    assert all(tensor.eq(9).all() for tensor in arrived)


@both_ways
def test_lazy_bits_belong_to_the_view(limit):
    numbers = torch.complex(torch.arange(6.0), torch.ones(6))
    sent = [numbers, numbers.conj(), numbers.real, numbers.conj().imag]
    arrived = travel(sent, limit)

    for tensor, original in zip(arrived, sent, strict=True):
        assert_same(tensor, original)
        assert tensor._base is None
    arrived[0].fill_(2 - 3j)
    assert arrived[1].tolist() == [2 + 3j] * 6
    assert arrived[2].tolist() == [2.0] * 6
    assert arrived[3].tolist() == [3.0] * 6


def test_views_that_share_may_be_changed_under_autograd():
    base = torch.arange(4.0)
    first, second = travel([base[:3], base[1:]])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * first).sum()
    second.sub_(0)  # their version counters are their own, so that this is nobody else's business
    loss.backward()

    assert weight.grad.tolist() == [0.0, 1.0, 2.0]


# -- what is not worth it


@both_ways
def test_views_far_apart_are_sent_alone(limit):
    base = torch.zeros(1_000_000)
    base[10:20], base[500_000:500_010] = 1, 2
    sent = [base[10:20], base[500_000:500_010], base[-5:]]

    assert sent_bytes(sent, limit) < 200
    arrived = travel(sent, limit)
    assert [tensor.tolist() for tensor in arrived] == [[1.0] * 10, [2.0] * 10, [0.0] * 5]
    assert not same_memory(arrived[0], arrived[1])


@both_ways
def test_a_view_far_away_does_not_drag_the_rest_along(limit):
    base = torch.zeros(1_000_000)
    sent = [base[:100], base[50:150], base[999_000:]]

    assert 4600 <= sent_bytes(sent, limit) < 4600 + ALIGNMENT
    first, second, third = travel(sent, limit)
    assert same_memory(first, second)
    assert not same_memory(first, third)


@both_ways
def test_columns_reach_over_each_other_and_have_nothing_in_common(limit):
    matrix = torch.arange(1_000_000.0).view(1000, 1000)
    sent = [matrix[:, 0], matrix[:, 1], matrix[:, 999]]

    assert sent_bytes(sent, limit) == 12_000
    for tensor, original in zip(travel(sent, limit), sent, strict=True):
        assert_same(tensor, original)


@both_ways
def test_sparse_views_that_meet_are_sent_with_all_that_is_between(limit):
    matrix = torch.arange(10_000.0).view(100, 100)
    column, row = matrix[:, 50], matrix[50, ::10]
    arrived = travel([column, row], limit)

    assert same_memory(*arrived)
    arrived[0].fill_(-1)
    assert arrived[1][5] == -1


def test_where_it_is_too_hard_to_tell_views_are_taken_to_share(monkeypatch):
    matrix = torch.arange(10_000.0).view(100, 100)
    columns = [matrix[:, 0], matrix[:, 1]]
    assert not same_memory(*travel(columns))

    monkeypatch.setattr(sharing, "_MAX_MEMBERS", 1)
    assert same_memory(*travel(columns))
    monkeypatch.undo()

    def too_hard(*_: object, **__: object) -> bool:
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert same_memory(*travel(columns))


@both_ways
def test_an_empty_view_shares_nothing_and_disturbs_nobody(limit):
    base = torch.arange(8.0)
    sent = [base[:0], base[2:4], base[3:6], base[8:], torch.empty(0), base[:0].view(0, 3).t()]

    for tensor, original in zip(travel(sent, limit), sent, strict=True):
        assert_same(tensor, original)


def test_other_slots_in_between_change_nothing():
    base = torch.arange(8.0)
    sparse = torch.eye(2).to_sparse_coo()
    meta = torch.empty(8, device="meta")
    arrived = travel([meta, base[:4], sparse, meta[2:], base[2:]])

    assert same_memory(arrived[1], arrived[4])
    assert arrived[0].is_meta
    assert arrived[3].is_meta
    assert torch.equal(arrived[2].to_dense(), torch.eye(2))


# -- any views


@st.composite
def views_of_one_storage(draw: st.DrawFn) -> list[Tensor]:
    size = 2000
    base = torch.arange(size, dtype=torch.int16).view(torch.uint8)
    made = []
    for _ in range(draw(st.integers(2, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float64]))
        items = base.view(dtype)
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        strides = draw(st.lists(st.integers(0, 25), min_size=len(shape), max_size=len(shape)))
        reach = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        near = draw(st.integers(0, min(30, items.numel() - reach)))
        offset = draw(st.sampled_from([near, items.numel() - reach - near]))
        made.append(items.as_strided(shape, strides, offset))
    return made


@given(views_of_one_storage(), st.sampled_from([BUFFERS, INLINE]))
@settings(max_examples=300)
def test_any_views_overlap_as_they_did_before(sent, limit):
    arrived = travel(sent, limit)

    for tensor, original in zip(arrived, sent, strict=True):
        assert_same(tensor, original)
        assert tensor.data_ptr() % tensor.element_size() == 0
    before, after = [addresses(tensor) for tensor in sent], [addresses(tensor) for tensor in arrived]
    for left in range(len(sent)):
        for right in range(left):
            assert len(after[left] & after[right]) == len(before[left] & before[right])
    assert sent_bytes(sent, limit) <= sent[0].untyped_storage().nbytes() + ALIGNMENT * len(sent)


def test_many_views_take_time_in_proportion():
    def seconds(count: int) -> float:
        rows = list(torch.zeros(count, 16))
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            pack(rows, 0)
            best = min(best, time.perf_counter() - start)
        return best

    seconds(100)
    assert seconds(8000) < 40 * 10 * seconds(200)
