"""`batched`: many concurrent calls of a function, run as one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, overload

from arpc.agent.server.functions import name_of
from arpc.batching.queue import Limits, Queue
from arpc.errors import ConfigurationError, SerializationError
from arpc.runtime import Worker, current
from arpc.wire.values.pickler import importable_name

__all__ = ["Batched", "Queues", "batched"]


class Queues:
    """The queues of one worker's batched calls, by function and object. A queue exists only while it has calls."""

    def __init__(self) -> None:
        self.queues: dict[tuple[Batched, int], Queue] = {}
        self._batches = 0
        self._calls = 0

    def of(self, worker: Worker, batched: Batched, owner: Any) -> Queue:
        key = batched, id(owner)
        queue = self.queues.get(key)
        if queue is None:
            function = batched.function if owner is None else MethodType(batched.function, owner)
            retire = partial(self._retire, key)
            queue = self.queues[key] = Queue(worker, function, name_of(batched), batched.limits, retire)
        return queue

    def _retire(self, key: tuple[Batched, int]) -> None:
        queue = self.queues.pop(key, None)
        if queue is not None:
            self._batches += queue.batches_run
            self._calls += queue.calls_run

    def statistics(self) -> dict[str, int]:
        """Return how many batched calls there were, and how many batches they ran in."""
        queues = self.queues.values()
        return {
            "batches": self._batches + sum(queue.batches_run for queue in queues),
            "batched_calls": self._calls + sum(queue.calls_run for queue in queues),
        }


class Batched:
    """A function decorated with `batched`. It takes the arguments of one call, and each call must be awaited."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[..., Any], limits: Limits) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.limits = limits
        self._is_method = False

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<batched {name_of(self)}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        owner = self._class()
        if owner is not None and self._is_class_method_of(owner):
            return _in_class_method, (owner, self.__name__)
        if importable_name(self) is None:
            raise SerializationError(
                f"{name_of(self)} is batched, and no module has it under its name: calls can only meet in a function "
                f"that the callee has of its own, so define it at the top level of a module"
            )
        return self.__qualname__

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = None
        if self._is_method or (args and isinstance(args[0], type) and self._is_class_method_of(args[0])):
            owner, *rest = args
            args = tuple(rest)
        if not args and not kwargs:
            raise TypeError(f"{name_of(self)} is batched, and was called without arguments: nothing could be gathered")
        worker = current()
        return await worker.keep(Queues).of(worker, self, owner).call(args, kwargs)

    def _class(self) -> type | None:
        """Return the class that defines the function; None if it cannot be found under its name."""
        found: Any = sys.modules.get(self.__module__)
        for name in self.__qualname__.split(".")[:-1]:
            found = getattr(found, name, None)
        return found if isinstance(found, type) else None

    def _is_class_method_of(self, cls: type) -> bool:
        # a function cannot know that a classmethod wraps it
        found = inspect.getattr_static(cls, self.__name__, None)
        return isinstance(found, classmethod) and found.__func__ is self


def _in_class_method(owner: type, name: str) -> Any:
    """Return the batched function that a class method of this process wraps."""
    return inspect.getattr_static(owner, name).__func__


@overload
def batched(function: Callable[..., Any], /) -> Batched: ...
@overload
def batched(
    *, max_size: int = ..., max_wait_ms: float = ..., max_concurrent: int = ...
) -> Callable[[Callable[..., Any]], Batched]: ...
def batched(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_size: int = 32,
    max_wait_ms: float = 2.0,
    max_concurrent: int = 1,
) -> Batched | Callable[[Callable[..., Any]], Batched]:
    """Combine concurrent calls of a function, from any callers, into one call of it.

    ::

        @arpc.batched(max_size=32, max_wait_ms=2)
        def predict(images: Tensor) -> Tensor:  # called with a batch
            return model(images)

        scores = await arpc.rpc_sync("server", predict, args=(image,))  # called for one image

    The function receives tensors stacked along a new first dimension, and a list for any other argument. It returns a
    tensor with one row for each call, or a list with one item for each, in their order; or a tuple or dict of such
    tensors and lists. It may be a plain function, an ``async def``, a method of an object that RRefs refer to, or a
    class or static method (write ``@classmethod`` above this decorator). Type checkers do not compare the arguments of
    calls, because the function is written for a batch and called for one item.

    A batch runs when it has ``max_size`` calls, or ``max_wait_ms`` after the first of them, but never while
    ``max_concurrent`` other batches of the function are running; meanwhile it takes more calls. Calls whose tensors
    differ in shape, dtype or device go into different batches, and so do calls of different autograd contexts.
    """
    if max_size < 1 or max_concurrent < 1 or not max_wait_ms >= 0:
        raise ConfigurationError(
            f"a batch has at least one call, one runs at a time, and none waits for less than 0 ms: not max_size="
            f"{max_size}, max_concurrent={max_concurrent}, max_wait_ms={max_wait_ms}"
        )
    limits = Limits(max_size, max_wait_ms / 1000, max_concurrent)

    def decorate(decorated: Callable[..., Any]) -> Batched:
        if isinstance(decorated, classmethod | staticmethod):
            kind = type(decorated).__name__
            raise TypeError(f"{name_of(decorated)} is a {kind}: write @{kind} above @arpc.batched, and not below it")
        if not inspect.isfunction(decorated) or inspect.isgeneratorfunction(decorated):
            raise TypeError(f"batched is for plain functions and async def, and {name_of(decorated)} is neither")
        if inspect.isasyncgenfunction(decorated):
            raise TypeError(f"batched is for functions that return, and {name_of(decorated)} is a generator")
        return Batched(decorated, limits)

    return decorate if function is None else decorate(function)
