"""A thread's torch state as a plain value: test it, take it away, put it back.

It covers the state that ``with`` blocks of torch's public API change on the calling thread: grad mode, inference mode,
autocast (every device type, its dtype, the cache flag, the nesting depth), the stack of torch function modes with the
default device, the stack of dispatch modes, and the stack of saved-tensor hooks. Not covered: torch's state per process
(anomaly mode, default dtype, thread counts), the profiler, the current CUDA device and stream, and autocast switched by
torch's bare setters outside of any ``torch.autocast`` block.

A :class:`SavedState` holds no guard object of torch, only values: restore it on any thread, any number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

# Imported by name: these run at every step of every coroutine, and a lookup in the module would cost as much as the
# call. Torch has no public equivalents of those with an underscore; its own Python code is built on them.
from torch._C import (
    _autograd,
    _InferenceMode,
    autocast_decrement_nesting,
    autocast_increment_nesting,
    is_grad_enabled,
    is_inference_mode_enabled,
)
from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
from torch._C import _len_torch_function_stack as count_function_modes
from torch._C import _pop_torch_dispatch_stack as pop_dispatch_mode
from torch._C import _pop_torch_function_stack as pop_function_mode
from torch._C import _push_on_torch_dispatch_stack as push_dispatch_mode
from torch._C import _push_on_torch_function_stack as push_function_mode
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_hooks

__all__ = ["DEFAULTS", "SavedState", "capture", "is_pristine", "restore", "save_and_reset", "top_saved_hooks"]

_HookPair: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


def _unreadable_hooks(_ignore_tracing: bool) -> _HookPair | None:
    """Stands in on torch < 2.8, which has no way to read the stack of saved-tensor hooks."""
    return None


top_saved_hooks: Callable[[bool], _HookPair | None] = getattr(
    _autograd, "_top_saved_tensors_default_hooks", _unreadable_hooks
)

# The place where torch.set_default_device() keeps the mode that it pushed on this thread's stack of function modes.
_default_device_slot: threading.local = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())


def _autocast_device_types() -> tuple[str, ...]:
    supported: Callable[[], list[str]] | None = getattr(torch._C, "_autocast_supported_devices", None)
    return tuple(supported()) if supported is not None else ("cpu", "cuda", "xpu", "mps")


# The dtypes of the importing thread count as torch's defaults.
_AUTOCAST_DTYPES = {device_type: torch.get_autocast_dtype(device_type) for device_type in _autocast_device_types()}


class _Autocast(NamedTuple):
    nesting: int
    cache_enabled: bool
    devices: tuple[tuple[str, bool, torch.dtype], ...]


class SavedState(NamedTuple):
    """The torch state of a thread at one moment; :data:`DEFAULTS` is that of a new thread."""

    grad: bool = True
    inference: bool = False
    autocast: _Autocast | None = None
    saved_hooks: tuple[_HookPair, ...] = ()
    dispatch_modes: tuple[Any, ...] = ()
    function_modes: tuple[Any, ...] = ()
    default_device: Any = None


DEFAULTS = SavedState()
_GRAD_DISABLED = SavedState(grad=False)


def is_pristine() -> bool:
    """Tell whether this thread's state is that of a new thread.

    Costs about a quarter of a microsecond: seven calls into torch and nothing else.
    """
    return (
        is_grad_enabled()
        and not (
            is_inference_mode_enabled() or count_function_modes() or count_dispatch_modes() or top_saved_hooks(True)
        )
        # Torch has no getter for the depth n, and every autocast block, enabled or not, counts in it. (n + 1) + n == 1.
        and autocast_increment_nesting() + autocast_decrement_nesting() == 1
    )


def save_and_reset() -> SavedState:
    """Reset this thread's state, so that it is pristine, and return the previous state."""
    # Function modes go first: torch would call them for the setters used below.
    function_modes: tuple[Any, ...] = ()
    default_device = None
    if count_function_modes():
        function_modes = tuple(pop_function_mode() for _ in range(count_function_modes()))
        default_device = getattr(_default_device_slot, "device_context", None)
        if default_device is not None:
            del _default_device_slot.device_context  # as on a new thread; torch 2.6 stumbles over a None
    dispatch_modes: tuple[Any, ...] = ()
    if count_dispatch_modes():
        dispatch_modes = tuple(pop_dispatch_mode(None) for _ in range(count_dispatch_modes()))
    saved_hooks = _take_saved_hooks() if top_saved_hooks(True) else ()
    autocast = None
    if autocast_increment_nesting() + autocast_decrement_nesting() != 1:
        autocast = _take_autocast()
    grad = is_grad_enabled()
    inference = is_inference_mode_enabled()
    if inference:
        _switch_inference_mode(False)  # also turns grad mode on
    elif not grad:
        set_grad_enabled(True)
    if inference or autocast or saved_hooks or dispatch_modes or function_modes:
        return SavedState(grad, inference, autocast, saved_hooks, dispatch_modes, function_modes, default_device)
    return DEFAULTS if grad else _GRAD_DISABLED


