"""A coroutine that keeps its own torch state from step to step."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
from torch._C import _len_torch_function_stack as count_function_modes
from torch._C import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    is_grad_enabled,
    is_inference_mode_enabled,
)

from arpc.torchstate.state import DEFAULTS, SavedState, capture, is_pristine, restore, save_and_reset, top_saved_hooks

__all__ = ["Isolated", "Rooted", "is_isolated", "isolate", "isolating_driver"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_DRIVERS: set[CodeType] = set()


def isolating_driver(func: F) -> F:
    """Declare that ``func`` itself steps coroutines and swaps torch's state at each step, as :class:`Isolated` does.

    :func:`is_isolated` then holds inside the coroutines that it drives.
    """
    _DRIVERS.add(func.__code__)
    return func


class Isolated(Coroutine[Any, Any, T]):
    """A coroutine around ``coro`` that swaps torch's thread-local state at every step.

    Before a step, what is on the thread (the base) is set aside and the coroutine's own state is put in place; after
    it, the coroutine's state is kept for the next step and the base comes back. So a ``with torch.no_grad():`` of the
    coroutine stays in force across its awaits and reaches nothing else, whoever runs next and on whatever thread.
    What the coroutine leaves behind when it ends, ends with it.

    Names, frames and the rest that debuggers and ``repr(task)`` read are those of ``coro``.
    """

    __slots__ = ("__weakref__", "_coro", "_send", "_state")

    def __init__(self, coro: Coroutine[Any, Any, T], state: SavedState = DEFAULTS) -> None:
        self._coro = coro
        self._send = coro.send
        self._state = state

    @property
    def state(self) -> SavedState:
        """The coroutine's own torch state, as of its last suspension or its end."""
        return self._state

    @isolating_driver
    def __next__(self) -> Any:
        # How asyncio's tasks and `await` resume whatever has it. Nearly always there is nothing to swap: then two tests
        # are the whole cost.
        if self._state is DEFAULTS and is_pristine():
            try:
                return self._send(None)
            finally:
                if not is_pristine():
                    self._state = save_and_reset()
        return self._step(self._send, None)

    def send(self, value: Any) -> Any:
        return self._step(self._send, value)

    def throw(self, *exception: Any) -> Any:
        return self._step(self._coro.throw, *exception)

    def close(self) -> None:
        self._step(self._coro.close)

    @isolating_driver
    def _step(self, resume: Callable[..., Any], *args: Any) -> Any:
        base = save_and_reset()
        restore(self._state)
        try:
            return resume(*args)
        finally:
            self._state = save_and_reset()
            restore(base)

    def __await__(self) -> Isolated[T]:
        # Not a generator of ours: tools that follow cr_await must find the user's coroutine behind this object.
        return self

    def __del__(self) -> None:
        # A coroutine that is dropped while it waits leaves its blocks now, so it needs its state. One that never
        # started is left alone: the interpreter warns that nobody awaited it.
        if getattr(self, "cr_suspended", False):
            self.close()

    def __getattr__(self, name: str) -> Any:
        if name in Isolated.__slots__:  # not initialised: __init__ was called wrongly
            raise AttributeError(name)
        return getattr(self._coro, name)

    def __repr__(self) -> str:
        return f"<Isolated {self._coro!r}>"


class Rooted(Isolated[T]):
    """The same for the coroutine of a task, on a loop whose thread is pristine between all steps, as `arpc.run` has it.

    Nothing needs to be set aside before a step then, so there is half as much to test. Not for tasks that start
    eagerly: their first step is in the middle of another one.
    """

    __slots__ = ()

    @isolating_driver
    def __next__(self) -> Any:
        if self._state is not DEFAULTS:
            return self._step(self._send, None)
        try:
            return self._send(None)
        finally:
            # `is_pristine`, written out
            if (
                not is_grad_enabled()
                or is_inference_mode_enabled()
                or count_function_modes()
                or count_dispatch_modes()
                or top_saved_hooks(True)
                or autocast_increment_nesting() + autocast_decrement_nesting() != 1
            ):
                self._state = save_and_reset()


def isolate(coro: Coroutine[Any, Any, T], *, inherit: bool = False) -> Isolated[T]:
    """Give ``coro`` a torch state of its own; an :class:`Isolated` is returned as it is.

    ``inherit=False`` starts from torch's defaults: right for a handler, since whatever surrounds its creation is the
    runtime's business. ``inherit=True`` starts from a copy of the state around this call, as a task copies the context
    variables of its creator: right for tasks, where ``with torch.no_grad(): group.create_task(evaluate())`` must mean
    what it says. It is a copy: neither sees what the other changes later.
    """
    if isinstance(coro, Isolated):
        return coro
    return Isolated(coro, capture() if inherit else DEFAULTS)


def is_isolated() -> bool:
    """Tell whether the running coroutine keeps its torch state to itself when it awaits.

    Found by looking at who drives whom on the stack, so that it costs nothing until somebody asks.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no running loop, perhaps another library's; drivers on the stack still count
        task = None
    root = task.get_coro() if task is not None else None
    if isinstance(root, Isolated):
        return True
    # An eager task starts inside the step of its creator: drivers beyond the task's own first frame drive the creator.
    first_frame = getattr(root, "cr_frame", None)
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code not in _DRIVERS:
        frame = frame.f_back if frame is not first_frame else None
    return frame is not None
