"""Blocks of torch that change the thread's state, and an observer that tells what their effects are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class CountingFunctionMode(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountingFunctionMode.calls += 1
        return func(*args, **(kwargs or {}))


class CountingDispatchMode(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountingDispatchMode.calls += 1
        return func(*args, **(kwargs or {}))


def counting_hooks() -> AbstractContextManager[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counting_hooks.calls += 1
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


counting_hooks.calls = 0

BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no_inference_mode": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu"),
    "autocast_half": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast_disabled": lambda: torch.autocast("cpu", dtype=torch.float16, enabled=False),
    "device": lambda: torch.device("meta"),
    "function_mode": CountingFunctionMode,
    "dispatch_mode": CountingDispatchMode,
    "saved_hooks": counting_hooks,
}

# Those of daily use, which leak from any `await` in a block when nothing isolates.
LEAKS = ["no_grad", "autocast", "inference_mode", "device", "saved_hooks"]

if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # torch < 2.8: they cannot be swapped
    del BLOCKS["saved_hooks"]
    LEAKS.remove("saved_hooks")

_leaf = torch.ones(2, 2, requires_grad=True)
_matrix = _leaf * 1  # no leaf, so that autocast keeps no cast of it: what one step computes must not depend on another


class Observation(NamedTuple):
    """What a computation shows of the thread's state."""

    grad_enabled: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    device: str
    result_requires_grad: bool
    result_is_inference: bool
    result_dtype: torch.dtype
    function_mode_calls: int
    dispatch_mode_calls: int
    packed_tensors: int


def observe() -> Observation:
    counters: tuple[Any, ...] = (CountingFunctionMode, CountingDispatchMode, counting_hooks)
    for counter in counters:
        counter.calls = 0
    result = _matrix @ _matrix
    created = torch.ones(1)
    calls = tuple(counter.calls for counter in counters)
    return Observation(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        str(created.device),
        result.requires_grad,
        result.is_inference(),
        result.dtype,
        *calls,
    )
