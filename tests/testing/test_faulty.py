"""The faulty network does what it is told, always the same way, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from arpc.errors import ConfigurationError, ConnectionClosedError, RpcTimeoutError, WireError, WorkerLostError
from arpc.options import RpcOptions
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.testing.conformance import TransportConformance
from arpc.testing.endpoints import Endpoints, Pair, bulk_frame, small_frame
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType

REQUEST = MessageType.REQUEST
REPLY = MessageType.REPLY
LONG_S = 3600.0


@asynccontextmanager
async def connected(*faults: Fault, seed: int = 0) -> AsyncIterator[tuple[FaultyTransport, Pair]]:
    network = FaultyTransport(MemoryNetwork(), list(faults), seed=seed)
    async with Endpoints(network, "memory://") as endpoints:
        yield network, await endpoints.pair()


async def arrivals(pair: Pair, numbers: range | list[int], *, last: int = 999) -> list[int]:
    """Send requests and a reply after them; which requests came before the reply, in their order."""
    for number in numbers:
        pair.near.connection.send(small_frame(number))
    pair.near.connection.send(frame(REPLY, 0, last, 0, 0, b""))
    await pair.far.until(lambda: any(message.id == last for message in pair.far.messages))
    return pair.far.numbers


@pytest.mark.parametrize("check", TransportConformance.names())
async def test_without_faults_it_is_a_transport_like_any_other(check):
    await TransportConformance(lambda: FaultyTransport(MemoryNetwork()), "memory://").run(check)


# -- what can happen to a message


async def test_drop():
    async with connected(Fault(REQUEST, "drop", count=2)) as (network, pair):
        assert await arrivals(pair, range(5)) == [2, 3, 4]
        assert network.injected == {(REQUEST, "drop"): 2}
        assert network.seen == {REQUEST: 5, REPLY: 1}


async def test_drop_some_in_the_middle():
    async with connected(Fault(REQUEST, "drop", count=2, after=1)) as (_, pair):
        assert await arrivals(pair, range(5)) == [0, 3, 4]


async def test_duplicate():
    async with connected(Fault(REQUEST, "duplicate", count=1)) as (_, pair):
        assert await arrivals(pair, range(3)) == [0, 0, 1, 2]


async def test_delay():
    async with connected(Fault(REQUEST, "delay", count=1, delay_s=0.05)) as (_, pair):
        started = asyncio.get_running_loop().time()
        assert await arrivals(pair, range(3)) == [1, 2]
        await pair.far.received(4)
        assert pair.far.numbers == [1, 2, 0]
        assert asyncio.get_running_loop().time() - started >= 0.049


async def test_reorder():
    async with connected(Fault(REQUEST, "reorder", count=1, delay_s=LONG_S)) as (_, pair):
        assert await arrivals(pair, range(3)) == [1, 0, 2]


async def test_reorder_all():
    async with connected(Fault(REQUEST, "reorder", delay_s=LONG_S)) as (_, pair):
        assert await arrivals(pair, range(6)) == [1, 0, 3, 2, 5, 4]


async def test_reorder_with_nothing_after():
    async with connected(Fault(REQUEST, "reorder", count=1, delay_s=0.01)) as (_, pair):
        pair.near.connection.send(small_frame(1))
        await pair.far.received(1)
        assert pair.far.numbers == [1]


async def test_cut():
    async with connected(Fault(REQUEST, "cut", after=1)) as (_, pair):
        pair.near.connection.send(small_frame(1))
        await pair.far.received(1)
        pair.near.connection.send(small_frame(2))
        near_error, far_error = await pair.near.ended(), await pair.far.ended()
        assert isinstance(near_error, WireError)
        assert "was cut by a fault" in str(near_error)
        assert isinstance(far_error, ConnectionClosedError)
        assert pair.far.numbers == [1]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("drop", [1, 2]),
        ("duplicate", [0, 0, 1, 2]),
        ("reorder", [1, 0, 2]),
        ("delay", [1, 2, 0]),
    ],
)
async def test_large_messages_meet_the_same_fate_as_a_whole(action, expected):
    async with connected(Fault(REQUEST, action, count=1, delay_s=0.05)) as (network, pair):
        bulks = []
        for number in range(3):
            buffers = [memoryview(bytes([number]) * 100_000)]
            bulks.append(pair.near.connection.send_bulk(bulk_frame(number, buffers), buffers))
        await pair.far.received(len(expected))
        assert network.seen[REQUEST] == 3
        assert sorted(pair.far.numbers) == sorted(expected)
        if action != "delay":
            assert pair.far.numbers == expected
        for message in pair.far.messages:
            assert message.buffers == [bytes([message.id]) * 100_000]
        assert not any(pair.near.connection.drop_bulk(bulk) for bulk in bulks)


async def test_what_was_held_back_is_lost_with_the_connection():
    faults = (Fault(REQUEST, "delay", count=1, delay_s=0.02), Fault(REQUEST, "reorder", count=1, delay_s=0.02))
    async with connected(*faults) as (_, pair):
        pair.near.connection.send(small_frame(1))
        pair.near.connection.send(small_frame(2))
        pair.near.connection.close()
        await pair.far.ended()
        await asyncio.sleep(0.04)
        assert pair.far.numbers == []


# -- which messages are hit


async def test_each_direction_is_hit():
    async with connected(Fault(REPLY, "drop")) as (network, (near, far)):
        for end in (near, far):
            end.connection.send(frame(REPLY, 0, 1, 0, 0, b""))
            end.connection.send(small_frame(2))
        await near.received(1)
        await far.received(1)
        assert (near.numbers, far.numbers) == ([2], [2])
        assert network.injected[REPLY, "drop"] == 2


async def test_the_first_fault_that_hits_is_the_one():
    async with connected(Fault(REQUEST, "duplicate", count=1), Fault(REQUEST, "drop", count=1)) as (network, pair):
        assert await arrivals(pair, range(3)) == [0, 0, 2]
        assert network.injected == {(REQUEST, "duplicate"): 1, (REQUEST, "drop"): 1}


async def test_faults_come_and_go():
    async with connected() as (network, pair):
        assert await arrivals(pair, [1]) == [1]
        fault = network.inject(Fault(REQUEST, "drop"))
        assert network.faults == (fault,)
        assert await arrivals(pair, [2], last=1000) == [1]
        network.heal()
        assert network.faults == ()
        assert await arrivals(pair, [3], last=1001) == [1, 3]


async def test_what_was_delayed_arrives_although_the_network_is_healed():
    async with connected(Fault(REQUEST, "delay", delay_s=0.01)) as (network, pair):
        pair.near.connection.send(small_frame(1))
        network.heal()
        await pair.far.received(1)


async def hit(seed: int, *others: Fault) -> list[int]:
    async with connected(Fault(REQUEST, "drop", probability=0.5), *others, seed=seed) as (_, pair):
        return await arrivals(pair, range(64))


async def test_the_same_seed_hits_the_same_messages():
    first = await hit(1)
    assert await hit(1) == first
    assert await hit(2) != first
    assert 10 < len(first) < 54


async def test_other_faults_change_no_chances():
    first = await hit(1)
    assert await hit(1, Fault(REPLY, "drop", probability=0.0), Fault(REQUEST, "duplicate", probability=0.0)) == first


@pytest.mark.parametrize(
    "arguments",
    [
        (MessageType.HELLO, "drop"),
        (MessageType.DATA, "drop"),
        (MessageType.GOODBYE, "drop"),
        (MessageType.PONG, "delay"),
        (REQUEST, "explode"),
        (REQUEST, "drop", -1),
        (REQUEST, "drop", None, 1.5),
        (REQUEST, "delay", None, 1.0, -1.0),
        (REQUEST, "drop", None, 1.0, 0.0, -1),
    ],
)
def test_faults_that_cannot_be(arguments):
    with pytest.raises(ConfigurationError):
        Fault(*arguments)


# -- in a group


async def echo(value):
    return value


calls_of_count = 0


async def count() -> int:
    global calls_of_count  # noqa: PLW0603 - the workers of a cluster share the module
    calls_of_count += 1
    return calls_of_count


@asynccontextmanager
async def faulty_cluster(*faults: Fault) -> AsyncIterator[tuple[FaultyTransport, object]]:
    network = FaultyTransport(MemoryNetwork())
    options = RpcOptions(gc_freeze=False, heartbeat_interval=0.1, heartbeat_timeout=0.5)
    async with cluster(2, transports={"memory": network}, options=options) as group:
        # connected: a call with a short timeout is then sent, however slow the machine
        await group[0].rpc_sync("worker1", echo, args=(0,))
        for fault in faults:
            network.inject(fault)
        yield network, group[0]
        network.heal()


async def test_a_lost_reply_is_a_timeout():
    async with faulty_cluster(Fault(REPLY, "drop", count=1)) as (network, worker):
        for timeout_s in (0.05, 1.0, 10.0):  # in which the other has to come to reply
            with pytest.raises(RpcTimeoutError):
                await worker.rpc_sync("worker1", echo, args=(1,), timeout=timeout_s)
            if network.injected[REPLY, "drop"]:
                break
        assert await worker.rpc_sync("worker1", echo, args=(2,)) == 2


async def test_a_lost_request_is_a_timeout_and_never_runs():
    before = calls_of_count
    async with faulty_cluster(Fault(REQUEST, "drop", count=1)) as (_, worker):
        with pytest.raises(RpcTimeoutError):
            await worker.rpc_sync("worker1", count, timeout=0.05)
        assert await worker.rpc_sync("worker1", count) == before + 1


async def test_a_reply_that_comes_twice_counts_once():
    async with faulty_cluster(Fault(REPLY, "duplicate")) as (_, worker):
        assert [await worker.rpc_sync("worker1", echo, args=(number,)) for number in range(5)] == list(range(5))


async def test_replies_out_of_order_find_their_calls():
    async with faulty_cluster(Fault(REPLY, "reorder", delay_s=0.02)) as (_, worker):
        futures = [worker.rpc_async("worker1", echo, args=(number,)) for number in range(10)]
        assert await asyncio.gather(*futures) == list(range(10))


async def test_tensors_through_a_bad_network():
    async with faulty_cluster(Fault(REQUEST, "delay", probability=0.5), Fault(REPLY, "reorder")) as (_, worker):
        tensors = [torch.full((50_000,), float(number)) for number in range(10)]
        replies = await asyncio.gather(*(worker.rpc_async("worker1", echo, args=(tensor,)) for tensor in tensors))
        assert all(torch.equal(*pair) for pair in zip(replies, tensors, strict=True))


async def test_a_cut_connection_fails_its_calls_and_the_next_call_connects():
    async with faulty_cluster(Fault(REPLY, "cut", count=1)) as (_, worker):
        with pytest.raises(WorkerLostError) as lost:
            await worker.rpc_sync("worker1", echo, args=(1,))
        assert lost.value.worker == "worker1"
        assert await worker.rpc_sync("worker1", echo, args=(2,)) == 2


async def test_a_peer_whose_signs_of_life_are_lost_is_given_up():
    async with faulty_cluster(Fault(MessageType.PING, "drop"), Fault(REPLY, "drop", count=1)) as (network, worker):
        with pytest.raises(WorkerLostError):  # whichever end gives up first
            await worker.rpc_sync("worker1", echo, args=(1,))
        assert network.injected[MessageType.PING, "drop"] > 0
        assert not worker.statistics()["connector"]["connections"]
