"""A coroutine that keeps its own torch state from step to step."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from itertools import dropwhile
from types import CodeType, FrameType
from typing import Any, Self, TypeVar

from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
from torch._C import _len_torch_function_stack as count_function_modes
from torch._C import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    is_grad_enabled,
    is_inference_mode_enabled,
)

from arpc.torchstate.state import DEFAULTS, SavedState, capture, is_pristine, restore, save_and_reset, top_saved_hooks

__all__ = ["Isolated", "Rooted", "Wrapper", "is_isolated", "isolate", "isolating_driver"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_DRIVERS: set[CodeType] = set()


def isolating_driver(func: F) -> F:
    """Declare that ``func`` itself steps coroutines and swaps torch's state at each step, as :class:`Isolated` does.

    :func:`is_isolated` then holds inside the coroutines that it drives.
    """
    _DRIVERS.add(func.__code__)
    return func


class Wrapper(Coroutine[Any, Any, T]):
    """The base of coroutines that wrap another one and do something around each of its steps.

    Names, frames and other attributes that debuggers and ``repr(task)`` read are those of the wrapped coroutine.
    """

    __slots__ = ()

    _coro: Coroutine[Any, Any, T]
    _send: Callable[[Any], Any]

    @abstractmethod
    def _step(self, resume: Callable[..., Any], *args: Any) -> Any:
        """Resume the wrapped coroutine. Subclasses must clear the arguments from their frames when a step has ended."""

    def send(self, value: Any) -> Any:
        return self._step(self._send, value)

    def throw(self, *exception: Any) -> Any:
        try:
            return self._step(self._coro.throw, *exception)
        finally:
            # If the exception comes out again, this frame is in its traceback, and the awaited future may refer to it
            del self, exception

    def close(self) -> None:
        self._step(self._coro.close)

    def __await__(self) -> Any:
        # Not another generator: tools that follow cr_await must find the user's coroutine behind this object.
        return self

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__slots__:  # not initialised: __init__ was called wrongly
            raise AttributeError(name)
        return getattr(self._coro, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._coro!r}>"


class _Swapping(Wrapper[T]):
    """Swaps torch's thread-local state at every step."""

    __slots__ = ()

    _state: SavedState

    @property
    def state(self) -> SavedState:
        """The coroutine's own torch state, as of its last suspension or its end."""
        return self._state

    def __del__(self) -> None:
        # A coroutine that is dropped while it is suspended leaves its blocks now, so it needs its state. One that never
        # started is left alone: the interpreter warns that it was never awaited.
        if getattr(self, "cr_suspended", False):
            self.close()

    @isolating_driver
    def _step(self, resume: Callable[..., Any], *args: Any) -> Any:
        base = save_and_reset()
        restore(self._state)
        try:
            return resume(*args)
        finally:
            self._state = save_and_reset()
            restore(base)
            del self, args  # as in `throw`


class Isolated(_Swapping[T]):
    """A coroutine around ``coro`` that swaps torch's thread-local state at every step.

    Before a step, the thread's state (the base) is set aside and the coroutine's own state is put in place; after it,
    the coroutine's state is kept for the next step and the base is restored. So a ``with torch.no_grad():`` of the
    coroutine stays in force across its awaits and affects no other code, on whatever thread it resumes. State that the
    coroutine leaves behind when it ends is dropped.
    """

    __slots__ = ("__weakref__", "_coro", "_send", "_state")

    def __init__(self, coro: Coroutine[Any, Any, T], state: SavedState = DEFAULTS) -> None:
        self._coro = coro
        self._send = coro.send
        self._state = state

    @isolating_driver
    def __next__(self) -> Any:
        # Asyncio's tasks and `await` resume objects by this method. Nearly always there is nothing to swap: then two
        # tests are the whole cost.
        if self._state is DEFAULTS and is_pristine():
            try:
                return self._send(None)
            finally:
                if not is_pristine():
                    self._state = save_and_reset()
        return self._step(self._send, None)


