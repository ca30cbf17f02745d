"""A small group with a mixed load, as something to watch with the dashboard, `arpc top` and `arpc stack`.

``python -m scripts.busy_group`` runs until it is interrupted, and prints the address of the dashboard.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import tempfile
import time
from typing import Final

import torch
from torch import nn

import arpc
from arpc.log import get_logger

logger = get_logger("busy")
NAMES: Final = ("ps", "trainer0", "trainer1", "trainer2", "logger")


class Replay:
    """A buffer of the items that trainers add."""

    def __init__(self) -> None:
        self.items: list[int] = []

    async def add(self, item: int) -> int:
        self.items = [*self.items[-1000:], item]
        return len(self.items)


async def lookup(keys: list[int]) -> int:
    """Count the keys: a fast handler."""
    return len(keys)


async def pull(step: int) -> torch.Tensor:
    """Return parameters, large enough for shared memory."""
    await asyncio.sleep(random.uniform(0.001, 0.006))
    return torch.full((256, 1024), float(step))


def augment(image: torch.Tensor) -> torch.Tensor:
    """Flip an image: a plain function, which runs in a thread."""
    time.sleep(random.uniform(0.001, 0.004))
    return image.flip(0)


async def log(name: str, step: int) -> None:
    """Sleep as if it waited for a disk, and sometimes fail."""
    await asyncio.sleep(random.expovariate(200))
    if random.random() < 0.01:
        logger.warning("step %d of %s is there already", step, name)
        raise ValueError(f"{name} reports step {step} twice")


async def evaluate(step: int) -> int:
    """Evaluate a step: a handler that makes a call itself."""
    logger.info("evaluates step %d", step)
    await asyncio.sleep(random.uniform(0.5, 2.5))
    found: int = await arpc.rpc_sync("logger", lookup, args=([step],))
    return found


async def square(x: torch.Tensor) -> torch.Tensor:
    """Square: an operation with a gradient."""
    return x * x


async def train(rank: int) -> None:
    """Run the loop of a trainer."""
    name = NAMES[rank]
    replay = arpc.remote("ps", Replay)
    heads = [arpc.remote("ps", nn.Linear, args=(8, 8)) for _ in range(rank)]
    evaluations: set[asyncio.Task[int]] = set()
    step = 0
    while heads:
        step += 1
        await asyncio.gather(*(arpc.rpc_sync("ps", lookup, args=([n],)) for n in range(4 * rank)))
        await arpc.rpc_sync("ps", pull, args=(step,))
        await arpc.rpc_sync(NAMES[1 + step % 3], augment, args=(torch.ones(64, 64),))
        await replay.rpc_async().add(step)
        with contextlib.suppress(ValueError):
            await arpc.rpc_sync("logger", log, args=(name, step))
        if len(evaluations) < rank:
            task = asyncio.create_task(arpc.rpc_sync("ps", evaluate, args=(step,)))
            evaluations.add(task)
            task.add_done_callback(evaluations.discard)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with arpc.autograd.context() as context:
            x = torch.ones(4, requires_grad=True)
            loss = (await arpc.rpc_sync("logger", square, args=(x,))).sum()
            await arpc.autograd.backward(context, [loss])
        await asyncio.sleep(0.01)


async def main(rank: int, place: str, http: str) -> None:
    """Run one worker."""
    name = NAMES[rank]
    options = arpc.RpcOptions(http=http if rank == 0 else "", metrics=True)
    async with arpc.init_rpc(
        NAMES[rank], rank=rank, world_size=len(NAMES), init_method=place, options=options
    ) as worker:
        if worker.http_address is not None:
            print(worker.http_address, flush=True)
        if name.startswith("trainer"):
            await train(rank)
        else:
            await asyncio.Event().wait()


def start(rank: int, place: str, http: str) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    logging.getLogger("busy").setLevel(logging.INFO)
    logging.getLogger("busy").addHandler(logging.NullHandler())  # the dashboard shows the log
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        arpc.run(main(rank, place, http))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="127.0.0.1:27720")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        place = f"file://{folder}/group"
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            start, args=(place, arguments.http), nprocs=len(NAMES)
        )
