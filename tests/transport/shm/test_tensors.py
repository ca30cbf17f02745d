"""Tensors in an arena, or elsewhere if that has no room."""

from __future__ import annotations

import gc

import pytest
import torch

import arpc
import arpc.testing
from arpc.testing.endpoints import turns_until
from arpc.transport.shm import Arena, empty_shared, shared
from arpc.transport.shm.mapping import is_supported

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
async def arena():
    if not is_supported():
        pytest.skip("only Linux has files in memory without a name")
    made = Arena(capacity_bytes=64 * MIB, from_bytes=64 * KIB, window_bytes=64 * MIB)
    yield made
    await made.aclose()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
async def test_a_copy_in_the_arena(arena, dtype):
    tensor = torch.randint(0, 2, (3, 5, 7)).to(dtype).permute(2, 0, 1)
    copy = shared(arena, tensor)
    assert torch.equal(copy, tensor)
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert copy.is_contiguous()
    assert copy.data_ptr() != tensor.data_ptr()
    assert not copy._is_view()
    assert arena.statistics()["shared_blocks"] == 1
    view = copy[1:]
    del copy
    gc.collect()
    assert arena.statistics()["shared_blocks"] == 1
    del view
    await turns_until(lambda: arena.statistics()["used_blocks"] == 0)


async def test_a_parameter_is_copied_without_its_history(arena):
    copy = shared(arena, torch.nn.Parameter(torch.ones(100)) * 2)
    assert not copy.requires_grad
    assert copy.sum() == 200


@pytest.mark.parametrize("size", [(0,), (3, 0), (), (2, 3)])
async def test_any_shape(arena, size):
    assert empty_shared(arena, size, None).shape == size
    assert shared(arena, torch.ones(size)).shape == size


async def test_the_default_dtype(arena):
    assert empty_shared(arena, (5,), None).dtype == torch.float32
    assert empty_shared(arena, (5,), torch.int8).dtype == torch.int8


async def test_no_arena_no_room(arena):
    for made in (empty_shared(None, (4, 5), torch.int16), shared(arena, torch.ones(17 * MIB))):
        assert made.numel() > 0
    assert arena.statistics()["shared_blocks"] == 0


async def test_the_worker_of_the_context():
    async with arpc.testing.cluster(1):
        tensor = arpc.empty_shared(3, 4, dtype=torch.int32)
        assert (tensor.shape, tensor.dtype) == ((3, 4), torch.int32)
        assert torch.equal(arpc.shared(torch.arange(5)), torch.arange(5))
    with pytest.raises(arpc.NotInitializedError):
        arpc.shared(torch.ones(3))
