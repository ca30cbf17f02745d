"""The table of pending calls: ids that are unique, calls that are found again, and calls that expire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.pending_calls import SEQUENCE_BITS, Call, PendingCalls
from arpc.options import UNSET
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import echo

LAST_NUMBER = (1 << SEQUENCE_BITS) - 1
TICK = Deadlines.tick(1000.0, 86400.0)


class Table:
    """A table, and a log of the calls that have expired."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.log: list[int] = []
        self.deadlines = Deadlines(loop)
        self.calls = PendingCalls(self.deadlines, self.log.extend)


@pytest.fixture
def table() -> Iterator[Table]:
    with asyncio.Runner() as runner:
        made = Table(runner.get_loop())
        yield made
        made.deadlines.close()


@pytest.fixture
def a_call() -> Iterator[Call]:
    with asyncio.Runner() as runner:
        yield make_call(runner.get_loop())


def make_call(loop: asyncio.AbstractEventLoop) -> Call:
    return Call(None, loop.create_future(), echo, size_bytes=10, function_id=1)


def leave_numbers(calls: PendingCalls, left: int) -> None:
    """As if all but so many of the numbers of this round had been taken."""
    calls.made = LAST_NUMBER - left


def test_ids_are_unique_and_found_again(table, a_call):
    calls = table.calls
    ids = [calls.add(which, a_call) for which in (TICK, TICK, NEVER, NEVER, TICK + 1)]
    assert len(set(ids)) == len(calls) == 5
    assert {call_id for call_id, _ in calls} == set(ids)
    for call_id in ids:
        assert calls.get(call_id) is a_call
        assert calls.pop(call_id) is a_call
        assert calls.get(call_id) is None
        assert calls.pop(call_id) is None
    assert len(calls) == 0
    assert calls.made == 5


def test_an_id_names_the_tick_of_its_deadline(table, a_call):
    assert table.calls.add(TICK, a_call) >> SEQUENCE_BITS == TICK
    assert table.calls.add(NEVER, a_call) >> SEQUENCE_BITS == NEVER


def test_an_id_still_in_use_is_not_given_out_again(table, a_call):
    calls = table.calls
    first = calls.add(NEVER, a_call)
    calls.made = first - 1
    assert calls.add(NEVER, a_call) == first + 1


@pytest.mark.parametrize("tick", [NEVER, TICK])
def test_numbers_that_wrap_around_pass_over_those_in_use(table, a_call, tick):
    calls = table.calls
    waiting = [calls.add(tick, a_call) for _ in range(3)]
    for round_ in range(3):
        leave_numbers(calls, 2)
        waiting += [calls.add(tick, a_call) for _ in range(5)]
        assert len(set(waiting)) == len(calls) == 8 + 5 * round_
        assert {call_id >> SEQUENCE_BITS for call_id in waiting} == {tick}
    for call_id in waiting:
        assert calls.get(call_id) is a_call
    calls.expire(tick)
    assert table.log == waiting
    assert len(calls) == 0


def test_ticks_that_take_turns_do_not_share_ids_in_use(table, a_call):
    calls = table.calls
    ids = [calls.add(which, a_call) for which in (NEVER, TICK, NEVER)]
    leave_numbers(calls, 1)
    ids += [calls.add(which, a_call) for which in (TICK, NEVER, TICK, NEVER, TICK)]
    assert len(set(ids)) == len(calls) == 8


def test_a_tick_that_expires_takes_its_calls_only(table, a_call):
    calls = table.calls
    due = [calls.add(TICK, a_call), calls.add(TICK, a_call)]
    later = calls.add(TICK + 1, a_call)
    never = calls.add(NEVER, a_call)
    calls.expire(TICK)
    assert table.log == due
    assert {call_id for call_id, _ in calls} == {later, never}


def test_a_call_that_has_ended_does_not_expire(table, a_call):
    call_id = table.calls.add(TICK, a_call)
    assert table.calls.pop(call_id) is a_call
    table.calls.expire(TICK)
    assert table.log == []


def test_a_tick_is_watched_once_and_again_after_it_has_expired(table, a_call):
    watched: list[int] = []
    table.deadlines.watch = lambda tick, _: watched.append(tick)
    for tick in (TICK, TICK, NEVER, TICK + 1):
        table.calls.add(tick, a_call)
    assert watched == [TICK, TICK + 1]
    table.calls.expire(TICK)
    table.calls.add(TICK, a_call)
    assert watched == [TICK, TICK + 1, TICK]


async def test_the_deadline_expires_a_call():
    table = Table(asyncio.get_running_loop())
    call = make_call(table.deadlines.loop)
    call_id = table.calls.add(Deadlines.tick(table.deadlines.now(), 0.001), call)
    never = table.calls.add(NEVER, call)
    await until(lambda: bool(table.log))
    assert table.log == [call_id]
    assert [id_ for id_, _ in table.calls] == [never]
    table.deadlines.close()


def test_calls_may_end_while_they_are_looked_at(table, a_call):
    calls = table.calls
    for tick in (TICK, NEVER, TICK):
        calls.add(tick, a_call)
    for call_id, _ in calls:
        calls.pop(call_id)
    assert len(calls) == 0


def test_clearing_forgets_all(table, a_call):
    for tick in (TICK, NEVER):
        table.calls.add(tick, a_call)
    table.calls.clear()
    table.calls.expire(TICK)
    assert len(table.calls) == 0
    assert table.log == []


def test_a_call_is_named_after_its_function(a_call):
    assert a_call.name == "echo"


def test_a_call_is_an_ordinary_request_unless_it_says_otherwise():
    call = Call("a peer", "a recipient", echo)
    assert call.type == MessageType.REQUEST
    assert call.timeout is UNSET
    assert not any((call.flags, call.metadata, call.is_internal, call.is_held, call.is_awaited))


# -- as a worker uses it


async def test_calls_without_a_timeout_never_run_out_of_numbers(pair):
    await pair[0].rpc_sync("worker1", echo, timeout=0)
    leave_numbers(pair[0].agent.known_peer("worker1").calls, 2)
    async with asyncio.timeout(30):  # the reply of one with a wrong id would find nobody
        for number in range(6):
            assert await pair[0].rpc_sync("worker1", echo, args=(number,), timeout=0) == number
    await assert_nothing_left(pair)
