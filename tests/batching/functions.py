"""What the tests call on other workers. Each notes how many calls it was called for."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import NamedTuple

import torch

import arpc

LONG_MS = 60_000.0
"""Nothing but a full batch ends such a wait."""

sizes: list[int] = []
request: ContextVar[str] = ContextVar("tests.batching.request", default="")  # propagated in its tests only


class Gate:
    """Holds a batch up until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.ends: list[str] = []

    async def pass_through(self) -> None:
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("passed")


gate: list[Gate] = []


@arpc.batched(max_size=4, max_wait_ms=LONG_MS)
def add(x, amount):
    sizes.append(len(x))
    assert isinstance(amount, list)
    return x + torch.tensor(amount).view(-1, *[1] * (x.dim() - 1))


@arpc.batched(max_size=4, max_wait_ms=LONG_MS)
async def add_async(x, *, amount):
    sizes.append(len(x))
    await asyncio.sleep(0)
    return x + torch.tensor(amount).view(-1, 1)


@arpc.batched(max_size=8, max_wait_ms=0)
def soon(numbers):
    sizes.append(len(numbers))
    return [number * 2 for number in numbers]


@arpc.batched(max_size=1)
def names_of(types):
    return [kind.__name__ for kind in types]


@arpc.batched
async def held(numbers):
    sizes.append(len(numbers))
    await gate[0].pass_through()
    return numbers


@arpc.batched(max_size=2, max_wait_ms=LONG_MS)
async def held_until_full(numbers):
    sizes.append(len(numbers))
    await gate[0].pass_through()
    return numbers


class Bar:
    """Holds a thread up until it is lifted."""

    def __init__(self) -> None:
        self.lifted = threading.Event()
        self.at_once = 0
        self.most_at_once = 0

    def wait(self, reached: threading.Event) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        reached.set()
        self.lifted.wait()
        self.at_once -= 1


bar: list[Bar] = []
reached = threading.Event()


@arpc.batched(max_size=1)
def held_in_thread(numbers):
    sizes.append(len(numbers))
    bar[0].wait(reached)
    return numbers


@arpc.batched(max_size=1)
def failing(x):
    raise LookupError("nothing is found")


@arpc.batched(max_size=1)
def ending(hows):
    raise {"exit": SystemExit(3), "stop": StopIteration(3)}[hows[0]]


@arpc.batched(max_size=1)
def ending_one(hows):
    return [{"exit": SystemExit(3), "stop": StopIteration(3)}[hows[0]]]


@arpc.batched(max_size=3, max_wait_ms=LONG_MS)
def picky(numbers):
    sizes.append(len(numbers))
    if 13 in numbers:
        raise LookupError("no thirteen")
    return [ValueError(f"{number} is negative") if number < 0 else number for number in numbers]


class Scored(NamedTuple):
    score: torch.Tensor
    label: list[str]


@arpc.batched(max_size=2, max_wait_ms=LONG_MS)
def several(x):
    sizes.append(len(x))
    names = [str(int(row)) for row in x]
    return {"pair": (x, names), "named": Scored(x * 2, names), "none": None}


@arpc.batched(max_size=2, max_wait_ms=LONG_MS)
def wrong(x, how):
    return {"rows": x[:1], "items": [1], "number": 3, "scalar": x.sum()}[how[0]]


@arpc.batched(max_size=2, max_wait_ms=LONG_MS)
def circumstances(numbers):
    return [(threading.current_thread().name, arpc.remaining_time(), request.get(), arpc.get_worker_info().name)] * 2


@arpc.batched(max_size=1)
async def with_call(numbers):
    return [await arpc.rpc_sync("worker2", identity, (number,)) for number in numbers]


async def identity(value):
    return value


class Model:
    """Has weights, and batched methods."""

    def __init__(self, weight: float) -> None:
        self.weight = torch.full((2,), weight, requires_grad=True)

    @arpc.batched(max_size=2, max_wait_ms=LONG_MS)
    def forward(self, x):
        sizes.append(len(x))
        return (x * self.weight).sum(1)

    @arpc.batched(max_size=2, max_wait_ms=0)
    async def alone(self, x):
        sizes.append(len(x))
        return (x * self.weight).sum(1)

    bias = 1

    @classmethod
    @arpc.batched(max_size=2, max_wait_ms=LONG_MS)
    def biased(cls, x):
        sizes.append(len(x))
        return x + cls.bias

    @staticmethod
    @arpc.batched(max_size=2, max_wait_ms=LONG_MS)
    async def negated(x):
        sizes.append(len(x))
        return -x

    def gradients(self, context_id: int) -> list[float]:
        gradients = arpc.autograd.get_gradients(context_id)
        return gradients[self.weight].tolist()


class BiasedModel(Model):
    """Inherits the class method, and is what that is called with."""

    bias = 10


def queues() -> int:
    """How many functions of this worker have calls that wait or run."""
    from arpc.batching.decorator import Queues
    from arpc.runtime import current

    return len(current().keep(Queues).queues)


def local() -> arpc.batching.Batched:
    @arpc.batched
    def inner(x):
        return x

    return inner
