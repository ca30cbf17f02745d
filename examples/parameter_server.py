"""Asynchronous training with a parameter server: a network learns to tell the arms of a spiral apart.

    arpc launch --role driver=1,server=1,trainer=3 examples/parameter_server.py

The server keeps the parameters. Each trainer draws data of its own, pushes gradients to the server and goes on with the
parameters that come back; none waits for another. The driver starts it all and shows how it goes. Every process runs
this file, and its rank says what it is, so that torchrun and srun do as well. Without any of them it launches itself.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

ARMS = 3
DRIVER, SERVER = 0, 1  # their ranks; all others are trainers


def make_model() -> nn.Module:
    """From two coordinates to a score for each arm."""
    return nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, ARMS))


def draw_spiral(points: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random points of a noisy spiral, and the arm that each of them lies on."""
    arm = torch.randint(ARMS, (points,), generator=dice)
    radius = torch.rand(points, generator=dice)
    angle = 5 * radius + 2 * math.pi / ARMS * arm + 0.2 * torch.randn(points, generator=dice)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm


# -- the server -------------------------------------------------------------------------------------------------------


class ParameterServer:
    """The parameters of the model as one vector, and the optimizer that moves it."""

    def __init__(self) -> None:
        self.weights = nn.Parameter(parameters_to_vector(make_model().parameters()))
        self.optimizer = torch.optim.Adam([self.weights], lr=1e-3)
        self.published = self.weights.detach().clone()
        self.pushes = 0
        self._pending: list[Tensor] = []
        self._stepping = asyncio.Lock()

    async def push(self, gradient: Tensor) -> Tensor:
        """Apply a gradient, averaged with those that came during the step before; the parameters after that."""
        self._pending.append(gradient)
        async with self._stepping:
            if self._pending:  # else whoever had the lock before applied ours along with its own
                gradients, self._pending = self._pending, []
                await asyncio.to_thread(self._step, gradients)  # meanwhile the loop serves others
                self.pushes += len(gradients)
        return self.published

    def _step(self, gradients: list[Tensor]) -> None:
        self.weights.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        # Tensors are sent from their own memory: what is handed out must not change any more, so it is a copy
        self.published = self.weights.detach().clone()


@functools.cache
def the_server() -> ParameterServer:
    """The one of this process. The functions below run in the server's."""
    return ParameterServer()


async def pull() -> Tensor:
    """The parameters as they are now."""
    return the_server().published


async def push(gradient: Tensor) -> Tensor:
    """Hand in a gradient; the parameters that go on with it."""
    return await the_server().push(gradient)


async def watch(total: int) -> AsyncIterator[tuple[int, Tensor]]:
    """How many gradients have come, and the parameters, several times a second until all have come."""
    server = the_server()
    while server.pushes < total:
        yield server.pushes, server.published
        await asyncio.sleep(0.1)
    yield server.pushes, server.published


# -- the trainers -----------------------------------------------------------------------------------------------------


async def train(steps: int, seed: int) -> None:
    """What the driver asks every trainer to do."""
    model, dice = make_model(), torch.Generator().manual_seed(seed)
    weights = await arpc.rpc_sync(SERVER, pull)
    for _ in range(steps):
        vector_to_parameters(weights, model.parameters())
        points, arm = draw_spiral(128, dice)
        loss = cross_entropy(model(points), arm)
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        weights = await arpc.rpc_sync(SERVER, push, args=(gradient,))


# -- the driver -------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """How far the training has come."""

    pushes: int
    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"{self.pushes:6} gradients   loss {self.loss:.3f}   accuracy {self.accuracy:6.1%}"


@torch.no_grad()
def evaluate(pushes: int, weights: Tensor) -> Report:
    """How good the parameters are, on points that no trainer has seen."""
    model = make_model()
    vector_to_parameters(weights, model.parameters())
    points, arm = draw_spiral(2000, torch.Generator().manual_seed(0))
    scores = model(points)
    return Report(pushes, cross_entropy(scores, arm).item(), (scores.argmax(dim=1) == arm).double().mean().item())


async def drive(steps: int) -> None:
    """Let the trainers train, and show how it goes."""
    trainers = arpc.get_worker_infos()[SERVER + 1 :]
    total = len(trainers) * steps
    reports: list[Report] = []
    started = time.perf_counter()
    async with asyncio.TaskGroup() as calls:  # if one of them fails, the others are cancelled
        for trainer in trainers:
            calls.create_task(arpc.rpc_sync(trainer, train, args=(steps, trainer.id), timeout=0))
        async for pushes, weights in arpc.stream(SERVER, watch, args=(total,), timeout=0, window=1):
            if not reports or 10 * pushes // total > 10 * reports[-1].pushes // total:
                reports.append(evaluate(pushes, weights))
                print(reports[-1], flush=True)
    seconds = time.perf_counter() - started
    first, last = reports[0], reports[-1]
    print(f"loss {first.loss:.3f} -> {last.loss:.3f}, accuracy {first.accuracy:.1%} -> {last.accuracy:.1%}")
    megabytes = 2 * total * weights.nbytes / 1e6  # gradients one way, parameters the other
    print(f"{total / seconds:,.0f} calls/s, {megabytes / seconds:,.0f} MB/s")


async def work(steps: int) -> None:
    """The life of every process: do what is asked for, until nobody in the group has work left."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and where to meet are in the environment
        if worker.id == DRIVER:
            await drive(steps)


def main() -> None:
    """Read the command line, and be a worker of a group, or launch one."""
    parser = argparse.ArgumentParser(description="Train a small network with a parameter server.")
    parser.add_argument("--steps", type=int, default=300, help="how many gradients each trainer pushes (300)")
    parser.add_argument("--trainers", type=int, default=3, help="how many processes train, if this launches them (3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        arpc.run(work(arguments.steps))
        return
    roles = {"driver": 1, "server": 1, "trainer": arguments.trainers}
    try:
        arpc.run(arpc.launch.local(__file__, ("--steps", str(arguments.steps)), workers=roles))
    except KeyboardInterrupt:
        sys.exit(130)
    except arpc.LaunchError as error:
        sys.exit(f"\n{error.traceback}\n\n{error}")


if __name__ == "__main__":
    main()
