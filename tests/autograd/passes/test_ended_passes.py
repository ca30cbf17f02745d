"""Passes that are ended in the middle of things: what others keep, and what the next pass meets."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch

import arpc
from arpc.autograd.passes.messages import Parcel, PassHeading, pack_parcel, unpack_parcel
from arpc.wire.messages import AutogradGradients
from tests.autograd import functions
from tests.autograd.conftest import until
from tests.autograd.test_backward import leaf

weight = torch.full((3,), 2.0, requires_grad=True)


@arpc.inline
def weigh(x):
    return x * weight


async def boom_before(x, further):
    return await arpc.rpc_sync(further, weigh, (functions.Boom.apply(x),))


async def weigh_there(x, further):
    return await arpc.rpc_sync(further, weigh, (x,))


async def test_who_has_finished_hears_of_it_through_the_one_that_failed(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        # worker2 is done with its part when worker1 fails, and worker0 does not know it
        y = await arpc.rpc_sync("worker1", boom_before, (x, "worker2"))
        with pytest.raises(arpc.BackwardError, match="boom"):
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert group[2].autograd.gradients(ctx_id) == {}


async def boom_there(x, further):
    return await arpc.rpc_sync(further, functions.boom, (x,))


async def test_an_error_tells_by_which_workers_it_came(group):
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker2", boom_there, (leaf(), "worker1"))
        with pytest.raises(arpc.BackwardError) as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
    assert caught.value.path == (0, 2, 1)
    assert caught.value.reason == "boom"


@pytest.mark.parametrize("turns", range(30))
async def test_a_pass_after_one_that_was_cancelled_at_any_moment(group, turns):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_there, (x, "worker2"))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            # also if all had been done, and only to be told
            assert not any(worker.autograd.gradients(ctx_id) for worker in group)
            await arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=True)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        assert group[2].autograd.gradients(ctx_id)[weight].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("turns", range(0, 30, 3))
async def test_a_pass_from_an_rref_that_was_cancelled_at_any_moment(group, turns):
    async with arpc.autograd.context() as ctx_id:
        root = arpc.remote("worker1", weigh_and_sum, ("worker2",))
        await root.to_here()
        task = asyncio.create_task(root.backward(ctx_id, retain_graph=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert not any(worker.autograd.gradients(ctx_id) for worker in group)
            await root.backward(ctx_id, retain_graph=True)
        assert group[2].autograd.gradients(ctx_id)[weight].tolist() == [1.0, 2.0, 3.0]


async def weigh_and_sum(further):
    return (await arpc.rpc_sync(further, weigh, (leaf(),))).sum()


async def test_a_pass_from_an_rref_has_a_timeout(group, held):
    async with arpc.autograd.context() as ctx_id:
        root = arpc.remote("worker1", hold_up_and_sum)
        with pytest.raises(arpc.RpcTimeoutError):
            await root.backward(ctx_id, timeout=0.1)
        Hold.go_on.set()
        await until(lambda: group[1].autograd.container.find(ctx_id).running_thread is None)


async def test_a_value_that_never_comes_ends_a_pass_from_it_in_time(group):
    late = arpc.remote("worker0", wait_for_the_end)
    async with arpc.autograd.context() as ctx_id:
        with pytest.raises(arpc.RpcTimeoutError, match="had no value in time"):
            await late.backward(ctx_id, timeout=0.05)
    the_end.set()


the_end = threading.Event()


def wait_for_the_end():
    the_end.wait(30)


def hold_up_and_sum():
    return hold_up(leaf()).sum()


async def test_the_graph_of_a_pass_that_failed_here_is_freed_without_the_garbage_collector(group):
    gc.collect()
    gc.disable()
    try:
        async with arpc.autograd.context() as ctx_id:
            x = leaf()
            y = await arpc.rpc_sync("worker1", functions.mul, (x * 1, 2))
            z = await arpc.rpc_sync("worker0", functions.boom, (y,))
            task = asyncio.create_task(arpc.autograd.backward(ctx_id, [z.sum()]))
            await asyncio.wait([task])
            assert isinstance(task.exception(), arpc.BackwardError)
            freed = weakref.ref(x), weakref.ref(y)
            del x, y, z, task
        await until(lambda: [reference() for reference in freed] == [None, None])
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["failed on a peer", "was cancelled", "timed out"])
async def test_the_graph_of_a_pass_that_ended_early_is_freed_without_the_garbage_collector(group, how, held):
    gc.collect()
    gc.disable()
    try:
        async with arpc.autograd.context() as ctx_id:
            x = leaf()
            received.clear()
            y = await arpc.rpc_sync("worker1", noted, (x * 1, functions.mul, 2))
            z = await arpc.rpc_sync("worker2", noted, (y, functions.boom if how == "failed on a peer" else hold_up))
            timeout = 0.1 if how == "timed out" else 10
            task = asyncio.create_task(arpc.autograd.backward(ctx_id, [z.sum()], timeout=timeout))
            if how == "was cancelled":
                await until(Hold.entered.is_set)
                task.cancel()
            with pytest.raises((asyncio.CancelledError, arpc.ArpcError)):
                await task
            freed = [weakref.ref(x), weakref.ref(y), *received]
            del x, y, z, task
        Hold.go_on.set()
        await until(lambda: not any(reference() is not None for reference in freed))
    finally:
        gc.enable()


received: list[weakref.ref[torch.Tensor]] = []


def noted(x, function, *args):
    """Call a function and remember, weakly, what it got and a leaf of the graph."""
    own = torch.ones(3, requires_grad=True)
    received.extend([weakref.ref(x), weakref.ref(own)])
    return function(x * own, *args)


def hold_up(x):
    return Hold.apply(x.expand(100_000, 3))


class Hold(torch.autograd.Function):
    """Waits, in a thread, until it may go on."""

    entered = threading.Event()
    go_on = threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Hold.entered.set()
        Hold.go_on.wait(30)
        return gradient


@pytest.fixture
def held():
    Hold.entered.clear()
    Hold.go_on.clear()
    yield
    Hold.go_on.set()


async def test_a_thread_of_a_pass_that_was_cancelled_is_waited_for_by_the_next(group, held):
    x = torch.ones(200_000, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        loss = Hold.apply(y).sum()
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [loss], retain_graph=True))
        await until(Hold.entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        Hold.entered.clear()
        with pytest.raises(arpc.RpcTimeoutError):
            await arpc.autograd.backward(ctx_id, [loss], retain_graph=True, timeout=0.05)
        assert not Hold.entered.is_set()
        again = asyncio.create_task(arpc.autograd.backward(ctx_id, [loss], retain_graph=True))
        await until(lambda: group[0].autograd.container.find(ctx_id).active_pass is not None)
        Hold.go_on.set()
        await again
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == x.mul(2).tolist()


@pytest.mark.parametrize("is_first", [True, False])
async def test_who_was_asked_before_it_knew_the_context_waits_for_nobody_in_vain(group, is_first, monkeypatch):
    x = leaf()
    # worker0 says nothing twice, as any pass that is under way
    monkeypatch.setattr(group[0].autograd, "_take", lambda *_: None)
    async with arpc.autograd.context() as ctx_id:
        pass_id = group[0].autograd.container.new_pass_id()

        async def tell(worker: int, parcel: Parcel) -> Parcel:
            packed = pack_parcel(parcel, PassHeading(ctx_id, pass_id, False, 99))
            answer = await group[worker].autograd.lifetimes.request(AutogradGradients, "worker1", (packed,), 15)
            return Parcel() if answer is None else unpack_parcel(answer)[0]

        # it has overtaken the call, and is answered for good
        answer = await tell(0, Parcel(is_first=is_first, asks=(1, 1 << 60)))
        assert answer.is_first
        assert not answer.gradients
        await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        if not is_first:  # what worker0 has to say comes after all
            assert not (await tell(0, Parcel(is_first=True))).gradients
        # now another one engages it in the same pass
        assert not (await tell(2, Parcel(is_first=True, asks=(1, 1 << 60)))).gradients
        assert group[1].autograd.statistics()["passes"] == 0
