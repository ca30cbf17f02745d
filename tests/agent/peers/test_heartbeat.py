"""Signs of life: who falls silent is given up in time, and who is merely idle or busy is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import arpc
from arpc.agent.peers.heartbeat import Heartbeat
from arpc.errors import WorkerLostError
from arpc.testing import Cluster, cluster
from arpc.transport.sockets import TcpTransport
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
            group[1].agent.heartbeat._seen.clear()  # as if something had come since the last look
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


# -- a peer that says nothing while more and more is sent to it


class Sent:
    """A connection to a peer that says nothing: what is sent on it arrives at a rate, or not at all."""

    def __init__(self, rate: int) -> None:
        self.protocol = SimpleNamespace(is_between_frames=True)
        self.bytes_received = 0
        self.sent_bytes = 0
        self.arrived_bytes = 0
        self.error: Exception | None = None
        self._rate = rate

    def send(self, data: bytes) -> None:
        self.sent_bytes += len(data)

    def flush(self) -> None:
        """There is nothing to gather."""

    def count_sent(self) -> int:
        return self.sent_bytes

    def count_delivered(self) -> int:
        self.arrived_bytes = min(self.sent_bytes, self.arrived_bytes + self._rate)
        return self.arrived_bytes

    def abort(self, error: Exception) -> None:
        self.error = error


def looks_until_given_up(connection: Sent, looks: int, sent_each_time: int = 0) -> int | None:
    """How often a heartbeat looks at a connection before it gives the peer up; None if it does not."""
    clock = SimpleNamespace(now=0.0, time=lambda: clock.now)
    connections: Any = SimpleNamespace(open_connections=lambda: [connection])
    heartbeat = Heartbeat(clock, OPTIONS, connections, lambda _, __: SimpleNamespace(cancel=lambda: None))
    for number in range(looks):
        clock.now = heartbeat._expected
        connection.sent_bytes += sent_each_time
        heartbeat._look()
        if connection.error is not None:
            return number
    return None


@pytest.mark.parametrize("sent_each_time", [0, 1000], ids=["idle", "calls"])
@pytest.mark.parametrize("rate", [0, 1 << 30], ids=["lost", "arrives"])
def test_a_peer_that_does_not_answer_is_given_up_in_time_whatever_is_sent_to_it(rate, sent_each_time):
    """Bytes arrive on the host of a process that was stopped, and the system keeps those for a host that is cut off."""
    most = int(OPTIONS.heartbeat_timeout / 0.05) + 3
    assert looks_until_given_up(Sent(rate), 1000, sent_each_time) in range(5, most)


def test_a_peer_that_has_not_been_reached_by_the_question_is_waited_for():
    connection = Sent(100)
    connection.sent_bytes = 100 * 200  # it takes 200 looks until the question arrives
    given_up_after = looks_until_given_up(connection, 1000, sent_each_time=100)
    assert given_up_after is not None
    assert given_up_after > 200


async def test_a_peer_that_reads_nothing_is_given_up_while_calls_are_made_to_it(stage):
    options = OPTIONS.replace(listen=("tcp://127.0.0.1:0",), shared_memory_bytes=0)
    async with cluster(2, options=options, transports={"tcp": TcpTransport()}, elastic=True) as group:
        future = group[0].rpc_async("worker1", hold, timeout=0)
        await stage.wait_until("held begun")
        group[1].agent.heartbeat.close()
        stopped = group[1].agent.peer("worker0").connection._transport
        stopped.pause_reading()  # as a process that was stopped
        others = []
        while not future.done():
            others.append(group[0].rpc_async("worker1", echo, timeout=0))
            await asyncio.wait([future], timeout=0.01)
        with pytest.raises(WorkerLostError, match="it has not been heard of"):
            await future
        assert len(others) < 1000  # within seconds
        for error in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(error, WorkerLostError)
        stopped.resume_reading()
        await stage.wait_until("held cancelled")