class _Kept:
    """Holds the state for a `Rooted` and its steps. These must not refer to the `Rooted`, which refers to them."""

    __slots__ = ("state",)

    def __init__(self, state: SavedState) -> None:
        self.state = state


@isolating_driver
def _steps(kept: _Kept, send: Callable[[Any], Any]) -> Generator[Any, None, Any]:
    """Run the steps of a coroutine on a thread that is pristine between them. Exceptions are thrown in another way."""
    while True:
        try:
            if kept.state is DEFAULTS:
                waits_for = send(None)
                # `is_pristine`, inlined
                if (
                    not is_grad_enabled()
                    or is_inference_mode_enabled()
                    or count_function_modes()
                    or count_dispatch_modes()
                    or top_saved_hooks(True)
                    or autocast_increment_nesting() + autocast_decrement_nesting() != 1
                ):
                    kept.state = save_and_reset()
            else:
                restore(kept.state)
                waits_for = send(None)
                kept.state = save_and_reset()
        except StopIteration as end:
            kept.state = save_and_reset()
            return end.value
        except BaseException:
            kept.state = save_and_reset()
            raise
        yield waits_for
        del waits_for  # its error has this frame in its traceback if it ends the coroutine


def _is_dropped(_waits_for: Any) -> bool:
    return False


class Rooted(dropwhile, _Swapping[T]):  # type: ignore[type-arg]
    """A task's coroutine that keeps its torch state, on a loop whose thread is pristine between steps (`arpc.run`).

    Nothing needs to be set aside before a step then, so there is half as much to test. Not for tasks that start
    eagerly: their first step is in the middle of another task's step.

    To a task it is a `dropwhile` that drops nothing, because that iterator is written in C: each step goes straight to
    the generator behind it, without the lookup and the call of a ``__next__`` in Python.
    """

    __slots__ = ("__weakref__", "_coro", "_generator", "_kept", "_send")

    _generator: Generator[Any, None, Any]
    _kept: _Kept

    def __new__(cls, coro: Coroutine[Any, Any, T], state: SavedState = DEFAULTS) -> Self:
        kept = _Kept(state)
        generator = _steps(kept, coro.send)
        self = super().__new__(cls, _is_dropped, generator)
        self._generator = generator
        self._coro = coro
        self._send = coro.send
        self._kept = kept
        return self

    def __init__(self, coro: Coroutine[Any, Any, T], state: SavedState = DEFAULTS) -> None:
        """See `__new__`."""

    def throw(self, *exception: Any) -> Any:
        try:
            return super().throw(*exception)
        finally:
            # A thrown exception bypasses the generator, which still has the future that the coroutine waited for: if
            # this was the last step, the future's error, with all frames it passed, would live as long as the task.
            if self.cr_frame is None:
                self._generator.close()
            del self, exception  # as in `_Swapping.throw`

    @property
    def _state(self) -> SavedState:
        return self._kept.state

    @_state.setter
    def _state(self, state: SavedState) -> None:
        self._kept.state = state

    def __await__(self) -> Any:
        if self.cr_frame is None:
            self._send(None)  # raises, because the coroutine has ended
        return self


Isolated.register(Rooted)


def isolate(coro: Coroutine[Any, Any, T], *, inherit: bool = False) -> Isolated[T]:
    """Give ``coro`` a torch state of its own; an :class:`Isolated` is returned as it is.

    ``inherit=False`` starts from torch's defaults: right for a handler, since the state around its creation is that of
    the runtime. ``inherit=True`` starts from a copy of the state around this call, as a task copies the context
    variables of its creator: right for tasks, so that ``with torch.no_grad(): group.create_task(evaluate())``
    evaluates without gradients. It is a copy: later changes on one side do not affect the other.
    """
    if isinstance(coro, Isolated):
        return coro
    return Isolated(coro, capture() if inherit else DEFAULTS)


def is_isolated() -> bool:
    """Tell whether the running coroutine keeps its torch state to itself when it awaits.

    It looks for drivers among the frames on the stack, so isolation costs nothing more as long as this is not called.
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
