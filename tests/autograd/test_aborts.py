"""Whoever has to hear that a pass has failed hears it, whatever becomes of the first attempt to tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

import arpc
from arpc.autograd.contexts import Container, current_context_id
from arpc.testing import Cluster, Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left, until
from tests.autograd.test_backward import leaf
from tests.autograd.test_failures import Wait, gate, hold_up

ABORT = MessageType.AUTOGRAD_ABORT
PATIENT = OPTIONS.replace(rref_grace=5)
"""Nobody is given up because connections to it are cut again and again."""


PARAMETER = torch.nn.Parameter(torch.tensor([5.0, 6.0, 7.0]))


@arpc.inline
def weighted(x):
    """Worker2 is the only one that is asked for it."""
    return PARAMETER * x


class Group:
    """Three workers, of which worker1 makes passes of one context fail when worker2 has done its part."""

    def __init__(self, workers: Cluster, transport: FaultyTransport, ctx_id: int) -> None:
        self.workers = workers
        self.transport = transport
        self.ctx_id = ctx_id
        self.x = leaf(1.0, 1.0, 1.0)
        self.bad: torch.Tensor
        self.good: torch.Tensor

    async def forward(self) -> None:
        self.bad = await arpc.rpc_sync("worker1", functions.boom, (self.x,))
        self.good = await arpc.rpc_sync("worker2", weighted, (self.x,))

    async def fail(self) -> None:
        with pytest.raises(arpc.BackwardError, match="boom"):
            await arpc.autograd.backward(self.ctx_id, [(self.good + self.bad).sum()], retain_graph=True)

    async def succeed(self) -> None:
        """Run passes until one gets through: connections may be cut in the midst of one."""
        while True:
            try:
                await arpc.autograd.backward(self.ctx_id, [self.good.sum()], retain_graph=True)
            except arpc.WorkerLostError:
                continue
            return

    @property
    def there(self) -> list[list[float]]:
        """The gradients on worker2."""
        return [gradient.tolist() for gradient in self.workers[2].autograd.gradients(self.ctx_id).values()]

    async def until_told(self) -> None:
        """Until nobody tries to tell anybody anything any more."""
        await until(lambda: not any(worker.autograd.aborts.unacknowledged for worker in self.workers))


@asynccontextmanager
async def group_of(*faults: Fault, options: arpc.RpcOptions = PATIENT) -> AsyncIterator[Group]:
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=options, transports={"memory": transport}) as workers:
        async with arpc.autograd.context() as ctx_id:
            group = Group(workers, transport, ctx_id)
            await group.forward()
            for fault in faults:
                transport.inject(fault)
            yield group
            await group.until_told()
            for worker in workers:
                assert not worker.autograd.statistics()["passes"]
                assert not worker.autograd.aborts.unacknowledged
            transport.heal()
        assert_nothing_is_left(workers)


@pytest.mark.parametrize(
    ("action", "count"), [("cut", 1), ("cut", 3), ("drop", 1), ("delay", 2), ("duplicate", 2), ("reorder", 1)]
)
async def test_a_worker_hears_of_a_failed_pass_whatever_the_network_does(action, count):
    async with group_of(Fault(ABORT, action, count=count, delay_s=0.3)) as group:
        await group.fail()
        assert group.there == []
        await group.succeed()
        assert group.there == [[1.0] * 3]
        assert arpc.autograd.get_gradients(group.ctx_id)[group.x].tolist() == [5.0, 6.0, 7.0]
        assert group.transport.injected[ABORT, action] >= 1


@pytest.mark.parametrize("action", ["cut", "drop", "delay", "duplicate", "reorder"])
async def test_no_later_pass_overtakes_the_news(action, monkeypatch):
    # as if it had taken longer than anybody waits
    monkeypatch.setattr("arpc.autograd.service._ABORT_S", 0.0)
    async with group_of(Fault(ABORT, action, count=4, delay_s=0.05)) as group:
        for number in range(1, 4):
            await group.fail()
            await group.succeed()
            assert group.there == [[float(number)] * 3]
        await group.until_told()
        assert group.there == [[3.0] * 3]


async def test_a_pass_takes_back_gradients_of_one_that_failed_unheard(monkeypatch):
    monkeypatch.setattr("arpc.autograd.service._ABORT_S", 0.0)
    async with group_of(Fault(ABORT, "drop"), options=PATIENT.replace(control_retries=0)) as group:
        await group.fail()
        assert group.there == [[1.0] * 3]  # nobody could tell it
        await group.until_told()
        for number in range(1, 3):
            await group.succeed()
            assert group.there == [[float(number)] * 3]
            assert arpc.autograd.get_gradients(group.ctx_id)[group.x].tolist() == [number * w for w in (5.0, 6.0, 7.0)]


async def test_news_that_come_before_the_pass_end_it():
    async with group_of() as group:
        result = arpc.remote("worker2", doubled_leaf)
        await result.to_here()
        answered = group.transport.seen[MessageType.FAILURE]
        group.transport.inject(Fault(MessageType.AUTOGRAD_BACKWARD, "delay", count=1, delay_s=0.3))
        with pytest.raises(arpc.RpcTimeoutError):
            await result.backward(group.ctx_id, timeout=0.05)
        await until(lambda: group.transport.seen[MessageType.FAILURE] > answered)
        assert group.there == []


@arpc.inline
def doubled_leaf():
    return 2 * leaf(1.0)


async def ask_for_leaf(of):
    await arpc.rpc_sync(of, functions.make_leaf, (1.0,))


async def begin_and_wait():
    """A pass that worker2 has done its part in, and that waits for worker1."""
    x = leaf(1.0)
    held = await arpc.rpc_sync("worker1", hold_up, (x,))
    done = await arpc.rpc_sync("worker2", weighted, (x,))
    ctx_id = current_context_id.get()
    assert ctx_id is not None
    await arpc.autograd.backward(ctx_id, [held + done.sum()], timeout=0)


@pytest.fixture
def closed_gate():
    gate.clear()
    yield gate
    gate.set()


async def test_who_began_a_pass_is_lost_and_the_others_tell_each_other(closed_gate):
    async with cluster(4, options=OPTIONS, elastic=True) as workers, arpc.autograd.context() as ctx_id:
        # they know each other, and not only the one that will be lost
        await arpc.rpc_sync("worker2", ask_for_leaf, ("worker1",))
        begun = asyncio.ensure_future(arpc.rpc_async("worker3", begin_and_wait))
        await until(lambda: workers[1].autograd.statistics()["passes"] == 1)
        await until(lambda: bool(workers[2].autograd.gradients(ctx_id)))
        await workers[3].shutdown(graceful=False)
        with pytest.raises(arpc.WorkerLostError):
            await begun
        await until(lambda: not workers[2].autograd.gradients(ctx_id))
        assert not any(worker.autograd.statistics()["passes"] for worker in workers[:3])


def test_a_pass_that_failed_before_its_context_was_known():
    container = Container(1)
    other = 2 << 48 | 7
    container.fail_early(other, 3)
    container.fail_early(other, 4)
    made = container.enter(other, 6)
    assert made is not None
    assert made.aborted_passes == {3, 4}
    container.remove(other)
    container.fail_early(other, 5)  # nothing will ever come of it
    for number in range(10_000):
        container.fail_early(3 << 48 | number, 1)
    assert len(container._unknown) <= 4096


@arpc.inline
def hold_up_and_boom(x):
    return Wait.apply(functions.Boom.apply(x.expand(200_000))).sum()


@pytest.mark.parametrize("is_told_why", [True, False])
async def test_the_news_do_not_hide_why_it_failed(closed_gate, monkeypatch, is_told_why):
    async with group_of() as group:
        for worker in group.workers:
            monkeypatch.setattr(worker.autograd.lifetimes, "attempt_s", 30.0)
        monkeypatch.setattr("arpc.autograd.service._REASON_S", 30.0 if is_told_why else 0.01)
        held = await arpc.rpc_sync("worker1", hold_up_and_boom, (group.x[0],))
        begun = asyncio.create_task(arpc.autograd.backward(group.ctx_id, [held + 0], retain_graph=True))
        root, other = (group.workers[number] for number in (0, 2))
        await until(lambda: group.workers[1].autograd.statistics()["passes"] == 1)
        # worker2 has heard of it by way of one that it was told to do its part by, say
        pass_id = root.autograd.container.find(group.ctx_id).active_pass.id
        assert other.autograd.abort(other.autograd.container.find(group.ctx_id), pass_id) is not None
        await until(lambda: begun.done() or root.agent.connector.busy_links())
        if is_told_why:
            closed_gate.set()
        with pytest.raises(arpc.AutogradError, match="boom" if is_told_why else "was ended by worker 'worker2'"):
            await begun
        closed_gate.set()
        await group.until_told()
