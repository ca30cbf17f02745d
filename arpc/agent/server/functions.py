"""The functions that peers can call, and how each kind of callable is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

from arpc.torchjit import ScriptFunction
from arpc.transport.bulk import SMALL_MESSAGE_BYTES
from arpc.user_errors import is_a, type_name_of

__all__ = [
    "NAMING",
    "NOT_KNOWN",
    "Function",
    "InlineHandler",
    "Mode",
    "Preparation",
    "ResultSizes",
    "RunInstead",
    "async_execution",
    "inline",
    "name_of",
    "named_by",
    "returns_coroutine",
    "returns_futures",
]

F = TypeVar("F", bound=Callable[..., Any])

# A function is quick once it has taken less than `_QUICK_S` in `_QUICK_CALLS` calls in a row
_QUICK_S: Final = 20e-6
_QUICK_CALLS: Final = 8
_WEIGHT: Final = 8
"""The weight of earlier results in the expected size: it takes about 30 small ones after 4 MB to count as small."""

Preparation = Callable[[Any, tuple[Any, ...], Mapping[str, Any] | None], "tuple[Any, tuple[Any, ...]]"]
"""Prepares a call of an object that is no Python function, such as a TorchScript function, to be sent.

It takes the object, its positional and its keyword arguments. It returns the function to send instead and its
arguments, all positional, or raises if the object cannot be called like that.
"""

NAMING: Final = 3
"""The number of arguments from which a function finds the name of a request, see `named_by`."""

_INLINE = "__arpc_inline__"
_COROUTINE = "__arpc_coroutine__"
_DESCRIBE = "__arpc_describe__"
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
    UNKNOWN = auto()
    """The function comes with the arguments of its call, or cannot be called at all."""


class Quickness:
    """Tracks whether a function takes less time than a second thread would need to begin."""

    __slots__ = ("_calls", "is_quick")

    def __init__(self) -> None:
        self.is_quick = False
        self._calls = 0

    def measured(self, seconds: float) -> None:
        """Record a call that has ended in a thread."""
        # A race between two threads miscounts a call, which does no harm
        if seconds < _QUICK_S:
            self._calls += 1
            self.is_quick = self._calls >= _QUICK_CALLS
        else:
            self._calls = 0
            self.is_quick = False


class ResultSizes:
    """The recent sizes of a function's results, from which the size of the next one is estimated."""

    __slots__ = ("are_large", "expected_bytes", "ignored_up_to_bytes")

    def __init__(self) -> None:
        self.expected_bytes = 0
        self.are_large = False
        self.ignored_up_to_bytes = -1
        """A result of at most this size changes nothing here. Negative unless results are known to be small."""

    def saw(self, size_bytes: int) -> None:
        """Record the size of a result."""
        expected_bytes = self.expected_bytes
        if size_bytes < expected_bytes:
            size_bytes = expected_bytes - max(1, (expected_bytes - size_bytes) // _WEIGHT)
        self.expected_bytes = size_bytes
        self.are_large = size_bytes > SMALL_MESSAGE_BYTES
        self.ignored_up_to_bytes = -1 if self.are_large else SMALL_MESSAGE_BYTES


class Function:
    """A callable, and how to run it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        if not callable(call):
            raise TypeError(f"function should be callable, and {type(call).__qualname__} is not")
        self.call = call
        self.mode = _mode_of(call)
        self.name = name_of(call)
        # Makes the name of a request, see `named_by`. Not read from other objects, whose attributes may raise
        self.describe = getattr(call, _DESCRIBE, None) if type(call) is FunctionType else None
        self.returns_future = returns_futures(call)
        # Whether the coroutine returns the result itself, and never something to be awaited
        self.is_final = self.mode is Mode.COROUTINE and not self.returns_future
        self.quickness = Quickness()
        self.results = ResultSizes()
        # Whether it is the runtime's own, and serves the messages of one class
        self.is_service = False
        # The reason why it cannot be called
        self.error: Exception | None = None
        # Whether a ScriptModule that it returns stays on this worker, and is never copied
        self.keeps_modules = getattr(call, "keeps_modules", False) is True

    def like(self, call: Callable[..., Any]) -> Function:
        """Return a function that runs another callable, such as a method of an object, like this one.

        Both share what is measured of them.
        """
        made = Function.__new__(Function)
        made.__dict__.update(self.__dict__)
        made.call = call
        return made

    @staticmethod
    def unknown(error: Exception | None = None) -> Function:
        """Return a placeholder for a function that comes with its call, or that an error keeps from being called."""
        made = NOT_KNOWN.like(_unknown)
        made.results = ResultSizes()
        made.error = error
        return made

    @staticmethod
    def of_coroutine(call: Callable[..., Any], name: str, results: ResultSizes | None = None) -> Function:
        """Return a coroutine function of the runtime that runs in another function's name, with its ``results``."""
        made = _SOME_COROUTINE.like(call)  # its mode is known, and no thread runs it that would be measured
        made.name = name
        made.results = results or ResultSizes()
        return made


async def _some_coroutine() -> None:
    """The template for all functions of `Function.of_coroutine`."""


class RunInstead(NamedTuple):
    """Returned by a handler of the runtime to have another function run in its place, in that function's mode."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class InlineHandler(partial[Any]):
    """A handler of a feature's own messages that can usually answer at once.

    It is a plain function, called on the loop. If it returns a coroutine, that runs like any handler.
    """


def _without_partial(call: Any) -> Any:
    while isinstance(call, partial):
        call = call.func
    return call


def _inner(call: Callable[..., Any]) -> Any:
    """Return the function or method whose code a call runs."""
    inner = _without_partial(call)
    # an object with __call__, such as an nn.Module
    return inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__


def _mode_of(call: Callable[..., Any]) -> Mode:
    inner = _inner(call)
    if inspect.iscoroutinefunction(inner) or getattr(inner, _COROUTINE, False):
        return Mode.COROUTINE
    if inspect.isasyncgenfunction(inner):
        return Mode.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(inner):
        return Mode.GENERATOR
    if getattr(inner, _INLINE, False) or getattr(call, _INLINE, False):
        return Mode.INLINE
    return Mode.THREAD


def returns_futures(call: Any) -> bool:
    """Return whether a callable is marked with `async_execution`."""
    return hasattr(_without_partial(call), _ASYNC_EXECUTION)


def named_by(describe: Callable[..., str]) -> Callable[[F], F]:
    """Name requests for a function of the runtime after the object that they are for, such as a method of a value.

    ``describe`` returns the name. It is called on the callee, when the name is needed, with the worker and the first
    `NAMING` arguments of the request.
    """

    def mark(function: F) -> F:
        setattr(function, _DESCRIBE, describe)
        return function

    return mark


def name_of(call: Any) -> str:
    """Return the name of a callable for users; a str is returned as it is. Never raises, whatever the object does."""
    if call.__class__ is str:
        return str(call)
    if is_a(call, partial):
        return name_of(call.func)
    try:
        if is_a(call, ScriptFunction):
            return str(call.qualified_name)  # its other names are the same for all script functions
        name = getattr(call, "__qualname__", None) or getattr(call, "__name__", None)
        return str.__str__(str(name)) if name else type_name_of(call)
    except BaseException:  # noqa: BLE001 - attributes of a user's object may raise anything
        return type_name_of(call)


def returns_coroutine(function: F) -> F:
    """Mark a plain function of the runtime whose result is a coroutine, to be run as an ``async def`` is."""
    setattr(function, _COROUTINE, True)
    return function


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


def _unknown() -> None:
    """The stand-in for a function that could not be found, in the error of its call."""


_SOME_COROUTINE: Final = Function(_some_coroutine)
NOT_KNOWN: Final = Function(_unknown)
"""The placeholder that `Function.unknown` copies."""
NOT_KNOWN.mode = Mode.UNKNOWN
