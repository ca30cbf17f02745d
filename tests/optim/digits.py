"""A model of the size of those for MNIST, in one process or cut into pieces, and something to learn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

STAGES = 3


_making = threading.Lock()


def make_stage(number: int) -> nn.Module:
    """One third of the model; always the same."""
    generator_state = torch.random.get_rng_state()
    with _making:  # workers of one process have threads of their own, and one generator
        torch.manual_seed(number)
        try:
            if number == 0:
                return nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
            if number == 1:
                return nn.Sequential(OrderedDict(hidden=nn.Linear(288, 64), relu=nn.ReLU()))
            return nn.Linear(64, 10)
        finally:
            torch.random.set_rng_state(generator_state)


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Pictures of ten kinds, and noise upon them."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randn(10, 1, 28, 28, generator=generator)
    made = []
    for _ in range(count):
        labels = torch.randint(10, (size,), generator=generator)
        made.append((kinds[labels] + 0.3 * torch.randn(size, 1, 28, 28, generator=generator), labels))
    return made


def train_here(steps: int, optimizer: type[torch.optim.Optimizer], lr: float) -> tuple[list[float], list[Tensor]]:
    """Losses and final weights in one process."""
    model = nn.Sequential(*(make_stage(number) for number in range(STAGES)))
    opt = optimizer(model.parameters(), lr=lr)
    losses = []
    for x, labels in batches(steps):
        opt.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


async def train_there(
    places: Sequence[str], steps: int, optimizer: type[torch.optim.Optimizer], lr: float
) -> tuple[list[float], list[Tensor]]:
    """The same with each stage at a place of its own."""
    stages = [arpc.nn.RemoteModule(place, make_stage, (number,)) for number, place in enumerate(places)]
    rrefs = [rref for stage in stages for rref in await stage.remote_parameters()]
    opt = arpc.optim.DistributedOptimizer(optimizer, rrefs, lr=lr)
    losses = []
    for x, labels in batches(steps):
        async with arpc.autograd.context() as context_id:
            for stage in stages:
                x = await stage(x)  # noqa: PLW2901 - that is what a pipeline does
            loss = cross_entropy(x, labels)
            await arpc.autograd.backward(context_id, [loss])
            await opt.step(context_id)
        losses.append(loss.item())
    return losses, [(await rref).detach() for rref in rrefs]
