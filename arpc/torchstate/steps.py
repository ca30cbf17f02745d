"""Hooks around each step of a piece of work, wherever its steps run.

A profiler of torch belongs to a thread, and the steps of many coroutines take turns on one thread. So the profiler is
switched on before each step of the work that it is for and off after it: in the work's own coroutine, in the tasks that
it starts and in the threads that it sends functions to.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

from arpc.torchstate.isolated import Wrapper

__all__ = ["AllSteps", "Stepped", "Steps", "call_stepped", "current_steps", "step_result"]

P = ParamSpec("P")
T = TypeVar("T")


class Steps(Protocol):
    """The hooks around each step. Two steps of the same work may run at once, in different threads."""

    def enter(self) -> Any:
        """Called when a step begins on this thread. Must not raise."""

    def leave(self, entered: Any) -> None:
        """Called when the step has ended, on the same thread; ``entered`` is what `enter` returned. Must not raise."""


current_steps: ContextVar[Steps | None] = ContextVar("arpc.steps", default=None)
"""The hooks around the steps of the current work. Tasks that it creates, and `to_thread`, use them, too."""


class AllSteps:
    """Several `Steps` as one: the first is the outermost."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self._parts = tuple(parts)

    def enter(self) -> list[Any]:
        return [part.enter() for part in self._parts]

    def leave(self, entered: list[Any]) -> None:
        for part, token in zip(reversed(self._parts), reversed(entered), strict=True):
            part.leave(token)


def call_stepped(steps: Steps, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function as one step."""
    entered = steps.enter()
    try:
        return function(*args, **kwargs)
    finally:
        del args  # an error that is thrown in, and comes out again, has this frame in its traceback
        steps.leave(entered)


class Stepped(Wrapper[T]):
    """A coroutine that wraps another one and calls the hooks ``steps`` around each of its steps."""

    __slots__ = ("__weakref__", "_coro", "_send", "_steps")

    def __init__(self, coro: Coroutine[Any, Any, T], steps: Steps) -> None:
        self._coro = coro
        self._send = coro.send
        self._steps = steps

    def _step(self, resume: Callable[..., Any], *args: Any) -> Any:
        try:
            return call_stepped(self._steps, resume, *args)
        finally:
            del self, args

    def __next__(self) -> Any:
        return self._step(self._send, None)


def step_result(steps: Steps, result: Any) -> Any:
    """Return the result of a function; a coroutine or an async generator is wrapped so that it runs in ``steps``."""
    if inspect.isasyncgen(result):
        return _stepped_async_generator(result, steps)
    if isinstance(result, Coroutine):
        return Stepped(result, steps)
    return result


async def _stepped_async_generator(items: AsyncGenerator[Any, Any], steps: Steps) -> AsyncGenerator[Any, None]:
    try:
        while True:
            try:
                item = await Stepped(_awaited(items.__anext__()), steps)
            except StopAsyncIteration:
                return
            yield item
    finally:
        await Stepped(_awaited(items.aclose()), steps)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
