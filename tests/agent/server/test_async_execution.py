"""Functions that return futures: the caller gets the value, and no thread waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from typing import Any

import pytest
import torch

import arpc
from arpc.functions import async_execution, inline
from tests.agent.stage import echo, hold


@async_execution
def future_of_a_call(to: str, value: Any) -> arpc.Future[Any]:
    return arpc.rpc_async(to, echo, args=(value,)).then(lambda future: future.value() + 1)


@async_execution
@inline
def future_of_an_inline_call(to: str, value: Any) -> arpc.Future[Any]:
    return arpc.rpc_async(to, echo, args=(value,)).then(lambda future: future.value() + 1)


@async_execution
def future_of_torch(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    threading.Timer(0.01, future.set_result, (value,)).start()
    return future


@async_execution
def failed_future_of_torch(text: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(LookupError(text))
    return future


@async_execution
def future_of_a_pool(value: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    threading.Timer(0.01, future.set_result, (value,)).start()
    return future


@async_execution
def failed_future_of_a_pool(text: str) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_exception(LookupError(text))
    return future


@async_execution
def failed_future_of_a_call(text: str) -> arpc.Future[Any]:
    return arpc.rpc_async("worker0", raise_lookup_error, args=(text,))


async def raise_lookup_error(text: str) -> None:
    raise LookupError(text)


@async_execution
def no_future_at_all() -> int:
    return 3


@async_execution
def raises_before_there_is_one() -> arpc.Future[Any]:
    raise LookupError("early")


@async_execution
def future_of_what_cannot_be_sent() -> arpc.Future[Any]:
    return arpc.rpc_async("worker0", echo).then(lambda _: threading.Lock())


@async_execution
def future_that_is_held() -> arpc.Future[Any]:
    return arpc.rpc_async("worker0", hold)


@async_execution
async def coroutine_with_a_future(value: Any) -> arpc.Future[Any]:
    await asyncio.sleep(0)
    return arpc.rpc_async("worker0", echo, args=(value,))


class Batcher:
    @staticmethod
    @async_execution
    def static(value: Any) -> arpc.Future[Any]:
        return arpc.rpc_async("worker0", echo, args=(value,))

    @classmethod
    @async_execution
    def of_class(cls, value: Any) -> arpc.Future[Any]:
        return arpc.rpc_async("worker0", echo, args=(value,))

    @async_execution
    def bound(self, value: Any) -> arpc.Future[Any]:
        return arpc.rpc_async("worker0", echo, args=(value,))


@pytest.mark.parametrize("function", [future_of_a_call, future_of_an_inline_call])
async def test_the_caller_gets_the_value_of_a_returned_future(trio, function):
    assert await trio[0].rpc_sync("worker1", function, args=("worker2", 1)) == 2


@pytest.mark.parametrize(
    "function",
    [future_of_torch, future_of_a_pool, coroutine_with_a_future, Batcher.static, Batcher.of_class, Batcher().bound],
)
async def test_futures_of_all_kinds(pair, function):
    assert await pair[0].rpc_sync("worker1", function, args=("value",)) == "value"
    assert await pair[0].rpc_sync("worker1", functools.partial(function, "value")) == "value"


@pytest.mark.parametrize("function", [failed_future_of_torch, failed_future_of_a_pool, failed_future_of_a_call])
async def test_the_error_of_a_returned_future(pair, function):
    with pytest.raises(LookupError, match="why"):
        await pair[0].rpc_sync("worker1", function, args=("why",))


async def test_something_else_than_a_future_is_an_error(pair):
    with pytest.raises(TypeError, match=r"must return a Future, and no_future_at_all returned int"):
        await pair[0].rpc_sync("worker1", no_future_at_all)
    with pytest.raises(LookupError, match="early"):
        await pair[0].rpc_sync("worker1", raises_before_there_is_one)


async def test_the_value_of_a_future_may_not_be_sendable(pair):
    with pytest.raises(arpc.SerializationError, match="future_of_what_cannot_be_sent"):
        await pair[0].rpc_sync("worker1", future_of_what_cannot_be_sent)


@async_execution
async def coroutine_with_a_future_that_is_held() -> arpc.Future[Any]:
    return arpc.rpc_async("worker0", hold)


@pytest.mark.parametrize("function", [future_that_is_held, coroutine_with_a_future_that_is_held])
async def test_a_call_whose_future_is_awaited_can_be_cancelled(pair, stage, function):
    future = pair[0].rpc_async("worker1", function)
    await stage.wait_until("held begun")
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future
    await stage.wait_until("held cancelled")


shared: list[arpc.Future[Any]] = []


@async_execution
@inline
def future_of_a_batch() -> arpc.Future[Any]:
    """All callers of one batch are given the same future."""
    if not shared:
        shared.append(arpc.Future(loop=asyncio.get_running_loop()))
    return shared[0]


async def test_one_caller_that_leaves_does_not_take_the_future_of_the_others(pair):
    calls = [pair[0].rpc_async("worker1", future_of_a_batch) for _ in range(3)]
    await pair[0].rpc_sync("worker1", echo)
    calls[1].cancel()
    await pair[0].rpc_sync("worker1", echo)
    shared.pop().set_result("the batch")
    assert [await calls[0], await calls[2]] == ["the batch"] * 2
    assert calls[1].cancelled()
