"""Federated averaging with clients that come and go: data stay where they are, only models are sent.

    python examples/federated.py

Every client has images of handwritten digits that it shows to no other worker, mostly of two of the ten digits. In each
round the server sends its model to the present clients; they train it on their data, and the server averages the models
that come back in time. Clients join late, leave early, or are too slow for a round. The group is elastic, so none of
that is an error: the server goes on with the clients that it has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

DIGITS = 10
TEST_IMAGES = 400


def make_model() -> nn.Module:
    """Make the model: from the 64 pixels of an image to a score for each digit."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, DIGITS))


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits, which come with scikit-learn, and their labels, shuffled."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


# -- the clients ------------------------------------------------------------------------------------------------------


class Client:
    """One client's own data, and the training on them."""

    def __init__(self, number: int) -> None:
        images, digits = load_digits()
        images, digits = images[TEST_IMAGES:], digits[TEST_IMAGES:]  # the server tests with the first ones
        is_favourite = (digits == number % DIGITS) | (digits == (number + 1) % DIGITS)
        weights = torch.where(is_favourite, 12.0, 1.0)
        mine = torch.multinomial(weights, 128, generator=torch.Generator().manual_seed(number))
        self.images, self.digits = images[mine], digits[mine]

    def train(self, weights: Tensor, epochs: int) -> tuple[Tensor, int]:
        """Train a model on the data of this client; return its weights and the number of images."""
        model = make_model()
        vector_to_parameters(weights, model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(epochs):
            for batch in torch.randperm(len(self.digits)).reshape(-1, 32):
                loss = cross_entropy(model(self.images[batch]), self.digits[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return parameters_to_vector(model.parameters()).detach(), len(self.digits)


client: Client  # exists in each client's process


def train(weights: Tensor, epochs: int) -> tuple[Tensor, int]:
    """Train on this client's data: called by the server in each round. A plain function, so it runs in a thread."""
    return client.train(weights, epochs)


async def be_client(number: int, place: str, rounds: int) -> None:
    """Run a client: join, take part in some rounds, and leave."""
    global client  # noqa: PLW0603 - one process, one client
    client = Client(number)
    async with arpc.init_rpc(f"client{number}", world_size=None, init_method=place):
        await arpc.rpc_sync("server", take_part, (f"client{number}", rounds), timeout=0)


# -- the server -------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """The result of a round."""

    number: int
    asked: int
    averaged: int
    accuracy: float

    def __str__(self) -> str:
        return f"round {self.number:3}   {self.averaged} of {self.asked} clients   accuracy {self.accuracy:6.1%}"


class Server:
    """The model that all clients get, and the clients that are present."""

    def __init__(self) -> None:
        self.weights = parameters_to_vector(make_model().parameters()).detach()
        self.rounds_left: dict[str, int] = {}
        self.changed = asyncio.Condition()
        self.is_over = False
        self.seen: set[str] = set()

    async def take_part(self, name: str, rounds: int) -> None:
        """Register a client for some rounds. Returns when these are over."""
        async with self.changed:
            self.rounds_left[name] = rounds
            self.seen.add(name)
            self.changed.notify_all()
            try:
                await self.changed.wait_for(lambda: self.is_over or self.rounds_left[name] <= 0)
            finally:  # also if the client is lost, which cancels this handler
                del self.rounds_left[name]

    async def run_round(self, number: int, timeout_s: float, test: tuple[Tensor, Tensor]) -> Round:
        """Let all present clients train, and average the models that come back in time."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.rounds_left)
        asked = [
            arpc.rpc_async(name, train, (self.weights, 1), timeout=timeout_s)  # the client cancels it at the timeout
            for name in self.rounds_left
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        came: list[tuple[Tensor, int]] = []
        for answer in answers:
            if not isinstance(answer, BaseException):
                came.append(answer)
            elif not isinstance(answer, arpc.CallError | arpc.ShutdownError | arpc.UnknownWorkerError):
                raise answer  # after those, training goes on: the client is late, lost, or leaving
        if came:
            total = sum(size for _, size in came)
            self.weights = torch.stack([weights * (size / total) for weights, size in came]).sum(dim=0)
        async with self.changed:
            for name in self.rounds_left:
                self.rounds_left[name] -= 1
            self.changed.notify_all()
        return Round(number, len(asked), len(came), self.accuracy(*test))

    async def end(self) -> None:
        """Let all clients leave, also those that register later."""
        async with self.changed:
            self.is_over = True
            self.changed.notify_all()

    @torch.no_grad()
    def accuracy(self, images: Tensor, digits: Tensor) -> float:
        """Return the accuracy of the model on images of all digits."""
        model = make_model()
        vector_to_parameters(self.weights, model.parameters())
        return float((model(images).argmax(dim=1) == digits).double().mean())


server: Server  # exists in the server's process only, where the function below runs


async def take_part(name: str, rounds: int) -> None:
    """Register a client: called by each client when it has joined."""
    await server.take_part(name, rounds)


async def start_client(number: int, place: str, rounds: int) -> None:
    """Run the process of a client. When this coroutine ends, for whatever reason, the process has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", str(number), "--place", place, "--stay", str(rounds)
    )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def run_server(place: str, arguments: argparse.Namespace) -> None:
    """Run all rounds while clients come and go."""
    global server  # noqa: PLW0603 - one process, one server
    os.environ |= {"ARPC_SECRET": secrets.token_hex(), "OMP_NUM_THREADS": "1"}  # inherited by the clients
    server = Server()
    images, digits = load_digits()
    test = images[:TEST_IMAGES], digits[:TEST_IMAGES]
    history: list[Round] = []
    async with arpc.init_rpc("server", world_size=None, init_method=place), asyncio.TaskGroup() as clients:
        print(f"accuracy {server.accuracy(*test):.1%} before the first round", flush=True)
        started = 0
        for number in range(1, arguments.rounds + 1):
            while started < 4 + number // 4:  # a new one every four rounds; each stays for some, and leaves
                clients.create_task(start_client(started, place, arguments.stay))
                started += 1
            pause = clients.create_task(asyncio.sleep(arguments.pace))  # rounds begin at fixed times
            history.append(await server.run_round(number, 5.0, test))
            await pause
            print(history[-1], flush=True)
        await server.end()
    best = max(history, key=lambda one: one.accuracy)
    most = max(one.averaged for one in history)
    print(f"{len(server.seen)} clients took part, at most {most} at once, and kept their data to themselves")
    print(f"accuracy {history[0].accuracy:.1%} -> {history[-1].accuracy:.1%}, {best.accuracy:.1%} at best")


def main() -> None:
    """Parse the command line, and run the server or one of its clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="how many rounds there are (24)")
    parser.add_argument("--stay", type=int, default=12, help="how many of them a client stays for (12)")
    parser.add_argument("--pace", type=float, default=0.5, help="seconds from one round to the next (0.5)")
    parser.add_argument("--client", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.client is not None:
        arpc.run(be_client(arguments.client, arguments.place, arguments.stay))
        return
    with tempfile.TemporaryDirectory() as folder:  # on one host a group can meet in a file, and needs no port
        arpc.run(run_server(f"file://{folder}/group", arguments))


if __name__ == "__main__":
    main()
