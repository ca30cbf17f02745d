"""Modules that the tests make on other workers, and what they ask them."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import arpc


class Pair(NamedTuple):
    left: Any
    right: Any


class Echo(nn.Module):
    """Tells what it was called with, and where."""

    def __init__(self, scale: float = 1.0, *, shift: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]))
        self.register_buffer("shift", torch.tensor([shift]))

    def forward(self, x: Tensor, number: int = 0, *, word: str = "none") -> tuple[Tensor, int, str, str, bool]:
        return x * self.scale + self.shift, number, word, arpc.get_worker_info().name, self.training

    def double(self) -> float:  # type: ignore[override]
        return self.scale.item() * 2


class Later(nn.Module):
    """Its forward pass is a coroutine."""

    async def forward(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return x + 1


class Where(nn.Module):
    """Tells on which devices its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> list[str]:
        return [str(self.own.device), *(str(tensor.device) for tensor in _tensors((args, kwargs)))]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class Broken(nn.Module):
    def __init__(self) -> None:
        raise ValueError("a module that cannot be made")


class BrokenForward(nn.Module):
    def forward(self) -> None:
        raise ZeroDivisionError("in forward")


class Blocked(nn.Module):
    """Never ends by itself."""

    entered: asyncio.Event
    cancelled: asyncio.Event

    async def forward(self) -> None:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def no_module() -> int:
    return 7


def hooked(scale: float) -> nn.Module:
    module = Echo(scale)
    module.register_forward_hook(lambda *_: "from a hook")
    return module


class Labelled(arpc.nn.RemoteModule[Echo]):
    """A handle of one's own."""


async def call(module: arpc.nn.RemoteModule[Any], *args: Any) -> Any:
    return await module(*args)


def call_from_a_thread(place: str, x: Tensor) -> Any:
    """A plain function runs in a thread."""
    module = arpc.nn.RemoteModule(place, Echo, (5.0,))
    module.eval().wait(20)
    return module.forward_async(x).wait(20)


def give_back(value: Any) -> Any:
    return value


def attributes(module: arpc.nn.RemoteModule[Any]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("on", "device", "training")} | {
        "own": sorted(module.__dict__),
        "kind": type(module).__name__,
    }


async def is_same_module(module: arpc.nn.RemoteModule[Any], rref: arpc.RRef[nn.Module]) -> bool:
    return await module.get_module_rref().local_value() is await rref.local_value()


async def requires_grad(rref: arpc.RRef[nn.Module]) -> list[bool]:
    return [p.requires_grad for p in (await rref.local_value()).parameters()]
