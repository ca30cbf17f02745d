"""Every way a worker runs code of a user, each with a handler that raises, and one that returns, a hostile specimen.

`RAISING` has a coroutine function for each way to raise one of `tests.hostile.EXCEPTIONS`, `RETURNING` for each way to
hand one of `tests.hostile.VALUES` to the caller, `TAKING` for each way to send one to the callee. They are called with
the worker that calls, the name of the worker that is called, and the name of the specimen.
"""

# TorchScript reads annotations as they are: none of them may be a text

import asyncio
import concurrent.futures
import contextlib
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch

import arpc
from arpc import torchjit
from tests.hostile import EXCEPTIONS, VALUES, raise_specimen

__all__ = ["RAISING", "RETURNING", "TAKING", "Way"]

Way = Callable[[arpc.Worker, str, str], Awaitable[Any]]

# -- handlers that raise


async def at_once(name: str) -> None:
    raise_specimen(name)


async def later(name: str) -> None:
    await asyncio.sleep(0)
    raise_specimen(name)


def in_thread(name: str) -> None:
    raise_specimen(name)


@arpc.inline
def inline(name: str) -> None:
    raise_specimen(name)


@arpc.batched(max_wait_ms=0)
def batch(names: list[str]) -> list[Any]:
    return raise_specimen(names[0])


@arpc.batched(max_wait_ms=0)
async def batch_later(names: list[str]) -> list[Any]:
    await asyncio.sleep(0)
    return raise_specimen(names[0])


@arpc.batched(max_wait_ms=0)
def batch_of_errors(names: list[str]) -> list[Any]:
    return [EXCEPTIONS[name]() for name in names]


def coroutine_of_thread(name: str) -> Any:
    return later(name)


async def items(name: str) -> AsyncIterator[int]:
    yield 1
    raise_specimen(name)


def plain_items(name: str) -> Iterator[int]:
    yield 1
    raise_specimen(name)


async def no_items(name: str) -> list[int]:
    return raise_specimen(name)


def stubborn_items(name: str) -> Iterator[int]:
    try:
        yield from range(1000)
    finally:
        raise_specimen(name)


async def stubborn_async_items(name: str) -> AsyncIterator[int]:
    try:
        for number in range(1000):
            yield number
    finally:
        raise_specimen(name)


@arpc.functions.async_execution
def by_concurrent_future(name: str) -> Any:
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_exception(EXCEPTIONS[name]())
    return done


@arpc.functions.async_execution
def by_own_future(name: str) -> Any:
    return arpc.rpc_async(arpc.get_worker_info(), at_once, args=(name,))


@arpc.functions.async_execution
def by_callback(name: str) -> Any:
    return arpc.rpc_async(arpc.get_worker_info(), nothing).then(lambda _: raise_specimen(name))


@arpc.functions.async_execution
def by_async_callback(name: str) -> Any:
    async def follow(_: Any) -> None:
        await later(name)

    return arpc.rpc_async(arpc.get_worker_info(), nothing).then(follow)


@arpc.functions.async_execution
def by_torch_future(name: str) -> Any:
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_exception(EXCEPTIONS[name]())
    return done


@arpc.functions.async_execution
def instead_of_future(name: str) -> Any:
    return raise_specimen(name)


async def nothing() -> None: ...


async def nested(name: str) -> None:
    await arpc.rpc_sync(arpc.get_worker_info(), in_thread, args=(name,))


