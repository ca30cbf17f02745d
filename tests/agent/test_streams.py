"""Streams: items in order, never more than were asked for, and an end for every way out of the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.streams import ItemOrder
from arpc.errors import RpcTimeoutError, SerializationError, ShutdownError, WireError, WorkerLostError
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import Stage, echo, the_stage

# -- generators


async def count_up(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        yield number


async def count_up_slowly(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        await asyncio.sleep(0)
        yield number


def count_up_in_thread(stop: int) -> Iterator[int]:
    yield from range(stop)


EVERY_GENERATOR = [count_up, count_up_slowly, count_up_in_thread]


async def watched() -> AsyncIterator[int]:
    """Never ends; tells how far it has come, and when it is stopped."""
    stage = the_stage()
    number = 0
    try:
        while True:
            stage.reached(f"made {number}")
            yield number
            number += 1
    finally:
        stage.reached("stopped")


def watched_in_thread() -> Iterator[int]:
    stage = the_stage()
    number = 0
    try:
        while True:
            stage.reached(f"made {number}")
            yield number
            number += 1
    finally:
        stage.reached("stopped")


WATCHED = [watched, watched_in_thread]


def made(stage: Stage) -> int:
    return sum(point.startswith("made") for point in stage.log)


async def held_after_one() -> AsyncIterator[int]:
    stage = the_stage()
    try:
        yield 1
        stage.reached("waiting")
        await stage.pass_gate()
        yield 2
    finally:
        stage.reached("stopped")


async def collect(stream: arpc.Stream[Any]) -> list[Any]:
    return [item async for item in stream]


# -- the items


@pytest.mark.parametrize("generator", EVERY_GENERATOR)
@pytest.mark.parametrize("window", [1, 2, 3, 16, 1000])
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
        (caller.stream(callee, generator, args=(100,), window=window), 100)
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


# -- backpressure


@pytest.mark.parametrize("generator", WATCHED)
@pytest.mark.parametrize("window", [1, 4])
async def test_the_producer_is_never_more_than_the_window_ahead(pair, stage, generator, window):
    async with pair[0].stream("worker1", generator, window=window) as stream:
        for taken in range(10):
            assert await anext(stream) == taken
            # let whatever is under way arrive
            await pair[0].rpc_sync("worker1", echo)
            assert made(stage) <= taken + 1 + window + 1, "one may be made, to be sent with the next credit"
        await stage.wait_until(f"made {9 + window // 2}")


@pytest.mark.parametrize("generator", WATCHED)
async def test_nothing_is_made_beyond_the_window_when_nobody_takes(pair, stage, generator):
    async with pair[0].stream("worker1", generator, window=3):
        await stage.wait_until("made 2")
        for _ in range(3):
            await pair[0].rpc_sync("worker1", echo)
        assert made(stage) == 3


@pytest.mark.parametrize("window", [0, -1])
async def test_a_window_holds_one_item_at_least(pair, window):
    with pytest.raises(ValueError, match="window of a stream must be at least 1"):
        pair[0].stream("worker1", count_up, args=(3,), window=window)
    assert len(pair[0].agent.peer("worker1").calls) == 0, "nothing was sent"


# -- ways out


@pytest.mark.parametrize("generator", WATCHED)
async def test_closing_it_stops_the_producer(pair, stage, generator):
    stream = pair[0].stream("worker1", generator)
    assert await anext(stream) == 0
    await stream.aclose()
    await stage.wait_until("stopped")
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("generator", WATCHED)
async def test_leaving_the_block_stops_the_producer(pair, stage, generator):
    async with pair[0].stream("worker1", generator) as stream:
        assert await anext(stream) == 0
    await stage.wait_until("stopped")


@pytest.mark.parametrize("generator", WATCHED)
async def test_breaking_off_the_loop_stops_the_producer(pair, stage, generator):
    async for number in pair[0].stream("worker1", generator):
        if number == 3:
            break
    await stage.wait_until("stopped")


@pytest.mark.parametrize("generator", WATCHED)
async def test_dropping_it_stops_the_producer(pair, stage, generator):
    stream = pair[0].stream("worker1", generator)
    assert await anext(stream) == 0
    del stream
    await stage.wait_until("stopped")


async def test_dropping_it_in_a_thread_stops_the_producer(pair, stage):
    kept = [pair[0].stream("worker1", watched)]
    assert await anext(kept[0]) == 0
    await asyncio.to_thread(kept.clear)
    await stage.wait_until("stopped")


async def test_dropping_it_at_once_stops_the_producer(pair, stage):
    pair[0].stream("worker1", watched)
    gc.collect()
    await assert_nothing_left(pair)


async def test_an_error_in_the_loop_stops_the_producer(pair, stage):
    async def consume() -> None:
        async for number in pair[0].stream("worker1", watched):
            raise LookupError(number)

    with pytest.raises(LookupError):
        await consume()
    await stage.wait_until("stopped")


@pytest.mark.parametrize("keep", [True, False])
async def test_cancelling_the_consumer_stops_the_producer(pair, stage, keep):
    stream = pair[0].stream("worker1", held_after_one)

    async def consume() -> None:
        async for _ in stream if keep else pair[0].stream("worker1", held_after_one):
            pass

    task = asyncio.create_task(consume())
    await stage.wait_until("waiting")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stage.wait_until("stopped")
    if keep:
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    await stream.aclose()


async def test_a_timeout_around_the_next_item_stops_the_producer(pair, stage):
    stream = pair[0].stream("worker1", held_after_one)
    assert await anext(stream) == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(stream)
    await stage.wait_until("stopped")


async def test_a_producer_that_waits_for_credit_is_stopped(pair, stage):
    async with pair[0].stream("worker1", watched, window=1):
        await stage.wait_until("made 0")
        await pair[0].rpc_sync("worker1", echo)
    await stage.wait_until("stopped")


async def test_an_item_does_not_wait_for_the_next(pair, stage):
    stream = pair[0].stream("worker1", held_in_thread)
    assert await anext(stream) == 1
    await stage.wait_until("waiting")
    stage.open()
    assert await collect(stream) == [2, 3]


async def test_a_thread_in_the_middle_of_an_item_is_closed_after_it(pair, stage):
    stream = pair[0].stream("worker1", held_in_thread)
    assert await anext(stream) == 1
    await stage.wait_until("waiting")
    await stream.aclose()
    await pair[0].rpc_sync("worker1", echo)
    assert not stage.was_reached("stopped")
    stage.open()
    await stage.wait_until("stopped")
    assert not stage.was_reached("went on")


def held_in_thread() -> Iterator[int]:
    stage = the_stage()
    try:
        yield 1
        stage.reached("waiting")
        stage.pass_gate_in_thread()
        yield 2
        stage.reached("went on")
        yield 3
    finally:
        stage.reached("stopped")


async def test_a_generator_that_objects_to_being_stopped(pair, stage, caplog):
    async with pair[0].stream("worker1", object_to_the_end) as stream:
        assert await anext(stream) == 1
    await stage.wait_until("objected")
    await assert_nothing_left(pair)
    assert "a generator raised when it was stopped" in caplog.text
    assert await pair[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"


def object_to_the_end() -> Iterator[int]:
    try:
        yield 1
        yield 2
        threading.Event().wait(0)
        while True:
            yield 3
    finally:
        the_stage().reached("objected")
        raise LookupError("objection")


# -- failures


async def fail_at(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        yield number
    raise LookupError("midway")


def fail_at_in_thread(stop: int) -> Iterator[int]:
    yield from range(stop)
    raise LookupError("midway")


@pytest.mark.parametrize("generator", [fail_at, fail_at_in_thread])
@pytest.mark.parametrize("stop", [0, 1, 16, 20])
async def test_an_error_comes_after_the_items_before_it(pair, generator, stop):
    stream = pair[0].stream("worker1", generator, args=(stop,))
    assert [await anext(stream) for _ in range(stop)] == list(range(stop))
    with pytest.raises(LookupError, match="midway") as caught:
        await anext(stream)
    assert caught.value.__cause__.worker == "worker1"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("name", ["give_lock", "give_lock_in_thread"])
async def test_an_item_that_cannot_be_sent(pair, name):
    stream = pair[0].stream("worker1", globals()[name])
    assert [await anext(stream), await anext(stream)] == [1, 2]
    with pytest.raises(SerializationError, match=rf"result of {name} \(lock\) cannot be sent"):
        await anext(stream)


async def give_lock() -> AsyncIterator[Any]:
    for item in (1, 2, threading.Lock(), 3):
        yield item


def give_lock_in_thread() -> Iterator[Any]:
    yield from (1, 2, threading.Lock(), 3)


async def test_wrong_arguments(pair):
    for generator in EVERY_GENERATOR:
        with pytest.raises(TypeError, match="argument"):
            await anext(pair[0].stream("worker1", generator, args=(1, 2, 3)))
    assert await pair[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"


async def test_its_deadline_ends_it(pair, stage):
    stream = pair[0].stream("worker1", held_after_one, timeout=0.1)
    assert await anext(stream) == 1
    with pytest.raises(RpcTimeoutError, match="held_after_one"):
        await anext(stream)
    await stage.wait_until("stopped")


async def test_a_lost_connection_ends_it(pair, stage):
    stream = pair[0].stream("worker1", held_after_one)
    assert await anext(stream) == 1
    await stage.wait_until("waiting")
    pair[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
    with pytest.raises(WorkerLostError, match="cut by the test"):
        await anext(stream)
    await stage.wait_until("stopped")


async def test_items_that_had_arrived_are_not_lost_with_the_connection(pair, stage):
    stream = pair[0].stream("worker1", watched, window=3)
    assert await anext(stream) == 0
    await stage.wait_until("made 2")
    await pair[0].rpc_sync("worker1", echo)
    pair[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
    await stage.wait_until("stopped")
    assert await anext(stream) == 1
    assert await anext(stream) == 2
    with pytest.raises(WorkerLostError):
        await anext(stream)


async def test_shutting_down_ends_it(stage):
    async with cluster(2, elastic=True) as group:
        stream = group[0].stream("worker1", held_after_one)
        assert await anext(stream) == 1
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError):
            await anext(stream)
        with pytest.raises(ShutdownError):
            group[0].stream("worker1", count_up, args=(1,))
        await stage.wait_until("stopped")
        await assert_nothing_left(group)


async def test_an_item_that_cannot_be_unpickled_ends_it(pair, stage):
    stream = pair[0].stream("worker1", give_what_nobody_can_take)
    assert await anext(stream) == 1
    with pytest.raises(SerializationError, match="cannot be unpacked"):
        await anext(stream)
    await stage.wait_until("stopped")


async def give_what_nobody_can_take() -> AsyncIterator[Any]:
    try:
        yield 1
        while True:
            yield Unreceivable()
    finally:
        the_stage().reached("stopped")


class Unreceivable:
    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise LookupError("not to be received")


async def test_two_tasks_cannot_wait_for_the_next_item(pair, stage):
    stream = pair[0].stream("worker1", held_after_one)
    assert await anext(stream) == 1
    first = asyncio.create_task(take_next(stream))
    await stage.wait_until("waiting")
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task is waiting"):
        await anext(stream)
    stage.open()
    assert await first == 2
    await stream.aclose()


async def take_next(stream: arpc.Stream[Any]) -> Any:
    return await anext(stream)


async def test_closing_it_wakes_who_waits(pair, stage):
    stream = pair[0].stream("worker1", held_after_one)
    assert await anext(stream) == 1
    first = asyncio.create_task(take_next(stream))
    await stage.wait_until("waiting")
    await asyncio.sleep(0)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await first
    await stage.wait_until("stopped")


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

    with pytest.raises(RuntimeError, match="event loop"):
        await asyncio.to_thread(start)


# -- the order


def test_steps_are_taken_in_order_whatever_order_they_come_in():
    taken: list[Any] = []
    order = ItemOrder(taken.append)
    order.item_arrived(2, "c")
    order.end_arrived(4, lambda: taken.append("end"))
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
