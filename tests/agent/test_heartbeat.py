"""Signs of life: who falls silent is given up in time, and who is merely idle or busy is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import arpc
from arpc.errors import WorkerLostError
from arpc.testing import Cluster, cluster
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import echo, hold

OPTIONS = arpc.RpcOptions(heartbeat_interval=0.1, heartbeat_timeout=0.5, gc_freeze=False)


def stop(group: Cluster) -> Callable[[], None]:
    """Worker1 reads nothing from worker0 any more, as a process that was stopped. Returns what lets it go on."""
    group[1].agent.heartbeat.close()
    connection = group[1].agent.peer("worker0").connection
    connection._deliver = lambda: None

    def go_on() -> None:
        del connection._deliver
        connection._delivery = None
        connection._schedule()

    return go_on


async def test_a_silent_peer_is_given_up_long_before_the_timeout(stage):
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        go_on = stop(group)
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"worker 'worker1' was lost: it has not been heard of for \d+\.\d s"):
            await future
        assert time.monotonic() - begin < 30
        assert group[0].statistics()["heartbeat"]["peers_given_up"] == 1
        go_on()
        await stage.wait_until("held cancelled")
        await assert_nothing_left(group)


async def test_an_idle_peer_is_asked_and_kept():
    async with cluster(2, options=OPTIONS) as group:
        await group[0].rpc_sync("worker1", echo)
        connection = group[0].agent.peer("worker1").connection
        end = time.monotonic() + 2 * OPTIONS.heartbeat_timeout
        await until(lambda: group[0].agent.heartbeat.pings_sent >= 3 and time.monotonic() > end)
        assert connection.is_open
        assert group[0].agent.heartbeat.peers_given_up == 0
        assert await group[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"


async def test_a_loop_that_was_busy_blames_nobody():
    async with cluster(2, options=OPTIONS) as group:
        await group[0].rpc_sync("worker1", echo)
        connection = group[0].agent.peer("worker1").connection
        for _ in range(2):
            time.sleep(2 * OPTIONS.heartbeat_timeout)
            for _ in range(5):
                await asyncio.sleep(0)
        assert connection.is_open
        assert await group[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"
        assert [worker.agent.heartbeat.peers_given_up for worker in group] == [0, 0]


async def test_heartbeats_can_be_turned_off():
    options = arpc.RpcOptions(heartbeat_interval=0, gc_freeze=False)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", echo)
        assert group[0].agent.heartbeat._timer is None
        assert group[0].statistics()["heartbeat"] == {"pings_sent": 0, "peers_given_up": 0}


async def test_a_worker_that_was_shut_down_asks_nobody():
    async with cluster(1, options=OPTIONS) as group:
        heartbeat = group[0].agent.heartbeat
        assert heartbeat._timer is not None
    assert heartbeat._timer is None


async def test_who_receives_a_large_message_bit_by_bit_shows_that_it_lives():
    """Its sender has handed all bytes to the network, and hears nothing else before the last of them has arrived."""
    async with cluster(2, options=OPTIONS) as group:
        await group[0].rpc_sync("worker1", echo)
        receiving = group[1].agent.peer("worker0").connection

        def frames_after_a_look() -> int:
            group[1].agent.heartbeat._heard.clear()  # as if something had come since the last look
            before = receiving.frames_sent + len(receiving._out)
            group[1].agent.heartbeat._look()
            return receiving.frames_sent + len(receiving._out) - before

        assert frames_after_a_look() == 0
        receiving.protocol._end = 1  # the first byte of a frame whose rest is under way
        try:
            assert frames_after_a_look() == 1
        finally:
            receiving.protocol._end = 0
        assert await group[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"
