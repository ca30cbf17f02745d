"""Streams give no more than was asked for, and have an end for every way out of the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import arpc
from arpc.errors import SerializationError, ShutdownError, WireError, WorkerLostError
from arpc.testing import cluster
from tests.agent.generators import (
    EVERY_GENERATOR,
    WATCHED,
    collect,
    count_up,
    held_after_one,
    made,
    watched,
)
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import echo, outlast, the_stage

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
    async def run_out(timeout_s: float) -> None:
        stream = pair[0].stream("worker1", held_after_one, timeout=timeout_s)
        assert await anext(stream) == 1
        stage.reached("one")
        await anext(stream)

    (await outlast("one", run_out)).match("held_after_one")
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
