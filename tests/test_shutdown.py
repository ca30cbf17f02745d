"""The end of a worker: graceful, at once, cancelled, and what it is good for afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

import arpc
from arpc.errors import (
    RendezvousTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, leftovers
from tests.agent.stage import (
    Stage,
    call_on,
    echo,
    echo_in_thread,
    hold,
    hold_in_thread,
    setting_stages,
    the_stage,
)

QUICK = RpcOptions(gc_freeze=False)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Where a test and its handlers meet."""
    with setting_stages() as set_stage:
        yield set_stage()


def is_closed(worker: arpc.Worker) -> bool:
    return worker.is_shut_down and not worker.agent.connector._links and not leftovers(worker)


# -- a graceful end


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_a_graceful_shutdown_waits_for_handlers(stage, handler):
    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", handler, args=("held", "value"))
        await stage.wait_until("held begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.1)
        assert not any(shutdown.done() for shutdown in shutdowns)
        assert not future.done()
        stage.open()
        assert await future == "value"
        await asyncio.gather(*shutdowns)
        assert all(map(is_closed, group))


async def test_a_graceful_shutdown_waits_for_the_work_of_the_whole_group(stage):
    """Worker 0 has nothing to do itself, but is called in the end by the handler that the others wait for."""
    async with cluster(3) as group:
        future = group[1].rpc_async("worker2", call_when_opened, args=("worker0",))
        await stage.wait_until("begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.1)
        assert not shutdowns[0].done()
        stage.open()
        assert await future == "from worker0"
        await asyncio.gather(*shutdowns)
        assert all(map(is_closed, group))


async def call_when_opened(to: str) -> str:
    stage = the_stage()
    stage.reached("begun")
    await stage.pass_gate()
    for _ in range(10):
        await arpc.rpc_sync(to, echo)
    return f"from {(await arpc.rpc_sync(to, whoami)).name}"


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def test_a_worker_serves_until_the_others_come():
    """As a parameter server does, that has nothing to do but to be called."""
    async with cluster(2) as group:
        server = asyncio.create_task(group[0].shutdown())
        for number in range(20):
            assert await group[1].rpc_sync("worker0", echo_in_thread, args=(number,)) == number
        assert not server.done()
        await group[1].shutdown()
        await server


async def test_a_graceful_shutdown_waits_for_streams(stage):
    async with cluster(2) as group:
        stream = group[0].stream("worker1", one_and_another)
        assert await anext(stream) == 1
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.05)
        assert not any(shutdown.done() for shutdown in shutdowns)
        stage.open()
        assert [item async for item in stream] == [2]
        await asyncio.gather(*shutdowns)


async def one_and_another():
    stage = the_stage()
    yield 1
    await stage.pass_gate()
    yield 2


async def test_time_may_run_out_before_all_have_come():
    async with cluster(2) as group:
        with pytest.raises(RendezvousTimeoutError, match="worker1"):
            await group[0].shutdown(timeout=0.1)
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


@pytest.mark.parametrize("elastic", [True, False])
async def test_time_may_run_out_with_calls_under_way(stage, elastic):
    async with cluster(2, elastic=elastic) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        with pytest.raises(RendezvousTimeoutError, match=r"calls under way.*within 0\.1 s"):
            await group[0].shutdown(timeout=0.1)
        with pytest.raises(ShutdownError):
            await future
        assert is_closed(group[0])
        await stage.wait_until("held cancelled")
        await group[1].shutdown(graceful=False)


async def test_the_options_say_how_long_at_most():
    async with cluster(2, options=RpcOptions(shutdown_timeout=0.1, gc_freeze=False)) as group:
        with pytest.raises(RendezvousTimeoutError):
            await group[0].shutdown()
        await group[1].shutdown(graceful=False)


@pytest.mark.parametrize("group_hears_first", [False, True])
async def test_a_worker_that_was_lost_is_not_waited_for(monkeypatch, group_hears_first):
    """Whoever finds out tells the group, and says who it was, whichever of the two happens first."""
    options = RpcOptions(heartbeat_interval=0.1, heartbeat_timeout=0.5, gc_freeze=False)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", echo)
        await group[1].shutdown(graceful=False)
        fail_gather = group[0].rendezvous.fail_gather

        async def fail_gather_and_wait(text: str) -> None:
            await fail_gather(text)
            if group_hears_first:
                await asyncio.Event().wait()

        monkeypatch.setattr(group[0].rendezvous, "fail_gather", fail_gather_and_wait)
        with pytest.raises(WorkerLostError, match=r"worker 'worker1' was lost.*gracefully") as caught:
            await group[0].shutdown()
        assert caught.value.worker == "worker1"
        assert is_closed(group[0])


# -- an end at once


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_an_end_at_once_waits_for_no_handler(stage, handler):
    async with cluster(2, elastic=True) as group:
        future = group[0].rpc_async("worker1", handler)
        await stage.wait_until("held begun")
        begin = time.monotonic()
        await group[1].shutdown(graceful=False)
        assert time.monotonic() - begin < 20
        assert is_closed(group[1]) or handler is hold_in_thread
        with pytest.raises(WorkerLostError, match="'worker1' has left"):
            await future
        stage.open()
        await assert_nothing_left(group)


async def test_an_end_at_once_gives_up_on_a_handler_that_goes_on(stage, monkeypatch):
    monkeypatch.setattr("arpc.agent.server.eager_tasks._CLOSE_S", 0.05)
    async with cluster(2, elastic=True) as group:
        future = group[0].rpc_async("worker1", refuse_to_end)
        await stage.wait_until("begun")
        begin = time.monotonic()
        await group[1].shutdown(graceful=False)
        assert time.monotonic() - begin < 20
        with pytest.raises(WorkerLostError, match="has left"):
            await future
        stage.open()
        await stage.wait_until("ended")
        await assert_nothing_left(group)


async def refuse_to_end() -> None:
    stage = the_stage()
    stage.reached("begun")
    while True:
        try:
            await stage.pass_gate()
        except asyncio.CancelledError:
            continue
        stage.reached("ended")
        return


async def test_an_end_at_once_before_anything_was_done():
    async with cluster(3) as group:
        await asyncio.gather(*(worker.shutdown(graceful=False) for worker in group))
        assert all(map(is_closed, group))


async def test_requests_that_wait_do_not_begin_in_the_end(stage):
    async with cluster(2, options=RpcOptions(max_handlers_per_peer=1, gc_freeze=False), elastic=True) as group:
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(3)]
        await stage.wait_until("n0 begun")
        await group[1].shutdown(graceful=False)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, arpc.CallCancelledError | WorkerLostError) for result in results)
        assert not stage.was_reached("n1 begun")
        await assert_nothing_left(group)


