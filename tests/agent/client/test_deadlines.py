"""Deadlines: how they travel, how they are inherited, and that any number of them takes one timer."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arpc
from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.loop_watch import LoopWatch
from arpc.errors import RpcTimeoutError
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import call_on, echo, hold, hold_in_thread, outlast, the_stage

ROUNDING_S = 1e-6
"""What is left of a time that was added to a clock and taken from it again may be a little more than that time."""

# -- what a handler sees


async def remaining() -> float | None:
    return arpc.remaining_time()


def remaining_in_thread() -> float | None:
    return arpc.remaining_time()


@arpc.inline
def remaining_inline() -> float | None:
    return arpc.remaining_time()


async def stream_remaining():
    yield arpc.remaining_time()


@pytest.mark.parametrize("function", [remaining, remaining_in_thread, remaining_inline])
async def test_a_handler_sees_the_time_its_caller_has_left(pair, function):
    assert 40 < await pair[0].rpc_sync("worker1", function, timeout=50) <= 50 + ROUNDING_S
    assert await pair[0].rpc_sync("worker1", function, timeout=0) is None
    assert 50 < await pair[0].rpc_sync("worker1", function) <= 60 + ROUNDING_S, "the default"


async def test_a_stream_has_a_deadline_too(pair):
    items = [item async for item in pair[0].stream("worker1", stream_remaining, timeout=50)]
    assert 40 < items[0] <= 50 + ROUNDING_S


async def test_the_default_comes_from_the_options():
    async with cluster(2, options=arpc.RpcOptions(rpc_timeout=30, gc_freeze=False)) as group:
        assert 20 < await group[0].rpc_sync("worker1", remaining) <= 30 + ROUNDING_S
    async with cluster(2, options=arpc.RpcOptions(rpc_timeout=0, gc_freeze=False)) as group:
        assert await group[0].rpc_sync("worker1", remaining) is None
        assert 20 < await group[0].rpc_sync("worker1", remaining, timeout=30) <= 30 + ROUNDING_S


async def test_outside_of_handlers_there_is_no_deadline(pair):
    assert arpc.remaining_time() is None


# -- inheritance


async def nested_remaining(to: str, timeout: Any = arpc.UNSET) -> float | None:
    return await arpc.rpc_sync(to, remaining, timeout=timeout)


def nested_remaining_from_thread(to: str) -> float | None:
    return arpc.rpc_async(to, remaining).wait()


async def nested_remaining_from_task(to: str) -> float | None:
    return await asyncio.create_task(nested_remaining(to))


@pytest.mark.parametrize("function", [nested_remaining, nested_remaining_from_thread, nested_remaining_from_task])
async def test_calls_inside_a_handler_inherit_what_is_left(trio, function):
    assert 40 < await trio[0].rpc_sync("worker1", function, args=("worker2",), timeout=50) <= 50 + ROUNDING_S


async def test_no_call_outlasts_the_callers_own_deadline(trio):
    left = await trio[0].rpc_sync("worker1", nested_remaining, args=("worker2", 1000), timeout=50)
    assert 40 < left <= 50 + ROUNDING_S
    left = await trio[0].rpc_sync("worker1", nested_remaining, args=("worker2", 0), timeout=50)
    assert 40 < left <= 50 + ROUNDING_S, "no timeout of its own does not mean none"


async def test_a_nested_call_may_have_less(trio):
    left = await trio[0].rpc_sync("worker1", nested_remaining, args=("worker2", 20), timeout=50)
    assert 10 < left <= 20 + ROUNDING_S


async def test_without_a_deadline_nothing_is_inherited(trio):
    assert await trio[0].rpc_sync("worker1", nested_remaining, args=("worker2", 0), timeout=0) is None
    left = await trio[0].rpc_sync("worker1", nested_remaining, args=("worker2",), timeout=0)
    assert 50 < left <= 60 + ROUNDING_S, "the default holds, as it does for any call"


async def test_nothing_is_sent_when_no_time_is_left(trio, stage):
    before = trio[2].agent.dispatcher.calls_handled
    await outlast(
        "too late", lambda timeout_s: trio[0].rpc_sync("worker1", call_too_late, args=("worker2",), timeout=timeout_s)
    )
    left, text = seen_too_late.pop()
    assert left == 0.0
    assert "no time is left to call echo" in text
    assert trio[2].agent.dispatcher.calls_handled == before


seen_too_late: list[tuple[float | None, str]] = []


async def call_too_late(to: str) -> None:
    while arpc.remaining_time():
        time.sleep(0.005)  # keeps the loop busy, so that nobody can cancel this
    try:
        await arpc.rpc_sync(to, echo)
    except RpcTimeoutError as error:
        seen_too_late.append((arpc.remaining_time(), str(error)))
        the_stage().reached("too late")
        raise


# -- at the deadline


async def test_the_coroutine_of_the_callee_is_cancelled(pair, stage):
    caught = await outlast("held begun", lambda timeout_s: pair[0].rpc_sync("worker1", hold, timeout=timeout_s))
    caught.match(r"hold.*worker1")
    assert isinstance(caught.value, TimeoutError)
    await stage.wait_until("held cancelled")


async def test_a_callee_that_notices_first_says_so(pair, stage):
    """The caller's own timer is held back: the answer is that of the callee."""
    pair[0].agent.deadlines._fire = lambda: None
    caught = await outlast("held begun", lambda timeout_s: pair[0].rpc_sync("worker1", hold, timeout=timeout_s))
    caught.match(r"hold on worker 'worker1' ran past its deadline")
    assert isinstance(caught.value.__cause__, arpc.RemoteTraceback)
    assert "pass_gate" in caught.value.__cause__.stack
    await stage.wait_until("held cancelled")


