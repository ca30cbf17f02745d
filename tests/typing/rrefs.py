# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportPrivateUsage=false
"""What a type checker knows of RRefs. Never run: `test_typing` has mypy read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import arpc
from arpc.agent.client.future import Future


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, number: int) -> int:
        return self.total + number

    async def add_later(self, number: int, *, text: str = "") -> float:
        return self.total + number

    def next(self) -> Counter:
        return self

    def numbers(self, count: int) -> Iterator[int]:
        yield from range(count)

    async def texts(self) -> AsyncIterator[str]:
        yield ""


class SpecialCounter(Counter):
    pass


async def fetch_text(number: int) -> str:
    return str(number)


async def values() -> None:
    counter = arpc.remote("ps", Counter, (3,))
    assert_type(counter, arpc.RRef[Counter])
    assert_type(await counter, Counter)
    assert_type(await counter.to_here(timeout=3), Counter)
    assert_type(await counter.local_value(), Counter)
    assert_type(await arpc.remote("ps", fetch_text, (3,)), str)
    assert_type(await arpc.RRef(3), int)
    assert_type(await counter._get_type(), type[Counter])
    async with counter as held:
        assert_type(held, arpc.RRef[Counter])


async def methods_by_themselves(counter: arpc.RRef[Counter]) -> None:
    assert_type(counter.rpc_async()(Counter.add, 3), Future[int])
    assert_type(counter.rpc_async(timeout=5)(Counter.add_later, 3, text="x"), Future[float])
    assert_type(await counter.rpc_sync()(Counter.add, number=3), int)
    assert_type(await counter.rpc_sync()(Counter.add_later, 3), float)
    assert_type(counter.remote()(Counter.next).remote()(Counter.next), arpc.RRef[Counter])
    assert_type(await counter.remote()(Counter.next).remote()(Counter.add_later, 1), float)
    async for number in counter.stream()(Counter.numbers, 3):
        assert_type(number, int)
    async for text in counter.stream()(Counter.texts):
        assert_type(text, str)


async def methods_by_name(counter: arpc.RRef[Counter]) -> None:
    assert_type(counter.rpc_async().add(3), Future[Any])
    assert_type(counter.remote().next().remote().next(), arpc.RRef[Any])


async def held_streams(held: arpc.RRef[Iterator[int]]) -> None:
    async for number in held.stream():
        assert_type(number, int)
    async for text in arpc.remote("ps", Counter.texts).stream():
        assert_type(text, str)


async def a_reference_to_more_is_one_to_less(counter: arpc.RRef[SpecialCounter]) -> None:
    plain: arpc.RRef[Counter] = counter
    assert_type(await plain.rpc_sync()(Counter.add, 3), int)
    assert_type(await counter.rpc_sync()(Counter.add, 3), int)


async def what_is_wrong(counter: arpc.RRef[Counter]) -> None:
    counter.rpc_async()(Counter.add, "3")  # type: ignore[call-overload]
    counter.rpc_async()(Counter.add)  # type: ignore[call-overload]
    counter.rpc_async()(Counter.add_later, 3, txt="")  # type: ignore[call-arg]
    counter.rpc_async()(str.upper)  # type: ignore[call-overload]
    counter.remote()(Counter.add, 1).remote()(Counter.next)  # type: ignore[call-overload]
