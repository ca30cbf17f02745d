"""Hogwild: several trainers change the same parameters at the same time, without a lock.

    arpc launch --role driver=1,server=1,trainer=2 examples/hogwild.py

The model lives on the server. Each trainer runs forward and backward passes through it in contexts of its own, and has
its own optimizer over the same parameters. With locks, steps that concern the same parameters take turns; without, they
write at the same time, as in the paper "Hogwild!". Both are run, one after the other, and compared. They learn the
handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

DRIVER, SERVER = "driver0", "server0"  # the launcher numbers the workers of each role
TEST_IMAGES = 400


def make_model() -> nn.Module:
    """Make the model: from the 64 pixels of an image to a score for each digit."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits, which come with scikit-learn, and their labels, shuffled."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


async def train(model: arpc.nn.RemoteModule[nn.Module], images: Tensor, digits: Tensor, steps: int, lock: bool) -> None:
    """Train the common model on a share of the images: called by the driver on every trainer."""
    dice = torch.Generator().manual_seed(0)
    optimizer = await arpc.optim.DistributedOptimizer(
        torch.optim.SGD, await model.remote_parameters(), serialize_steps=lock, lr=0.05, momentum=0.9
    )
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=dice)
        async with arpc.autograd.context() as context_id:
            loss = cross_entropy(await model(images[batch]), digits[batch])
            await arpc.autograd.backward(context_id, [loss])
            await optimizer.step(context_id)


class Result(NamedTuple):
    """The result of one of the two ways."""

    losses: list[float]
    seconds: float


async def compare(trainers: list[str], steps: int, lock: bool) -> Result:
    """Train a new model in one of the two ways, and sample its loss meanwhile."""
    model = arpc.nn.RemoteModule(SERVER, make_model)
    images, digits = load_digits()
    shares = zip(images[TEST_IMAGES:].chunk(len(trainers)), digits[TEST_IMAGES:].chunk(len(trainers)), strict=True)

    async def look() -> float:
        with arpc.no_grad():
            return cross_entropy(await model(images[:TEST_IMAGES]), digits[:TEST_IMAGES]).item()

    await train(
        model, images[:64], digits[:64], 1, lock
    )  # a process's first optimizer imports a good part of torch, which should not be timed
    losses, started = [await look()], time.perf_counter()
    way = "with locks" if lock else "without   "
    async with asyncio.TaskGroup() as group:
        training = [
            group.create_task(arpc.rpc_sync(name, train, (model, *share, steps, lock), timeout=0))
            for name, share in zip(trainers, shares, strict=True)
        ]
        while not all(one.done() for one in training):
            await asyncio.wait(training, timeout=0.1)
            losses.append(await look())
            print(f"{way}   loss {losses[-1]:.4f}", flush=True)
    return Result(losses, time.perf_counter() - started)


def draw(results: dict[str, Result], path: Path) -> None:
    """Draw the losses of both ways."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for way, result in results.items():
        axes.plot(torch.linspace(0, result.seconds, len(result.losses)), result.losses, label=way)
    axes.set(
        title="Digits learnt by several trainers on the same parameters",
        xlabel="seconds",
        ylabel="loss on images not trained with",
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: the other workers serve the driver, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name != DRIVER:
            return
        trainers = [one.name for one in worker.get_worker_infos() if one.name not in {DRIVER, SERVER}]
        results = {
            "with locks": await compare(trainers, arguments.steps, lock=True),
            "without": await compare(trainers, arguments.steps, lock=False),
        }
    print("way            first loss   last loss   steps/s")
    for way, (losses, seconds) in results.items():
        rate = len(trainers) * arguments.steps / seconds
        print(f"{way:12}   {losses[0]:10.4f}   {losses[-1]:9.4f}   {rate:7.0f}")
    if arguments.plot:
        draw(results, arguments.plot)
        print(f"the picture is {arguments.plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="how many steps each trainer makes (300)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the loss, such as build/hogwild.png")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
