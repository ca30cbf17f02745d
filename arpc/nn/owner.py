"""The owner's side of remote modules: all of these functions run there, most with the module as first argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from arpc.agent.server.functions import inline, name_of, named_by
from arpc.errors import ConfigurationError
from arpc.optim.locks import run_alone
from arpc.rref.calls import held_value, method_name, run_here
from arpc.rref.handle import RRef
from arpc.runtime import current
from arpc.wire.values.allowlist import export

__all__ = [
    "call_module",
    "create_module",
    "do_with_module",
    "get_state",
    "load_state",
    "parameter_rrefs",
    "set_mode",
    "set_requires_grad",
    "touch",
]


@export
def create_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> nn.Module:
    """Make a module and put it on its device. Runs on the worker that will own it."""
    try:
        module = module_cls(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise ConfigurationError(
                f"a RemoteModule is made of what returns an nn.Module, and {name_of(module_cls)} returned "
                f"{type(module).__qualname__}"
            )
        return module.to(device)
    except Exception as error:
        error.add_note(f"while worker {current().name!r} made the RemoteModule {name_of(module_cls)} on {device}")
        raise


# -- the two handlers: they receive the id of the RRef to the module


@export
@named_by(lambda worker, rref, *_: method_name(worker, rref, "forward"))
async def call_module(
    rref: int,
    is_created: bool,
    is_grad_enabled: bool,
    device: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a module, hooks included, in the caller's grad mode, with inputs on its device and results on the CPU."""
    module = await held_value(rref, is_created)
    current().rref_context.get_method(module, "__call__")  # raises if it is not allowed
    return await run_here(_forward, module, is_grad_enabled, device, args, kwargs)


@export
@named_by(lambda worker, rref, _is_created, function: method_name(worker, rref, name_of(function)))
async def do_with_module(rref: int, is_created: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call one of the functions below with a module."""
    return await run_here(function, await held_value(rref, is_created), *args)


def _forward(
    module: nn.Module, is_grad_enabled: bool, on: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if on is not None:
        args, kwargs = _moved(args, torch.device(on)), _moved(kwargs, torch.device(on))
    with torch.set_grad_enabled(is_grad_enabled):
        result = module(*args, **kwargs)
    if inspect.iscoroutine(result):
        return _forward_later(result, is_grad_enabled, on)
    return result if on is None else _moved(result, torch.device("cpu"))


async def _forward_later(forward: Coroutine[Any, Any, Any], is_grad_enabled: bool, on: str | None) -> Any:
    with torch.set_grad_enabled(is_grad_enabled):  # a handler has its own grad mode, also while it waits
        result = await forward
    return result if on is None else _moved(result, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors, also those in containers, moved to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if isinstance(value, tuple):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


# -- operations on a module


@export
@inline
def touch(module: nn.Module) -> None:
    """Do nothing: the reply shows that the module exists."""


# These run on the loop, hence in the order in which they and the forward passes of one caller arrive
@export
@inline
def set_mode(module: nn.Module, mode: bool) -> None:
    """Set the module to training or evaluation mode."""
    module.train(mode)


@export
@inline
def set_requires_grad(module: nn.Module, requires_grad: bool) -> None:
    """Set whether the module's parameters get gradients."""
    module.requires_grad_(requires_grad)


@export
def parameter_rrefs(module: nn.Module, recurse: bool) -> dict[str, RRef[Parameter]]:
    """Return an RRef to each parameter, by its name."""
    return {name: RRef(parameter) for name, parameter in module.named_parameters(recurse=recurse)}


@export
async def get_state(module: nn.Module) -> dict[str, Any]:
    """Return a copy of the state dict, on the CPU, made between two steps of an optimizer."""
    return await run_alone(module.parameters(), lambda: _copied_state(module))


def _copied_state(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


@export
async def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> tuple[list[str], list[str]]:
    """Load a state dict between two steps of an optimizer; return missing and unexpected keys."""
    keys = await run_alone(module.parameters(), lambda: module.load_state_dict(state, strict=strict))
    return list(keys.missing_keys), list(keys.unexpected_keys)
