"""Training with a parameter server, three ways: a network learns to tell the arms of a spiral apart.

    arpc launch --role driver=1,server=1,trainer=3 examples/parameter_server.py

The server keeps the parameters. Each trainer draws data of its own, pushes gradients to the server and goes on with the
parameters that come back.

- sync: the server waits for a gradient of every trainer and applies their mean, so that all go on alike;
- async: it applies each gradient when it comes, and nobody waits for anybody;
- batch: it applies the mean of those that came during the step before, so that many trainers cost it no more than few.

The driver runs them one after the other and shows how it goes. Every process runs this file, and its rank says what it
is, so that torchrun and srun do as well. Without any of them it launches itself.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

MODES = ("sync", "async", "batch")
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

    def __init__(self, mode: str, trainers: int) -> None:
        torch.manual_seed(0)  # all modes start from the same parameters
        self.weights = nn.Parameter(parameters_to_vector(make_model().parameters()))
        self.optimizer = torch.optim.Adam([self.weights], lr=1e-3)
        self.published = self.weights.detach().clone()
        self.mode, self.trainers = mode, trainers
        self.pushes = self.steps = 0
        self._pending: list[Tensor] = []
        self._stepping = asyncio.Condition()

    async def pull(self) -> Tensor:
        """The parameters as they are now."""
        return self.published

    async def push(self, gradient: Tensor) -> Tensor:
        """Hand in a gradient; the parameters that go on with it."""
        self._pending.append(gradient)
        async with self._stepping:
            if self.mode == "sync" and len(self._pending) < self.trainers:
                step = self.steps  # the last of them makes the step for all
                await self._stepping.wait_for(lambda: self.steps > step)
            elif self._pending:  # else whoever was here before applied this one along with its own
                count = 1 if self.mode == "async" else len(self._pending)
                gradients, self._pending = self._pending[:count], self._pending[count:]
                await asyncio.to_thread(self._step, gradients)  # meanwhile the loop serves others
                self._stepping.notify_all()
        return self.published

    def _step(self, gradients: list[Tensor]) -> None:
        self.weights.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        # Tensors are sent from their own memory: what is handed out must not change any more, so it is a copy
        self.published = self.weights.detach().clone()
        self.pushes += len(gradients)
        self.steps += 1

    async def watch(self, total: int) -> AsyncIterator[tuple[int, int, Tensor]]:
        """How many gradients have come, in how many steps, and the parameters; several times a second, to the end."""
        while self.pushes < total:
            yield self.pushes, self.steps, self.published
            await asyncio.sleep(0.1)
        yield self.pushes, self.steps, self.published


# -- the trainers -----------------------------------------------------------------------------------------------------


async def train(server: arpc.RRef[ParameterServer], steps: int, seed: int) -> None:
    """What the driver asks every trainer to do."""
    model, dice = make_model(), torch.Generator().manual_seed(seed)
    weights = await server.rpc_sync().pull()
    for _ in range(steps):
        vector_to_parameters(weights, model.parameters())
        points, arm = draw_spiral(128, dice)
        loss = cross_entropy(model(points), arm)
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        weights = await server.rpc_sync().push(gradient)


# -- the driver -------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """How far the training has come."""

    seconds: float
    pushes: int
    steps: int
    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(weights: Tensor) -> tuple[float, float]:
    """Loss and accuracy on points that no trainer has seen."""
    model = make_model()
    vector_to_parameters(weights, model.parameters())
    points, arm = draw_spiral(2000, torch.Generator().manual_seed(0))
    scores = model(points)
    return cross_entropy(scores, arm).item(), (scores.argmax(dim=1) == arm).double().mean().item()


async def run_mode(mode: str, steps: int) -> list[Report]:
    """Train a new model in one of the three ways, and show how it goes."""
    trainers = arpc.get_worker_infos()[SERVER + 1 :]
    total = len(trainers) * steps
    server = arpc.remote(SERVER, ParameterServer, (mode, len(trainers)))
    await server.rpc_sync().pull()  # it is there: time starts now
    reports: list[Report] = []
    started = time.perf_counter()
    async with asyncio.TaskGroup() as calls:  # if one of them fails, the others are cancelled
        for trainer in trainers:
            calls.create_task(arpc.rpc_sync(trainer, train, args=(server, steps, trainer.id), timeout=0))
        async for pushes, updates, weights in server.stream(timeout=0, window=1).watch(total):
            if not reports or 10 * pushes // total > 10 * reports[-1].pushes // total:
                seconds = time.perf_counter() - started
                reports.append(Report(seconds, pushes, updates, *evaluate(weights)))
                bar = f"[{'#' * (20 * pushes // total):20}]"
                report = reports[-1]
                print(f"{mode:5} {bar} {pushes:5} gradients   loss {report.loss:.3f}   accuracy {report.accuracy:6.1%}")
    return reports


def draw(results: dict[str, list[Report]], path: Path) -> None:
    """A picture of all modes."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for mode, reports in results.items():
        axes.plot([one.seconds for one in reports], [one.accuracy for one in reports], marker=".", label=mode)
    axes.set(xlabel="seconds", ylabel="accuracy", ylim=(0.3, 1))
    axes.legend()
    figure.savefig(path)


async def drive(arguments: argparse.Namespace) -> None:
    """Run the modes one after the other, and tell which did how well."""
    modes = MODES if arguments.mode == "all" else (arguments.mode,)
    results = {mode: await run_mode(mode, arguments.steps) for mode in modes}
    print("mode    updates   seconds          loss             accuracy")
    for mode, reports in results.items():
        first, last = reports[0], reports[-1]
        print(
            f"{mode:5}   {last.steps:7}   {last.seconds:7.1f}   {first.loss:.3f} -> {last.loss:.3f}   "
            f"{first.accuracy:6.1%} -> {last.accuracy:6.1%}"
        )
    if arguments.plot:
        draw(results, arguments.plot)
        print(f"the picture is {arguments.plot}")
    calls = sum(reports[-1].pushes for reports in results.values())
    seconds = sum(reports[-1].seconds for reports in results.values())
    size_bytes = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    # a gradient one way and the parameters the other with every call
    print(f"{calls / seconds:,.0f} calls/s, {2 * size_bytes * calls / seconds / 1e6:,.0f} MB/s")


async def work(arguments: argparse.Namespace) -> None:
    """The life of every process: do what is asked for, until nobody in the group has work left."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and where to meet are in the environment
        if worker.id == DRIVER:
            await drive(arguments)


def main() -> None:
    """Read the command line, and be a worker of a group, or launch one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all", help="how gradients are applied (all)")
    parser.add_argument("--steps", type=int, default=300, help="how many gradients each trainer pushes (300)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the accuracy, such as ps.png")
    parser.add_argument("--trainers", type=int, default=3, help="how many processes train, if this launches them (3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        arpc.run(work(arguments))
        return
    roles = {"driver": 1, "server": 1, "trainer": arguments.trainers}
    try:
        arpc.run(arpc.launch.local(__file__, sys.argv[1:], workers=roles))
    except KeyboardInterrupt:
        sys.exit(130)
    except arpc.LaunchError as error:
        sys.exit(f"\n{error.traceback}\n\n{error}")


if __name__ == "__main__":
    main()
