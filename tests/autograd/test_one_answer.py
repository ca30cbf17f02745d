"""Passes whose only answer has the gradients of leaves: they end in the read that brings it, or as all others do."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
from torch import Tensor

import arpc
from arpc.autograd import pace
from arpc.autograd.brief import BriefPass
from arpc.testing import cluster
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS
from tests.autograd.test_backward import leaf
from tests.autograd.test_brief import weigh


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch):
    """However slow the machine is, what takes next to nothing is not taken for long."""
    monkeypatch.setattr(pace, "SHORT_S", 60.0)


@pytest.fixture
def ended(monkeypatch) -> list[bool]:
    """Of each pass that had one answer, whether that ended it in the short way."""
    noted: list[bool] = []
    try_to_end = BriefPass._try_to_end_with

    def try_noted(self: BriefPass, *args: object) -> bool:
        noted.append(try_to_end(self, *args))
        return noted[-1]

    monkeypatch.setattr(BriefPass, "_try_to_end_with", try_noted)
    return noted


async def run_and_tell(x: Tensor, y: Tensor, **options: bool) -> dict[Tensor, Tensor]:
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", functions.mul, (x, y))
        await arpc.autograd.backward(ctx_id, [product.sum()], **options)
        return arpc.autograd.get_gradients(ctx_id)


async def test_gradients_of_leaves_end_it(group, ended):
    x, y = leaf(), leaf() * 2
    y = y.detach().requires_grad_()
    gradients = await run_and_tell(x, y)
    assert gradients[x].tolist() == y.tolist()
    assert gradients[y].tolist() == x.tolist()
    gradients[x].add_(1)  # memory of its own
    assert gradients[y].tolist() == x.tolist()
    assert ended == [True]


async def test_also_if_the_graph_is_retained(group, ended):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        for turn in range(1, 4):
            await arpc.autograd.backward(ctx_id, [result], retain_graph=True)
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 * turn] * 3
    assert ended == [True] * 3


async def test_a_leaf_that_was_sent_twice_gets_the_sum(group, ended):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", functions.mul, (x, x[:]))
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == (2 * x).tolist()
    assert (await run_and_tell(x, x))[x].tolist() == (2 * x).tolist()
    assert ended == [False, True]  # a view is no leaf, and the same tensor travels once


async def test_one_that_was_frozen_since_gets_none(group, ended):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", functions.mul, (x, y))
        x.requires_grad_(False)
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert list(arpc.autograd.get_gradients(ctx_id)) == [y]
    assert ended == [False]


async def test_gradients_lie_as_their_leaves_do(group, ended):
    x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    y = torch.ones(3, 2, requires_grad=True)
    gradients = await run_and_tell(x, y)
    assert gradients[x].stride() == x.stride()
    assert torch.equal(gradients[y], x)
    assert False in ended or not ended


async def test_of_two_messages_each_has_its_part(group, ended):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        results = [await arpc.rpc_sync("worker1", functions.mul, (each, 3)) for each in (x, y)]
        await arpc.autograd.backward(ctx_id, [sum(results).sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert [gradients[each].tolist() for each in (x, y)] == [[3.0] * 3] * 2
    assert True not in ended


async def test_gradients_that_were_here_already_are_added_to(group, ended):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        await arpc.autograd.backward(ctx_id, [(result * x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == (6 * x).tolist()
    assert ended == [False]


async def test_who_is_cancelled_meanwhile_gets_nothing(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [result], retain_graph=True))
        await asyncio.sleep(0)
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert arpc.autograd.get_gradients(ctx_id) == {}
        assert group[0].autograd.container.find(ctx_id).active_pass is None
        await arpc.autograd.backward(ctx_id, [result])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3


async def test_one_that_others_end_meanwhile_raises_why_and_cancels_nobody(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [result]))
        await asyncio.sleep(0)
        active = group[0].autograd.container.find(ctx_id).active_pass
        assert isinstance(active, BriefPass)
        (future,) = active.unanswered
        active.fail(arpc.AutogradError("somebody has had enough"))
        with pytest.raises(arpc.AutogradError, match="somebody has had enough"):
            await task
        assert not task.cancelling()
        assert not future.cancelled()
        assert arpc.autograd.get_gradients(ctx_id) == {}


async def test_what_follows_runs_in_the_state_of_its_own_task(group, ended):
    x, y = leaf(), leaf()

    @arpc.no_grad()
    async def run(ctx_id: int, product: Tensor) -> None:
        await arpc.autograd.backward(ctx_id, [product])
        assert not torch.is_grad_enabled()
        assert not (x * 2).requires_grad

    async with arpc.autograd.context() as ctx_id:
        await run(ctx_id, (await arpc.rpc_sync("worker1", functions.mul, (x, y))).sum())
        assert torch.is_grad_enabled()
        assert len(arpc.autograd.get_gradients(ctx_id)) == 2
    assert ended == [True]


async def test_gradients_that_do_not_fit_those_of_an_earlier_pass_fail_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", functions.mul, (x, 3))).sum()])
        x.data = torch.ones(5)
        result = await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        with pytest.raises(arpc.BackwardError, match="size"):
            await arpc.autograd.backward(ctx_id, [result.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3
        assert group[0].autograd.container.find(ctx_id).active_pass is None


@pytest.mark.parametrize("body", [value for name, value in list(globals().items()) if name.startswith("test_")])
def test_all_that_in_tasks_which_go_on_in_the_read(body, ended):
    """Under `arpc.run` a task that waits for an answer is resumed by the read that brings it."""

    async def main() -> None:
        async with cluster(3, options=OPTIONS) as group:
            await body(*[{"group": group, "ended": ended}[name] for name in inspect.signature(body).parameters])

    arpc.run(main)