async def test_the_innermost_of_nested_calls_is_cancelled(trio, stage):
    args = ("worker2", hold, "innermost")
    await outlast(
        "innermost begun", lambda timeout_s: trio[0].rpc_sync("worker1", call_on, args=args, timeout=timeout_s)
    )
    await stage.wait_until("innermost cancelled")


async def test_a_function_in_a_thread_is_answered_for(pair, stage):
    await outlast("held begun", lambda timeout_s: pair[0].rpc_sync("worker1", hold_in_thread, timeout=timeout_s))
    stage.open()
    await stage.wait_until("held ended")


async def test_a_call_that_never_got_away_says_so(stage):
    options = arpc.RpcOptions(window_bytes=64 << 10, gc_freeze=False)
    async with cluster(2, options=options) as group:
        first = group[0].rpc_async("worker1", hold, args=("first", b"1" * (60 << 10)))
        await stage.wait_until("first begun")
        with pytest.raises(RpcTimeoutError, match="could not be sent"):
            await group[0].rpc_sync("worker1", hold, args=("second", b"2" * (60 << 10)), timeout=0.1)
        stage.open()
        await first
        assert not stage.was_reached("second begun")
        await assert_nothing_left(group)


async def test_a_short_timeout_is_no_shorter_than_it_says(pair, stage):
    begin = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        await pair[0].rpc_sync("worker1", hold, timeout=0.1)
    assert time.monotonic() - begin >= 0.099


@pytest.mark.parametrize("timeout", [-1, -0.001, -math.inf, math.nan])
async def test_a_timeout_below_zero_is_an_error(pair, timeout):
    with pytest.raises(ValueError, match="timeout is 0"):
        pair[0].rpc_async("worker1", echo, timeout=timeout)
    with pytest.raises(ValueError, match="timeout is 0"):
        await pair[0].rpc_sync("worker1", echo, timeout=timeout)
    with pytest.raises(ValueError, match="timeout is 0"):
        pair[0].stream("worker1", echo, timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e9])
