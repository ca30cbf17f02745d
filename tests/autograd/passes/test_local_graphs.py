"""Passes over larger graphs of one worker alone, on the loop and in threads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import arpc
from arpc.autograd import service
from arpc.autograd.engine import run
from arpc.autograd.passes.backward_pass import WALK_NODES, BackwardPass
from arpc.autograd.passes.messages import Parcel
from tests.autograd import functions
from tests.autograd.conftest import until
from tests.autograd.passes.test_ended_passes import Hold, held
from tests.autograd.test_backward import leaf

__all__ = ["held"]

_NODES = 500


def deep(x: Tensor, nodes: int = _NODES) -> Tensor:
    for _ in range(nodes):
        x = x + 1
    return x


@pytest.fixture
def passes(monkeypatch) -> list[BackwardPass]:
    """The passes that were made."""
    made: list[BackwardPass] = []

    class Noted(BackwardPass):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(service, "BackwardPass", Noted)
    return made


@pytest.mark.parametrize("is_short", [False, True], ids=["in a thread", "on the loop"])
async def test_gradients_are_those_of_torch_and_nothing_is_written(group, passes, monkeypatch, is_short):
    monkeypatch.setattr(group[0].autograd.run_policy, "is_short", lambda *_: is_short)
    x, y, unused = leaf(), leaf(), leaf()
    loss = (deep(x * y) * deep(y) + x).sum()
    expected = torch.autograd.grad(loss, [x, y], retain_graph=True)
    async with arpc.autograd.context() as ctx_id:
        for times in (1, 2):
            await arpc.autograd.backward(ctx_id, [loss], retain_graph=times == 1)
            found = arpc.autograd.get_gradients(ctx_id)
            assert found.keys() == {x, y}
            assert found[x].equal(times * expected[0])
            assert found[y].equal(times * expected[1])
        with pytest.raises(arpc.BackwardError, match="second time"):
            await arpc.autograd.backward(ctx_id, [loss])
        assert arpc.autograd.get_gradients(ctx_id)[x].equal(2 * expected[0])
    assert x.grad is y.grad is unused.grad is None
    assert len(passes) == 3


async def test_several_roots(group, passes):
    x = leaf()
    first, second = deep(x).sum(), deep(x * 2).sum()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [first, second, first + second])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3


async def test_what_is_done_to_the_roots_meanwhile_changes_nothing(group, passes):
    x = leaf()
    root = deep(x).sum()
    roots = [root]
    async with arpc.autograd.context() as ctx_id:
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, roots))
        await until(lambda: bool(passes))
        roots.clear()
        root *= 5
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3


async def test_hooks_run_once(group, passes):
    x, ran = leaf(), []
    x.register_hook(lambda gradient: ran.append("leaf") or 2 * gradient)
    middle = deep(x)
    middle.register_hook(lambda _: ran.append("tensor"))
    middle.grad_fn.register_hook(lambda *_: ran.append("node"))
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(deep(middle) + middle).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0] * 3
    assert ran == ["tensor", "node", "leaf"]


@pytest.mark.parametrize("others", [0, 1])
async def test_a_leaf_that_was_frozen_gets_nothing(group, passes, others):
    x, further = leaf(), [leaf() for _ in range(others)]
    loss = sum(map(deep, [x, *further])).sum()
    x.requires_grad_(False)
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [loss])
        assert arpc.autograd.get_gradients(ctx_id).keys() == set(further)
    assert x.grad is None


async def test_a_gradient_that_nobody_else_has_is_not_copied(group):
    x, seen = leaf(), []
    x.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(deep(x * 2) * deep(x)).sum()])
        assert [gradient.data_ptr() for gradient in arpc.autograd.get_gradients(ctx_id).values()] == seen


async def test_large_graphs_that_lead_to_others_or_were_sent(group, passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.make_leaf, (1.0, 2.0, 3.0))  # which is recorded there alone
        await arpc.autograd.backward(ctx_id, [deep(x * y).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0, 2.0, 3.0]
        assert [gradient.tolist() for gradient in group[1].autograd.gradients(ctx_id).values()] == [x.tolist()]
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", functions.mul, (x, 2))  # it was sent, and nobody uses it
        await arpc.autograd.backward(ctx_id, [deep(x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3


async def test_hooks_at_the_end_anomaly_mode_and_very_large_graphs(group, passes):
    x, heeded, ran = leaf(), leaf(), []
    heeded.register_post_accumulate_grad_hook(lambda tensor: ran.append(tensor.grad.tolist()))
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [deep(heeded).sum()])
    assert ran == [[1.0] * 3]
    async with arpc.autograd.context() as ctx_id:
        with torch.autograd.set_detect_anomaly(True):
            loss = deep(x).sum()
            await arpc.autograd.backward(ctx_id, [loss])
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [deep(x, 3 * WALK_NODES).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3


async def test_what_a_node_raises_fails_it_and_leaves_nothing(group, passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [deep(x).sum()])
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [deep(functions.Boom.apply(x)).sum()])
        assert caught.value.path == (0,)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3
        await arpc.autograd.backward(ctx_id, [deep(x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3


@pytest.mark.parametrize("is_short", [False, True], ids=["in a thread", "on the loop"])
async def test_the_graph_of_one_that_failed_is_freed_without_the_collector(group, monkeypatch, is_short):
    monkeypatch.setattr(group[0].autograd.run_policy, "is_short", lambda *_: is_short)

    async def fail() -> weakref.ref[Tensor]:
        middle = functions.Boom.apply(leaf())
        async with arpc.autograd.context() as ctx_id:
            with pytest.raises(arpc.BackwardError):
                await arpc.autograd.backward(ctx_id, [deep(middle).sum()])
        return weakref.ref(middle)

    await fail()
    gc.collect()
    gc.disable()
    try:
        kept = await fail()
        await until(lambda: kept() is None)
    finally:
        gc.enable()


async def test_one_that_is_cancelled_is_waited_for_by_the_next(group, passes, held):
    x = leaf()
    loss = deep(Hold.apply(x)).sum()
    async with arpc.autograd.context() as ctx_id:
        context = group[0].autograd.container.find(ctx_id)
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [loss], retain_graph=True))
        await until(Hold.entered.is_set)
        with pytest.raises(arpc.AutogradError, match="under way"):
            await arpc.autograd.backward(ctx_id, [loss])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.active_pass is None
        Hold.entered.clear()
        with pytest.raises(arpc.RpcTimeoutError):
            await arpc.autograd.backward(ctx_id, [loss], retain_graph=True, timeout=0.05)
        assert not Hold.entered.is_set()
        Hold.go_on.set()
        await until(lambda: context.running_thread is None)
        assert not arpc.autograd.get_gradients(ctx_id)
        await arpc.autograd.backward(ctx_id, [loss])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3


async def test_it_has_a_timeout(group, passes, held):
    async with arpc.autograd.context() as ctx_id:
        with pytest.raises(arpc.RpcTimeoutError):
            await arpc.autograd.backward(ctx_id, [deep(Hold.apply(leaf())).sum()], timeout=0.05)
        Hold.go_on.set()
        await until(lambda: group[0].autograd.container.find(ctx_id).running_thread is None)
        assert not arpc.autograd.get_gradients(ctx_id)


async def test_one_that_is_ended_before_a_thread_comes_to_it_runs_nothing(group, monkeypatch):
    jobs = []

    class Later:
        def call(self, function: Any) -> asyncio.Future[Any]:
            jobs.append(function)
            return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(run, "run_backward", lambda *_: pytest.fail("it was ended"))
    async with arpc.autograd.context() as ctx_id:
        roots = [deep(leaf()).sum()]
        with pytest.raises(arpc.RpcTimeoutError):
            await group[0].autograd.backward(ctx_id, roots, False, timeout=0.01, threads=Later())
        jobs[0]()
        assert not arpc.autograd.get_gradients(ctx_id)


async def test_parcels_that_nobody_should_have_sent(group, held):
    async with arpc.autograd.context() as ctx_id:
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [deep(Hold.apply(leaf())).sum()]))
        await until(Hold.entered.is_set)
        active = group[0].autograd.container.find(ctx_id).active_pass
        assert active.receive(1, Parcel([(7, [torch.ones(3)])]), is_engaging=False) is None
        assert not active.unanswered
        Hold.go_on.set()
        with pytest.raises(arpc.AutogradError, match="has no graph"):
            await task
        assert not arpc.autograd.get_gradients(ctx_id)


async def test_a_worker_that_asks_hears_that_nothing_is_live(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        received = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [received.sum()]))
        await asyncio.sleep(0)
        active = group[0].autograd.container.find(ctx_id).active_pass
        assert active.receive(2, Parcel(asks=(1, 1 << 60)), is_engaging=False) == Parcel([], True, [])
        await task
