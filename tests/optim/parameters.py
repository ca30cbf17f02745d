"""Parameters of other workers, and gradients for them, made by hand."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import arpc
from arpc.autograd.contexts import current_context_id
from arpc.runtime import current


def make_parameter(value: Tensor, requires_grad: bool = True) -> Parameter:
    return Parameter(value.clone(), requires_grad=requires_grad)


def place(values: Sequence[Tensor], owners: Sequence[str]) -> list[arpc.RRef[Parameter]]:
    """A parameter for each value, in turn on each owner."""
    return [arpc.remote(owners[i % len(owners)], make_parameter, (value,)) for i, value in enumerate(values)]


async def set_gradient(ballast: Tensor, rref: arpc.RRef[Any], gradient: Tensor | None) -> None:
    """As if a backward pass had left it there. What requires grad takes the context to the owner."""
    context_id = current_context_id.get()
    assert context_id is not None
    context = current().autograd.container.find(context_id)
    if gradient is not None:
        context.gradients = {**context.gradients, await rref.local_value(): gradient}


@asynccontextmanager
async def gradients(rrefs: Sequence[arpc.RRef[Any]], values: Sequence[Tensor | None]) -> AsyncIterator[int]:
    """A context that has gradients for some parameters."""
    async with arpc.autograd.context() as context_id:
        for rref, value in zip(rrefs, values, strict=True):
            await arpc.rpc_sync(rref.owner_name(), set_gradient, (torch.ones((), requires_grad=True), rref, value))
        yield context_id


async def grad_of(rref: arpc.RRef[Parameter]) -> Tensor | None:
    return (await rref.local_value()).grad


async def set_grad_of(rref: arpc.RRef[Parameter], gradient: Tensor) -> None:
    (await rref.local_value()).grad = gradient


async def values_of(rrefs: Sequence[arpc.RRef[Any]]) -> list[Tensor]:
    return [(await rref).detach() for rref in rrefs]


def all_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


class Failing(torch.optim.SGD):
    """Fails in its step on the workers that are named."""

    def __init__(self, params: Any, lr: float, on: Sequence[str]) -> None:
        super().__init__(params, lr)
        self._fails = current().name in on

    def step(self, closure: Any = None) -> None:
        if self._fails:
            raise ValueError(f"no step on {current().name}")
        super().step(closure)


class Stage:
    """What the steps of `Staged` optimizers meet at."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.both = threading.Barrier(2, timeout=20)
        self.running = 0
        self.most_running = 0


stages: dict[str, Stage] = {}


class Staged(torch.optim.SGD):
    """Stops in its step until it may go on."""

    def __init__(self, params: Any, lr: float, stage: str) -> None:
        super().__init__(params, lr)
        self._stage = stages[stage]

    def step(self, closure: Any = None) -> None:
        self._stage.running += 1
        self._stage.most_running = max(self._stage.most_running, self._stage.running)
        self._stage.entered.set()
        assert self._stage.may_go_on.wait(40)
        super().step(closure)
        self._stage.running -= 1


class Meeting(torch.optim.SGD):
    """Makes its step only while another one makes its own."""

    def __init__(self, params: Any, lr: float, stage: str) -> None:
        super().__init__(params, lr)
        self._stage = stages[stage]

    def step(self, closure: Any = None) -> None:
        self._stage.both.wait()
        super().step(closure)
