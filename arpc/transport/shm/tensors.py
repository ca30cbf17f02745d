"""Tensors that lie in a worker's arena, so that sending them takes no copy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from arpc.transport.shm.arena import Arena

__all__ = ["empty_shared", "shared"]


def empty_shared(arena: Arena | None, size: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Return an uninitialized tensor, in the arena if that has room."""
    size = tuple(size)
    kind = torch.get_default_dtype() if dtype is None else dtype
    count = prod(size)
    memory = arena.allocate_shared(count * kind.itemsize) if arena is not None and count > 0 else None
    if memory is None:
        return torch.empty(size, dtype=kind)
    # `data` makes it a tensor of its own, not a view of a tensor that the caller never sees
    return torch.frombuffer(memory, dtype=kind).view(size).data


def shared(arena: Arena | None, tensor: Tensor) -> Tensor:
    """Return a contiguous copy without autograd history, in the arena if that has room."""
    copy = empty_shared(arena, tensor.shape, tensor.dtype)
    copy.copy_(tensor.detach())
    return copy