async def test_a_timeout_beyond_all_measure_is_as_good_as_none(pair, timeout):
    assert await pair[0].rpc_sync("worker1", remaining, timeout=timeout) > 1e6
    assert await pair[0].rpc_sync("worker1", nested_remaining, args=("worker0", timeout), timeout=timeout) > 1e6


async def test_an_endless_default_timeout():
    async with cluster(2, options=arpc.RpcOptions(rpc_timeout=math.inf, gc_freeze=False)) as group:
        assert await group[0].rpc_sync("worker1", remaining) > 1e6


# -- one timer


def test_ten_thousand_calls_take_one_timer(make_stage):
    def timers(loop: Any) -> int:
        # without that of the loop's watch, which is not there while it is due
        alive = [handle for handle in loop._scheduled if not handle.cancelled()]
        return sum(not isinstance(getattr(handle._callback, "__self__", None), LoopWatch) for handle in alive)

    async def main() -> None:
        stage = make_stage()
        loop = asyncio.get_running_loop()
        async with cluster(2, options=arpc.RpcOptions(heartbeat_interval=0, gc_freeze=False)) as group:
            await group[0].rpc_sync("worker1", echo, timeout=0)
            before = timers(loop)
            call = group[0].rpc_async
            futures = [call("worker1", hold, args=(str(number),), timeout=30) for number in range(10_000)]
            await stage.wait_until("9999 begun")
            assert len(group[0].agent.peer("worker1").calls) == 10_000
            assert timers(loop) == before + len(group), "one each for the caller and the callee"
            stage.open()
            await asyncio.gather(*futures)
            await assert_nothing_left(group)

    # asyncio's own loop, which lets its timers be counted, and without its debug mode, to be quick
    with asyncio.Runner(debug=False, loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


# -- the ticks


@given(now=st.floats(0, 1e7), timeout_s=st.floats(0, 1e6))
def test_a_tick_is_never_early_and_hardly_late(now, timeout_s):
    due = now + timeout_s
    at = Deadlines.time_of(Deadlines.tick(now, timeout_s))
    assert Deadlines.tick(now, timeout_s) != NEVER
    assert due < at or math.isclose(due, at)
    assert at - due <= timeout_s / 32 + 1 / 64


class Bucket:
    """Remembers the ticks it was told of."""

    def __init__(self) -> None:
        self.expired: list[int] = []
        self.told = asyncio.Event()

    def expire(self, tick: int) -> None:
        self.expired.append(tick)
        self.told.set()


async def test_ticks_come_in_order_to_all_who_watch():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    early, late = Bucket(), Bucket()
    ticks = sorted({deadlines.tick(loop.time(), delay_s) for delay_s in (0.02, 0.04, 0.06)})
    for tick in reversed(ticks):
        deadlines.watch(tick, early)
    deadlines.watch(ticks[-1], late)
    await asyncio.wait_for(late.told.wait(), 30)
    assert early.expired == ticks
    assert late.expired == [ticks[-1]]
    assert deadlines.statistics() == {"ticks_watched": 0}
    assert loop.time() >= deadlines.time_of(ticks[-1])


async def test_a_tick_may_be_watched_while_another_expires():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    second = Bucket()

    class Chained(Bucket):
        def expire(self, tick: int) -> None:
            deadlines.watch(deadlines.tick(loop.time(), 0.01), second)

    deadlines.watch(deadlines.tick(loop.time(), 0.01), Chained())
    await asyncio.wait_for(second.told.wait(), 30)
    deadlines.close()


async def test_closing_forgets_them_all():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    bucket, witness = Bucket(), asyncio.Event()
    deadlines.watch(deadlines.tick(loop.time(), 0.01), bucket)
    deadlines.close()
    loop.call_later(0.05, witness.set)
    await witness.wait()
    assert bucket.expired == []
    assert deadlines.statistics() == {"ticks_watched": 0}
