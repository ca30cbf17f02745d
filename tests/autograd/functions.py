"""What the tests call on other workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch import Tensor

import arpc
from arpc.autograd.contexts import current_context_id


@arpc.inline
def mul(x: Tensor, y: Any) -> Tensor:
    return x * y


@arpc.inline
def give_back(value: Any) -> Any:
    return value


def mul_in_thread(x: Tensor, y: Any) -> Tensor:
    return x * y


class Pair:
    """An object of a user, with tensors inside."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.second = second


@arpc.inline
def mul_inside(pair: Pair, box: dict[str, list[Tensor]]) -> dict[str, Any]:
    return {"pair": Pair(pair.first * box["x"][0], pair.second), "plain": 3}


@arpc.inline
def change_in_place(x: Tensor) -> Tensor:
    x[1:].mul_(3)
    x.view(-1)[0].add_(1)
    return x


@arpc.inline
def make_leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


@arpc.inline
def context_id() -> int | None:
    return current_context_id.get()


class Model:
    """A parameter that stays where it is."""

    def __init__(self, *values: float) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def gradient(self, ctx_id: int) -> Tensor | None:
        return arpc.autograd.get_gradients(ctx_id).get(self.weight)


async def nested(x: Tensor, to: str, *further: str) -> Tensor:
    """Multiply by two on each of a row of workers."""
    if further:
        return 2 * await arpc.rpc_sync(to, nested, (x, *further))
    return 2 * await arpc.rpc_sync(to, mul, (x, 2))


async def ping_pong(x: Tensor, turns: int, *workers: str) -> Tensor:
    """Hand a value back and forth, and change it at each turn."""
    if not turns:
        return x
    return x + await arpc.rpc_sync(workers[0], ping_pong, (x * 2, turns - 1, *workers[1:], workers[0]))


async def count_up(x: Tensor, count: int) -> AsyncIterator[Tensor]:
    for number in range(count):
        yield x * number


def count_up_in_thread(x: Tensor, count: int) -> Iterator[Tensor]:
    with torch.enable_grad():
        for number in range(count):
            yield x * number


async def count_up_under_no_grad(x: Tensor, count: int) -> AsyncIterator[Tensor]:
    made = [x * number for number in range(count)]
    with torch.no_grad():
        for item in made:
            yield item


class Boom(torch.autograd.Function):
    """Raises when its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("boom")


@arpc.inline
def raise_boom(*_: Any) -> None:
    raise ValueError("boom")


def boom(x: Tensor) -> Tensor:
    return Boom.apply(x)


class Gate:
    """Lets a test decide when a backward pass goes on, in a thread."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.left = asyncio.Event()


@arpc.inline
def is_grad_enabled() -> bool:
    return torch.is_grad_enabled()