class Caller:
    """An object that is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        raise_specimen(self.name)


class Thing:
    """An object that an RRef refers to."""

    def __init__(self, name: str = "") -> None:
        if name:
            raise_specimen(name)

    async def fail(self, name: str) -> None:
        raise_specimen(name)

    async def fail_later(self, name: str) -> None:
        await asyncio.sleep(0)
        raise_specimen(name)

    def fail_in_thread(self, name: str) -> None:
        raise_specimen(name)

    @arpc.batched(max_wait_ms=0)
    def fail_in_batch(self, names: list[str]) -> list[Any]:
        return raise_specimen(names[0])

    def fail_in_items(self, name: str) -> Iterator[int]:
        yield 1
        raise_specimen(name)

    def give(self, name: str) -> Any:
        return VALUES[name]()

    async def give_at_once(self, name: str) -> Any:
        return VALUES[name]()


@torchjit.ignore
def raise_for_script(name: str) -> int:
    return raise_specimen(name)


def script(name: str) -> int:
    return raise_for_script(name)


if torchjit.IS_AVAILABLE:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")  # torch deprecates TorchScript, and arpc runs it
        script_function = torch.jit.script(script)


def _calling(function: Callable[..., Any]) -> Way:
    async def call(worker: arpc.Worker, to: str, name: str) -> Any:
        return await worker.rpc_sync(to, function, args=(name,))

    return call


def _streaming(function: Callable[..., Any]) -> Way:
    async def call(worker: arpc.Worker, to: str, name: str) -> Any:
        return [item async for item in worker.stream(to, function, args=(name,))]

    return call


def _leaving(function: Callable[..., Any]) -> Way:
    async def call(worker: arpc.Worker, to: str, name: str) -> Any:
        async for _ in worker.stream(to, function, args=(name,)):
            break
        raise LookupError(name)  # nobody hears of the error: what counts is that the worker lives

    return call


def _creating(function: Callable[..., Any], *, is_fetched: bool) -> Way:
    async def call(worker: arpc.Worker, to: str, name: str) -> Any:
        rref = worker.remote(to, function, args=(name,))
        return await (rref.to_here() if is_fetched else rref)

    return call


def _on_thing(method: str, *, way: str = "rpc_sync") -> Way:
    async def call(worker: arpc.Worker, to: str, name: str) -> Any:
        thing = worker.remote(to, Thing)
        if way == "stream":
            return [item async for item in getattr(thing.stream(), method)(name)]
        result = getattr(getattr(thing, way)(), method)(name)
        return await (result.to_here() if way == "remote" else result)

    return call


async def _call_object(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, Caller(name))


async def _call_together(worker: arpc.Worker, to: str, name: str) -> Any:
    calls = [worker.rpc_async(to, function, args=(name,)) for function in (batch, batch_of_errors) * 3]
    await asyncio.wait(calls, timeout=20)
    assert all(call.done() and not call.cancelled() for call in calls), calls
    assert all(issubclass(type(call.exception()), Exception) for call in calls)
    return calls[0].result()


async def _then(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_async(to, nothing).then(lambda _: _as_exception(name))


def _as_exception(name: str) -> Any:
    try:
        raise_specimen(name)
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - which is raised, in another one
        raise LookupError(
            type(error).__qualname__
        ) from None  # one that is meant for this process, and not for a caller


async def _await_twice(worker: arpc.Worker, to: str, name: str) -> Any:
    """An error is kept in the place of a value, and raised at each use."""
    rref = worker.remote(to, in_thread, args=(name,))
    for _ in range(2):
        with contextlib.suppress(Exception):
            await rref.to_here()
    return await rref.to_here()


RAISING: Final[dict[str, Way]] = {
    **{
        function.__name__: _calling(function)
        for function in (
            *(at_once, later, in_thread, inline, batch, batch_later, batch_of_errors, coroutine_of_thread),
            *(
                by_concurrent_future,
                by_own_future,
                by_callback,
                by_async_callback,
                by_torch_future,
                instead_of_future,
                nested,
            ),
        )
    },
    **({"script": _calling(script_function)} if torchjit.IS_AVAILABLE else {}),
    "object": _call_object,
    "batched together": _call_together,
    "then": _then,
    **{function.__name__: _streaming(function) for function in (items, plain_items, no_items)},
    **{function.__name__: _leaving(function) for function in (stubborn_items, stubborn_async_items)},
    **{f"create by {function.__name__}": _creating(function, is_fetched=False) for function in (at_once, later, Thing)},
    **{
        f"fetch of {function.__name__}": _creating(function, is_fetched=True)
        for function in (at_once, in_thread, Thing)
    },
    "fetched twice": _await_twice,
    **{f"method {name}": _on_thing(name) for name in ("fail", "fail_later", "fail_in_thread", "fail_in_batch")},
    "method remote": _on_thing("fail", way="remote"),
    "method in thread remote": _on_thing("fail_in_thread", way="remote"),
    "method stream": _on_thing("fail_in_items", way="stream"),
}

# -- handlers that return


async def give(name: str) -> Any:
    return VALUES[name]()


async def give_later(name: str) -> Any:
    await asyncio.sleep(0)
    return VALUES[name]()


def give_in_thread(name: str) -> Any:
    return VALUES[name]()


@arpc.inline
def give_inline(name: str) -> Any:
    return VALUES[name]()


@arpc.batched(max_wait_ms=0)
def give_batch(names: list[str]) -> list[Any]:
    return [VALUES[name]() for name in names]


@arpc.batched(max_wait_ms=0)
async def give_no_batch(names: list[str]) -> Any:
    return VALUES[names[0]]()


async def give_items(name: str) -> AsyncIterator[Any]:
    yield VALUES[name]()


def give_plain_items(name: str) -> Iterator[Any]:
    yield VALUES[name]()


@arpc.functions.async_execution
def give_instead_of_future(name: str) -> Any:
    return VALUES[name]()


@arpc.functions.async_execution
def give_by_future(name: str) -> Any:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_result(VALUES[name]())
    return done


RETURNING: Final[dict[str, Way]] = {
    **{
        function.__name__: _calling(function)
        for function in (
            *(give, give_later, give_in_thread, give_inline, give_batch, give_no_batch),
            *(give_instead_of_future, give_by_future),
        )
    },
    **{function.__name__: _streaming(function) for function in (give_items, give_plain_items)},
    "instead of items": _streaming(give),
    "instead of items in thread": _streaming(give_in_thread),
    **{
        f"fetch of {function.__name__}": _creating(function, is_fetched=True)
        for function in (give, give_in_thread, give_inline)
    },
    "method": _on_thing("give"),
    "method at once": _on_thing("give_at_once"),
    "method remote": _on_thing("give_at_once", way="remote"),
    "method in thread remote": _on_thing("give", way="remote"),
}

# -- arguments


async def take(*_: Any, **__: Any) -> str:
    return "taken"


def take_in_thread(*_: Any, **__: Any) -> str:
    return "taken"


@arpc.inline
def take_inline(*_: Any, **__: Any) -> str:
    return "taken"


@arpc.batched(max_wait_ms=0)
def take_batch(values: list[Any]) -> list[str]:
    return ["taken" for _ in values]


def take_and_yield(_: Any) -> Iterator[str]:
    yield "taken"


class TakingThing:
    def __init__(self, *_: Any) -> None: ...

    def take(self, _: Any) -> str:
        return "taken"


variable: ContextVar[Any] = ContextVar("tests.hostile_handlers.variable")
"""To be propagated where it is used, and not for all tests of the process: it would ride on every call."""


async def _positional(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, take, args=(VALUES[name](),))


async def _begun(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_async(to, take, args=(1, VALUES[name]()))


async def _by_keyword(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, take, kwargs={"value": VALUES[name]()})


async def _to_thread(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, take_in_thread, args=(VALUES[name](),))


async def _to_inline(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, take_inline, args=(VALUES[name](), torch.ones(2)))


async def _to_batch(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, take_batch, args=(VALUES[name](),))


async def _to_stream(worker: arpc.Worker, to: str, name: str) -> Any:
    return [item async for item in worker.stream(to, take_and_yield, args=(VALUES[name](),))]


async def _to_creation(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.remote(to, TakingThing, args=(VALUES[name](),))


async def _to_coroutine_creation(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.remote(to, take, args=(VALUES[name](),)).to_here()


async def _to_method(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.remote(to, TakingThing).rpc_sync().take(VALUES[name]())


async def _in_variable(worker: arpc.Worker, to: str, name: str) -> Any:
    token = variable.set(VALUES[name]())
    try:
        return await worker.rpc_sync(to, take)
    finally:
        variable.reset(token)


async def _as_function(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.rpc_sync(to, VALUES[name]())


async def _as_creating_function(worker: arpc.Worker, to: str, name: str) -> Any:
    return await worker.remote(to, VALUES[name]())


TAKING: Final[dict[str, Way]] = {
    "argument": _positional,
    "begun": _begun,
    "keyword": _by_keyword,
    "thread": _to_thread,
    "inline": _to_inline,
    "batch": _to_batch,
    "stream": _to_stream,
    "creation": _to_creation,
    "creation by a coroutine": _to_coroutine_creation,
    "method": _to_method,
    "variable": _in_variable,
    "function": _as_function,
    "creating function": _as_creating_function,
}
