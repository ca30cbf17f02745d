"""A parameter server that survives its trainers: some are killed in the middle of their work, and replaced.

    python examples/fault_tolerant.py

The group is elastic: workers join and leave at any time. This process is the server. It starts the trainers, calls
each of them to train, and notices at once when one dies (by SIGKILL, without a goodbye): its call to that trainer fails
with `WorkerLostError`. It then starts another process under the same name, which continues where the dead one stopped.
Gradients that were in flight are lost, and nothing else is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

TEST_IMAGES = 400


def make_model() -> nn.Module:
    """Make the model: from the 64 pixels of an image to a score for each digit."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits, which come with scikit-learn, and their labels, shuffled."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


# -- the trainers -----------------------------------------------------------------------------------------------------


async def train(images: Tensor, digits: Tensor, first: int, steps: int) -> None:
    """Compute gradients for these steps on a share of the images, and push them to the server one by one."""
    model, name = make_model(), arpc.get_worker_info().name
    dice = torch.Generator().manual_seed(first)
    weights = await arpc.rpc_sync("server", pull)
    for _ in range(first, steps):
        vector_to_parameters(weights, model.parameters())
        batch = torch.randint(len(images), (64,), generator=dice)
        loss = cross_entropy(model(images[batch]), digits[batch])
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        weights = await arpc.rpc_sync("server", push, (name, gradient))


async def be_trainer(name: str, place: str) -> None:
    """Run a trainer: register it at the server, and serve calls until it may leave."""
    async with arpc.init_rpc(name, world_size=None, init_method=place):
        await arpc.rpc_sync("server", join, (name,), timeout=0)


# -- the server -------------------------------------------------------------------------------------------------------


class Trainer:
    """One trainer: its share of the images, and the process that trains on it at present."""

    def __init__(self, name: str, images: Tensor, digits: Tensor) -> None:
        self.name, self.images, self.digits = name, images, digits
        self.pushes = 0
        self.deaths = 0
        self.process: asyncio.subprocess.Process | None = None
        self.joined = asyncio.Event()
        self.may_leave = asyncio.Event()


class Server:
    """The parameters, and the trainers that push gradients."""

    def __init__(self, place: str, trainers: int, steps: int) -> None:
        self.weights = nn.Parameter(parameters_to_vector(make_model().parameters()))
        self.optimizer = torch.optim.Adam([self.weights], lr=3e-3)
        self.published = self.weights.detach().clone()
        self.place, self.steps = place, steps
        self.pushed = asyncio.Event()
        images, digits = load_digits()
        self.test_images, self.test_digits = images[:TEST_IMAGES], digits[:TEST_IMAGES]  # no trainer sees these
        shares = zip(images[TEST_IMAGES:].chunk(trainers), digits[TEST_IMAGES:].chunk(trainers), strict=True)
        self.trainers = {f"trainer{n}": Trainer(f"trainer{n}", *share) for n, share in enumerate(shares)}

    @property
    def pushes(self) -> int:
        """The number of gradients received so far."""
        return sum(trainer.pushes for trainer in self.trainers.values())

    def push(self, name: str, gradient: Tensor) -> Tensor:
        """Apply one gradient, and return the new parameters."""
        self.weights.grad = gradient
        self.optimizer.step()
        self.trainers[name].pushes += 1
        self.pushed.set()
        self.pushed.clear()  # tasks that were waiting go on nevertheless
        self.published = self.weights.detach().clone()  # a tensor that is being sent must not change
        return self.published

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on images that no trainer has seen."""
        model = make_model()
        vector_to_parameters(self.published, model.parameters())
        return float((model(self.test_images).argmax(dim=1) == self.test_digits).double().mean())

    async def keep_training(self, trainer: Trainer) -> None:
        """Make sure that all gradients of one trainer are computed, by as many processes as necessary."""
        while trainer.pushes < self.steps:
            trainer.joined.clear()
            process = trainer.process = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--trainer", trainer.name, "--place", self.place
            )
            try:
                await trainer.joined.wait()
                print(f"{trainer.name} is process {process.pid}, and starts at step {trainer.pushes}", flush=True)
                share = (trainer.images, trainer.digits)
                await arpc.rpc_sync(trainer.name, train, (*share, trainer.pushes, self.steps), timeout=0)
                trainer.may_leave.set()
                await process.wait()
            except arpc.WorkerLostError as error:
                trainer.deaths += 1
                print(f"{error}", flush=True)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def cause_trouble(self, kills: int) -> None:
        """Kill trainers, `kills` times, evenly spread over the work."""
        total = self.steps * len(self.trainers)
        for kill in range(1, kills + 1):
            while self.pushes < total * kill / (kills + 1):
                await self.pushed.wait()
            working = [one for one in self.trainers.values() if one.joined.is_set() and not one.may_leave.is_set()]
            if not working:
                continue
            victim = min(working, key=lambda one: one.deaths)
            assert victim.process is not None
            print(f"{self.pushes} gradients, accuracy {self.accuracy():.1%}: kill -9 {victim.name}", flush=True)
            victim.process.kill()


server: Server  # exists in the server's process only, where the functions below run


async def join(name: str) -> None:
    """Register a trainer. Returns when the trainer may leave."""
    trainer = server.trainers[name]
    trainer.joined.set()
    await trainer.may_leave.wait()


async def pull() -> Tensor:
    """Return the current parameters."""
    return server.published


async def push(name: str, gradient: Tensor) -> Tensor:
    """Apply a gradient, and return the new parameters."""
    return server.push(name, gradient)


async def run_server(place: str, arguments: argparse.Namespace) -> None:
    """Train in spite of the kills, and print the results."""
    global server  # noqa: PLW0603 - one process, one server
    os.environ |= {"ARPC_SECRET": secrets.token_hex(), "OMP_NUM_THREADS": "1"}  # inherited by the trainers
    server = Server(place, arguments.trainers, arguments.steps)
    async with arpc.init_rpc("server", world_size=None, init_method=place), asyncio.TaskGroup() as group:
        before, started = server.accuracy(), time.perf_counter()
        training = [group.create_task(server.keep_training(trainer)) for trainer in server.trainers.values()]
        trouble = group.create_task(server.cause_trouble(arguments.kills))
        await asyncio.wait(training)
        trouble.cancel()
        seconds = time.perf_counter() - started
    print("trainer    gradients   killed")
    for trainer in server.trainers.values():
        print(f"{trainer.name:8}   {trainer.pushes:9}   {trainer.deaths:6}")
    print(f"accuracy {before:.1%} -> {server.accuracy():.1%} in {seconds:.1f} s, {server.pushes} gradients")


def main() -> None:
    """Parse the command line, and run the server or one of its trainers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=3, help="how many train (3)")
    parser.add_argument("--steps", type=int, default=500, help="how many gradients each of them computes (500)")
    parser.add_argument("--kills", type=int, default=2, help="how many of them are killed on the way (2)")
    parser.add_argument("--trainer", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.trainer:
        arpc.run(be_trainer(arguments.trainer, arguments.place))
        return
    with tempfile.TemporaryDirectory() as folder:  # on one host a group can meet in a file, and needs no port
        arpc.run(run_server(f"file://{folder}/group", arguments))


if __name__ == "__main__":
    main()
