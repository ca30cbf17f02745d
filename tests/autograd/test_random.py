"""Random programs cut at random places over 2 to 5 workers, against the same programs in one process."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

import arpc
from arpc.autograd.engine.run_policy import RunPolicy
from arpc.autograd.passes.backward_pass import BackwardPass
from arpc.testing import cluster
from arpc.transport.in_process import MemoryConnection
from tests.autograd import programs
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left

runs = itertools.count()


async def check(group, seed, workers):
    program = programs.make_program(seed, workers)
    expected, expected_calls, has_roots = programs.run_reference(program)
    run = next(runs)
    async with arpc.autograd.context() as ctx_id:
        roots = await programs.run_forward(run, program)
        assert bool(roots) == has_roots
        if roots:
            async with asyncio.timeout(30):
                await arpc.autograd.backward(ctx_id, roots)
        found = programs.gradients_of(group, ctx_id, run, program)
    calls = sum((programs.place_of(run, worker.name).hook_calls for worker in group), start=type(expected_calls)())
    programs.forget(run)
    assert calls == expected_calls, seed
    for number, gradient in expected.items():
        assert (gradient is None) == (found[number] is None), (seed, number)
        if gradient is not None and program.is_exact:
            assert torch.equal(found[number], gradient), (seed, number)
        elif gradient is not None:
            torch.testing.assert_close(found[number], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
async def test_gradients_are_those_of_one_process(workers):
    async with cluster(workers, options=OPTIONS) as group:
        for seed in range(12):
            await check(group, seed * 10 + workers, workers)
        assert_nothing_is_left(group)


@pytest.fixture
def cuts(monkeypatch):
    """The posts of gradients before a pass has run all that it could. All runs are long, and workers have own CPUs."""
    monkeypatch.setattr(RunPolicy, "nodes_per_slice", 1)
    monkeypatch.setattr(MemoryConnection, "is_peer_elsewhere", True)
    found = []
    post_early = BackwardPass._post_early

    def recorded(*args):
        found.append(args)
        post_early(*args)

    monkeypatch.setattr(BackwardPass, "_post_early", recorded)
    return found


async def test_gradients_are_those_of_one_process_if_runs_are_cut(cuts):
    async with cluster(3, options=OPTIONS) as group:
        for seed in range(20):
            await check(group, seed * 10 + 3, 3)
        assert_nothing_is_left(group)
    assert cuts


async def multiply(x, y):
    return (x * y).sum()


async def test_calls_side_by_side_get_their_gradients_one_after_the_other(cuts):
    inputs = [torch.arange(3.0, requires_grad=True) for _ in range(10)]
    weight = torch.ones(3, requires_grad=True)
    async with cluster(2, options=OPTIONS) as group, arpc.autograd.context() as ctx_id:
        sent = [x * 2 for x in inputs]
        results = [await arpc.rpc_sync("worker1", multiply, (x, weight)) for x in sent]
        await arpc.autograd.backward(ctx_id, [torch.stack(results).sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert len(cuts) >= 9
        assert all(torch.equal(gradients[x], torch.full((3,), 2.0)) for x in inputs)
        assert torch.equal(gradients[weight], 10 * 2 * torch.arange(3.0))
        del cuts[:]  # they refer to the pass
    assert_nothing_is_left(group)
