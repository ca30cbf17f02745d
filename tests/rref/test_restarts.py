"""Owners that come back under their names: what was meant for one of them never reaches the next."""

from __future__ import annotations

import asyncio
import random

import pytest

import arpc
from arpc.errors import ArpcError
from arpc.ids import UNKNOWN_ID, WorkerInfo
from arpc.testing import Cluster, cluster
from tests.rref import objects
from tests.rref.conftest import OPTIONS, nothing_is_held, until
from tests.rref.objects import Counter

RESTARTS = 20
USERS = ["creator", "user", "other"]


ended: list[arpc.Worker] = []


@pytest.fixture(autouse=True)
async def tidy_up():
    """Release what workers that crashed have opened."""
    yield
    while ended:
        await ended.pop().shutdown(graceful=False)


async def leave(worker: arpc.Worker) -> None:
    await worker.shutdown(graceful=False)


async def crash(worker: arpc.Worker) -> None:
    """As near to a death as a worker of this process can come: no goodbye, and nobody listens any more."""
    connector = worker.agent.connector
    for listener in connector._listeners:
        await listener.aclose()
    worker.agent.is_closing = True
    for _ in range(20):  # a connection that was being made when the door closed is there a few turns later
        for link in connector.links:
            link.connection.abort()
        await asyncio.sleep(0)


async def restart(group: Cluster, name: str, end=leave) -> arpc.Worker:
    old = group[name]
    await end(old)
    group._workers.remove(old)
    ended.append(old)
    return await group.add(name)


@pytest.fixture
async def elastic():
    async with cluster([*USERS, "owner"], options=OPTIONS, elastic=True) as group:
        yield group
        await nothing_is_held(group)


def hand_to(user: arpc.Worker, owner: WorkerInfo, creator: arpc.Worker, *, is_created=False) -> arpc.RRef[int]:
    """An RRef as it arrives at a worker from its creator."""
    rref, fork = creator.rref_context.ids.next_number(), creator.rref_context.ids.next_number()
    held = user.rref_context.receive(rref, fork, owner, creator.info, is_created=is_created)
    return arpc.RRef.of(user.rref_context, held)


async def use_in_any_way(rref: arpc.RRef[int]) -> None:
    uses = [
        rref.to_here,
        rref.rpc_sync().bit_length,
        lambda: rref.remote().bit_length().to_here(),
        rref._get_type,
        lambda: anext(rref.stream().bit_length()),
        lambda: anext(aiter(rref.stream())),
    ]
    for use in uses:
        with pytest.raises(arpc.OwnerLostError) as caught:
            await use()
        assert caught.value.worker == "owner"


@pytest.mark.parametrize("end", [leave, crash])
@pytest.mark.parametrize("is_created", [True, False])
async def test_a_successor_gets_nothing_that_was_meant_for_its_predecessor(elastic, is_created, end):
    creator, user, old = elastic["creator"], elastic["user"], elastic["owner"].info
    new = await restart(elastic, "owner", end)
    # it arrives when the worker it belongs to is gone, and its receiver knows the successor, or neither
    for knows_the_successor in (False, True):
        if knows_the_successor:
            await user.rpc_sync("owner", objects.nothing)
        rref = hand_to(user, old, creator, is_created=is_created)
        await use_in_any_way(rref)
        assert not new.rrefs()
        del rref
        await nothing_is_held(elastic)


async def test_a_successor_that_is_handed_what_its_predecessor_owned(elastic):
    creator, old = elastic["creator"], elastic["owner"].info
    new = await restart(elastic, "owner")
    rref = hand_to(new, old, creator)
    assert not rref.is_owner()
    await use_in_any_way(rref)
    del rref


async def test_an_rref_to_a_predecessor_is_of_no_use_anywhere(elastic):
    creator = elastic["creator"]
    rref = creator.remote("owner", Counter)
    assert await rref.rpc_sync().add(1) == 1
    new = await restart(elastic, "owner")
    assert await creator.rpc_sync("owner", objects.give_back, (1,)) == 1
    await use_in_any_way(rref)
    with pytest.raises(arpc.OwnerLostError):
        await creator.rpc_sync("user", objects.fetch, (rref,))
    assert not new.rrefs()
    del rref


async def test_an_owner_known_by_name_only(elastic):
    """Whoever hears of it knows it by its id as soon as there is a connection."""
    late = await elastic.add("late")
    creator, user = elastic["creator"], elastic["user"]
    assert creator.agent.peer("late") is None
    rref = creator.remote("late", int, (7,))
    assert rref.owner() == WorkerInfo("late", UNKNOWN_ID)
    assert await creator.rpc_sync("user", objects.fetch, (rref,)) == 7
    assert await rref == 7
    assert rref.owner() == late.info
    again = hand_to(user, WorkerInfo("late", UNKNOWN_ID), creator)
    assert again.owner() == late.info
    with pytest.raises(arpc.RRefCreationError, match="knows of no such creation"):
        await again
    new = await restart(elastic, "late")
    with pytest.raises(arpc.OwnerLostError):
        await rref
    assert not new.rrefs()
    del rref, again


@pytest.mark.parametrize("end", [leave, crash])
async def test_an_owner_is_replaced_again_and_again_while_rrefs_to_it_are_handed_on(end):
    dice = random.Random(20)
    options = OPTIONS.replace(rpc_timeout=5, connect_timeout=2)
    async with cluster([*USERS, "owner"], options=options, elastic=True) as group:
        users = [group[name] for name in USERS]
        is_over = False
        used: list[int] = []

        async def use_some(worker: arpc.Worker) -> None:
            while not is_over:
                try:
                    rrefs = [worker.remote("owner", int, (7,)), worker.remote("owner", Counter).remote().add(7)]
                    way = dice.choices(USERS, k=dice.randint(0, 3))
                    to, *further = [*way, "owner"]
                    results = [worker.rpc_sync(to, objects.pass_on, (rref, *further)) for rref in rrefs]
                    used.extend(await asyncio.gather(*results))
                except (ArpcError, OSError):
                    await asyncio.sleep(0.001)  # the owner is being replaced
                finally:
                    rrefs = results = None

        using = [asyncio.create_task(use_some(worker)) for worker in users for _ in range(3)]
        for _ in range(RESTARTS):
            before = len(used)
            await until(lambda before=before: len(used) > before + 5)
            await restart(group, "owner", end)
        before = len(used)
        await until(lambda: len(used) > before + 5)
        is_over = True
        await asyncio.gather(*using)
        assert set(used) == {7}
        del using
        await nothing_is_held(group)
        for worker in group:
            context = worker.rref_context
            assert not context.forks.owned
            assert not context.forks.offers
            assert not context._answers
            # one for each incarnation of its peers would be one for each restart
            assert len(context.windows) <= len(group)
