"""Hogwild: several trainers change the same parameters at the same time, and nobody holds a lock.

    arpc launch --role driver=1,server=1,trainer=2 examples/hogwild.py

The model lives on the server. Each trainer runs forward and backward passes through it in contexts of its own, and has
its own optimizer over the same parameters. With locks, steps that concern the same parameters take turns; without, they
write at the same time, as in the paper "Hogwild!". Both are run, one after the other, and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import arpc

DRIVER, SERVER = "driver0", "server0"  # the launcher numbers the workers of each role
WIDTH = 32


def make_model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))


def draw_batch(size: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random inputs, and the wave that is to be learnt."""
    inputs = torch.randn(size, WIDTH, generator=dice)
    return inputs, torch.sin(inputs[:, :4].sum(dim=1, keepdim=True))


async def train(model: arpc.nn.RemoteModule[nn.Module], steps: int, seed: int, lock: bool) -> None:
    """What the driver asks every trainer to do. All of them get a handle to the same model."""
    dice = torch.Generator().manual_seed(seed)
    optimizer = await arpc.optim.DistributedOptimizer(
        torch.optim.SGD, await model.remote_parameters(), serialize_steps=lock, lr=0.05, momentum=0.9
    )
    for _ in range(steps):
        inputs, wave = draw_batch(64, dice)
        async with arpc.autograd.context() as context_id:
            loss = mse_loss(await model(inputs), wave)
            await arpc.autograd.backward(context_id, [loss])
            await optimizer.step(context_id)


class Result(NamedTuple):
    """How one of the two ways went."""

    losses: list[float]
    seconds: float


async def compare(trainers: list[str], steps: int, lock: bool) -> Result:
    """Train a new model one of the two ways, and look at its loss on the way."""
    model = arpc.nn.RemoteModule(SERVER, make_model)
    inputs, wave = draw_batch(1000, torch.Generator().manual_seed(0))

    async def look() -> float:
        with arpc.no_grad():
            return mse_loss(await model(inputs), wave).item()

    await train(model, 1, seed=0, lock=lock)  # a process's first optimizer loads a good part of torch: not to be timed
    losses, started = [await look()], time.perf_counter()
    way = "with locks" if lock else "without   "
    async with asyncio.TaskGroup() as group:
        training = [
            group.create_task(arpc.rpc_sync(name, train, (model, steps, number, lock), timeout=0))
            for number, name in enumerate(trainers, 1)
        ]
        while not all(one.done() for one in training):
            await asyncio.wait(training, timeout=0.5)
            losses.append(await look())
            print(f"{way}   loss {losses[-1]:.4f}", flush=True)
    return Result(losses, time.perf_counter() - started)


def draw(results: dict[str, Result], path: str) -> None:
    """A picture of both."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for way, result in results.items():
        axes.plot(torch.linspace(0, result.seconds, len(result.losses)), result.losses, label=way)
    axes.set(xlabel="seconds", ylabel="loss")
    axes.legend()
    figure.savefig(path)


async def main(arguments: argparse.Namespace) -> None:
    """The life of each process: the others serve the driver, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and where to meet are in the environment
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
    parser.add_argument("--plot", metavar="FILE", help="where to draw the loss, such as hogwild.png")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
