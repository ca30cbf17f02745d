"""Functions that the rows of distributed autograd call, and a clock for torch's own engine."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

import arpc
from arpc.autograd.engine import pausing, run

__all__ = [
    "BLOCKS",
    "CONTEXTS",
    "FAN_OUT",
    "MICROBATCHES",
    "SIZE",
    "EngineClock",
    "arithmetic_s",
    "block",
    "deepen",
    "mul",
    "mul_async",
    "pass_on_async",
    "run_block",
    "run_block_async",
    "sequences",
    "timed_engine",
    "total",
]

SIZE: Final = 16
"""Elements of each tensor: few, as arithmetic is not to be measured."""
CONTEXTS: Final = 8
BLOCKS: Final = 4
"""The blocks of a transformer: the caller has the first and the third, the callee the others."""
MICROBATCHES: Final = 25
"""Each is sent and returned twice in a step, so that 100 tensors are sent forward, and as many gradients back."""
_WIDTH: Final = 64
_SAMPLES: Final = 5
FAN_OUT: Final = 8


def mul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply."""
    return x * y


async def mul_async(x: Tensor, y: Tensor) -> Tensor:
    """Multiply, as a coroutine."""
    return x * y


async def pass_on_async(x: Tensor, *further: str) -> Tensor:
    """Call a chain of workers, each of which calls the next."""
    return 2 * await arpc.rpc_sync(further[0], pass_on_async, (x, *further[1:])) if further else 2 * x


def deepen(x: Tensor, nodes: int) -> Tensor:
    """Append a chain of nodes to the graph."""
    for _ in range(nodes):
        x = x + 1
    return x


class EngineClock:
    """The CPU time of torch's engine, in whatever threads it ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begun

        return timed


@contextmanager
def timed_engine() -> Iterator[EngineClock]:
    """Time every call of torch's engine that arpc makes inside of the block."""
    clock = EngineClock()
    modules: tuple[Any, ...] = run, pausing  # there is no public hook for this
    as_it_is = [module.run_backward for module in modules]
    for module, run_backward in zip(modules, as_it_is, strict=True):
        module.run_backward = clock.around(run_backward)
    try:
        yield clock
    finally:
        for module, run_backward in zip(modules, as_it_is, strict=True):
            module.run_backward = run_backward


def leaves() -> tuple[Tensor, Tensor]:
    """Return the tensors that gradients are computed for."""
    return torch.ones(SIZE, requires_grad=True), torch.ones(SIZE, requires_grad=True)


@functools.cache
def block(number: int) -> nn.Module:
    """Return one block of a transformer, the same in every process."""
    torch.manual_seed(number)
    return nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True)


def sequences() -> list[Tensor]:
    """Return the microbatches of one step, each an input sequence of a transformer."""
    return [torch.full((1, 32, _WIDTH), 1.0 + number) for number in range(MICROBATCHES)]


def total(values: Sequence[Tensor]) -> Tensor:
    """Return the root of the backward pass of a step."""
    return torch.cat(list(values)).sum()


def run_block(number: int, x: Tensor) -> Tensor:
    """Run one block."""
    result: Tensor = block(number)(x)
    return result


async def run_block_async(number: int, x: Tensor) -> Tensor:
    """Run one block, as a coroutine."""
    return run_block(number, x)


def arithmetic_s() -> float:
    """Return the seconds of a step of the transformer in one process, without any call: the median of a few steps."""
    taken: list[float] = []
    parameters = [parameter for number in range(BLOCKS) for parameter in block(number).parameters()]
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        values = sequences()
        for number in range(BLOCKS):
            values = [run_block(number, value) for value in values]
        torch.autograd.grad(total(values), parameters)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
