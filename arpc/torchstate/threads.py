"""Torch's state in worker threads: use a given state there, and leave the thread clean."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from arpc.torchstate.state import SavedState, capture, is_pristine, restore, save_and_reset
from arpc.torchstate.steps import call_stepped, current_steps

__all__ = ["call_isolated", "run_with", "to_thread"]

P = ParamSpec("P")
T = TypeVar("T")


def call_isolated(func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func`` on a pool thread and make the thread pristine again, whatever ``func`` left behind."""
    try:
        return func(*args, **kwargs)
    finally:
        if not is_pristine():
            save_and_reset()


def run_with(state: SavedState, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func`` with ``state`` in place on this thread, and restore the thread's own state afterwards."""
    base = save_and_reset()
    restore(state)
    try:
        return func(*args, **kwargs)
    finally:
        save_and_reset()
        restore(base)


async def to_thread(func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Like :func:`asyncio.to_thread`, but ``func`` runs in the caller's torch state too, not only in its context."""
    context = contextvars.copy_context()
    if (steps := current_steps.get()) is not None:
        func = functools.partial(call_stepped, steps, func)
    call = functools.partial(context.run, run_with, capture(), func, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(None, call)
