"""Streams: what can be streamed, and that its items come in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.client.streams import ItemOrder
from arpc.agent.hooks.observers import Observer
from arpc.testing import cluster
from tests.agent.generators import (
    EVERY_GENERATOR,
    collect,
    count_up,
    count_up_in_thread,
)
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import echo

# -- the items


@pytest.mark.parametrize("generator", EVERY_GENERATOR)
@pytest.mark.parametrize("window", [1, 2, 3, 16])
async def test_items_come_in_order(pair, generator, window):
    for stop in (0, 1, window, window + 1, 40):
        stream = pair[0].stream("worker1", generator, args=(stop,), window=window)
        assert await collect(stream) == list(range(stop))


@pytest.mark.parametrize("generator", [count_up, count_up_in_thread])
async def test_ten_thousand_items(pair, generator):
    assert await collect(pair[0].stream("worker1", generator, args=(10_000,), window=256)) == list(range(10_000))


async def test_an_ended_stream_stays_ended(pair):
    stream = pair[0].stream("worker1", count_up, args=(1,))
    assert await collect(stream) == [0]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_none_is_an_item_like_any_other(pair):
    assert await collect(pair[0].stream("worker1", give, args=([None, 0, None],))) == [None, 0, None]


async def give(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def give_in_thread(items: list[Any]) -> Iterator[Any]:
    yield from items


@pytest.mark.parametrize("generator", [give, give_in_thread])
async def test_small_items_do_not_overtake_large_tensors(pair, generator):
    """Large tensors are sent in chunks between which other messages pass; the order is kept all the same."""
    sizes = [1 << 20, 1, 0, 3 << 20, 10, 1 << 16, 2, 1 << 21]
    items = [torch.full((size,), float(index)) for index, size in enumerate(sizes)] + ["small", None]
    got = await collect(pair[0].stream("worker1", generator, args=(items,)))
    assert got[-2:] == ["small", None]
    for expected, tensor in zip(items[:-2], got[:-2], strict=True):
        assert torch.equal(tensor, expected)


async def test_large_arguments_do_not_lose_the_credit(pair):
    large = torch.arange(2 << 20)
    got = await collect(pair[0].stream("worker1", split, args=(large, 4)))
    assert torch.equal(torch.cat(got), large)


async def split(tensor: torch.Tensor, parts: int) -> AsyncIterator[torch.Tensor]:
    for part in tensor.chunk(parts):
        yield part


async def test_large_tensors_before_a_failure_arrive_first(pair):
    stream = pair[0].stream("worker1", fail_after_a_large_one)
    assert (await anext(stream)).numel() == 3 << 20
    with pytest.raises(LookupError, match="after"):
        await anext(stream)


async def fail_after_a_large_one() -> AsyncIterator[torch.Tensor]:
    yield torch.ones(3 << 20)
    raise LookupError("after")


async def test_several_streams_at_once(trio):
    streams = [
        (caller.stream(callee, generator, args=(30,), window=window), 30)
        for caller in trio
        for callee in ("worker0", "worker1", "worker2")
        for window, generator in enumerate(EVERY_GENERATOR, 1)
    ]
    assert await asyncio.gather(*(collect(stream) for stream, _ in streams)) == [list(range(n)) for _, n in streams]


async def test_a_stream_inside_a_handler(trio):
    assert await trio[0].rpc_sync("worker1", sum_up, args=("worker2", 10)) == 45
    relayed = trio[0].stream("worker1", relay, args=("worker2", 10), window=2)
    assert await collect(relayed) == list(range(10))


async def sum_up(to: str, stop: int) -> int:
    return sum([number async for number in arpc.stream(to, count_up, args=(stop,))])


async def relay(to: str, stop: int) -> AsyncIterator[int]:
    async for number in arpc.stream(to, count_up, args=(stop,), window=1):
        yield number


request: ContextVar[str] = ContextVar("request", default="")


async def test_a_generator_keeps_its_context_from_item_to_item(pair):
    for function in (context_of_a_generator, context_of_a_plain_generator):
        seen = await collect(pair[0].stream("worker1", function, window=1))
        assert seen == ["", "set", "set", "worker1"]


async def context_of_a_generator() -> AsyncIterator[str]:
    yield request.get()
    request.set("set")
    yield request.get()
    await asyncio.sleep(0)
    yield request.get()
    yield arpc.get_worker_info().name


def context_of_a_plain_generator() -> Iterator[str]:
    yield request.get()
    request.set("set")
    yield request.get()
    yield request.get()
    yield arpc.get_worker_info().name


# -- what can be streamed


class Numbers:
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.stop))

    def up(self) -> Iterator[int]:
        yield from range(self.stop)

    async def up_slowly(self) -> AsyncIterator[int]:
        for number in range(self.stop):
            yield number


def return_a_list(stop: int) -> list[int]:
    return list(range(stop))


async def return_a_list_later(stop: int) -> list[int]:
    await asyncio.sleep(0)
    return list(range(stop))


@arpc.inline
def return_a_list_inline(stop: int) -> list[int]:
    return list(range(stop))


def return_a_generator(stop: int) -> Iterator[int]:
    return (number for number in range(stop))


def return_an_async_generator(stop: int) -> AsyncIterator[int]:
    return count_up(stop)


@pytest.mark.parametrize(
    "function",
    [
        return_a_list,
        return_a_list_later,
        return_a_list_inline,
        return_a_generator,
        return_an_async_generator,
        Numbers,
        range,
    ],
)
async def test_a_function_that_returns_something_to_iterate_over(pair, function):
    assert await collect(pair[0].stream("worker1", function, args=(5,), window=2)) == [0, 1, 2, 3, 4]


async def test_methods_and_closures(pair):
    assert await collect(pair[0].stream("worker1", Numbers(3).up)) == [0, 1, 2]
    assert await collect(pair[0].stream("worker1", Numbers(3).up_slowly)) == [0, 1, 2]
    stop = 3
    assert await collect(pair[0].stream("worker1", lambda: range(stop))) == [0, 1, 2]


@pytest.mark.parametrize("function", [echo, int])
async def test_something_that_cannot_be_iterated_over(pair, function):
    with pytest.raises(TypeError, match=r"needs something to iterate over, not int"):
        await collect(pair[0].stream("worker1", function, args=(3,)))


async def test_the_iterator_is_made_in_a_thread(pair):
    (thread,) = set(await collect(pair[0].stream("worker1", Slow)))
    assert thread.startswith("arpc-worker1-")


class Slow:
    """Takes its time to begin, as a loader of data does."""

    def __iter__(self) -> Iterator[str]:
        return iter([threading.current_thread().name])


@pytest.mark.parametrize("generator", [count_up, count_up_in_thread])
async def test_calling_a_generator_says_what_to_do(pair, generator):
    with pytest.raises(TypeError, match=rf"{generator.__name__} is a generator: call it with arpc\.stream"):
        await pair[0].rpc_sync("worker1", generator, args=(3,))


async def test_an_unknown_worker():
    async with cluster(2) as group:
        with pytest.raises(arpc.UnknownWorkerError, match=r"nobody.*worker1"):
            await anext(group[0].stream("nobody", count_up, args=(1,)))
        with pytest.raises(TypeError, match="by name, id or WorkerInfo"):
            group[0].stream(("nobody",), count_up, args=(1,))


async def test_a_worker_that_joined_later():
    async with cluster(1, elastic=True) as group:
        await group.add("newcomer")
        assert await collect(group[0].stream("newcomer", count_up, args=(3,))) == [0, 1, 2]
        await assert_nothing_left(group)


async def test_only_the_loop_can_start_one(pair):
    def start() -> None:
        pair[0].stream("worker1", count_up, args=(1,))

    with pytest.raises(RuntimeError, match="from a thread that is not worker 'worker0'"):
        await asyncio.to_thread(start)


# -- the order


def test_steps_are_taken_in_order_whatever_order_they_come_in():
    taken: list[Any] = []
    order = ItemOrder(taken.append)
    order.item_arrived(2, "c")
    order.arrived(4, lambda: taken.append("end"))
    order.item_arrived(1, "b")
    assert taken == []
    order.item_arrived(0, "a")
    assert taken == ["a", "b", "c"]
    order.item_arrived(0, "again")
    order.item_arrived(3, "d")
    assert taken == ["a", "b", "c", "d", "end"]
    assert not order._early


def test_places_go_round_after_four_billion_items():
    taken: list[int] = []
    order = ItemOrder(taken.append)
    order._next = (1 << 32) - 1
    order.item_arrived(0, 2)
    order.item_arrived((1 << 32) - 1, 1)
    order.item_arrived(1, 3)
    assert taken == [1, 2, 3]


async def test_observers_do_not_hear_of_a_stream_that_is_refused_in_another_thread(pair):
    threads: list[int] = []

    class Watching(Observer):
        def request_begins(self, *_: Any) -> None:
            threads.append(threading.get_ident())

    pair[0].agent.observe(Watching())
    with pytest.raises(RuntimeError, match="from a thread that is not"):
        await asyncio.to_thread(pair[0].agent.stream, "worker1", count_up, (3,), None, arpc.options.UNSET, 4)
    assert threads == []
