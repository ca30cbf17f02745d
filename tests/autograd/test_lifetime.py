"""Contexts end: on every worker they touched, whatever is lost on the way, and with the worker that made them."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

import arpc
from arpc.autograd import contexts
from arpc.autograd.contexts import Container
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left, until
from tests.autograd.test_backward import leaf


def has_contexts(group):
    return any(worker.autograd.statistics()["contexts"] for worker in group if not worker.is_shut_down)


async def test_leaving_releases_it_on_every_worker_it_touched(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", functions.nested, (x, "worker2"))  # worker0 never spoke to worker2
        assert all(ctx_id in worker.autograd.container.contexts for worker in group)
    assert_nothing_is_left(group)


async def test_leaving_by_an_error_releases_it_too(group):
    async def train():
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.mul, (leaf(), 2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await train()
    assert_nothing_is_left(group)


async def test_a_cancelled_task_releases_it_too(group):
    inside = asyncio.Event()

    async def train():
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(train())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not has_contexts(group))


async def test_being_cancelled_while_leaving_does_not_keep_it(group):
    entered = asyncio.Event()

    async def train():
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
            entered.set()

    task = asyncio.create_task(train())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not has_contexts(group))


async def test_a_release_that_nobody_waits_for_any_more_reaches_all(group):
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
        handler = group[1].autograd.lifetimes.on_release(ctx_id, group[0].info.id)
        assert handler is not None
        handler.close()  # as if it were cancelled before its first step
        await until(lambda: not any(ctx_id in worker.autograd.container.contexts for worker in group[1:]))
    assert_nothing_is_left(group)


async def test_being_cancelled_while_leaving_waits_for_nobody():
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=OPTIONS, transports={"memory": transport}) as group:
        about_to_leave = asyncio.Event()

        async def train():
            async with arpc.autograd.context():
                await arpc.rpc_sync("worker1", functions.mul, (leaf(), 2))
                await arpc.rpc_sync("worker2", functions.mul, (leaf(), 2))
                transport.inject(Fault(MessageType.AUTOGRAD_RELEASE, "drop", count=2))
                about_to_leave.set()

        task = asyncio.create_task(train())
        await about_to_leave.wait()
        await until(lambda: transport.injected[MessageType.AUTOGRAD_RELEASE, "drop"] == 2)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert task.cancelled()
        await until(lambda: not has_contexts(group))


async def test_a_call_that_outlives_its_context_records_nothing(group):
    gate = asyncio.Event()
    x = leaf()

    async def later():
        await gate.wait()
        return await arpc.rpc_sync("worker1", functions.mul, (x, 2))

    async with arpc.autograd.context():
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    gate.set()
    assert (await task).tolist() == [2.0, 4.0, 6.0]
    assert_nothing_is_left(group)


async def test_a_call_under_way_when_its_context_ends_does_not_bring_it_back():
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(2, options=OPTIONS, transports={"memory": transport}) as group:
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.mul, (leaf(), 2))
            transport.inject(Fault(MessageType.REQUEST, "delay", count=1, delay_s=0.05))
            late = arpc.rpc_async("worker1", functions.mul, (leaf(), 3))
        assert (await late).tolist() == [3.0, 6.0, 9.0]
        assert_nothing_is_left(group)


@pytest.mark.parametrize("action", ["drop", "delay", "cut", "duplicate"])
async def test_a_release_survives_a_bad_network(action):
    fault = Fault(MessageType.AUTOGRAD_RELEASE, action, count=2, delay_s=0.05)
    transport = FaultyTransport(MemoryNetwork(), [fault])
    async with cluster(3, options=OPTIONS, transports={"memory": transport}) as group:
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
        await until(lambda: not has_contexts(group))
        assert transport.injected[MessageType.AUTOGRAD_RELEASE, action] > 0


async def start_and_stay(inside: str, further: str) -> None:
    x = leaf()
    async with arpc.autograd.context():
        await arpc.rpc_sync(inside, functions.nested, (x, further))
        await asyncio.Event().wait()


async def test_contexts_of_a_worker_that_leaves_are_reclaimed():
    async with cluster(["worker0", "worker1", "worker2"], options=OPTIONS, elastic=True) as group:
        task = arpc.rpc_async("worker2", start_and_stay, ("worker0", "worker1"))
        await until(lambda: all(worker.autograd.container.contexts for worker in group))
        # nobody says goodbye to worker1, which does not know worker2
        await group[2].shutdown(graceful=False)
        with pytest.raises((arpc.WorkerLostError, arpc.CallCancelledError, arpc.ShutdownError)):
            await task
        await until(lambda: not has_contexts(group))


async def test_who_heard_of_a_context_by_way_of_a_lost_worker_hears_of_its_end():
    async with cluster(3, options=OPTIONS, elastic=True) as group:
        async with arpc.autograd.context() as ctx_id:
            await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
            context = group[0].autograd.container.find(ctx_id)
            assert group[2].id not in context.known_workers
            await group[1].shutdown(graceful=False)
            await until(lambda: group[2].id in context.known_workers)
            assert has_contexts([group[2]])
        assert_nothing_is_left(group)


async def test_a_creator_that_does_not_answer_is_asked_again():
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=OPTIONS, elastic=True, transports={"memory": transport}) as group:
        async with arpc.autograd.context() as ctx_id:
            await arpc.rpc_sync("worker1", functions.nested, (leaf(), "worker2"))
            transport.inject(Fault(MessageType.AUTOGRAD_QUERY, "drop", count=1))
            await group[1].shutdown(graceful=False)
            context = group[0].autograd.container.find(ctx_id)
            await until(lambda: group[2].id in context.known_workers)
            assert transport.injected[MessageType.AUTOGRAD_QUERY, "drop"] == 1
        assert_nothing_is_left(group)


async def test_a_lost_connection_alone_ends_no_context():
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(2, options=OPTIONS, transports={"memory": transport}) as group:
        x = leaf()
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
            transport.inject(Fault(MessageType.REQUEST, "cut", count=1))
            with pytest.raises(arpc.WorkerLostError):
                await arpc.rpc_sync("worker1", functions.give_back, (1,))
            lifetimes = group[1].autograd.lifetimes
            await until(lambda: bool(lifetimes._doubtful))
            await until(lambda: not lifetimes._doubtful)
            await arpc.autograd.backward(ctx_id, [y.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        assert_nothing_is_left(group)


async def test_many_passes_leave_nothing(group):
    x = leaf()
    kept = weakref.WeakSet()
    for _ in range(200):
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
            kept.add(y)
            z = await arpc.rpc_sync("worker2", functions.mul, (y, x))
            await arpc.autograd.backward(ctx_id, [z.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0, 8.0, 12.0]
        del y, z
    gc.collect()
    assert not kept
    for worker in group:
        container = worker.autograd.container
        assert not container.contexts
        assert len(container._ended) + len(container._left) == (200 if worker is not group[0] else 0)
        assert not container._unknown
        assert not worker.autograd.lifetimes._tasks


async def test_a_graph_is_freed_with_its_context_without_the_garbage_collector(group):
    gc.collect()
    gc.disable()
    try:
        async with arpc.autograd.context() as ctx_id:
            x = leaf()
            y = await arpc.rpc_sync("worker1", functions.mul, (x * 1, 2))
            await arpc.autograd.backward(ctx_id, [y.sum()])
            freed = weakref.ref(x), weakref.ref(y)
            del x, y
        assert [reference() for reference in freed] == [None, None]
    finally:
        gc.enable()


# -- the container


def test_ids_are_of_the_worker_that_makes_them():
    container = Container(5)
    first, second = container.new(), container.new()
    assert first.id != second.id
    assert first.creator == second.creator == 5
    assert container.new_message_id() not in {0, container.new_message_id()}
    assert container.enter(first.id, 6) is first


def test_what_has_ended_is_not_entered_again():
    container = Container(5)
    foreign = 6 << 48 | 3
    assert container.enter(foreign, 6) is container.enter(foreign, 6)
    assert container.remove(foreign) is not None
    assert container.remove(foreign) is None
    assert container.enter(foreign, 6) is None
    assert container.enter(5 << 48 | 99, 6) is None  # of its own, and it is not there


def test_a_worker_has_so_many_contexts_and_no_more(monkeypatch):
    monkeypatch.setattr(contexts, "_MAX_OF_PEER", 3)
    container = Container(5)
    brought = [container.enter(6 << 48 | number, 6) for number in range(3)]
    for context in brought:
        assert context is not None
        context.known_workers[6] = 0
    with pytest.raises(arpc.OverloadedError, match="3 autograd contexts"):
        container.enter(6 << 48 | 3, 6)
    assert container.enter(6 << 48 | 1, 6) is brought[1]
    assert container.enter(7 << 48 | 1, 7) is not None  # of another worker
    container.remove(6 << 48)
    assert container.enter(6 << 48 | 3, 6) is not None


def test_tombstones_are_bounded():
    container = Container(5)
    for number in range(10_000):
        container.enter(6 << 48 | number, 6)
        container.remove(6 << 48 | number)
    assert len(container._ended) <= 4096


def test_so_is_what_is_remembered_of_contexts_that_were_left_or_asked_for():
    container = Container(5)
    for number in range(10_000):
        context = container.enter(6 << 48 | number, 6)
        assert context is not None
        assert container.try_to_leave(context, 1, notified=6)
        container.record_early_reply(7 << 48 | number, 1, 6, has_announced=True)
    assert not container.contexts
    assert len(container._left) <= 4096
    assert len(container._unknown) <= 4096
    assert not container.callable
    told = 7 << 48 | 9_999
    container.record_early_reply(told, 0, 6, has_announced=True)
    container.record_early_reply(told, 1, 6, has_announced=True)  # of an earlier pass nobody asks any more
    again = container.enter(told, 6)
    assert again is not None
    assert again.early_replies == {1: {6: True}}
    container.remove(told)
    container.record_early_reply(told, 2, 6, has_announced=True)  # it has ended, and nothing will ever come of it
    assert container.enter(told, 6) is None


@pytest.mark.parametrize("tells", ["ends", "failed passes", "early news"])
def test_what_is_learned_of_others_does_not_make_it_forget_a_context_that_it_left(tells):
    container = Container(5)
    left = container.enter(6 << 48, 6)
    assert left is not None
    left.known_workers[6] = 1
    assert container.try_to_leave_unused(left, notified=6)
    for number in range(1, 5_000):
        if tells == "ends":
            container.remove(6 << 48 | number)
        elif tells == "failed passes":
            container.fail_early(6 << 48 | number, 1)
        else:
            container.record_early_reply(6 << 48 | number, 1, 6, has_announced=True)
    assert container.has_left(6 << 48)
    assert 6 << 48 in container.callable  # a task that outlives its handler may go on there
    assert container.rejoin(6 << 48) is container.find(6 << 48)


@pytest.mark.parametrize("tells", ["failed passes", "early news", "contexts left"])
def test_what_is_learned_of_others_brings_no_context_to_life_again(tells):
    container = Container(5)
    container.enter(6 << 48, 6)
    container.remove(6 << 48)
    for number in range(1, 5_000):
        if tells == "failed passes":
            container.fail_early(6 << 48 | number, 1)
        elif tells == "early news":
            container.record_early_reply(6 << 48 | number, 1, 6, has_announced=True)
        else:
            context = container.enter(6 << 48 | number, 6)
            assert context is not None
            assert container.try_to_leave(context, 1, notified=6)
    assert container.enter(6 << 48, 6) is None


def test_contexts_that_are_left_do_not_make_it_forget_news_of_others():
    container = Container(5)
    container.fail_early(7 << 48, 3)
    for number in range(5_000):
        context = container.enter(6 << 48 | number, 6)
        assert context is not None
        assert container.try_to_leave(context, 1, notified=6)
    entered = container.enter(7 << 48, 6)
    assert entered is not None
    assert entered.aborted_passes == {3}


def test_a_pass_can_be_taken_back_until_the_next_has_ended():
    context = Container(1).new()
    x = torch.ones(1, requires_grad=True)
    context.commit(1, {x: torch.tensor([1.0])})
    context.commit(2, {x: torch.tensor([2.0])})
    assert context.gradients[x].tolist() == [3.0]
    context.roll_back(1)
    assert context.gradients[x].tolist() == [3.0]
    context.roll_back(2)
    assert context.gradients[x].tolist() == [1.0]
    assert context.aborted_passes == {1, 2}


async def test_leaving_does_not_wait_for_the_dead():
    async with cluster(3, options=OPTIONS.replace(control_backoff=30.0), elastic=True) as group:
        async with arpc.autograd.context():
            await arpc.rpc_sync("worker1", functions.mul, (leaf(), 2))
            await arpc.rpc_sync("worker2", functions.mul, (leaf(), 2))
            await group[1].shutdown(graceful=False)
        # far from the backoff of half a minute
        assert_nothing_is_left([group[0], group[2]])


async def test_what_was_sent_to_a_worker_that_is_lost_is_in_nobodys_way():
    x = leaf()
    async with cluster(3, options=OPTIONS, elastic=True) as group, arpc.autograd.context() as ctx_id:
        lost = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        kept = await arpc.rpc_sync("worker2", functions.mul, (x, 3))
        await group[1].shutdown(graceful=False)
        context = group[0].autograd.container.find(ctx_id)
        await until(lambda: [send.to for send in context.sends.values()] == [group[2].id])
        # a pass that does not need it goes through
        await arpc.autograd.backward(ctx_id, [kept.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3
        with pytest.raises(arpc.WorkerLostError):
            await arpc.autograd.backward(ctx_id, [lost.sum()])
