"""Forward, backward and step over several workers: the same training as in one process."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import arpc
from arpc.optim import DistributedOptimizer
from tests.optim.digits import train_here, train_there
from tests.optim.parameters import all_equal


@pytest.mark.parametrize(
    ("places", "optimizer", "lr"),
    [
        (["worker1", "worker2", "worker0"], torch.optim.SGD, 0.2),
        (["worker1", "worker2", "worker1"], torch.optim.Adam, 0.01),
    ],
)
async def test_a_model_in_pieces_has_the_loss_curve_of_one_process(group, places, optimizer, lr):
    expected, weights = await asyncio.to_thread(train_here, 8, optimizer, lr)
    losses, remote_weights = await train_there(places, 8, optimizer, lr)
    assert losses == expected
    assert all_equal(remote_weights, weights)
    assert losses[-1] < losses[0] * 0.9


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


async def train(module: arpc.nn.RemoteModule[nn.Module], steps: int, seed: int) -> list[float]:
    """One of several trainers of the same module, who do not wait for each other."""
    generator = torch.Generator().manual_seed(seed)
    opt = DistributedOptimizer(torch.optim.SGD, await module.remote_parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 4, generator=generator)
        async with arpc.autograd.context() as context_id:
            loss = mse_loss(await module(x), x.sum(1, keepdim=True))
            await asyncio.sleep(0)
            await arpc.autograd.backward(context_id, [loss])
            await opt.step(context_id)
        losses.append(loss.item())
    return losses


async def test_trainers_that_do_not_wait_for_each_other_learn_together(group):
    module = arpc.nn.RemoteModule("worker1", make_model)
    curves = await asyncio.gather(
        train(module, 15, seed=1),
        arpc.rpc_sync("worker2", train, (module, 15, 2)),
        arpc.rpc_sync("worker1", train, (module, 15, 3)),
    )
    for losses in curves:
        assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
