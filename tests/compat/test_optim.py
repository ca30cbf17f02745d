"""torch.distributed.optim's names, by a worker that calls itself."""

from __future__ import annotations

import pytest
import torch

from arpc.compat import autograd as dist_autograd
from arpc.compat import rpc
from arpc.compat.optim import DistributedOptimizer


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("no step")


class NeverMade(torch.optim.SGD):
    def __init__(self, params):
        raise ValueError("not made")


def make() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def weigh(rref: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return rref.local_value() * x


def test_a_step(alone):
    weight = rpc.remote(alone, make)
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(alone, weigh, (weight, torch.full((3,), 2.0))).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert weight.to_here().tolist() == [0.0] * 3
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        optimizer.step(context_id)


def test_errors_are_those_of_the_owner(alone):
    weight = rpc.remote(alone, make)
    with pytest.raises(ValueError, match="not made"):
        DistributedOptimizer(NeverMade, [weight])
    optimizer = DistributedOptimizer(Failing, [weight])
    with dist_autograd.context() as context_id, pytest.raises(ValueError, match="no step"):
        optimizer.step(context_id)
