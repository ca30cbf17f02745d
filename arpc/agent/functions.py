"""What can be called, and how each kind of callable is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar

from arpc.agent.reply_window import ResultSizes
from arpc.torchjit import ScriptFunction
from arpc.user_errors import is_a, type_name_of

__all__ = ["Function", "Mode", "Preparation", "Prompt", "async_execution", "inline", "name_of", "returns_futures"]

F = TypeVar("F", bound=Callable[..., Any])

# A function that took less than this that many times in a row is quick
_QUICK_S: Final = 20e-6
_QUICK_CALLS: Final = 8

Preparation = Callable[[Any, tuple[Any, ...], Mapping[str, Any] | None], "tuple[Any, tuple[Any, ...]]"]
"""What makes a call of something that is no function of Python's own ready to be sent: function and arguments.

It returns what is sent in its place, with positional arguments alone, or raises why it cannot be called like that.
"""

_INLINE = "__arpc_inline__"
_ASYNC_EXECUTION = "_wrapped_async_rpc_function"


class Mode(Enum):
    """How a function is run."""

    COROUTINE = auto()
    """``async def``: as a task on the loop."""
    THREAD = auto()
    """Plain ``def``, builtins, classes: in the thread pool, because they may block."""
    INLINE = auto()
    """Marked with `inline`: on the loop, at once."""
    ASYNC_GENERATOR = auto()
    GENERATOR = auto()
    """Streams. The generator's steps run in the thread pool."""


class Function:
    """A callable, and how to run it."""

    __slots__ = (
        "_quick_calls",
        "call",
        "is_plain",
        "is_quick",
        "is_service",
        "is_simple",
        "mode",
        "name",
        "results",
        "returns_future",
    )

    def __init__(self, call: Callable[..., Any]) -> None:
        if not callable(call):
            raise TypeError(f"function should be callable, and {type(call).__qualname__} is not")
        self.call = call
        self.mode = _mode_of(call)
        self.name = name_of(call)
        self.returns_future = returns_futures(call)
        # nothing but a coroutine to be awaited, or nothing but a function to be called in a thread
        self.is_simple = self.mode is Mode.COROUTINE and not self.returns_future and _is_async_def(call)
        self.is_plain = self.mode is Mode.THREAD and not self.returns_future
        # It takes less time than a second thread would take to begin. See `measured`
        self.is_quick = False
        self._quick_calls = 0
        self.results = ResultSizes()
        # It is the runtime's own, and serves the messages of one class
        self.is_service = False

    def measured(self, seconds: float) -> None:
        """A call has ended in a thread."""
        # Two threads may get in each other's way here; then a call is counted wrongly, and that is all
        if seconds < _QUICK_S:
            self._quick_calls += 1
            self.is_quick = self._quick_calls >= _QUICK_CALLS
        else:
            self._quick_calls = 0
            self.is_quick = False

    @classmethod
    def of_coroutine(cls, call: Callable[..., Any], name: str, results: ResultSizes | None = None) -> Function:
        """What the runtime itself lets run as a coroutine, in the name of another function and with its ``results``."""
        made = cls.__new__(cls)  # there is nothing to find out, and no thread to be measured
        made.call = call
        made.mode = Mode.COROUTINE
        made.name = name
        made.is_simple = True
        made.returns_future = made.is_plain = made.is_quick = made.is_service = False
        made.results = results or ResultSizes()
        return made


class Prompt:
    """A handler of a feature's own message that can be answered at once more often than not.

    It is a plain function, called on the loop; if it returns a coroutine, that goes on like any handler.
    """

    __slots__ = ("call", "take_parcel")

    def __init__(self, call: Callable[..., Any], take_parcel: Callable[..., Any] | None = None) -> None:
        """``take_parcel`` is called for small parcels: see `Executor.serve`."""
        self.call = call
        self.take_parcel = take_parcel

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _without_partial(call: Any) -> Any:
    while isinstance(call, partial):
        call = call.func
    return call


def _inner(call: Callable[..., Any]) -> Any:
    """What has the code that a call runs."""
    inner = _without_partial(call)
    # an object with __call__, such as an nn.Module
    return inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__


def _is_async_def(call: Callable[..., Any]) -> bool:
    """Whether calling it runs none of its code. One that is only marked as a coroutine function does as it likes."""
    code = getattr(_inner(call), "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_COROUTINE)


def _mode_of(call: Callable[..., Any]) -> Mode:
    inner = _inner(call)
    if inspect.iscoroutinefunction(inner):
        return Mode.COROUTINE
    if inspect.isasyncgenfunction(inner):
        return Mode.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(inner):
        return Mode.GENERATOR
    if getattr(inner, _INLINE, False) or getattr(call, _INLINE, False):
        return Mode.INLINE
    return Mode.THREAD


def returns_futures(call: Any) -> bool:
    """Whether it is marked with `async_execution`."""
    return hasattr(_without_partial(call), _ASYNC_EXECUTION)


def name_of(call: Any) -> str:
    """How people call it. Never raises, whatever an object that can be called says of itself."""
    if is_a(call, partial):
        return name_of(call.func)
    try:
        if is_a(call, ScriptFunction):
            return str(call.qualified_name)  # the others are the same for all of them
        name = getattr(call, "__qualname__", None) or getattr(call, "__name__", None)
        return str.__str__(str(name)) if name else type_name_of(call)
    except BaseException:  # noqa: BLE001 - attributes of a user's object may raise anything
        return type_name_of(call)


def inline(function: F) -> F:
    """Mark a plain function as short and never blocking, so that workers run it on their loop without a thread.

    >>> @inline
    ... def add(a, b):
    ...     return a + b
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isclass(function):
        raise TypeError(f"inline is for plain functions, and {name_of(function)} is not one")
    setattr(function, _INLINE, True)
    return function


def async_execution(function: F) -> F:
    """Mark a function that returns a `Future`: the caller gets the value of that future, and no thread waits for it.

    The function itself runs like any plain function. An ``async def`` needs no mark: `await` does the same.
    """
    try:
        setattr(function, _ASYNC_EXECUTION, function)
    except AttributeError:
        raise TypeError(f"{name_of(function)} cannot be marked: wrap it in a function of your own") from None
    return function
