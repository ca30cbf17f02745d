"""Asynchronous training with a parameter server: a network learns to tell the arms of a spiral apart.

    python examples/parameter_server.py --trainers 3

This process, the driver, starts the others: a server, which keeps the parameters, and trainers. Each trainer draws data
of its own, pushes gradients to the server and goes on with the parameters that come back. None waits for another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

ARMS = 3
SERVER_RANK = 1  # after the driver, which has rank 0; the trainers follow


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


server: ParameterServer  # there is one in the server's process only; the functions below run there, and find it


async def pull() -> Tensor:
    """The parameters as they are now."""
    return server.published


async def push(gradient: Tensor) -> Tensor:
    """Hand in a gradient; the parameters that go on with it."""
    return await server.push(gradient)


async def watch(total: int) -> AsyncIterator[tuple[int, Tensor]]:
    """How many gradients have come, and the parameters, several times a second until all have come."""
    while server.pushes < total:
        yield server.pushes, server.published
        await asyncio.sleep(0.1)
    yield server.pushes, server.published


# -- the trainers -----------------------------------------------------------------------------------------------------


async def train(steps: int, seed: int) -> None:
    """What the driver asks every trainer to do."""
    model, dice = make_model(), torch.Generator().manual_seed(seed)
    weights = await arpc.rpc_sync("server", pull)
    for _ in range(steps):
        vector_to_parameters(weights, model.parameters())
        points, arm = draw_spiral(128, dice)
        loss = cross_entropy(model(points), arm)
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        weights = await arpc.rpc_sync("server", push, args=(gradient,))


# -- processes --------------------------------------------------------------------------------------------------------


async def serve_group(place: str) -> None:
    """The life of the server and of the trainers: do what is asked for, until nobody in the group has work left."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    number = int(os.environ["RANK"]) - SERVER_RANK
    if number == 0:
        global server  # noqa: PLW0603 - one process, one server
        server = ParameterServer()
    # RANK and WORLD_SIZE say the rest, as under torchrun; there the place would be "env://", the default
    async with arpc.init_rpc("server" if number == 0 else f"trainer{number}", init_method=place):
        pass  # leaving the block waits for the whole group, and serves it meanwhile


async def run_process(rank: int, place: str) -> None:
    """Start a process and own it: however this coroutine ends, the process has ended before."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--worker",
        place,
        env={**os.environ, "RANK": str(rank)},
        start_new_session=True,  # out of reach of the terminal's Ctrl-C: the driver alone reacts to that
    )
    try:
        if code := await process.wait():
            raise ChildProcessError(f"the process of rank {rank} ended with exit code {code}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


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


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A function to tell how far things have come. Without rich, or a terminal, nobody looks."""
    try:
        from rich.progress import Progress  # optional
    except ImportError:
        yield lambda _: None
        return
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("training", total=total)
        yield lambda completed: progress.update(bar, completed=completed)


async def drive(trainers: int, steps: int, place: str) -> None:
    """Start the processes, let them train, and show how it goes."""
    total = trainers * steps
    # what all workers find in their environment, this one too
    os.environ |= {"WORLD_SIZE": str(trainers + 2), "ARPC_SECRET": secrets.token_hex(), "OMP_NUM_THREADS": "1"}
    reports: list[Report] = []
    print(f"starting {trainers + 1} processes: the server and its trainers", flush=True)
    # whatever fails first, a process or a call, ends all the others; so does Ctrl-C
    async with asyncio.TaskGroup() as group:
        for rank in range(SERVER_RANK, trainers + 2):
            group.create_task(run_process(rank, place))
        async with arpc.init_rpc("driver", rank=0, init_method=place), asyncio.TaskGroup() as calls:
            started = time.perf_counter()
            for n in range(1, trainers + 1):
                calls.create_task(arpc.rpc_sync(f"trainer{n}", train, args=(steps, n), timeout=0))
            with progress_bar(total) as advance:
                async for pushes, weights in arpc.stream("server", watch, args=(total,), timeout=0, window=1):
                    advance(pushes)
                    if not reports or 10 * pushes // total > 10 * reports[-1].pushes // total:
                        reports.append(evaluate(pushes, weights))
                        print(reports[-1], flush=True)
            seconds = time.perf_counter() - started
    first, last = reports[0], reports[-1]
    print(f"loss {first.loss:.3f} -> {last.loss:.3f}, accuracy {first.accuracy:.1%} -> {last.accuracy:.1%}")
    megabytes = 2 * total * weights.nbytes / 1e6  # gradients one way, parameters the other
    print(f"{total / seconds:,.0f} calls/s, {megabytes / seconds:,.0f} MB/s")


def main() -> None:
    """Read the command line, and run the driver or one of its workers."""
    parser = argparse.ArgumentParser(description="Train a small network with a parameter server.")
    parser.add_argument("--trainers", type=int, default=3, help="how many processes train (3)")
    parser.add_argument("--steps", type=int, default=300, help="how many gradients each of them pushes (300)")
    parser.add_argument("--worker", metavar="PLACE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        with contextlib.suppress(asyncio.CancelledError):
            arpc.run(serve_group(arguments.worker))
        return
    try:
        with tempfile.TemporaryDirectory() as folder:  # on one host a group can meet in a file, and needs no port
            arpc.run(drive(arguments.trainers, arguments.steps, f"file://{folder}/group"))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