# -- twice, and cancelled


async def test_a_second_shutdown_waits_for_the_first(stage):
    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in [*group, *group]]
        await asyncio.wait(shutdowns, timeout=0.05)
        assert not any(shutdown.done() for shutdown in shutdowns)
        stage.open()
        await asyncio.gather(future, *shutdowns)
        await group[0].shutdown()
        await group[0].shutdown(graceful=False)


async def test_one_at_once_makes_the_first_stop_waiting():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        await asyncio.wait([first], timeout=0.05)
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError, match="shut down without the group"):
            await first
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


async def test_a_cancelled_shutdown_closes_all_the_same():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        second = asyncio.create_task(group[0].shutdown())
        await asyncio.wait([first], timeout=0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert is_closed(group[0])
        with pytest.raises(ShutdownError, match="waiting for it was cancelled"):
            await second
        await group[1].shutdown(graceful=False)


async def test_a_shutdown_cancelled_in_its_first_step_closes_all_the_same():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


async def test_a_shutdown_under_a_timeout():
    async with cluster(2) as group:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await group[0].shutdown()
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


# -- afterwards


async def test_a_worker_that_was_shut_down_takes_no_calls():
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        await asyncio.gather(*(worker.shutdown() for worker in group))
        for to in ("worker0", "worker1", 1):
            with pytest.raises(ShutdownError, match="worker0"):
                await group[0].rpc_sync(to, echo)
            with pytest.raises(ShutdownError, match="worker0"):
                group[0].rpc_async(to, echo)
            with pytest.raises(ShutdownError, match="worker0"):
                group[0].stream(to, echo)
        future = await asyncio.to_thread(group[0].rpc_async, "worker1", echo)
        with pytest.raises(ShutdownError):
            await future
        assert group[0].statistics()["connector"]["connections"] == 0
        assert "worker0" in repr(group[0])


async def test_nothing_of_a_worker_is_left_on_its_loop():
    before = asyncio.all_tasks()
    async with cluster(3) as group:
        await group[0].rpc_sync("worker1", call_on, args=("worker2", echo_in_thread, 1))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert all(map(is_closed, group))
