"""Who listens hears what becomes of the others: in groups of fixed size and elastic ones."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

import arpc
from arpc import MemberEvent, MemberJoined, MemberLeft, MemberLost, MemberReturned, MemberStream, MemberSuspected
from arpc.errors import WireError
from arpc.group.membership import WorkerRecord
from arpc.testing import Cluster, Fault, FaultyTransport, cluster
from arpc.transport.connection import Connection
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import echo

OPTIONS = arpc.RpcOptions(gc_freeze=False, heartbeat_interval=0.05, heartbeat_timeout=5.0, rref_grace=5.0)


async def next_of(stream: MemberStream, kind: type[MemberEvent]) -> MemberEvent:
    """The next event of a kind."""
    async with asyncio.timeout(30):
        async for event in stream:
            if isinstance(event, kind):
                return event
    raise AssertionError("the stream has ended")


async def all_connected(group: Cluster, worker: int = 0) -> None:
    """The worker has heard of all others, which in an elastic group takes a while, and is connected to them."""
    agent = group[worker].agent
    others = {member.info for member in group} - {agent.info}
    await until(lambda: {peer.info for peer in agent.peers if peer.connection} >= others)


async def kill(group: Cluster, which: int) -> None:
    """As near to a death as a worker of this process can come: no goodbye, and nobody listens any more."""
    connector = group[which].agent.connector
    for listener in connector._listeners:
        await listener.aclose()
    group[which].agent.is_closing = True
    for _ in range(20):  # a connection that was being made when the door closed is there a few turns later
        for link in connector.links:
            link.connection.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("elastic", [False, True])
async def test_it_begins_with_the_others(elastic):
    async with cluster(3, options=OPTIONS, elastic=elastic) as group:
        stream = group[0].membership()
        events = {await anext(stream), await anext(stream)}
        assert events == {
            MemberJoined(other.info, other.rendezvous.record.incarnation) for other in (group[1], group[2])
        }
        await all_connected(group)  # without a call
        await stream.aclose()


@pytest.mark.parametrize("elastic", [False, True])
async def test_a_death_is_noticed_without_a_call(elastic):
    async with cluster(3, options=OPTIONS, elastic=elastic) as group:
        lost: list[MemberLost] = []
        group[0].on_peer_lost(lost.append)
        stream = group[0].membership()
        await all_connected(group)
        await kill(group, 1)
        suspected = await next_of(stream, MemberSuspected)
        assert suspected.worker == group[1].info
        event = await next_of(stream, MemberLost)
        assert event.worker == group[1].info
        assert lost == [event]
        assert await group[0].rpc_sync("worker2", echo, args=("alive",)) == "alive"
        await group.shutdown(graceful=False)
        # it ends with the worker, which may have seen the other one go first
        assert {event.worker async for event in stream} <= {group[2].info}


async def test_a_worker_that_cannot_be_reached_is_given_up_in_time():
    """Nobody says that it is dead: its network is silent."""
    options = OPTIONS.replace(rref_grace=0.3)
    async with cluster(2, options=options) as group:
        stream = group[0].membership()
        await all_connected(group)
        network = group.network

        async def connect(*_: object) -> None:
            raise OSError(113, "No route to host")

        network.connect = connect
        try:
            group[1].agent.connector.retry.begin_search = lambda *_: None
            group[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
            event = await next_of(stream, MemberLost)
            assert event.worker == group[1].info
            assert "has not come back within 0.3 s" in event.reason
        finally:
            del network.connect
        # and it is found again by whoever calls first
        assert await group[1].rpc_sync("worker0", echo, args=("back",)) == "back"
        assert await next_of(stream, MemberReturned) == MemberReturned(
            group[1].info, group[1].rendezvous.record.incarnation, is_new=False
        )


class NobodyListens(MemoryNetwork):
    """A network in which nobody listens where one looks."""

    async def connect(self, address: str, *_: object) -> Connection:
        raise ConnectionRefusedError(111, f"nobody listens on {address}")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "unix:///nowhere/at/all"])
async def test_a_worker_that_only_others_can_connect_to_has_its_grace(monkeypatch, address):
    """It gave an address that is good on its own host only, or somebody has removed the file of its socket."""
    async with cluster(2, options=OPTIONS.replace(rref_grace=600.0)) as group:
        agent = group[0].agent
        resolve = agent.resolve
        resolved = []

        async def resolve_in_vain(to: Any) -> WorkerRecord:
            resolved.append(to)
            return msgspec.structs.replace(await resolve(to), addresses=(address,))

        assert await group[1].rpc_sync("worker0", echo, args=("there",)) == "there"
        monkeypatch.setattr(agent, "resolve", resolve_in_vain)
        monkeypatch.setitem(agent.connector.dialer.transports, "tcp", NobodyListens())
        lost: list[MemberLost] = []
        group[0].on_peer_lost(lost.append)
        stream = group[0].membership()
        agent.peer("worker1").connection.abort(WireError("cut by the test"))
        await until(lambda: len(resolved) > 2)
        assert await group[1].rpc_sync("worker0", echo, args=("back",)) == "back"
        await next_of(stream, MemberReturned)
        assert lost == []
        assert not agent.connector.retry.searches


async def test_a_cut_connection_is_made_again():
    network = FaultyTransport(MemoryNetwork())
    async with cluster(2, options=OPTIONS, transports={"memory": network}) as group:
        lost: list[MemberLost] = []
        group[0].on_peer_lost(lost.append)
        stream = group[0].membership()
        await all_connected(group)
        network.inject(Fault(MessageType.REQUEST, "cut", count=1))
        with pytest.raises(arpc.WorkerLostError, match="may have run"):
            await group[0].rpc_sync("worker1", echo)
        await next_of(stream, MemberSuspected)
        returned = await next_of(stream, MemberReturned)
        assert not returned.is_new
        assert await group[0].rpc_sync("worker1", echo, args=("again",)) == "again"
        assert lost == []
        await assert_nothing_left(group)


async def test_who_leaves_is_not_lost():
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        lost: list[MemberLost] = []
        group[0].on_peer_lost(lost.append)
        stream = group[0].membership()
        await all_connected(group)
        await group[1].shutdown()
        assert (await next_of(stream, MemberLeft)).worker == group[1].info
        assert lost == []


async def test_a_worker_that_comes_later_is_heard_of_and_connected_to():
    async with cluster(1, options=OPTIONS, elastic=True) as group:
        stream = group[0].membership()
        late = await group.add("late")
        assert await next_of(stream, MemberJoined) == MemberJoined(late.info, late.rendezvous.record.incarnation)
        await until(lambda: group[0].agent.peer("late").connection is not None)
        await late.shutdown()
        assert (await next_of(stream, MemberLeft)).worker == late.info
        again = await group.add("late")
        assert await next_of(stream, MemberReturned) == MemberReturned(
            again.info, again.rendezvous.record.incarnation, is_new=True
        )


async def test_callbacks_may_be_coroutines_and_may_fail_and_be_taken_back(caplog):
    async with cluster(4, options=OPTIONS) as group:
        calls: list[str] = []
        called = asyncio.Event()

        async def call_another(event: MemberLost) -> None:
            calls.append(await arpc.rpc_sync("worker3", echo, args=(event.worker.name,)))
            called.set()

        def fail(_: MemberLost) -> None:
            raise LookupError("why")

        stop = group[0].on_peer_lost(call_another)
        group[0].on_peer_lost(fail)
        await all_connected(group)
        with caplog.at_level(logging.CRITICAL, logger="arpc.membership"):
            await kill(group, 1)
            async with asyncio.timeout(30):
                await called.wait()
            assert calls == ["worker1"], "it runs as this worker"
            stop()
            stop()
            stream = group[0].membership()
            await kill(group, 2)
            await next_of(stream, MemberLost)
        assert calls == ["worker1"]
        await group.shutdown(graceful=False)


async def test_no_callback_takes_its_worker_down(caplog):
    async with cluster(2, options=OPTIONS) as group:
        heard: list[MemberLost] = []

        def leave(_: MemberLost) -> None:
            raise SystemExit(3)

        async def leave_later(_: MemberLost) -> None:
            raise SystemExit(4)

        for callback in (leave, leave_later, heard.append):
            group[0].on_peer_lost(callback)
        await all_connected(group)
        with caplog.at_level(logging.CRITICAL, logger="arpc.membership"):
            await kill(group, 1)
            await until(lambda: bool(heard))
            assert await group[0].rpc_sync("worker0", echo, args=("alive",)) == "alive"
        await group.shutdown(graceful=False)


async def test_nobody_is_connected_to_when_nobody_listens():
    async with cluster(3, options=OPTIONS) as group:
        stream = group[0].membership()
        await all_connected(group)
        await until(lambda: not group[0].agent.connector.retry.searches)
        await stream.aclose()
        group[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
        await until(lambda: group[0].agent.peer("worker1").connection is None)
        assert not group[0].agent.connector.retry.searches
        assert group[0].statistics()["members"]["suspected"] == 1
        assert await group[0].rpc_sync("worker1", echo, args=("anew",)) == "anew"
        assert group[0].statistics()["members"]["suspected"] == 0


async def test_a_callback_that_waits_ends_with_the_worker():
    async with cluster(2, options=OPTIONS) as group:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def wait(_: MemberLost) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        group[0].on_peer_lost(wait)
        await all_connected(group)
        await kill(group, 1)
        async with asyncio.timeout(30):
            await begun.wait()
        await group.shutdown(graceful=False)
        await ended.wait()
