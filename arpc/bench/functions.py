"""What the callers call. Each function exists plain and as a coroutine; peers without coroutines use the plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

__all__ = ["FUNCTIONS", "Chained", "Flavour", "big", "chained_async", "nap", "new_tensor", "new_tensor_async"]

Flavour = Literal["async", "def"]

# What `keep` has received. While it is here its memory cannot be used again, so that each new arrival is cold.
_kept: list[object] = []

_made: dict[int, object] = {}


def noop() -> None:
    """Does nothing: what remains is the cost of the call."""


def echo(value: object) -> object:
    """Sends it back."""
    return value


def drop(value: object) -> None:
    """Receives something and lets go of it."""


def keep(value: object) -> None:
    """Receives something and holds on to it."""
    _kept.append(value)


def forget() -> None:
    """Lets go of everything that `keep` has received."""
    _kept.clear()


class Chained:
    """Something whose method returns something with that method."""

    async def next(self) -> Chained:
        return self


def big(size_bytes: int) -> object:
    """A tensor of that size, the same one each time."""
    import torch

    if size_bytes not in _made:
        _made[size_bytes] = torch.ones(size_bytes // 4)
    return _made[size_bytes]


def nap() -> None:
    """Keeps a thread busy for a while, and no CPU: a worker of 16 threads takes 800 of these a second."""
    time.sleep(0.02)


def new_tensor(size_bytes: int) -> object:
    """A tensor of that size, another one each time."""
    import torch

    return torch.ones(size_bytes // 4)


async def new_tensor_async(size_bytes: int) -> object:
    """A tensor of that size, another one each time."""
    return new_tensor(size_bytes)


async def chained_async() -> Chained:
    """The beginning of a chain."""
    return Chained()


async def noop_async() -> None:
    """Does nothing: what remains is the cost of the call."""


async def echo_async(value: object) -> object:
    """Sends it back."""
    return value


async def drop_async(value: object) -> None:
    """Receives something and lets go of it."""


async def keep_async(value: object) -> None:
    """Receives something and holds on to it."""
    _kept.append(value)


async def forget_async() -> None:
    """Lets go of everything that `keep_async` has received."""
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
