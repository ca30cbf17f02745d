"""Several trainers, one set of parameters."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch.nn import Parameter

import arpc
from arpc.optim import DistributedOptimizer
from tests.optim.parameters import (
    Meeting,
    Stage,
    Staged,
    all_equal,
    gradients,
    place,
    stages,
    values_of,
)


@pytest.fixture
def stage():
    stages["stage"] = made = Stage()
    yield made
    made.may_go_on.set()
    del stages["stage"]


async def train(cls: type, rrefs: list, steps: int, options: dict) -> None:
    opt = DistributedOptimizer(cls, rrefs, **options)
    for _ in range(steps):
        async with gradients(rrefs, [torch.ones(3)] * len(rrefs)) as context_id:
            await opt.step(context_id)


@pytest.mark.parametrize("serialize_steps", [True, False])
async def test_no_step_of_concurrent_trainers_is_lost(group, serialize_steps):
    rrefs = place([torch.zeros(3)] * 4, ["worker1", "worker2"])
    options = {"lr": 1.0, "serialize_steps": serialize_steps}
    tasks = [train(torch.optim.SGD, rrefs, 5, options)]
    # trainers on every worker, with all or some of the parameters, in different orders
    tasks += [arpc.rpc_sync("worker1", train, (torch.optim.SGD, rrefs[::-1], 5, options))]
    tasks += [arpc.rpc_sync("worker2", train, (torch.optim.SGD, rrefs[1:3], 5, options))]
    await asyncio.gather(*tasks)
    if serialize_steps:
        expected = [torch.full((3,), -float(steps)) for steps in (10, 15, 15, 10)]
        assert all_equal(await values_of(rrefs), expected)
    else:  # two writes at once may be one: that is what one asks for
        assert all((value < 0).all() for value in await values_of(rrefs))


async def test_steps_on_the_same_parameters_come_one_after_the_other(group, stage):
    rrefs = place([torch.zeros(3)] * 2, ["worker1"])
    stage.may_go_on.set()
    options = {"lr": 1.0, "stage": "stage"}
    await asyncio.gather(*(train(Staged, some, 3, options) for some in (rrefs, rrefs[:1], rrefs[::-1])))
    assert stage.most_running == 1
    assert all_equal(await values_of(rrefs), [torch.full((3,), -9.0), torch.full((3,), -6.0)])


async def test_steps_on_other_parameters_do_not_wait(group, stage):
    rrefs = place([torch.zeros(3)] * 2, ["worker1"])
    options = {"lr": 1.0, "stage": "stage"}
    await asyncio.gather(*(train(Meeting, [rref], 1, options) for rref in rrefs))
    assert all_equal(await values_of(rrefs), [torch.full((3,), -1.0)] * 2)


async def test_without_the_lock_optimizers_do_not_wait_for_each_other(group, stage):
    rrefs = place([torch.zeros(3)], ["worker1"])
    options = {"lr": 1.0, "stage": "stage", "serialize_steps": False}
    await asyncio.gather(*(train(Meeting, rrefs, 1, options) for _ in range(2)))
    assert ((await rrefs[0]) < 0).all()


async def test_without_the_lock_steps_of_one_optimizer_still_do(group, stage):
    rrefs = place([torch.zeros(3)], ["worker1"])
    opt = DistributedOptimizer(Staged, rrefs, lr=1.0, stage="stage", serialize_steps=False)
    stage.may_go_on.set()

    async def step(factor: float) -> None:
        async with gradients(rrefs, [torch.full((3,), factor)]) as context_id:
            await opt.step(context_id)

    await asyncio.gather(*(step(2.0**number) for number in range(4)))
    assert stage.most_running == 1
    assert torch.equal((await rrefs[0]).detach(), torch.full((3,), -15.0))  # each with its own gradient


async def test_the_owner_goes_on_serving_during_a_step(group, stage):
    rrefs = place([torch.zeros(3)], ["worker1"])
    opt = DistributedOptimizer(Staged, rrefs, lr=1.0, stage="stage")
    async with gradients(rrefs, [torch.ones(3)]) as context_id:
        task = asyncio.create_task(opt.step(context_id))
        await asyncio.to_thread(stage.entered.wait, 20)
        assert await arpc.rpc_sync("worker1", release_stage) is None
        await task
    assert torch.equal((await rrefs[0]).detach(), -torch.ones(3))


async def release_stage() -> None:
    stages["stage"].may_go_on.set()


# -- gradients that were computed before a step of somebody else


def squares_of(parameter: Parameter) -> torch.Tensor:
    return (parameter * parameter).sum()


@pytest.mark.parametrize("check_versions", [False, True])
async def test_graphs_from_before_a_step(group, check_versions):
    parameter = Parameter(torch.ones(2))
    rrefs = [arpc.RRef(parameter)]
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0, check_versions=check_versions)
    loss = squares_of(parameter)
    async with gradients(rrefs, [torch.ones(2)]) as context_id:
        await opt.step(context_id)
    if check_versions:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, parameter)
    else:
        (gradient,) = torch.autograd.grad(loss, parameter)
        assert torch.equal(gradient, torch.zeros(2))  # of the weights as they are now
