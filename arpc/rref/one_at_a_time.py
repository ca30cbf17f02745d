"""Calls of one object that run one at a time: `one_at_a_time`, and the queues behind it on the object's owner."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from arpc.agent.server.dispatcher import Dispatcher
from arpc.agent.server.functions import Function, Mode, name_of

__all__ = ["MethodQueues", "is_one_at_a_time", "one_at_a_time"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK: Final = "__arpc_one_at_a_time__"


def one_at_a_time(target: F) -> F:
    """Let remote calls of a class's methods, or of one method, run one at a time, in the order in which they arrive.

    ::

        @arpc.one_at_a_time
        class Counter:
            total = 0

            def add(self, number):  # without the decorator, two calls may read the same total
                self.total = self.total + number

    This applies to calls through RRefs. Each object has one queue for all callers and all RRefs to it. In a marked
    class all methods use the queue, including methods of base classes and subclasses; in any other class only marked
    methods do. An ``async def`` keeps its turn while it awaits; a plain ``def`` keeps it until its thread has ended,
    even if the caller has been cancelled. A call that fails, or is cancelled while it waits, lets the next one start.

    Not queued are calls of the object in its own process, methods that yield, and the forward passes of an
    `arpc.nn.RemoteModule`. A method that awaits a remote call of its own object is in a deadlock until the timeout.
    """
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise TypeError(
            f"{name_of(target)} yields, and a stream may take as long as its reader likes: other calls cannot wait for "
            f"it. Use an asyncio.Lock around the parts that must not run together with other calls"
        )
    if not inspect.isclass(target) and not inspect.isfunction(target):
        kind = type(target).__name__
        raise TypeError(f"one_at_a_time is for classes and for methods of the kind def or async def, not for a {kind}")
    setattr(target, _MARK, True)
    return target


def _is_marked(kind: type, name: str) -> bool:
    return getattr(kind, _MARK, False) is True or getattr(getattr(kind, name, None), _MARK, False) is True


is_one_at_a_time: Callable[[type, str], bool] = lru_cache(maxsize=1024)(_is_marked)
"""Whether calls of a method of a class run one at a time. Cached, since every method call looks it up."""


class MethodQueues:
    """The queues of one worker, by object. An object has one only while calls of it run or wait."""

    def __init__(self) -> None:
        # All code that refers to a lock also refers to its object, so no other object has its id meanwhile
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def is_idle(self) -> bool:
        return not self._locks

    async def run(
        self, dispatcher: Dispatcher, value: Any, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method when all earlier calls of its object have ended, and return its result."""
        lock = self._locks.setdefault(id(value), asyncio.Lock())
        await lock.acquire()
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        if function.mode is Mode.THREAD:
            function = function.like(_completing(function.call, over))
        else:
            over.set_result(None)
        try:
            return await dispatcher.call(function, args, kwargs)
        finally:
            if over.done():
                lock.release()
            else:
                # the caller was cancelled, but its thread cannot be: the object is in use until the thread ends
                over.add_done_callback(partial(_release, dispatcher.loop, lock, value))


def _completing(call: Callable[..., Any], over: concurrent.futures.Future[None]) -> Callable[..., Any]:
    """Return a function that also completes a future when the call has ended in its thread."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            over.set_result(None)

    return run


def _release(loop: asyncio.AbstractEventLoop, lock: asyncio.Lock, _value: Any, _over: object) -> None:
    """Release the lock of a value, from a thread. Until then the arguments keep the value alive."""
    with suppress(RuntimeError):  # the loop is closed, and with it all queues
        loop.call_soon_threadsafe(lock.release)
