"""Creations that never reach their owner: everybody who was handed the RRef hears of it, however long it would wait."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

import arpc
from arpc.ids import WorkerInfo
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType, RRefCreationFailed
from tests.rref import objects
from tests.rref.conftest import OPTIONS, nothing_is_held, until
from tests.rref.objects import Counter

OWNER = "worker1"
# None waits in vain: whoever waits for ever fails here
PATIENCE_S = 20
# Without a limit for those who wait, the tests show that it is not a timeout that ends it
FOR_EVER = OPTIONS.replace(rpc_timeout=0, rref_grace=0.5)


@asynccontextmanager
async def faulty_cluster(options=FOR_EVER, workers=4, elastic=False):
    network = FaultyTransport(MemoryNetwork())
    async with cluster(workers, options=options, transports={"memory": network}, elastic=elastic) as group:
        for worker in group:
            for other in group:
                await worker.rpc_sync(other.name, objects.nothing)
        for function in (objects.give_back, objects.make_number):
            assert await arpc.remote(OWNER, function, (5,)) == 5  # so that it is defined there
        async with asyncio.timeout(PATIENCE_S):
            yield group, network
            await nothing_is_held(group)


def lose_next(network, action):
    network.inject(Fault(MessageType.RREF_CREATE, action, count=1))
    # who drops a message tells nobody: only a timeout shows that it is lost
    return 0.2 if action == "drop" else 0


# -- what is created


def by_function(timeout):
    return arpc.remote(OWNER, objects.give_back, (Counter(),), timeout=timeout)


def by_function_not_known_yet(timeout):
    return arpc.remote(OWNER, objects.keywords, kwargs={"a": 1}, timeout=timeout)


def by_coroutine(timeout):
    return arpc.remote(OWNER, objects.make_number, (7,), timeout=timeout)


def by_class(timeout):
    return arpc.remote(OWNER, Counter, timeout=timeout)


def by_method_of_a_lost_value(timeout):
    # only the first of these creations is lost
    return arpc.remote(OWNER, Counter, timeout=timeout).remote(timeout=0).next()


def with_a_tensor(timeout):
    return arpc.remote(OWNER, objects.give_back, (torch.ones(1 << 18),), timeout=timeout)


CREATIONS = [
    by_function,
    by_function_not_known_yet,
    by_coroutine,
    by_class,
    by_method_of_a_lost_value,
    with_a_tensor,
]


# -- how it is handed on


async def as_an_argument(rref):
    return await arpc.rpc_sync("worker2", objects.fetch, (rref,))


async def in_a_container(rref):
    return await arpc.rpc_sync("worker2", objects.fetch_nested, ({"rrefs": [rref, rref]},))


async def from_user_to_user_to_user(rref):
    return await objects.pass_on(rref, "worker2", "worker3", "worker2", "worker0")


async def to_its_owner(rref):
    return await arpc.rpc_sync(OWNER, objects.fetch, (rref,))


async def for_a_method(rref):
    return await arpc.rpc_sync("worker2", objects.call_add, (rref,))


async def for_a_chain_of_methods(rref):
    return await arpc.rpc_sync("worker2", objects.call_next_twice, (rref,))


async def for_its_type(rref):
    return await arpc.rpc_sync("worker2", objects.type_of, (rref,))


async def for_a_stream(rref):
    return await arpc.rpc_sync("worker2", objects.sum_of_stream, (rref,))


WAYS = [
    as_an_argument,
    in_a_container,
    from_user_to_user_to_user,
    to_its_owner,
    for_a_method,
    for_a_chain_of_methods,
    for_its_type,
    for_a_stream,
]


@pytest.mark.parametrize("action", ["cut", "drop"])
@pytest.mark.parametrize("create", CREATIONS)
async def test_third_workers_hear_that_a_creation_is_lost(create, action):
    # the creator tells: the owner would ask it much later
    async with faulty_cluster(FOR_EVER.replace(rref_grace=2 * PATIENCE_S)) as (_, network):
        rref = create(lose_next(network, action))
        with pytest.raises(arpc.RRefCreationError):
            await as_an_argument(rref)
        assert network.injected[MessageType.RREF_CREATE, action] == 1
        del rref


@pytest.mark.parametrize("action", ["cut", "drop"])
@pytest.mark.parametrize("hand_on", WAYS)
async def test_however_it_was_handed_on(hand_on, action):
    async with faulty_cluster() as (_, network):
        rref = by_class(lose_next(network, action))
        # a call of the creator to the owner itself may be lost with the connection
        lost = (arpc.RRefCreationError, arpc.WorkerLostError) if hand_on is to_its_owner else arpc.RRefCreationError
        with pytest.raises(lost):
            await hand_on(rref)
        with pytest.raises((arpc.RRefCreationError, arpc.OwnerLostError)):
            await rref
        del rref


@pytest.mark.parametrize("action", ["cut", "drop"])
async def test_as_a_result(action):
    async with faulty_cluster() as (group, network):
        timeout = lose_next(network, action)
        rref = await group[2].rpc_sync("worker0", objects.make_elsewhere, (OWNER, timeout))
        assert rref.owner_name() == OWNER
        with pytest.raises(arpc.RRefCreationError):
            await rref
        with pytest.raises(arpc.RRefCreationError):
            await rref.rpc_sync().add(1)
        del rref


async def test_the_reason_reaches_all_users_at_once_and_later():
    async with faulty_cluster() as (group, network):
        rref = by_coroutine(lose_next(network, "drop"))
        elsewhere = await arpc.rpc_sync("worker2", objects.keep, (rref,))
        with pytest.raises(arpc.RRefCreationError, match="timed out"):
            await arpc.rpc_sync("worker2", objects.use_kept)
        with pytest.raises(arpc.RRefCreationError, match="timed out"):
            await arpc.rpc_sync("worker2", objects.use_kept)
        # it is a value like any other for the owner, until the last has let go
        (row,) = [row for row in group[1].rrefs() if row.state == "abandoned"]
        assert set(row.forks) == {"worker0", "worker2"}
        await arpc.rpc_sync("worker2", objects.drop_kept)
        del rref, elsewhere


async def test_a_cancelled_creation_that_was_lost():
    async with faulty_cluster() as (_, network):
        lose_next(network, "drop")
        rref = by_coroutine(0)
        waits = asyncio.ensure_future(as_an_argument(rref))
        await until(lambda: network.injected[MessageType.RREF_CREATE, "drop"] == 1)
        rref._get_future().cancel()
        with pytest.raises(arpc.RRefCreationError, match="cancelled"):
            await waits
        del rref, waits


async def test_a_creation_that_comes_after_it_was_given_up_does_not_run():
    async with faulty_cluster() as (group, network):
        network.inject(Fault(MessageType.RREF_CREATE, "delay", count=1, delay_s=0.5))
        objects.runs.clear()
        rref = arpc.remote(OWNER, objects.note_run, ("late",), timeout=0.1)
        with pytest.raises(arpc.RRefCreationError):
            await as_an_argument(rref)
        handled = group[1].statistics()["executor"]["calls_handled"]
        del rref
        await nothing_is_held(group)
        await until(lambda: group[1].statistics()["executor"]["calls_handled"] > handled)
        assert not objects.runs


@pytest.mark.parametrize("action", ["drop", "duplicate", "delay", "reorder", "cut"])
async def test_the_news_is_told_until_it_is_heard(action):
    async with faulty_cluster() as (_, network):
        network.inject(Fault(MessageType.RREF_CREATION_FAILED, action, count=2))
        rref = by_coroutine(lose_next(network, "cut"))
        with pytest.raises(arpc.RRefCreationError):
            await as_an_argument(rref)
        del rref


async def test_the_news_of_a_creation_may_come_after_the_owner_was_taken_for_lost_and_is_back():
    async with faulty_cluster(FOR_EVER.replace(control_backoff=0.3, rref_grace=2 * PATIENCE_S)) as (group, network):
        creator, owner = group[0].rref_context, group[1]
        timeout = lose_next(network, "drop")
        network.inject(Fault(MessageType.RREF_CREATION_FAILED, "cut", count=1))
        rref = by_coroutine(timeout)
        await until(lambda: network.injected[MessageType.RREF_CREATION_FAILED, "cut"] == 1)
        creator.peer_lost(owner.info, "it is silent")
        creator.peer_connected(owner.info)
        del rref
        # all is forgotten when the news is sent again, and the owner counts the fork
        await until(lambda: network.seen[MessageType.RREF_CREATION_FAILED] == 2)
        await until(lambda: creator.post.is_idle)


async def test_a_creation_may_arrive_after_the_owner_was_taken_for_lost_and_is_back():
    async with faulty_cluster(FOR_EVER.replace(rref_grace=2 * PATIENCE_S)) as (group, network):
        creator, owner = group[0].rref_context, group[1]
        network.inject(Fault(MessageType.RREF_CREATE, "delay", count=1, delay_s=0.3))
        rref = by_coroutine(0)
        creation = rref._creation
        await until(lambda: network.injected[MessageType.RREF_CREATE, "delay"] == 1)
        creator.peer_lost(owner.info, "it is silent")
        creator.peer_connected(owner.info)
        del rref
        await until(creation.done)
        assert creation.error is None


async def test_a_fork_may_be_counted_after_the_owner_was_taken_for_lost_and_is_back():
    async with faulty_cluster(FOR_EVER.replace(control_backoff=0.3, rref_grace=2 * PATIENCE_S)) as (group, network):
        user, owner = group[2].rref_context, group[1]
        rref = by_coroutine(0)
        assert await rref == 7
        network.inject(Fault(MessageType.RREF_FORK_REQUEST, "cut", count=1))
        kept = asyncio.ensure_future(arpc.rpc_sync("worker2", objects.keep, (rref,)))
        await until(lambda: network.injected[MessageType.RREF_FORK_REQUEST, "cut"] == 1)
        user.peer_lost(owner.info, "it is silent")
        user.peer_connected(owner.info)
        await kept
        await arpc.rpc_sync("worker2", objects.drop_kept)
        await until(lambda: network.seen[MessageType.RREF_FORK_REQUEST] == 2)
        await until(lambda: user.post.is_idle)
        del rref, kept


@pytest.mark.parametrize("timeouts_travel", [True, False])
async def test_a_creation_that_runs_goes_on_if_its_creator_only_loses_patience(timeouts_travel):
    objects.gates["gate"] = gate = objects.Gate()
    async with faulty_cluster(FOR_EVER.replace(timeouts_travel=timeouts_travel)) as (_, network):
        rref = arpc.remote(OWNER, objects.pass_gate, ("gate", 7), timeout=0.2)
        waits = asyncio.ensure_future(as_an_argument(rref))
        await gate.entered.wait()
        with pytest.raises(arpc.RRefCreationError):
            await rref
        await until(lambda: network.seen[MessageType.RREF_CREATION_FAILED] == 1)
        gate.event.set()
        if timeouts_travel:  # then the owner has ended it
            with pytest.raises(arpc.RRefCreationError):
                await waits
        else:
            assert await waits == 7
        del rref, waits
    del objects.gates["gate"]


async def test_a_creation_on_oneself_that_is_given_up_before_it_arrives():
    async with faulty_cluster():
        rref = arpc.remote("worker0", objects.make_number, (1,))
        rref._get_future().cancel()
        with pytest.raises(arpc.RRefCreationError):
            await arpc.rpc_sync("worker2", objects.fetch, (rref,))
        del rref


# -- creators that cannot tell


async def test_a_creator_that_dies_before_it_can_tell():
    """The owner was never connected to it: nothing but a question shows that it is gone."""
    async with cluster(["creator", "owner", "user"], options=FOR_EVER, elastic=True) as group:
        creator, owner, user = group
        async with asyncio.timeout(PATIENCE_S):
            rref = creator.rref_context.ids.next_number()
            fork = user.rref_context.ids.next_number()
            await creator.shutdown(graceful=False)
            # as if the creator had handed it on, and died
            arrived = user.rref_context.receive(rref, fork, owner.info, creator.info, is_created=False)
            assert arrived.owner == owner.info
            handle = arpc.RRef.of(user.rref_context, arrived)
            with pytest.raises((arpc.RRefCreationError, arpc.RRefError)):
                await handle
            del handle, arrived
            await nothing_is_held(group)


async def test_a_worker_that_knows_nothing_of_a_creation_is_asked():
    async with faulty_cluster() as (group, network):
        creator, owner, user, _ = group
        rref, fork = creator.rref_context.ids.next_number(), user.rref_context.ids.next_number()
        arrived = user.rref_context.receive(rref, fork, owner.info, creator.info, is_created=False)
        handle = arpc.RRef.of(user.rref_context, arrived)
        with pytest.raises(arpc.RRefCreationError, match="knows of no such creation"):
            await handle
        assert network.seen[MessageType.RREF_CREATION_QUERY] == 1
        del handle, arrived


async def test_an_owner_goes_on_waiting_for_a_creation_that_is_on_its_way():
    async with faulty_cluster(FOR_EVER.replace(rref_grace=0.1)) as (_, network):
        network.inject(Fault(MessageType.RREF_CREATE, "delay", count=1, delay_s=0.6))
        rref = by_coroutine(0)
        assert await as_an_argument(rref) == 7
        assert network.seen[MessageType.RREF_CREATION_QUERY] > 1
        del rref


async def test_news_of_a_stranger_s_creation_fails_nothing(group):
    """Only the worker that chose the number of a creation can use it up."""
    gate = objects.gates["gate"] = objects.Gate()
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5))
    await gate.entered.wait()
    number, fork = rref.ids()
    label = (number.to_int(), fork.to_int(), 1, "no")
    await group[2].agent.request(RRefCreationFailed, "worker1", (0, 1, list(label)))
    gate.event.set()
    assert await rref == 5
    assert isinstance(rref.owner(), WorkerInfo)
    del objects.gates["gate"]
