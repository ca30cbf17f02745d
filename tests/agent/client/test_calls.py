"""Every call ends exactly once, whatever happens to it, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

import arpc
from arpc.errors import CallCancelledError, RpcTimeoutError, ShutdownError, WireError, WorkerLostError
from arpc.testing import Cluster, cluster
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import (
    Stage,
    call_on,
    echo,
    echo_in_thread,
    echo_inline,
    echo_later,
    hold,
    hold_in_thread,
    outlast,
    the_stage,
)


async def fail(text: str) -> None:
    raise LookupError(text)


class Endings:
    """Counts how often each future ends."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def watch(self, name: str, future: arpc.Future[Any]) -> arpc.Future[Any]:
        self.counts[name] = 0
        future.add_done_callback(lambda _: self.counts.update([name]))
        return future

    def assert_once(self) -> None:
        assert set(self.counts.values()) == {1}, self.counts


# -- the ways a call can end


@pytest.mark.parametrize("function", [echo, echo_later, echo_in_thread, echo_inline])
async def test_a_call_ends_with_its_value(pair, function):
    endings = Endings()
    future = endings.watch("value", pair[0].rpc_async("worker1", function, args=([1, "two", None],)))
    assert await future == [1, "two", None]
    assert await pair[0].rpc_sync("worker1", function, kwargs={"value": 3}) == 3
    assert await pair[0].rpc_sync("worker1", function) is None
    endings.assert_once()


async def test_a_call_ends_with_the_exception_of_its_function(pair):
    endings = Endings()
    future = endings.watch("raises", pair[0].rpc_async("worker1", fail, args=("why",)))
    with pytest.raises(LookupError, match="why"):
        await future
    endings.assert_once()


async def test_a_call_ends_with_its_timeout(pair, stage):
    endings = Endings()
    caught = await outlast(
        "held begun",
        lambda timeout_s: endings.watch(f"{timeout_s} s", pair[0].rpc_async("worker1", hold, timeout=timeout_s)),
    )
    caught.match("hold")
    await stage.wait_until("held cancelled")
    endings.assert_once()


