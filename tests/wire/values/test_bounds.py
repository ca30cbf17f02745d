"""Extents are computed in integers that do not overflow, and what is right is let through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError
from arpc.wire.values.bounds import check_contiguous, check_range, check_sizes, check_strided

HUGE = 1 << 62


@pytest.mark.parametrize("span", [(0, 0, 0), (0, 8, 8), (8, 0, 8), (3, 5, 8)])
def test_bytes_that_are_there(span):
    check_range(*span)


@pytest.mark.parametrize("span", [(0, 9, 8), (9, 0, 8), (-1, 1, 8), (0, -1, 8), (1 << 64, 0, 8), (8, 1 << 64, 8)])
def test_bytes_that_are_not_there(span):
    with pytest.raises(ProtocolError):
        check_range(*span)


@pytest.mark.parametrize("shape", [(), (0,), (0, 1 << 40), (1,) * 64, ((1 << 63) - 1,), (1 << 31, 1 << 31)])
def test_shapes_that_can_be_counted(shape):
    check_sizes(shape)
    assert torch.empty_strided(shape, (0,) * len(shape), dtype=torch.uint8, device="meta").shape == shape


@pytest.mark.parametrize("shape", [(1,) * 65, (-1,), (1 << 63,), (1 << 32, 1 << 32), (0, 1 << 32, 1 << 32), (0, -1)])
def test_shapes_that_cannot(shape):
    with pytest.raises(ProtocolError):
        check_sizes(shape)


def test_bytes_are_counted_too():
    check_sizes((HUGE,))
    with pytest.raises(ProtocolError):
        check_sizes((HUGE,), 2)


def test_a_contiguous_tensor_must_fit():
    check_contiguous((2, 3), 4, 24)
    with pytest.raises(ProtocolError):
        check_contiguous((2, 3), 4, 23)


@pytest.mark.parametrize(
    ("shape", "strides", "available"),
    [
        pytest.param((HUGE + 1,), (4,), 64, id="wraps-to-nothing"),
        pytest.param((1 << 61,), (1 << 3,), 64, id="wraps-to-a-negative"),
        pytest.param((2,), (-1,), 64, id="negative-stride"),
        pytest.param((1,), (1 << 63,), 64, id="stride-of-64-bits"),
        pytest.param((2, 2), (1,), 64, id="too-few-strides"),
        pytest.param((5,), (16,), 64, id="one-too-many"),
        pytest.param((), (), 0, id="no-memory"),
    ],
)
def test_strides_that_leave_the_memory(shape, strides, available):
    with pytest.raises(ProtocolError):
        check_strided(shape, strides, 1, available)


def test_a_tensor_may_repeat_its_memory():
    check_strided((1 << 40,), (0,), 4, 4)


def test_an_empty_tensor_may_begin_at_the_end():
    check_strided((0, 3), (3, 1), 4, 8, 8)
    with pytest.raises(ProtocolError):
        check_strided((0, 3), (3, 1), 4, 8, 9)


sizes = st.lists(st.integers(0, 5), max_size=4)


@given(sizes, st.lists(st.integers(0, 7), min_size=4, max_size=4), st.integers(0, 9), st.integers(0, 60))
def test_torch_agrees(shape, strides, offset, elements):
    strides = strides[: len(shape)]
    memory = torch.zeros(elements, dtype=torch.int16)
    try:
        memory.as_strided(shape, strides, offset)
        fits = offset <= elements
    except RuntimeError:
        fits = False
    try:
        check_strided(shape, strides, 2, 2 * elements, 2 * offset)
        assert fits
    except ProtocolError:
        assert not fits
