"""What the rows of distributed autograd call, and how much of a pass is torch's own engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

import arpc
from arpc.autograd.engine import pausing, run

__all__ = ["CONTEXTS", "FAN_OUT", "SIZE", "EngineClock", "deepen", "mul", "mul_async", "pass_on_async", "timed_engine"]

SIZE: Final = 16
"""Elements of each tensor: what is measured is not the arithmetic."""
CONTEXTS: Final = 8
FAN_OUT: Final = 8


def mul(x: Tensor, y: Tensor) -> Tensor:
    """One operation."""
    return x * y


async def mul_async(x: Tensor, y: Tensor) -> Tensor:
    """Multiply, as a coroutine."""
    return x * y


async def pass_on_async(x: Tensor, *further: str) -> Tensor:
    """A row of workers, each of which calls the next."""
    return 2 * await arpc.rpc_sync(further[0], pass_on_async, (x, *further[1:])) if further else 2 * x


def deepen(x: Tensor, nodes: int) -> Tensor:
    """A chain of nodes."""
    for _ in range(nodes):
        x = x + 1
    return x


class EngineClock:
    """The time of the CPU that torch's engine has taken, in whatever thread it ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begun

        return timed


@contextmanager
def timed_engine() -> Iterator[EngineClock]:
    """Times every call of torch's engine that arpc makes inside of the block."""
    clock = EngineClock()
    modules: tuple[Any, ...] = run, pausing  # no user can get in between
    as_it_is = [module.run_backward for module in modules]
    for module, run_backward in zip(modules, as_it_is, strict=True):
        module.run_backward = clock.around(run_backward)
    try:
        yield clock
    finally:
        for module, run_backward in zip(modules, as_it_is, strict=True):
            module.run_backward = run_backward


def leaves() -> tuple[Tensor, Tensor]:
    """What gradients are asked for."""
    return torch.ones(SIZE, requires_grad=True), torch.ones(SIZE, requires_grad=True)
