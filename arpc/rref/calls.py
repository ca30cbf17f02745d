"""What runs on the owner when somebody calls a method of a value, by way of an RRef."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import lru_cache
from types import BuiltinMethodType, FunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.scope import current_scope
from arpc.agent.server.functions import Function, HandOver, Mode, named_by, returns_coroutine
from arpc.agent.server.run import Run
from arpc.rref.turns import Turns, takes_turns
from arpc.rref.values import NOTHING
from arpc.user_errors import type_name_of
from arpc.wire.values.allowlist import export

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = [
    "bound",
    "call_method",
    "held_value",
    "method_name",
    "rref_typeof_on_owner",
    "run_here",
    "stream_items",
    "stream_method",
    "template_of",
]

_YIELDS: Final = (Mode.GENERATOR, Mode.ASYNC_GENERATOR)


@lru_cache(maxsize=1024)
def _template(function: Any) -> Function:
    return Function(function)


def template_of(method: Callable[..., Any]) -> Function:
    """How to run a method, or any callable. Finding that out takes longer than a short call, so it is remembered.

    But of none that holds an object, as an instance does that can be called: the cache would keep that object.
    """
    if isinstance(method, BuiltinMethodType):
        method = getattr(type(method.__self__), method.__name__, method)
    plain = getattr(method, "__func__", method)
    if isinstance(plain, FunctionType | MethodDescriptorType):
        return _template(plain)
    return Function(method)


def bound(method: Callable[..., Any], template: Function) -> Function:
    """The method itself, to be run like its template."""
    return template if template.call is method else template.like(method)


def _context() -> RRefContext:
    scope = current_scope.get()
    assert scope is not None  # these are handlers
    context: RRefContext = scope.worker.rref_context
    return context


async def held_value(rref: int, is_created: bool) -> Any:
    """A value of this worker as calls name it, once it is there."""
    return await _context().value(rref, is_created=is_created)


async def run_here(function: Callable[..., Any], *args: Any) -> Any:
    """Have a function run in the way its kind asks for, in the place of the handler that calls this."""
    return HandOver(bound(function, template_of(function)), args, {})


def method_name(worker: Any, rref: int, name: str) -> str:
    """What people call a method of a value of a worker: with the class, if the value is there."""
    held = worker.rref_context.values.get(rref)
    if held is None or held.content is NOTHING:
        return name
    return f"{type_name_of(held.content)}.{name}"


@export
@returns_coroutine
@named_by(lambda worker, rref, _is_created, name: method_name(worker, rref, name))
def call_method(rref: int, is_created: bool, name: str, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    """Have a method of a value run, once the value is there; one marked with `one_at_a_time`, when it is its turn."""
    run = current_scope.get()
    assert isinstance(run, Run)  # this is a handler
    context: RRefContext = run.worker.rref_context
    held = context.values.get(rref)
    if held is not None and held.is_ready and run.handling is None:
        value = held.get_nowait()
        method = context.get_method(value, name)
        template = template_of(method)
        if (
            template.mode is Mode.COROUTINE
            and not template.returns_future
            and not template.results.are_large
            and not takes_turns(type(value), name)
        ):
            if run.creation is None:  # whose results stay here
                run.results = template.results
            coroutine: Coroutine[Any, Any, Any] = method(*args, **kwargs)
            return coroutine
    return _hand_over(context, rref, is_created, name, args, kwargs)


async def _hand_over(
    context: RRefContext, rref: int, is_created: bool, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    value = await context.value(rref, is_created=is_created)
    method = context.get_method(value, name)
    function = bound(method, template_of(method))
    if takes_turns(type(value), name) and function.mode not in _YIELDS:
        scope = current_scope.get()
        assert scope is not None  # this is a handler
        turns: Turns = scope.worker.keep(Turns)
        return await turns.run(context.agent.dispatcher, value, function, args, kwargs)
    return HandOver(function, args, kwargs)


@export
@named_by(lambda worker, rref, _is_created, name: method_name(worker, rref, name))
async def stream_method(rref: int, is_created: bool, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Have a method of a value run whose result is iterated over."""
    return await _hand_over(_context(), rref, is_created, name, args, kwargs)


@export
async def stream_items(rref: int, is_created: bool) -> Any:
    """The items that a value yields. The value stays open when the reader leaves early."""
    value = await held_value(rref, is_created)
    return _items_async(value) if hasattr(value, "__aiter__") else _items(value)


async def _items_async(held: Any) -> AsyncIterator[Any]:
    async for item in held:
        yield item


def _items(held: Any) -> Iterator[Any]:
    for item in held:  # noqa: UP028 - `yield from` would close what is held
        yield item


@export
async def rref_typeof_on_owner(rref: int, is_created: bool) -> type:
    """The type of a value."""
    return type(await held_value(rref, is_created))
