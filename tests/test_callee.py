"""`arpc.on`: the calls of the other form, with arguments in the place where calls have them."""

from __future__ import annotations

import asyncio

import pytest

import arpc
from arpc.testing import Cluster, cluster


def add(number: int, *, step: int = 1) -> int:
    return number + step


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def numbers(count: int):
    yield from range(count)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.total = start


@pytest.fixture
async def group():
    async with cluster(2) as workers:
        yield workers


async def test_every_verb_takes_arguments_as_a_call_does(group: Cluster) -> None:
    there = arpc.on("worker1")
    assert await there.rpc_sync(add, 1, step=2) == 3
    assert await there.rpc_async(add, number=1) == 2
    assert (await there.remote(Counter, start=3)).total == 3
    assert [number async for number in there.stream(numbers, 3)] == [0, 1, 2]


async def test_it_belongs_to_the_worker_that_made_it(group: Cluster) -> None:
    other = group[1].on("worker0")
    assert await other.rpc_sync(arpc.get_worker_info) == group[0].info
    assert repr(other) == "<arpc.on('worker0') of worker 'worker1'>"


async def test_its_timeout_is_that_of_each_call(group: Cluster) -> None:
    there = arpc.on("worker1", timeout=0.05)
    with pytest.raises(arpc.RpcTimeoutError):
        await there.rpc_sync(wait_for_ever)
    with pytest.raises(arpc.RpcTimeoutError):
        await there.rpc_async(wait_for_ever)
    rref = there.remote(wait_for_ever)
    with pytest.raises(arpc.RRefCreationError):
        await rref


async def test_a_future_says_where_the_call_was_made(group: Cluster) -> None:
    future = arpc.on("worker1").rpc_async(add, 1)
    assert "test_callee.py" in repr(future)
    await future


async def test_the_window_is_that_of_streams(group: Cluster) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        arpc.on("worker1", window=0).stream(numbers, 3)


async def test_there_must_be_a_worker() -> None:
    with pytest.raises(arpc.NotInitializedError):
        arpc.on("worker1")
