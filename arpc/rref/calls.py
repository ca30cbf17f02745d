"""The functions that run on the owner when a caller calls a method of a value through an RRef."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import lru_cache
from types import BuiltinMethodType, FunctionType, MethodDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.scope import current_scope
from arpc.agent.server.functions import Function, Mode, RunInstead, named_by, returns_coroutine
from arpc.agent.server.run import Run
from arpc.rref.one_at_a_time import MethodQueues, is_one_at_a_time
from arpc.rref.values import NOTHING
from arpc.user_errors import type_name_of
from arpc.wire.values.allowlist import export

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = [
    "call_method",
    "held_value",
    "method_name",
    "rref_typeof_on_owner",
    "run_here",
    "runnable",
    "stream_items",
    "stream_method",
]

_YIELDS: Final = (Mode.GENERATOR, Mode.ASYNC_GENERATOR)


@lru_cache(maxsize=1024)
def _template(function: Any) -> Function:
    return Function(function)


def runnable(method: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """Return the `Function` that runs a method, or any callable, and its arguments.

    Making a `Function` takes longer than a short call, so those of functions and methods are cached. A callable that
    holds an object, such as a callable instance, is not: the cache would keep the object alive.
    """
    if isinstance(method, MethodType) and isinstance(method.__func__, FunctionType):
        return _template(method.__func__), (method.__self__, *args)
    if isinstance(method, FunctionType):
        return _template(method), args
    if isinstance(method, BuiltinMethodType):
        of_class = getattr(type(method.__self__), method.__name__, None)
        if isinstance(of_class, MethodDescriptorType):
            return _template(of_class).like(method), args
    return Function(method), args


def _context() -> RRefContext:
    scope = current_scope.get()
    assert scope is not None  # these are handlers
    context: RRefContext = scope.worker.rref_context
    return context


async def held_value(rref: int, is_created: bool) -> Any:
    """Return a value of this worker, once it is ready. The arguments name it as calls do."""
    return await _context().value(rref, is_created=is_created)


async def run_here(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in place of the handler that returns this; it runs as its kind requires."""
    return RunInstead(*runnable(function, args), {})


def method_name(worker: Any, rref: int, name: str) -> str:
    """Return the name of a method as shown to users: with the class of the worker's value, if that is ready."""
    held = worker.rref_context.forks.owned.get(rref)
    if held is None or held.content is NOTHING:
        return name
    return f"{type_name_of(held.content)}.{name}"


@export
@returns_coroutine
@named_by(lambda worker, rref, _is_created, name: method_name(worker, rref, name))
def call_method(rref: int, is_created: bool, name: str, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    """Run a method of a value, once the value is ready; a method marked `one_at_a_time` also waits for its turn."""
    run = current_scope.get()
    assert isinstance(run, Run)  # this is a handler
    context: RRefContext = run.worker.rref_context
    held = context.forks.owned.get(rref)
    if held is None or held.content is NOTHING:
        return _call_later(context, rref, is_created, name, args, kwargs)
    value = held.content
    function, arguments = runnable(context.get_method(value, name), args)
    is_queued = is_one_at_a_time(type(value), name)
    if not function.is_final or is_queued or function.results.are_large or run.handling is not None:
        return _run_method(context, value if is_queued else None, function, arguments, kwargs)
    if run.creation is None:  # the result of a creation stays here
        run.results = function.results
    coroutine: Coroutine[Any, Any, Any] = function.call(*arguments, **kwargs)
    return coroutine


async def _call_later(
    context: RRefContext, rref: int, is_created: bool, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wait for the value, then run its method."""
    value = await context.value(rref, is_created=is_created)
    function, arguments = runnable(context.get_method(value, name), args)
    queued = value if is_one_at_a_time(type(value), name) else None
    return await _run_method(context, queued, function, arguments, kwargs)


async def _run_method(
    context: RRefContext, queued: Any, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a method in place of this handler.

    ``queued`` is the object whose queue it waits in; None if it need not wait.
    """
    if queued is not None and function.mode not in _YIELDS:
        scope = current_scope.get()
        assert scope is not None  # this is a handler
        queues: MethodQueues = scope.worker.keep(MethodQueues)
        return await queues.run(context.agent.dispatcher, queued, function, args, kwargs)
    return RunInstead(function, args, kwargs)


@export
@named_by(lambda worker, rref, _is_created, name: method_name(worker, rref, name))
async def stream_method(rref: int, is_created: bool, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a method of a value whose result is iterated over."""
    return await _call_later(_context(), rref, is_created, name, args, kwargs)


@export
async def stream_items(rref: int, is_created: bool) -> Any:
    """Return an iterator over the items that a value yields. The value stays open when the reader leaves early."""
    value = await held_value(rref, is_created)
    return _items_async(value) if hasattr(value, "__aiter__") else _items(value)


async def _items_async(held: Any) -> AsyncIterator[Any]:
    async for item in held:
        yield item


def _items(held: Any) -> Iterator[Any]:
    for item in held:  # noqa: UP028 - `yield from` would close the held iterator
        yield item


@export
async def rref_typeof_on_owner(rref: int, is_created: bool) -> type:
    """Return the type of a value."""
    return type(await held_value(rref, is_created))