def restore(state: SavedState) -> None:
    """Put ``state`` in place on this thread, which must be pristine."""
    if state is DEFAULTS:
        return
    if state is _GRAD_DISABLED:  # a short cut for by far the most common state
        set_grad_enabled(False)
        return
    if state.inference:
        _switch_inference_mode(True)  # also turns grad mode off
    if state.grad is not is_grad_enabled():
        set_grad_enabled(state.grad)
    if state.autocast is not None:
        _put_autocast(state.autocast)
    for pack, unpack in reversed(state.saved_hooks):
        push_saved_hooks(pack, unpack)
    for mode in reversed(state.dispatch_modes):
        push_dispatch_mode(mode)
    if state.default_device is not None:
        _default_device_slot.device_context = state.default_device
    for mode in reversed(state.function_modes):
        push_function_mode(mode)


def capture() -> SavedState:
    """Return a copy of this thread's state, which stays as it is."""
    if is_pristine():
        return DEFAULTS
    state = save_and_reset()
    restore(state)
    return state


def _switch_inference_mode(enabled: bool) -> None:
    """Switch inference mode and leave no guard alive that could switch it back when it is freed.

    Torch offers only a guard: entering it saves the thread's state and sets a new one, leaving it restores the saved
    state. Here the inner guard saves the wanted state, and is left last, so that state stays. The guard of a suspended
    coroutine's own block is not involved: when the coroutine leaves that block, it restores the state from before it.
    """
    outer: Any = _InferenceMode(enabled)
    outer.__enter__()
    inner: Any = _InferenceMode(enabled)
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def _take_saved_hooks() -> tuple[_HookPair, ...]:
    taken = []
    while (top := top_saved_hooks(True)) is not None:
        taken.append(top)
        pop_saved_hooks()
    return tuple(taken)


def _take_autocast() -> _Autocast:
    nesting = autocast_increment_nesting() - 1
    autocast_decrement_nesting()
    _shift_autocast_nesting(-nesting)
    devices = []
    for device_type, default_dtype in _AUTOCAST_DTYPES.items():
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        if enabled or dtype is not default_dtype:
            devices.append((device_type, enabled, dtype))
            torch.set_autocast_enabled(device_type, False)
            torch.set_autocast_dtype(device_type, default_dtype)
    cache_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    # One cache serves every block: a weight cast here, perhaps without grad or to another dtype, must not be found by
    # the next coroutine in a block of its own.
    torch.clear_autocast_cache()
    return _Autocast(nesting, cache_enabled, tuple(devices))


def _put_autocast(autocast: _Autocast) -> None:
    _shift_autocast_nesting(autocast.nesting)
    for device_type, enabled, dtype in autocast.devices:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(autocast.cache_enabled)


def _shift_autocast_nesting(change: int) -> None:
    shift = autocast_increment_nesting if change > 0 else autocast_decrement_nesting
    for _ in range(abs(change)):
        shift()
