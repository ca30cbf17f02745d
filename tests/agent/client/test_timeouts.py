"""`Timeouts`: from the timeout of a call to the tick at which it expires, and the milliseconds the peer is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.agent.client.deadlines import NEVER, Deadlines, Timeouts, checked_timeout
from arpc.agent.client.pending_calls import SEQUENCE_BITS
from arpc.errors import RpcTimeoutError
from arpc.options import UNSET
from arpc.wire.frames import MAX_TIMEOUT_MS
from tests.agent.stage import echo

DEFAULT_S = 60.0


class Clock:
    """Timeouts, and the time by which they go."""

    def __init__(self, *, are_sent: bool = True) -> None:
        self.now = 1000.0
        deadlines: Any = Deadlines.__new__(Deadlines)
        deadlines.now = lambda: self.now
        self.timeouts = Timeouts(deadlines, DEFAULT_S, are_sent=are_sent)

    def left(self, timeout: Any = UNSET, inherited: float | None = None) -> tuple[float, int]:
        """How many seconds a call has, and the milliseconds that the peer is told."""
        tick, timeout_ms, _ = self.timeouts.within(inherited, timeout, echo)
        assert tick != NEVER
        return Deadlines.time_of(tick) - self.now, timeout_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_call_that_does_not_say_has_the_default(clock):
    left_s, timeout_ms = clock.left()
    assert DEFAULT_S <= left_s <= DEFAULT_S * 1.03
    assert timeout_ms == 60_000


def test_another_default_is_that_of_the_next_call(clock):
    clock.left()
    clock.timeouts.default_s = 10
    assert clock.left()[1] == 10_000
    clock.timeouts.default_s = 0
    assert clock.timeouts.deadline(UNSET)[:2] == (NEVER, 0)
    assert clock.timeouts.default_s == 0


@pytest.mark.parametrize("timeout", [-1, -0.001, nan])
def test_a_default_below_zero_is_refused(clock, timeout):
    with pytest.raises(ValueError, match=r"0 \(none\) or more seconds"):
        clock.timeouts.default_s = timeout
    assert clock.timeouts.default_s == DEFAULT_S


@pytest.mark.parametrize("timeout", [0, 0.0, False])
def test_zero_is_no_deadline(clock, timeout):
    assert clock.timeouts.deadline(timeout)[:2] == (NEVER, 0)


@pytest.mark.parametrize("timeout", [inf, 1e300, MAX_TIMEOUT_MS])
def test_more_than_a_message_can_say_is_the_most_it_can(clock, timeout):
    left_s, timeout_ms = clock.left(timeout)
    assert left_s >= MAX_TIMEOUT_MS / 1000
    assert timeout_ms == MAX_TIMEOUT_MS


def test_the_least_that_the_peer_is_told_is_a_millisecond(clock):
    left_s, timeout_ms = clock.left(1e-9)
    assert 0 < left_s < 0.01
    assert timeout_ms == 1


def test_timeouts_that_do_not_travel_are_kept_here():
    left_s, timeout_ms = Clock(are_sent=False).left(5)
    assert left_s >= 5
    assert timeout_ms == 0


@given(st.lists(st.tuples(st.floats(0.001, 100), st.sampled_from([0.01, 0.5, 5.0, 60.0, 3600.0])), max_size=40))
def test_no_call_has_less_time_than_it_says_whatever_is_remembered(calls):
    clock = Clock()
    for pause_s, timeout_s in calls:
        clock.now += pause_s
        left_s, timeout_ms = clock.left(timeout_s)
        assert timeout_s <= left_s <= timeout_s * (1 + 1 / 32) + 1 / 128
        assert timeout_ms == int(timeout_s * 1000)


def test_calls_of_about_the_same_time_share_a_tick(clock):
    ticks = {clock.timeouts.deadline(60)[0]}
    for _ in range(100):
        clock.now += 0.001
        ticks.add(clock.timeouts.deadline(60)[0])
    assert len(ticks) <= 2


def test_few_timeouts_are_remembered(clock):
    for number in range(1, 200):
        clock.left(float(number))
    assert len(clock.timeouts._kept) <= 17


# -- a handler's own deadline


def test_a_call_has_no_more_than_is_left_of_the_handlers_own(clock):
    for timeout in (UNSET, 60, 0, inf):
        left_s, timeout_ms = clock.left(timeout, inherited=clock.now + 5)
        assert 5 <= left_s < 5.1
        assert timeout_ms == 5000


def test_a_call_may_have_less(clock):
    assert clock.left(1, inherited=clock.now + 5)[1] == 1000


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_when_nothing_is_left_no_call_is_made(clock, late_s):
    with pytest.raises(RpcTimeoutError, match="no time is left to call echo") as caught:
        clock.timeouts.within(clock.now - late_s, UNSET, echo)
    assert not caught.value.may_have_run


def test_what_is_inherited_is_not_remembered_for_others(clock):
    clock.left(60, inherited=clock.now + 5)
    assert clock.left(60)[1] == 60_000


# -- what is no timeout


@pytest.fixture(params=[checked_timeout, "deadline"])
def check(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Any]:
    if request.param == "deadline":
        return clock.timeouts.deadline
    return request.param


@pytest.mark.parametrize("timeout", [-1, -1e-9, nan])
def test_a_timeout_below_zero_is_refused(check, timeout):
    with pytest.raises(ValueError, match=r"0 \(none\) or more seconds"):
        check(timeout)


@pytest.mark.parametrize("timeout", ["5", None, [5], 5j])
def test_what_is_no_number_is_refused(check, timeout):
    with pytest.raises(TypeError, match="a timeout is a number of seconds"):
        check(timeout)


# -- as a worker uses it


async def test_another_default_timeout_is_that_of_the_next_call_of_a_worker(pair):
    peer = pair[0].agent.known_peer("worker1")
    for default_s, has_deadline in ((60, True), (0, False), (30, True)):
        pair[0].agent.timeouts.default_s = default_s
        future = pair[0].rpc_async("worker1", echo)
        ((call_id, _),) = peer.calls
        assert bool(call_id >> SEQUENCE_BITS) is has_deadline
        await future
    await asyncio.sleep(0)
