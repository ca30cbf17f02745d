"""Small calls while many large results wait to be taken: none waits for those."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.server.functions import ResultSizes
from arpc.testing import Cluster, cluster
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.shared_memory import BusySharedMemory
from tests.agent.stage import echo, echo_in_thread, hold_in_thread

LARGE_BYTES = 1 << 17
CALLS = 200
THREADS = 4
OPTIONS = arpc.RpcOptions(gc_freeze=False, num_worker_threads=THREADS)
begun: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def none_has_begun() -> None:
    begun.clear()


def make_large() -> torch.Tensor:
    begun["large"] += 1
    return torch.ones(LARGE_BYTES, dtype=torch.uint8)


async def make_large_on_the_loop() -> torch.Tensor:
    return make_large()


@arpc.inline
def make_large_inline() -> torch.Tensor:
    return make_large()


def make_large_bytes() -> bytes:
    begun["large"] += 1
    return bytes(LARGE_BYTES)


def count_up() -> Iterator[int]:
    yield from range(3)


async def count_up_on_the_loop() -> AsyncIterator[int]:
    for number in range(3):
        yield number


class Store:
    """An object with methods of all kinds."""

    def large(self) -> torch.Tensor:
        return make_large()

    async def large_on_the_loop(self) -> torch.Tensor:
        return make_large()

    def small(self) -> int:
        return 1

    async def small_on_the_loop(self) -> int:
        return 1


def link_of(group: Cluster) -> Any:
    """What worker1 keeps of its connection to worker0."""
    (link,) = [link for link in group[1].agent.connector.links if link.peer.info.name == "worker0"]
    return link


async def make_small_calls(group: Cluster, store: Any) -> None:
    """One call of each kind."""
    worker = group[0]
    assert await worker.rpc_sync("worker1", echo_in_thread, args=(1,)) == 1
    assert await worker.rpc_sync("worker1", echo, args=(2,)) == 2
    assert await worker.rpc_sync("worker1", lambda: 3) == 3
    assert await store.rpc_async().small() == 1
    assert await store.rpc_async().small_on_the_loop() == 1
    tensor = torch.arange(4096)
    assert torch.equal(await worker.rpc_sync("worker1", echo_in_thread, args=(tensor,)), tensor)
    assert [item async for item in worker.stream("worker1", count_up)] == [0, 1, 2]
    assert [item async for item in worker.stream("worker1", count_up_on_the_loop)] == [0, 1, 2]


LARGE_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "def": lambda worker, _: worker.rpc_async("worker1", make_large, timeout=0),
    "async def": lambda worker, _: worker.rpc_async("worker1", make_large_on_the_loop, timeout=0),
    "inline": lambda worker, _: worker.rpc_async("worker1", make_large_inline, timeout=0),
    "pickle": lambda worker, _: worker.rpc_async("worker1", make_large_bytes, timeout=0),
    "method": lambda _, store: store.rpc_async(timeout=0).large(),
    "async method": lambda _, store: store.rpc_async(timeout=0).large_on_the_loop(),
}


KINDS_AND_KNOWN = [
    # where first steps are not taken at once, all of one read are before the first result is there
    pytest.param(kind, known, marks=[pytest.mark.private_apis] if (kind, known) == ("async def", False) else [])
    for kind in LARGE_CALLS
    for known in (True, False)
]


@pytest.mark.parametrize(("kind", "is_known"), KINDS_AND_KNOWN)
async def test_small_calls_end_while_large_results_wait(kind, is_known):
    async with cluster(2, options=OPTIONS) as group:
        store = group[0].remote("worker1", Store)
        await make_small_calls(group, store)
        call = LARGE_CALLS[kind]
        if is_known:
            await call(group[0], store)
        begun.clear()
        shared_memory = BusySharedMemory(link_of(group).connection)
        large = [call(group[0], store) for _ in range(CALLS)]
        await make_small_calls(group, store)
        pending = sum(not each.done() for each in large)
        # Until the first result is there nobody knows that it is large. Threads are not far ahead of the loop then.
        assert pending >= (CALLS if is_known else CALLS - 4 * THREADS)
        assert begun["large"] <= (0 if is_known else 4 * THREADS)
        shared_memory.catch_up()
        for each in large:
            assert len(await each) == LARGE_BYTES
        await assert_nothing_left(group)
        assert not link_of(group).queue.is_waited_for


@pytest.mark.parametrize("kind", ["def", "async def", "method", "async method"])
async def test_results_that_wait_to_be_taken_are_bounded(kind):
    """A caller that does not read has no more made for it than its window, and what threads are at."""
    window_bytes = 8 * LARGE_BYTES
    async with cluster(2, options=OPTIONS.replace(window_bytes=window_bytes)) as group:
        store = group[0].remote("worker1", Store)
        await LARGE_CALLS[kind](group[0], store)
        begun.clear()
        connection = link_of(group).connection
        reader = group[0].agent.peer("worker1").connection
        deliver, reader._deliver = reader._deliver, lambda: None
        large = [LARGE_CALLS[kind](group[0], store) for _ in range(CALLS)]
        await until(lambda: connection.held_bytes + LARGE_BYTES > window_bytes)
        for _ in range(100):
            await asyncio.sleep(0)
        assert begun["large"] <= 8 + THREADS
        reader._deliver = deliver
        reader._delivery = None
        reader._schedule()
        for each in large:
            assert len(await each) == LARGE_BYTES
        assert begun["large"] == CALLS
        await assert_nothing_left(group)


met: list[asyncio.Event] = []


async def meet_all() -> torch.Tensor:
    begun["met"] += 1
    if begun["met"] == 50:
        met[0].set()
    await met[0].wait()
    return make_large()


async def test_handlers_with_large_results_can_wait_for_each_other():
    met[:] = [asyncio.Event()]
    async with cluster(2, options=OPTIONS.replace(window_bytes=2 * LARGE_BYTES)) as group:
        for _ in range(2):  # the second time it is known how large they are
            begun.clear()
            met[0].clear()
            for result in await asyncio.gather(*(group[0].rpc_async("worker1", meet_all) for _ in range(50))):
                assert len(result) == LARGE_BYTES
        await assert_nothing_left(group)


@pytest.mark.parametrize("kind", LARGE_CALLS)
async def test_what_waits_for_room_can_be_cancelled(kind):
    async with cluster(2, options=OPTIONS) as group:
        store = group[0].remote("worker1", Store)
        await LARGE_CALLS[kind](group[0], store)
        begun.clear()
        shared_memory = BusySharedMemory(link_of(group).connection)
        large = [LARGE_CALLS[kind](group[0], store) for _ in range(20)]
        inbound = link_of(group)
        await until(lambda: bool(inbound.queue and inbound.queue.is_waited_for))
        await group[0].rpc_sync("worker1", echo)
        for each in large[::2]:
            each.cancel()
        await group[0].rpc_sync("worker1", echo)
        shared_memory.catch_up()
        for each in large[1::2]:
            assert len(await each) == LARGE_BYTES
        assert begun["large"] == 10
        # and there is room for others
        for each in [LARGE_CALLS[kind](group[0], store) for _ in range(2 * THREADS)]:
            assert len(await each) == LARGE_BYTES
        await assert_nothing_left(group)


async def test_what_waits_for_room_ends_with_its_deadline():
    async with cluster(2, options=OPTIONS) as group:
        await group[0].rpc_sync("worker1", make_large)
        shared_memory = BusySharedMemory(link_of(group).connection)
        late = group[0].rpc_async("worker1", make_large, timeout=0.1)
        with pytest.raises(arpc.RpcTimeoutError):
            await late
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1
        shared_memory.catch_up()
        assert len(await group[0].rpc_sync("worker1", make_large)) == LARGE_BYTES
        await assert_nothing_left(group)


async def test_a_connection_that_is_lost_takes_what_waits_with_it():
    async with cluster(2, options=OPTIONS) as group:
        await group[0].rpc_sync("worker1", make_large)
        connection = link_of(group).connection
        BusySharedMemory(connection)
        begun.clear()
        large = [group[0].rpc_async("worker1", make_large) for _ in range(20)]
        await group[0].rpc_sync("worker1", echo)
        connection.abort()
        for each in large:
            with pytest.raises(arpc.WorkerLostError):
                await each
        assert not begun["large"]
        assert len(await group[0].rpc_sync("worker1", make_large)) == LARGE_BYTES
        await assert_nothing_left(group)


# -- what is expected of a function


def test_a_large_result_counts_at_once_and_small_ones_in_the_long_run():
    results = ResultSizes()
    results.saw(100)
    assert not results.are_large
    results.saw(4 << 20)
    assert results.are_large
    results.saw(8 << 20)
    assert results.expected_bytes == 8 << 20
    results.saw(0)
    assert results.are_large
    for _ in range(100):
        results.saw(0)
    assert not results.are_large
    for _ in range(1000):
        results.saw(10)
    assert results.expected_bytes <= 10


@pytest.mark.parametrize("function", [make_large, make_large_on_the_loop])
async def test_a_thread_answers_just_when_a_request_finds_that_too_many_run(stage, function):
    """The thread has looked whether any wait before this one counts as waiting, so it wakes nobody."""
    options = OPTIONS.replace(max_handlers_per_peer=1, heartbeat_interval=0)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", function)
        held = group[0].rpc_async("worker1", hold_in_thread)
        await stage.wait_until("held begun")
        link = link_of(group)
        queue = group[1].agent.dispatcher.queue_of(link)
        wait_for_handler = queue._wait_for_handler

        def wait_after_answer(call_id: int) -> None:
            for run in list(link.running.values()):
                assert link.claim(run)  # what the thread does
            wait_for_handler(call_id)

        queue._wait_for_handler = wait_after_answer
        async with asyncio.timeout(5):
            assert (await group[0].rpc_async("worker1", function)).nbytes == LARGE_BYTES
        stage.open()
        await held
        await assert_nothing_left(group)
