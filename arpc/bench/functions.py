"""The functions that are called, each plain and as a coroutine; peers without coroutines use the plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

__all__ = ["FUNCTIONS", "Chained", "Flavour", "big", "chained_async", "nap", "new_tensor", "new_tensor_async"]

Flavour = Literal["async", "def"]

# The values that `keep` has received. Their memory cannot be reused, so each new value lands in cold memory.
_kept: list[object] = []

_made: dict[int, object] = {}


def noop() -> None:
    """Do nothing: what remains is the cost of the call."""


def echo(value: object) -> object:
    """Return the value."""
    return value


def drop(value: object) -> None:
    """Receive a value and drop it."""


def keep(value: object) -> None:
    """Receive a value and keep it."""
    _kept.append(value)


def forget() -> None:
    """Drop all values that `keep` has received."""
    _kept.clear()


class Chained:
    """An object whose method returns an object with that method."""

    async def next(self) -> Chained:
        return self


def big(size_bytes: int) -> object:
    """Return a tensor of that size, the same one each time."""
    import torch

    if size_bytes not in _made:
        _made[size_bytes] = torch.ones(size_bytes // 4)
    return _made[size_bytes]


def nap() -> None:
    """Block a thread for a while, without using a CPU: a worker of 16 threads runs 800 of these a second."""
    time.sleep(0.02)


def new_tensor(size_bytes: int) -> object:
    """Return a tensor of that size, a new one each time."""
    import torch

    return torch.ones(size_bytes // 4)


async def new_tensor_async(size_bytes: int) -> object:
    """Return a tensor of that size, a new one each time."""
    return new_tensor(size_bytes)


async def chained_async() -> Chained:
    """Return the first object of a chain."""
    return Chained()


async def noop_async() -> None:
    """Do nothing: what remains is the cost of the call."""


async def echo_async(value: object) -> object:
    """Return the value."""
    return value


async def drop_async(value: object) -> None:
    """Receive a value and drop it."""


async def keep_async(value: object) -> None:
    """Receive a value and keep it."""
    _kept.append(value)


async def forget_async() -> None:
    """Drop all values that `keep_async` has received."""
    _kept.clear()


FUNCTIONS: Final[Mapping[Flavour, Mapping[str, Callable[..., object]]]] = {
    "def": {"noop": noop, "echo": echo, "drop": drop, "keep": keep, "forget": forget},
    "async": {
        "noop": noop_async,
        "echo": echo_async,
        "drop": drop_async,
        "keep": keep_async,
        "forget": forget_async,
    },
}
