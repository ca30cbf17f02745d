"""Peers: connecting on first use, one connection a pair, bytes in flight, losing one and finding it again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.peers.peer import Peer, PeerState
from arpc.errors import RendezvousError, UnknownWorkerError, WireError, WorkerLostError
from arpc.testing import Cluster, cluster
from arpc.transport.in_process import MemoryNetwork
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import call_on, echo, echo_in_thread, hold

BLOCK_BYTES = 40 << 10
"""More than what counts as small."""


def peer_of(group: Cluster, caller: int = 0, callee: str = "worker1") -> Peer:
    return group[caller].agent.peer(callee)


def connections(group: Cluster) -> int:
    return sum(len(worker.agent.connector._links) for worker in group)


# -- connecting


async def test_nobody_is_connected_before_the_first_call():
    async with cluster(4) as group:
        assert connections(group) == 0
        assert all(peer.state is PeerState.IDLE for worker in group for peer in worker.agent.peers)
        await group[0].rpc_sync("worker1", echo)
        assert connections(group) == 2, "two ends of one"
        assert peer_of(group).state is peer_of(group, 1, "worker0").state is PeerState.OPEN
        assert peer_of(group, 0, "worker2").state is PeerState.IDLE


async def test_the_callee_calls_back_on_the_same_connection(pair):
    assert await pair[1].rpc_sync("worker0", echo, args=("back",)) == "back"
    assert connections(pair) == 2
    assert peer_of(pair).connects == peer_of(pair, 1, "worker0").connects == 1


async def test_many_first_calls_share_one_connection():
    async with cluster(2) as group:
        results = await asyncio.gather(*(group[0].rpc_sync("worker1", echo, args=(n,)) for n in range(100)))
        assert results == list(range(100))
        assert peer_of(group).connects == 1


@pytest.mark.parametrize("size", [2, 5])
async def test_workers_that_connect_to_each_other_at_once_end_up_with_one_connection(size):
    async with cluster(size) as group:
        calls = [
            caller.rpc_sync(callee.name, function, args=(f"{caller.name} to {callee.name}",))
            for caller in group
            for callee in group
            for function in (echo, echo_in_thread)
        ]
        results = await asyncio.gather(*calls)
        assert len(set(results)) == size * size
        pairs = size * (size - 1) // 2
        await until(lambda: connections(group) == 2 * pairs + 2 * size, lambda: connections(group))
        await assert_nothing_left(group)


async def test_calls_to_oneself_take_no_listener(stage):
    async with cluster(1) as group:
        await group[0].agent.connector._listeners[0].aclose()
        assert await group[0].rpc_sync("worker0", call_on, args=("worker0", echo, "deep")) == "deep"
        assert await group[0].rpc_sync(0, echo_in_thread, args=("by id",)) == "by id"
        tensor = torch.ones(100_000)
        result = await group[0].rpc_sync("worker0", echo, args=(tensor,))
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr(), "a callee never shares memory with its caller"
        future = group[0].rpc_async("worker0", hold)
        await stage.wait_until("held begun")
        future.cancel()
        await stage.wait_until("held cancelled")
        await assert_nothing_left(group)


async def test_a_worker_that_cannot_be_reached_fails_all_who_wait():
    async with cluster(2) as group:
        await group[1].agent.connector._listeners[0].aclose()
        futures = [group[0].rpc_async("worker1", echo) for _ in range(3)]
        errors = await asyncio.gather(*futures, return_exceptions=True)
        for error in errors:
            assert isinstance(error, WorkerLostError)
            assert "worker 'worker1' cannot be reached" in str(error)
            assert not error.may_have_run
            assert isinstance(error.__cause__, WireError)
        assert len({id(error) for error in errors}) == 3, "each has its own traceback to collect"
        assert peer_of(group).state is PeerState.IDLE, "the next call tries again"
        await assert_nothing_left(group)
        # the other way round there is no obstacle, and then there is a connection for both
        assert await group[1].rpc_sync("worker0", echo, args=(1,)) == 1
        assert await group[0].rpc_sync("worker1", echo, args=(2,)) == 2


async def test_a_connection_that_takes_too_long():
    class Silent(MemoryNetwork):
        """Accepts nobody, and never says so."""

        async def connect(self, *args: Any) -> Any:
            await asyncio.Event().wait()

    options = arpc.RpcOptions(connect_timeout=0.05, gc_freeze=False)
    async with cluster(2, options=options, transports={"memory": Silent()}) as group:
        with pytest.raises(WorkerLostError, match=r"no connection to worker 'worker1' within 0\.05 s"):
            await group[0].rpc_sync("worker1", echo)
        await assert_nothing_left(group)


async def test_a_connection_that_opens_when_time_is_up_is_kept(monkeypatch):
    """A loop that was busy runs the timer first, and then those who wait for the connection."""
    options = arpc.RpcOptions(connect_timeout=0.2, gc_freeze=False)
    async with cluster(2, options=options) as group:
        peer = peer_of(group)
        opened = peer.opened

        def opened_late(*args: Any, **kwargs: Any) -> None:
            opened(*args, **kwargs)
            time.sleep(0.3)

        monkeypatch.setattr(peer, "opened", opened_late)
        assert await group[0].rpc_sync("worker1", echo, args=("sent",)) == "sent"
        await until(lambda: peer._connecting is None)
        assert await group[0].rpc_sync("worker1", echo, args=("open",)) == "open"
        assert peer.connects == 1
        await assert_nothing_left(group)


async def test_a_store_that_fails_fails_the_call(monkeypatch):
    async with cluster(2) as group:

        async def resolve(_: Any) -> Any:
            raise RendezvousError("the store is gone")

        monkeypatch.setattr(group[0].agent, "resolve", resolve)
        with pytest.raises(RendezvousError, match="the store is gone"):
            await group[0].rpc_sync("worker1", echo)
        await assert_nothing_left(group)


async def test_a_connection_that_comes_while_ours_fails_is_used():
    async with cluster(2) as group:
        await group[1].agent.connector._listeners[0].aclose()
        mine = asyncio.create_task(group[0].rpc_sync("worker1", echo, args=("mine",)))
        theirs = asyncio.create_task(group[1].rpc_sync("worker0", echo, args=("theirs",)))
        assert await theirs == "theirs"
        with_luck = (await asyncio.gather(mine, return_exceptions=True))[0]
        assert with_luck == "mine" or isinstance(with_luck, WorkerLostError)
        assert await group[0].rpc_sync("worker1", echo, args=("now",)) == "now"
        await assert_nothing_left(group)


# -- losing and finding


async def test_after_a_loss_the_next_call_connects_anew(pair):
    for attempt in range(3):
        assert await pair[0].rpc_sync("worker1", echo, args=(attempt,)) == attempt
        connection = peer_of(pair).connection
        connection.abort(WireError("cut by the test"))
        await connection.wait_closed()
        await until(lambda: peer_of(pair).state is PeerState.IDLE)
    assert await pair[1].rpc_sync("worker0", echo, args=("back",)) == "back"
    assert peer_of(pair).connects == 4


async def test_one_side_that_does_not_notice_a_loss(pair):
    """The peer connects anew while we still believe in the old connection: the new one takes its place."""
    old = peer_of(pair, 1, "worker0").connection
    peer = peer_of(pair, 0)
    link = pair[0].agent.connector._links[peer.connection]
    peer.lost(peer.connection, WireError("only we know"), reason=None)
    assert peer.state is PeerState.IDLE
    assert await pair[0].rpc_sync("worker1", echo, args=("anew",)) == "anew"
    assert peer_of(pair, 1, "worker0").connection is not old
    await old.wait_closed()
    assert link.connection is not peer.connection
    assert await pair[1].rpc_sync("worker0", echo, args=("back",)) == "back"


async def test_a_worker_that_left_is_told_apart_from_one_that_was_lost():
    async with cluster(2, elastic=True) as group:
        await group[0].rpc_sync("worker1", echo)
        await group[1].shutdown()
        await until(lambda: peer_of(group).state is PeerState.GONE)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=r"worker 'worker1' has left: it was shut down") as caught:
                await group[0].rpc_sync("worker1", echo)
            assert not caught.value.may_have_run
        assert peer_of(group).state is PeerState.GONE


async def test_a_new_worker_under_the_name_of_one_that_left():
    async with cluster(2, elastic=True) as group:
        old = await group[0].rpc_sync("worker1", whoami)
        await group[1].shutdown()
        await until(lambda: peer_of(group).state is PeerState.GONE)
        await group.add("worker1")
        new = await group[0].rpc_sync("worker1", whoami)
        assert new.name == old.name
        assert new.id != old.id
        assert group[0].get_worker_info("worker1") == group[0].get_worker_info(new.id) == new
        with pytest.raises(UnknownWorkerError):
            group[0].get_worker_info(old.id)
        with pytest.raises(UnknownWorkerError):
            await group[0].rpc_sync(old.id, echo)
        await assert_nothing_left(group)


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def test_a_new_worker_under_the_name_of_one_that_died():
    """It said no goodbye: connections are cut, and its place in the group is taken over."""
    async with cluster(2, elastic=True) as group:
        await group[0].rpc_sync("worker1", echo)
        connection = peer_of(group).connection
        await group[1].shutdown(graceful=False)
        await connection.wait_closed()
        peer_of(group)._gone_because = ""
        await group.add("worker1")
        assert (await group[0].rpc_sync("worker1", whoami)).id == group[2].id
        await assert_nothing_left(group)


# -- bytes in flight


class Flight:
    """Watches how many bytes a peer has in flight at most."""

    def __init__(self, peer: Peer) -> None:
        self.most = 0
        submit = peer.submit

        def watch(*args: Any, **options: Any) -> None:
            submit(*args, **options)
            self.most = max(self.most, peer.in_flight_bytes)

        peer.submit = watch


async def test_bytes_in_flight_stay_within_the_window():
    window_bytes = 4 * BLOCK_BYTES
    async with cluster(2, options=arpc.RpcOptions(window_bytes=window_bytes, gc_freeze=False)) as group:
        await group[0].rpc_sync("worker1", echo)
        flight = Flight(peer_of(group))
        block = b"x" * (BLOCK_BYTES - 1000)
        futures = [group[0].rpc_async("worker1", function, args=(block,)) for function in [echo, echo_in_thread] * 20]
        assert len(peer_of(group).backlog) > 30
        assert all(result == block for result in await asyncio.gather(*futures))
        assert window_bytes // 2 < flight.most <= window_bytes
        await assert_nothing_left(group)


async def test_small_calls_pass_large_ones_that_wait(stage):
    async with cluster(2, options=arpc.RpcOptions(window_bytes=2 * BLOCK_BYTES, gc_freeze=False)) as group:
        block = b"x" * (BLOCK_BYTES - 1000)
        large = [group[0].rpc_async("worker1", hold, args=(f"n{number}", block)) for number in range(5)]
        await stage.wait_until("n0 begun", "n1 begun")
        assert len(peer_of(group).backlog) == 3
        for number in range(20):
            assert await group[0].rpc_sync("worker1", echo, args=(number,)) == number
        assert not stage.was_reached("n2 begun")
        stage.open()
        await asyncio.gather(*large)
        await assert_nothing_left(group)


async def test_small_calls_have_a_window_too(stage):
    async with cluster(2, options=arpc.RpcOptions(window_bytes=8 << 10, gc_freeze=False)) as group:
        await group[0].rpc_sync("worker1", echo)
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}", b"x" * 1000)) for number in range(40)]
        peer = peer_of(group)
        assert peer.in_flight_bytes <= 2 * (8 << 10)
        assert len(peer.backlog) > 20
        stage.open()
        await asyncio.gather(*futures)
        await assert_nothing_left(group)


async def test_one_message_larger_than_the_window_goes_alone(stage):
    async with cluster(2, options=arpc.RpcOptions(window_bytes=BLOCK_BYTES, gc_freeze=False)) as group:
        giant = torch.ones(1 << 20)
        first = group[0].rpc_async("worker1", hold, args=("first", giant))
        await stage.wait_until("first begun")
        second = group[0].rpc_async("worker1", hold, args=("second", giant))
        assert len(peer_of(group).backlog) == 1
        stage.open()
        assert torch.equal(await first, giant)
        assert torch.equal(await second, giant)
        await assert_nothing_left(group)


async def test_a_slow_peer_slows_its_own_callers_only(stage):
    async with cluster(3, options=arpc.RpcOptions(window_bytes=BLOCK_BYTES, gc_freeze=False)) as group:
        block = b"x" * (BLOCK_BYTES - 1000)
        stuck = [group[0].rpc_async("worker1", hold, args=(f"n{number}", block)) for number in range(3)]
        await stage.wait_until("n0 begun")
        for _ in range(5):
            assert await group[0].rpc_sync("worker2", echo, args=(block,)) == block
        assert len(peer_of(group).backlog) == 2
        stage.open()
        await asyncio.gather(*stuck)
        await assert_nothing_left(group)


async def test_a_waiting_stream_gets_its_credit(stage):
    async with cluster(2, options=arpc.RpcOptions(window_bytes=BLOCK_BYTES, gc_freeze=False)) as group:
        block = b"x" * (BLOCK_BYTES - 1000)
        held = group[0].rpc_async("worker1", hold, args=("held", block))
        await stage.wait_until("held begun")
        stream = group[0].stream("worker1", lengths, args=(block, 3), window=1)
        assert len(peer_of(group).backlog) == 1
        stage.open()
        await held
        assert [item async for item in stream] == [len(block)] * 3
        await assert_nothing_left(group)


async def lengths(block: bytes, times: int):
    for _ in range(times):
        yield len(block)


# -- what it tells


async def test_statistics_tell_what_is_under_way(stage):
    async with cluster(2, options=arpc.RpcOptions(window_bytes=BLOCK_BYTES, gc_freeze=False)) as group:
        block = b"x" * (BLOCK_BYTES - 1000)
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}", block)) for number in range(3)]
        assert group[0].statistics()["peers"]["worker1"]["state"] == "CONNECTING"
        await stage.wait_until("n0 begun")
        statistics = group[0].statistics()["peers"]["worker1"]
        assert statistics["state"] == "OPEN"
        assert statistics["calls_made"] == statistics["calls_in_flight"] == 3
        assert statistics["calls_waiting"] == 2
        assert len(block) < statistics["bytes_in_flight"] < BLOCK_BYTES
        assert statistics["connects"] == 1
        assert statistics["bytes_sent"] > len(block)
        stage.open()
        await asyncio.gather(*futures)
        statistics = group[0].statistics()["peers"]["worker1"]
        assert statistics["calls_in_flight"] == statistics["calls_waiting"] == statistics["bytes_in_flight"] == 0
