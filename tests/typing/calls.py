# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportPrivateUsage=false
"""What a type checker knows of calls of functions. Never run: `test_typing` has mypy and pyright read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import arpc
from arpc.agent.client.streams import Stream


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.total = start


def add(number: int, *, step: int = 1) -> int:
    return number + step


async def add_later(number: int, step: float = 1) -> float:
    return number + step


@arpc.functions.async_execution
def add_elsewhere(number: int) -> arpc.Future[int]:
    return arpc.rpc_async("w2", add, (number,))


def make(start: int) -> arpc.RRef[Counter]:
    return arpc.RRef(Counter(start))


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def texts(count: int) -> AsyncIterator[str]:
    for number in range(count):
        yield str(number)


def untyped(*args: Any) -> Any:
    return args


async def results(worker: arpc.Worker) -> None:
    assert_type(await arpc.rpc_sync("w1", add, args=(1,)), int)
    assert_type(await arpc.rpc_sync("w1", add_later, args=(1,), timeout=5), float)
    assert_type(await arpc.rpc_sync("w1", add_elsewhere, args=(1,)), int)
    assert_type(await arpc.rpc_sync("w1", Counter), Counter)
    assert_type(await arpc.rpc_sync("w1", untyped), Any)
    assert_type(arpc.rpc_async(1, add, (1,)), arpc.Future[int])
    assert_type(arpc.rpc_async(1, add_later, (1,)), arpc.Future[float])
    assert_type(await arpc.rpc_async(worker.info, add_elsewhere, (1,)), int)
    assert_type(arpc.remote("w1", Counter, (3,)), arpc.RRef[Counter])
    assert_type(arpc.remote("w1", add_later, (3,)), arpc.RRef[float])
    assert_type(arpc.remote("w1", add_elsewhere, (3,)), arpc.RRef[int])
    assert_type(await worker.rpc_sync("w1", add_later, (1,)), float)
    assert_type(worker.rpc_async("w1", add, (1,)), arpc.Future[int])
    assert_type(worker.remote("w1", add_later, (1,)), arpc.RRef[float])


async def an_rref_is_a_result_like_any_other() -> None:
    """It can be awaited, but is not what a call awaits."""
    assert_type(await arpc.rpc_sync("w1", make, (3,)), arpc.RRef[Counter])
    assert_type(await arpc.on("w1").rpc_sync(make, 3), arpc.RRef[Counter])


async def streams(worker: arpc.Worker) -> None:
    assert_type(arpc.stream("w1", numbers, (3,)), Stream[int])
    async for text in arpc.stream("w1", texts, (3,), window=2):
        assert_type(text, str)
    assert_type(worker.stream("w1", texts, (3,)), Stream[str])
    assert_type(arpc.on("w1", window=2).stream(numbers, 3), Stream[int])
    assert_type(arpc.on("w1").stream(texts, count=3), Stream[str])


async def arguments(worker: arpc.Worker) -> None:
    assert_type(await arpc.on("w1").rpc_sync(add, 1, step=2), int)
    assert_type(await arpc.on("w1", timeout=5).rpc_sync(add_later, 1), float)
    assert_type(await arpc.on("w1").rpc_sync(add_elsewhere, 1), int)
    assert_type(arpc.on("w1").rpc_async(add, number=1), arpc.Future[int])
    assert_type(arpc.on("w1").rpc_async(add_later, 1, 0.5), arpc.Future[float])
    assert_type(arpc.on("w1").remote(Counter, start=3), arpc.RRef[Counter])
    assert_type(worker.on("w1").remote(add_later, 3), arpc.RRef[float])


async def what_is_wrong() -> None:
    here = arpc.on("w1")
    here.rpc_async(add, "1")  # type: ignore[call-overload]
    here.rpc_async(add)  # type: ignore[call-overload]
    await here.rpc_sync(add_later, 1, setp=2)  # type: ignore[call-arg]
    here.remote(Counter, "3")  # type: ignore[call-overload]
    here.stream(add, 1)  # type: ignore[call-overload]
    arpc.stream("w1", add, (1,))  # type: ignore[arg-type]
    arpc.rpc_async("w1", "add", (1,))  # type: ignore[call-overload]
    arpc.rpc_async("w1", add, 1)  # type: ignore[call-overload]
    _: str = await arpc.rpc_sync("w1", add, (1,))  # type: ignore[arg-type]
