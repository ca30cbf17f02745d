"""Lost messages, lost connections, lost workers; drops from anywhere; reports."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from contextlib import asynccontextmanager

import pytest

import arpc
from arpc.agent.hooks.observers import Handling, Observer
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.rref import objects
from tests.rref.conftest import OPTIONS, nothing_is_held, until
from tests.rref.objects import Counter, Gate, gates

CONTROL = [MessageType.RREF_FORK_REQUEST, MessageType.RREF_CHILD_ACCEPT, MessageType.RREF_USER_DELETE]


@asynccontextmanager
async def faulty_cluster(*faults, seed=0, workers=3, options=OPTIONS):
    transport = FaultyTransport(MemoryNetwork(), list(faults), seed=seed)
    async with cluster(workers, options=options, transports={"memory": transport}) as group:
        yield group, transport


class Seen(Observer):
    """Notes the handlers of a worker."""

    def __init__(self) -> None:
        self.accepted: list[Handling] = []
        self.ended: list[Handling] = []

    def handler_accepted(self, handling: Handling) -> None:
        self.accepted.append(handling)

    def handler_ends(self, handling: Handling) -> None:
        self.ended.append(handling)


@pytest.mark.parametrize("type_", CONTROL)
@pytest.mark.parametrize("action", ["drop", "duplicate", "delay", "reorder"])
async def test_control_messages_survive(type_, action):
    async with faulty_cluster(Fault(type_, action, count=2)) as (group, transport):
        rref = arpc.remote("worker1", int, (7,))
        assert await objects.pass_on(rref, "worker2", "worker0", "worker2") == 7
        del rref
        await nothing_is_held(group)
        assert transport.injected[type_, action] == 2


@pytest.mark.parametrize("action", ["duplicate", "delay", "reorder"])
async def test_a_creation_runs_once(action):
    async with faulty_cluster(Fault(MessageType.RREF_CREATE, action, count=1)) as (group, _):
        counter = arpc.remote("worker1", Counter)
        assert await counter.rpc_sync().add(1) == 1
        assert await counter.rpc_sync().add(1) == 2
        del counter
        await nothing_is_held(group)


async def test_observers_hear_of_the_end_of_a_creation_that_comes_twice():
    async with faulty_cluster(Fault(MessageType.RREF_CREATE, "duplicate", count=1)) as (group, transport):
        seen = Seen()
        group[1].agent.observe(seen)
        counter = arpc.remote("worker1", Counter)
        assert await counter.rpc_sync().add(1) == 1
        assert transport.injected[MessageType.RREF_CREATE, "duplicate"] == 1
        await until(lambda: len(seen.accepted) == len(seen.ended) == 3)
        group[1].agent.unobserve(seen)
        del counter
        await nothing_is_held(group)


async def test_a_lost_creation_times_out_and_is_given_up():
    async with faulty_cluster(Fault(MessageType.RREF_CREATE, "drop", count=1)) as (group, _):
        rref = arpc.remote("worker1", int, timeout=0.05)
        with pytest.raises(arpc.RRefCreationError):
            await rref
        del rref
        await nothing_is_held(group)


@pytest.mark.parametrize("type_", [MessageType.REQUEST, MessageType.REPLY])
async def test_a_fork_in_a_message_that_never_arrives_is_found_out(type_):
    async with faulty_cluster() as (group, transport):
        rref = arpc.remote("worker1", int, (7,))
        assert await rref == 7
        transport.inject(Fault(type_, "drop", count=1))
        with pytest.raises(arpc.RpcTimeoutError):
            await arpc.rpc_sync("worker2", objects.give_back, (rref,), timeout=0.05)
        del rref
        await nothing_is_held(group)


@pytest.mark.parametrize("seed", range(4))
async def test_chaos(seed):
    """Random RRefs of random workers, over a network that does everything to control messages at once."""
    faults = [
        Fault(type_, action, probability=0.15, delay_s=0.005)
        for type_ in [*CONTROL, MessageType.RREF_FORK_QUERY]
        for action in ("drop", "duplicate", "reorder", "delay")
    ]
    dice = random.Random(seed)
    async with faulty_cluster(*faults, seed=seed, workers=4) as (group, transport):
        names = [worker.name for worker in group]

        async def use_some() -> None:
            for _ in range(12):
                rref = arpc.remote(dice.choice(names), int, (7,))
                way = dice.choices(names, k=dice.randint(0, 4))
                assert await objects.pass_on(rref, *way) == 7

        await asyncio.gather(*(use_some() for _ in range(6)))
        await nothing_is_held(group)
        assert sum(transport.injected.values()) > 20


async def test_a_cut_connection_is_made_again_and_nothing_is_reclaimed():
    options = OPTIONS.replace(rref_grace=5)
    async with faulty_cluster(options=options) as (group, transport):
        rref = arpc.remote("worker1", int, (7,))
        assert await rref == 7
        transport.inject(Fault(MessageType.REQUEST, "cut", count=1))
        with pytest.raises(arpc.WorkerLostError):
            await arpc.rpc_sync("worker1", int)
        await until(lambda: not any(worker.agent.connector.retry.searches for worker in group))
        assert await rref == 7
        del rref
        await nothing_is_held(group)


async def test_a_dead_users_forks_are_reclaimed():
    async with cluster(3, options=OPTIONS, elastic=True) as group:
        rref = arpc.remote("worker1", Counter)
        kept = group[2].remote("worker1", Counter)
        shared = await arpc.rpc_sync("worker2", objects.give_back, (rref,))
        assert await kept.rpc_sync().add(1) == 1
        del shared
        assert len(group[1].rrefs()) == 2
        await group[2].shutdown(graceful=False)
        await until(lambda: len(group[1].rrefs()) == 1)
        assert await rref.rpc_sync().add(1) == 1
        del rref, kept
        gc.collect()
        await until(lambda: not group[1].rrefs())


async def test_a_dead_owner_is_noticed_at_once():
    gates["gate"] = Gate()
    async with cluster(3, options=OPTIONS, elastic=True) as group:
        rref = arpc.remote("worker1", int)
        assert await rref == 0
        waiting = arpc.remote("worker1", objects.pass_gate, ("gate",))
        fetch = asyncio.ensure_future(waiting.to_here())
        call = rref.rpc_async().bit_length()
        await gates["gate"].entered.wait()
        await call
        await group[1].shutdown(graceful=False)
        with pytest.raises(arpc.OwnerLostError):
            await fetch
        for use in (rref.to_here, rref.rpc_sync().bit_length, waiting.to_here):
            with pytest.raises(arpc.OwnerLostError) as caught:
                await use()
            assert caught.value.worker == "worker1"
        with pytest.raises(arpc.OwnerLostError):
            await arpc.rpc_sync("worker2", objects.fetch, (rref,))
    del gates["gate"]


# -- drops


async def test_many_drops_are_few_messages(group):
    asyncio.get_running_loop().set_debug(enabled=False)  # it notes where each of them was made
    rrefs = [arpc.remote("worker1", objects.nothing) for _ in range(10_000)]
    await asyncio.gather(*(rref._get_future() for rref in rrefs))
    before = group[0].statistics()["rrefs"]["control_messages_sent"]
    rrefs.clear()
    await nothing_is_held(group)
    assert group[0].statistics()["rrefs"]["control_messages_sent"] - before <= 5


async def test_drops_from_other_threads(group):
    rrefs = [arpc.remote("worker1", int) for _ in range(400)]

    def drop_all() -> None:
        while rrefs:
            try:
                rrefs.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await nothing_is_held(group)


async def test_drops_in_reference_cycles(group):
    class Node:
        pass

    for _ in range(10):
        node = Node()
        node.me, node.rref = node, arpc.remote("worker1", int)
    del node
    await nothing_is_held(group)


async def test_a_drop_after_the_worker_is_gone():
    async with cluster(2, options=OPTIONS):
        rref = arpc.remote("worker1", int)
        assert await rref == 0
    with pytest.raises((arpc.ShutdownError, arpc.RRefError)):
        await rref
    del rref
    gc.collect()


# -- reports


async def test_survivors_are_named_when_stacks_are_on(caplog):
    options = OPTIONS.replace(rref_creation_stacks=True)
    with caplog.at_level(logging.WARNING, logger="arpc.rref"):
        async with cluster(2, options=options) as group:
            rref = arpc.remote("worker1", Counter)
            await rref.rpc_sync().add(1)
            (row,) = group[1].rrefs()
            assert (row.role, row.owner, row.type, row.state, row.forks) == (
                "owner",
                "worker1",
                "Counter",
                "ready",
                {"worker0": 1},
            )
            assert "test_survivors_are_named_when_stacks_are_on" in row.made
    assert "1 RRefs are still held at shutdown" in caplog.text
    assert "Counter of worker1" in caplog.text
    assert "test_survivors_are_named_when_stacks_are_on" in caplog.text
    assert all(not worker.leaked_rrefs for worker in group)
    with pytest.raises(arpc.RRefError, match="was released: worker 'worker0' has shut down"):
        await rref


async def test_programs_in_a_folder_called_arpc_are_named_too():
    program = {"arpc": arpc, "Counter": Counter}
    source = "def make():\n    return arpc.remote('worker1', Counter)\n"
    exec(compile(source, "/somewhere/arpc/train.py", "exec"), program)
    async with cluster(2, options=OPTIONS.replace(rref_creation_stacks=True)) as group:
        rref = program["make"]()
        await rref.rpc_sync().add(1)
        (row,) = group[1].rrefs()
        assert "/somewhere/arpc/train.py" in row.made
        assert "arpc/api.py" not in row.made


async def test_leaks_are_reported(caplog):
    async with cluster(2, options=OPTIONS) as group:
        rref = arpc.remote("worker1", Counter)
        await rref.rpc_sync().add(1)
        # a user that is counted but does not exist, as if its delete had been lost for good
        context = group[1].rref_context
        (owned,) = context.forks.owned.values()
        owned.forks[context.ids.next()] = group[0].info
    assert "1 RRefs leak" in caplog.text
    (row,) = group[1].leaked_rrefs
    assert row.type == "Counter"


async def test_statistics_count_what_torch_counts(group):
    rref = arpc.remote("worker1", int)
    assert group[0].statistics()["rrefs"]["num_pending_users"] == 1
    await rref
    await until(rref.confirmed_by_owner)
    assert group[0].statistics()["rrefs"]["num_pending_users"] == 0
    assert group[1].statistics()["rrefs"]["num_owner_rrefs"] == 1
    assert group[1].statistics()["rrefs"]["num_forks"] == 1


async def test_what_was_sent_and_dropped_does_not_wait_for_the_garbage_collector(group):
    gc.collect()
    gc.disable()
    try:
        rrefs = [arpc.remote("worker1", objects.nothing) for _ in range(200)]
        back = await arpc.rpc_sync("worker1", objects.give_back, (rrefs,))
        del rrefs, back
        await until(lambda: not group[1].rrefs())
    finally:
        gc.enable()
