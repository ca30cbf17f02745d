"""Hooks that torch runs when it writes `.grad`, in passes that never do."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import arpc
from arpc.autograd.engine.accumulate_hooks import has_node_hooks, heed_accumulate_hooks
from arpc.autograd.engine.run_policy import ThreadsOnly
from tests.autograd import functions
from tests.autograd.conftest import until

weight = torch.full((3,), 2.0, requires_grad=True)


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


@pytest.fixture
def accumulating():
    """A leaf of all workers of the process with a hook; what the hook has seen, and in which threads."""
    seen: list[tuple[list[float], str]] = []

    def look(parameter: torch.Tensor) -> None:
        seen.append((parameter.grad.tolist(), threading.current_thread().name))

    handle = weight.register_post_accumulate_grad_hook(look)
    yield seen
    handle.remove()


@arpc.inline
def weigh(x):
    return x * weight


async def test_they_run_once_with_the_total_and_grad_is_as_it_was(group, accumulating):
    weight.grad = torch.zeros(3)
    before = weight.grad
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        # two messages, whose gradients come one after the other
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        z = await arpc.rpc_sync("worker1", weigh, (y,))
        await arpc.autograd.backward(ctx_id, [z.sum()])
        found = group[1].autograd.gradients(ctx_id)[weight]
    assert found.tolist() == [4.0, 8.0, 12.0]
    ((gradient, thread),) = accumulating
    assert gradient == found.tolist()
    assert thread != threading.current_thread().name  # they may block
    assert weight.grad is before
    assert not before.any()
    weight.grad = None


async def test_what_a_hook_writes_is_what_the_context_has(group):
    x = leaf()

    def double(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad * 2

    x.register_post_accumulate_grad_hook(double)
    x.register_hook(lambda gradient: gradient + 1)  # once, and before
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", torch.mul, (x, 3.0))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [8.0] * 3
    assert x.grad is None


async def test_a_hook_that_takes_the_gradient_away_leaves_none(group):
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(x * 2).sum()])
        assert arpc.autograd.get_gradients(ctx_id) == {}


async def test_a_hook_that_raises_fails_the_pass(group):
    x = leaf()
    x.register_post_accumulate_grad_hook(functions.raise_boom)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        with pytest.raises(arpc.BackwardError, match="boom"):
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id) == {}
        assert group[1].autograd.gradients(ctx_id) == {}
    assert x.grad is None


async def test_hooks_of_one_leaf_may_write_to_others_of_its_group(group):
    x, unused = leaf(), leaf()
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_hook(lambda *_: setattr(unused, "grad", x.grad * 10))
    heed_accumulate_hooks([x, unused])
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(x * 2).sum()])
        found = arpc.autograd.get_gradients(ctx_id)
        assert found[x].tolist() == [2.0] * 3
        assert found[unused].tolist() == [20.0] * 3
    assert x.grad is None
    assert unused.grad is None


async def test_contexts_take_turns(group):
    """Each holds the other up at the gate if both get in."""
    x = leaf()
    inside = threading.Semaphore(1)
    met: list[bool] = []

    def alone(_: torch.Tensor) -> None:
        met.append(inside.acquire(blocking=False))
        inside.release()

    x.register_post_accumulate_grad_hook(alone)

    async def run(factor: float) -> list[float]:
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", torch.mul, (x, factor))
            await arpc.autograd.backward(ctx_id, [y.sum()])
            return arpc.autograd.get_gradients(ctx_id)[x].tolist()

    found = await asyncio.gather(*(run(float(number)) for number in range(1, 6)))
    assert found == [[float(number)] * 3 for number in range(1, 6)]
    assert met == [True] * 5


def test_hooks_of_a_node_are_seen():
    x = leaf()
    node = torch.autograd.graph.get_gradient_edge(x).node
    assert not has_node_hooks(node, x)
    handle = node.register_hook(lambda *_: None)
    assert has_node_hooks(node, x)
    handle.remove()
    assert not has_node_hooks(node, x)


def test_only_leaves_have_them():
    with pytest.raises(arpc.AutogradError, match="only leaves"):
        heed_accumulate_hooks([leaf() * 2])
    with pytest.raises(arpc.AutogradError, match="only leaves"):
        heed_accumulate_hooks(["weight"])  # type: ignore[list-item]


async def test_passes_of_a_worker_whose_hooks_may_block_never_run_on_the_loop(group):
    x = leaf()
    threads: list[str] = []
    x.register_hook(lambda _: threads.append(threading.current_thread().name))
    group[0].autograd.run_policy = ThreadsOnly()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", torch.mul, (x, 3.0))
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            await arpc.autograd.backward(ctx_id, [y.sum()])
        await until(lambda: len(threads) == 1)
    assert threads != [threading.current_thread().name]