async def test_a_reply_that_crosses_the_timeout_is_dropped(pair, stage):
    """The handler ends at its deadline by swallowing the cancellation and returning."""
    await outlast("begun", lambda timeout_s: pair[0].rpc_sync("worker1", swallow_cancellation, timeout=timeout_s))
    await stage.wait_until("swallowed")
    assert await pair[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"


async def swallow_cancellation() -> str:
    stage = the_stage()
    stage.reached("begun")
    try:
        await stage.pass_gate()
    except asyncio.CancelledError:
        stage.reached("swallowed")
    return "too late"


async def test_a_cut_connection_ends_every_call_on_it(pair, stage):
    endings = Endings()
    futures = {
        "coroutine": pair[0].rpc_async("worker1", hold, args=("coroutine",)),
        "thread": pair[0].rpc_async("worker1", hold_in_thread, args=("thread",)),
    }
    for name, future in futures.items():
        endings.watch(name, future)
    await stage.wait_until("coroutine begun", "thread begun")
    pair[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
    for future in futures.values():
        with pytest.raises(WorkerLostError, match=r"worker1.*cut by the test") as caught:
            await future
        assert caught.value.worker == "worker1"
        assert caught.value.may_have_run
    await stage.wait_until("coroutine cancelled")
    stage.open()
    await stage.wait_until("thread ended")
    endings.assert_once()
    # at most once: what was lost is not sent again, but new calls connect anew
    assert await pair[0].rpc_sync("worker1", echo, args=("again",)) == "again"
    assert stage.log.count("coroutine begun") == stage.log.count("thread begun") == 1
    assert pair[0].agent.peer("worker1").connects == 2


async def test_a_connection_cut_by_the_callee_ends_the_calls_of_both_sides(pair, stage):
    there = pair[0].rpc_async("worker1", hold, args=("there",))
    back = pair[1].rpc_async("worker0", hold, args=("back",))
    await stage.wait_until("there begun", "back begun")
    pair[1].agent.peer("worker0").connection.abort(WireError("cut by the test"))
    results = await asyncio.gather(there, back, return_exceptions=True)
    assert [type(result) for result in results] == [WorkerLostError, WorkerLostError]
    await stage.wait_until("there cancelled", "back cancelled")


async def test_calls_waiting_to_be_sent_survive_a_cut_and_run_once(stage):
    options = arpc.RpcOptions(window_bytes=64 << 10, gc_freeze=False)
    async with cluster(2, options=options) as group:
        first = group[0].rpc_async("worker1", hold, args=("first", b"x" * (60 << 10)))
        await stage.wait_until("first begun")
        second = group[0].rpc_async("worker1", hold, args=("second", b"y" * (60 << 10)))
        assert len(group[0].agent.peer("worker1").backlog) == 1
        group[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
        with pytest.raises(WorkerLostError):
            await first
        stage.open()
        assert await second == b"y" * (60 << 10)
        assert stage.log.count("second begun") == 1
        await assert_nothing_left(group)


async def test_a_call_to_a_worker_that_leaves_ends_at_once(stage):
    async with cluster(2, elastic=True) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        await group[1].shutdown(graceful=False)
        with pytest.raises((CallCancelledError, WorkerLostError), match="worker1"):
            await future
        with pytest.raises(WorkerLostError, match="has left") as caught:
            await group[0].rpc_sync("worker1", echo)
        assert not caught.value.may_have_run
        await assert_nothing_left(group)


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_shutting_down_ends_the_calls_under_way(stage, handler):
    async with cluster(2, elastic=True) as group:
        endings = Endings()
        sent = endings.watch("sent", group[0].rpc_async("worker1", handler))
        await stage.wait_until("held begun")
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError, match=r"before hold\w* ended"):
            await sent
        endings.assert_once()
        stage.open()
        await assert_nothing_left(group)


async def test_shutting_down_ends_a_call_that_waits_for_its_connection():
    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", echo)
        assert group[0].agent.peer("worker1").backlog
        await asyncio.gather(*(worker.shutdown(graceful=False) for worker in group))
        with pytest.raises(ShutdownError):
            await future
        await assert_nothing_left(group)


async def test_shutting_down_ends_a_call_whose_worker_is_being_looked_for():
    async with cluster(1, elastic=True) as group:
        future = group[0].rpc_async("unheard_of", echo)
        assert group[0].agent.caller.deferred
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError):
            await future
        await assert_nothing_left(group)


async def test_a_closing_worker_refuses_new_requests(stage):
    """One whose handler takes its time to end is still connected: what comes then is refused, and not left to hang."""
    async with cluster(2, elastic=True) as group:
        slow = group[0].rpc_async("worker1", end_slowly)
        await stage.wait_until("begun")
        shutdown = asyncio.create_task(group[1].shutdown(graceful=False))
        await stage.wait_until("cancelled")
        with pytest.raises(ShutdownError, match=r"worker1.*did not run echo"):
            await group[0].rpc_sync("worker1", echo)
        stage.open("end")
        await shutdown
        with pytest.raises(WorkerLostError, match="shut down while end_slowly ran"):
            await slow
        await assert_nothing_left(group)


async def end_slowly() -> None:
    stage = the_stage()
    stage.reached("begun")
    try:
        await stage.pass_gate()
    finally:
        stage.reached("cancelled")
        await stage.pass_gate("end")


def test_a_loop_that_closes_takes_its_calls_with_it(make_stage):
    """Tasks that await calls are cancelled, and so are handlers."""

    async def main() -> Stage:
        stage = make_stage()
        group = Cluster(arpc.RpcOptions(gc_freeze=False), None, elastic=False)
        await group.start(["worker0", "worker1"])
        left_to_the_loop.append(asyncio.create_task(group[0].rpc_sync("worker1", hold)))
        await stage.wait_until("held begun")
        return stage

    left_to_the_loop: list[asyncio.Task[Any]] = []
    with asyncio.Runner() as runner:
        stage = runner.run(main())
    assert left_to_the_loop[0].cancelled()
    assert stage.was_reached("held cancelled")


# -- many at once


def test_a_hundred_thousand_calls_in_flight_complete():
    async def main() -> None:
        async with cluster(2) as group:
            call = group[0].rpc_async
            futures = [call("worker1", echo, args=(number,)) for number in range(100_000)]
            assert len(group[0].agent.peer("worker1").calls) == 100_000
            assert await asyncio.gather(*futures) == list(range(100_000))
            await assert_nothing_left(group)

    gc.disable()  # it would look at all of them again and again
    try:
        # without the debug mode of the other tests, which makes this many times slower
        arpc.run(main, debug=False)
    finally:
        gc.enable()


async def test_calls_in_all_directions_at_once(trio):
    names = [worker.name for worker in trio]
    calls = {
        (caller.name, callee, number): caller.rpc_async(callee, function, args=((caller.name, callee, number),))
        for number, function in enumerate([echo, echo_later, echo_in_thread, echo_inline] * 5)
        for caller in trio
        for callee in names
    }
    assert {key: await future for key, future in calls.items()} == {key: key for key in calls}


async def test_nested_calls_reach_back_and_forth(trio):
    assert await trio[0].rpc_sync("worker1", call_on, args=("worker2", call_on, "worker0", echo, "deep")) == "deep"


async def test_a_call_that_ended_leaves_no_garbage(pair):
    """What it was called with is freed at once, without the help of the garbage collector."""
    value = Weighty()
    reference = weakref.ref(value)
    await pair[0].rpc_sync("worker1", keep_and_tell, args=(value,))
    gc.collect()
    gc.disable()
    try:
        await pair[0].rpc_sync("worker1", keep_and_tell, args=(value,))
        await asyncio.sleep(0)
        del value
        assert reference() is None
        assert seen[-1]() is None, "the callee still holds the argument of a call that has ended"
    finally:
        gc.enable()
        seen.clear()


@pytest.mark.parametrize("function", [echo, echo_later, echo_in_thread, echo_inline])
async def test_calls_leave_nothing_to_the_garbage_collector(pair, function):
    """No cycles: what a call needed is freed when it ends, and collections have nothing to find."""

    async def make_calls() -> None:
        for _ in range(20):
            await pair[0].rpc_sync("worker1", function, args=(1,))
            await pair[0].rpc_async("worker1", function, args=(1,))

    await make_calls()
    gc.collect()
    gc.disable()
    try:
        await make_calls()
        assert gc.collect() < 20
    finally:
        gc.enable()


async def test_a_call_that_timed_out_is_not_kept_until_the_next(pair, stage):
    future = pair[0].rpc_async("worker1", hold, timeout=0.01)
    reference = weakref.ref(future)
    with pytest.raises(RpcTimeoutError):
        await future
    del future
    await asyncio.sleep(0)
    gc.collect()
    assert reference() is None


class Weighty:
    """Something that can be watched."""


seen: list[weakref.ref[Weighty]] = []


async def keep_and_tell(value: Weighty) -> None:
    seen.append(weakref.ref(value))


# -- what a call may not look like


async def test_what_is_no_tuple_of_arguments_is_refused_every_time(pair):
    for _ in range(2):
        with pytest.raises(TypeError, match="write args="):
            await pair[0].rpc_sync("worker1", echo, args=torch.tensor(0))
        assert await pair[0].rpc_sync("worker1", echo) is None
        assert await pair[0].rpc_sync("worker1", echo, args=None) is None
