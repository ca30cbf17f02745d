"""Every call ends exactly once, whatever happens to it, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from operator import length_hint
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.client.pending_calls import LAST_NUMBER, Call, Calls
from arpc.agent.client.deadlines import NEVER, Deadlines
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


# -- the table


@pytest.fixture
def table():
    timed_out: list[int] = []
    with asyncio.Runner() as runner:
        deadlines = Deadlines(runner.get_loop())
        yield Calls(deadlines, lambda call_id, _: timed_out.append(call_id)), deadlines, timed_out
        deadlines.close()


@pytest.fixture
def a_call():
    with asyncio.Runner() as runner:
        yield Call(runner.get_loop().create_future(), echo, 10)


def test_ids_are_unique_and_found_again(table, a_call):
    calls, deadlines, _ = table
    tick = deadlines.tick(1.0, 5.0)
    ids = [calls.add(which, a_call) for which in (tick, tick, NEVER, NEVER, tick + 1)]
    assert len(set(ids)) == len(calls) == 5
    assert {call_id for call_id, _ in calls} == set(ids)
    for call_id in ids:
        assert calls.get(call_id) is a_call
        assert calls.pop(call_id) is a_call
        assert calls.get(call_id) is None
        assert calls.pop(call_id) is None
    assert len(calls) == 0


def test_an_id_still_in_use_is_not_given_out_again(table, a_call):
    calls, _, _ = table
    first = calls.add(NEVER, a_call)
    calls._numbers = iter([first, first, 7])
    assert calls.add(NEVER, a_call) == 7


def take_number(calls: Calls, tick: int, call: Call) -> int:
    """What the agent does for a call with nothing special about it."""
    call_id = calls.take_id(tick)
    assert call_id not in calls.bucket
    calls.bucket[call_id] = call
    return call_id


def leave_numbers(calls: Calls, left: int) -> None:
    """As if all but so many of the numbers of this round had been taken."""
    end = next(calls._ids) + 1 + length_hint(calls._ids)
    calls._ids = iter(range(end - left, end))
    calls.next_id = calls._ids.__next__


@pytest.mark.parametrize("tick", [NEVER, Deadlines.tick(1000.0, 86400.0)])
def test_numbers_that_run_out_begin_again_apart_from_those_in_use(table, a_call, tick):
    calls, _, timed_out = table
    waiting = [take_number(calls, tick, a_call) for _ in range(3)]
    for round_ in range(3):
        leave_numbers(calls, 2)
        waiting += [take_number(calls, tick, a_call) for _ in range(5)]
        assert len(set(waiting)) == len(calls) == 8 + 5 * round_
    assert calls.made == 3 * LAST_NUMBER + 3
    for call_id in waiting:
        assert calls.get(call_id) is a_call
    for expired in list(calls.buckets):
        calls.expire(expired)
    assert timed_out == waiting
    assert calls.tick == -1
    assert not calls.bucket


def test_ticks_that_take_turns_do_not_share_numbers_in_use(table, a_call):
    calls, deadlines, _ = table
    tick = deadlines.tick(1.0, 5.0)
    ids = [take_number(calls, which, a_call) for which in (NEVER, tick, NEVER)]
    leave_numbers(calls, 1)
    ids += [take_number(calls, which, a_call) for which in (tick, NEVER, tick, NEVER, tick)]
    assert len(set(ids)) == len(calls) == 8


async def test_calls_without_a_timeout_never_run_out_of_numbers(pair):
    await pair[0].rpc_sync("worker1", echo, timeout=0)
    calls = pair[0].agent.known_peer("worker1").calls
    leave_numbers(calls, 2)
    async with asyncio.timeout(30):  # the reply of one with a wrong id would find nobody
        for number in range(6):
            assert await pair[0].rpc_sync("worker1", echo, args=(number,), timeout=0) == number
    await assert_nothing_left(pair)


async def test_another_default_timeout_is_that_of_the_next_call(pair):
    await pair[0].rpc_sync("worker1", echo)
    calls = pair[0].agent.known_peer("worker1").calls
    before = calls.tick
    pair[0].agent.timeouts.default_s = 0
    await pair[0].rpc_sync("worker1", echo)
    assert before != NEVER
    assert calls.tick == NEVER


async def test_what_is_no_tuple_of_arguments_is_refused_every_time(pair):
    for _ in range(2):
        with pytest.raises(TypeError, match="write args="):
            await pair[0].rpc_sync("worker1", echo, args=torch.tensor(0))
        assert await pair[0].rpc_sync("worker1", echo) is None
        assert await pair[0].rpc_sync("worker1", echo, args=None) is None


def test_a_tick_that_expires_takes_its_calls_only(table, a_call):
    calls, deadlines, timed_out = table
    tick = deadlines.tick(1.0, 5.0)
    due = [calls.add(tick, a_call), calls.add(tick, a_call)]
    later = calls.add(tick + 1, a_call)
    never = calls.add(NEVER, a_call)
    calls.expire(tick)
    assert timed_out == due
    assert {call_id for call_id, _ in calls} == {later, never}


def test_a_call_is_named_after_its_function(a_call):
    assert a_call.name == "echo"
