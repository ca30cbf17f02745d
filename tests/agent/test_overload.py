"""More calls than a worker can take: they wait in bounded numbers, and are refused in time, on either side."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import arpc
from arpc.agent.client.deadlines import NEVER
from arpc.agent.client.pending_calls import SEQUENCE_BITS
from arpc.errors import OverloadedError, RpcTimeoutError, WorkerLostError
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import echo, hold

OPTIONS = arpc.RpcOptions(gc_freeze=False)


def peer_of(group: Any) -> Any:
    return group[0].agent.peer("worker1")


@pytest.mark.parametrize("args", [(), (b"x" * 100,)])
async def test_no_more_calls_are_in_flight_than_may_be(stage, args):
    async with cluster(2, options=OPTIONS.replace(max_calls_in_flight=3)) as group:
        await group[0].rpc_sync("worker1", echo)
        held = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(3)]
        await stage.wait_until("n0 begun", "n1 begun", "n2 begun")
        others = [asyncio.create_task(group[0].rpc_sync("worker1", echo, args=args)) for _ in range(5)]
        await until(lambda: len(peer_of(group).backlog) == 5)
        assert peer_of(group).in_flight_calls == 3
        stage.open()
        await asyncio.gather(*held)
        assert await asyncio.gather(*others) == [args[0] if args else None] * 5
        assert peer_of(group).in_flight_calls == 0
        await assert_nothing_left(group)


async def test_what_is_too_much_to_wait_is_refused_at_once(stage):
    options = OPTIONS.replace(max_calls_in_flight=1, max_calls_waiting=2)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", echo)
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        waiting = [group[0].rpc_async("worker1", echo, args=(number,)) for number in range(2)]
        with pytest.raises(OverloadedError, match="echo was not sent to worker 'worker1': 2 calls wait already"):
            await group[0].rpc_sync("worker1", echo)
        # who gives up makes room
        waiting[0].cancel()
        third = group[0].rpc_async("worker1", echo, args=("third",))
        with pytest.raises(OverloadedError):
            await group[0].rpc_sync("worker1", echo)
        stage.open()
        await held
        assert await waiting[1] == 1
        assert await third == "third"
        await assert_nothing_left(group)


async def test_calls_that_were_given_up_take_no_memory(stage):
    async with cluster(2, options=OPTIONS.replace(max_calls_in_flight=1)) as group:
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        for _ in range(5):
            waiting = [group[0].rpc_async("worker1", echo, args=(number,)) for number in range(500)]
            for call in waiting:
                call.cancel()
        assert len(peer_of(group).backlog) <= 130
        stage.open()
        await held
        await assert_nothing_left(group)


@pytest.mark.parametrize("timeouts_travel", [True, False])
async def test_many_that_expire_at_once_leave_the_room_that_there_is(stage, timeouts_travel):
    options = OPTIONS.replace(max_calls_in_flight=1, max_calls_waiting=200, timeouts_travel=timeouts_travel)
    async with cluster(2, options=options) as group:
        held = group[0].rpc_async("worker1", hold, timeout=0)
        await stage.wait_until("held begun")
        waiting = [group[0].rpc_async("worker1", echo, args=(number,), timeout=600) for number in range(200)]
        for tick in {call_id >> SEQUENCE_BITS for call_id, _ in peer_of(group).calls} - {NEVER}:
            peer_of(group).calls.expire(tick)  # by hand
        assert all(isinstance(call.exception(), RpcTimeoutError) for call in waiting)
        waiting = [group[0].rpc_async("worker1", echo, args=(number,)) for number in range(200)]
        with pytest.raises(OverloadedError):
            group[0].rpc_async("worker1", echo)
        stage.open()
        await held
        assert await asyncio.gather(*waiting) == [*range(200)]
        await assert_nothing_left(group)


async def test_a_call_that_would_come_too_late_is_not_sent(stage):
    async with cluster(2, options=OPTIONS.replace(max_calls_in_flight=1)) as group:
        await group[0].rpc_sync("worker1", echo)
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        late = group[0].rpc_async("worker1", hold, args=("late",), timeout=30)
        in_time = group[0].rpc_async("worker1", echo, args=("in time",), timeout=0)
        peer_of(group)._answer_s = 1000.0  # as if it had taken that long of late
        stage.open()
        await held
        with pytest.raises(OverloadedError, match="would not be answered within its timeout"):
            await late
        assert await in_time == "in time"
        assert not stage.was_reached("late begun")
        # and what finds room goes, so that the figure can get better
        assert await group[0].rpc_sync("worker1", echo, args=("again",), timeout=30) == "again"
        assert peer_of(group)._answer_s < 1000.0
        await assert_nothing_left(group)


async def test_a_lost_connection_counts_for_nothing(stage):
    async with cluster(2, options=OPTIONS.replace(max_calls_in_flight=2)) as group:
        held = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(2)]
        await stage.wait_until("n0 begun", "n1 begun")
        peer_of(group).connection.abort()
        for call in held:
            with pytest.raises(WorkerLostError):
                await call
        assert peer_of(group).in_flight_calls == 0
        assert await asyncio.gather(*(group[0].rpc_sync("worker1", echo, args=(n,)) for n in range(10))) == [*range(10)]
        await assert_nothing_left(group)


async def test_the_callee_refuses_what_is_too_much_for_it(stage):
    options = OPTIONS.replace(max_handlers_per_peer=2, max_requests_waiting=3)
    async with cluster(2, options=options) as group:
        calls = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(8)]
        refused = [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls[5:]]
        assert all(isinstance(error, OverloadedError) for error in refused)
        assert "worker 'worker1' refused" in str(refused[0])
        assert group[1].statistics()["executor"]["calls_refused"] == 3
        stage.open()
        await asyncio.gather(*calls[:5])
        assert not stage.was_reached("n5 begun")
        assert await group[0].rpc_sync("worker1", echo, args=("again",)) == "again"
        await assert_nothing_left(group)
