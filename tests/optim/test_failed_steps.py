"""Owners that fail, are lost, or are not waited for any longer."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from arpc.optim import DistributedOptimizer
from arpc.optim.locks import ParameterLocks
from arpc.testing import cluster
from tests.optim.parameters import (
    Failing,
    Stage,
    Staged,
    all_equal,
    gradients,
    place,
    stages,
    values_of,
)
from tests.rref.conftest import OPTIONS, until

OWNERS = ["worker1", "worker2", "worker0"]


@pytest.fixture
def stage():
    stages["stage"] = made = Stage()
    yield made
    made.may_go_on.set()
    del stages["stage"]


async def step(opt: DistributedOptimizer, rrefs: list) -> None:
    async with gradients(rrefs, [torch.ones(2)] * len(rrefs)) as context_id:
        await opt.step(context_id)


@pytest.mark.parametrize("failing", [["worker1"], ["worker1", "worker0"], OWNERS])
async def test_all_errors_of_a_step_are_told(group, failing):
    rrefs = place([torch.zeros(2)] * 3, OWNERS)
    opt = DistributedOptimizer(Failing, rrefs, lr=1.0, on=failing)
    with pytest.raises(arpc.WorkersFailedError, match="the step of context") as caught:
        await step(opt, rrefs)
    error = caught.value
    assert list(error.failed) == failing
    assert set(error.succeeded) == set(OWNERS) - set(failing)
    assert [str(one) for one in error.exceptions] == [f"no step on {name}" for name in failing]
    assert all(isinstance(one, ValueError) for one in error.exceptions)
    causes = [one.__cause__ for one in error.exceptions]
    assert [cause.worker for cause in causes if isinstance(cause, arpc.RemoteTraceback)] == failing
    # the others have made it
    moved = [torch.zeros(2) if owner in failing else -torch.ones(2) for owner in OWNERS]
    assert all_equal(await values_of(rrefs), moved)
    del error, caught, causes


async def test_errors_can_be_picked_and_sent_on(group):
    rrefs = place([torch.zeros(2)] * 2, OWNERS)
    opt = DistributedOptimizer(Failing, rrefs, lr=1.0, on=["worker2"])
    with pytest.raises(arpc.WorkersFailedError) as caught:
        await arpc.rpc_sync("worker2", step, (opt, rrefs))
    picked, rest = caught.value.split(ValueError)
    assert isinstance(picked, arpc.WorkersFailedError)
    assert (picked.failed, picked.succeeded) == (("worker2",), ("worker1",))
    assert rest is None
    del caught, picked


class FailingAtFirst(torch.optim.SGD):
    def __init__(self, params, lr):
        raise ValueError("never made")


async def test_an_optimizer_that_cannot_be_made_raises_at_each_use(group):
    rrefs = place([torch.zeros(2)] * 2, OWNERS)
    opt = DistributedOptimizer(FailingAtFirst, rrefs, lr=1.0)
    for use in (lambda: opt, lambda: step(opt, rrefs), opt.state_dict, lambda: opt.load_state_dict({})):
        with pytest.raises(arpc.WorkersFailedError, match="making the optimizer failed on 'worker1', 'worker2'") as it:
            await use()
        assert [str(error) for error in it.value.exceptions] == ["never made"] * 2
        assert "made the optimizer FailingAtFirst" in it.value.exceptions[0].__notes__[0]
        del it


async def test_what_is_no_parameter_is_refused_by_its_owner(group):
    for wrong, text in ((arpc.remote("worker1", int), "not to int"), (arpc.RRef(computed()), "no leaf")):
        opt = DistributedOptimizer(torch.optim.SGD, [wrong], lr=1.0)
        with pytest.raises(arpc.WorkersFailedError) as caught:
            await opt
        (error,) = caught.value.exceptions
        assert isinstance(error, arpc.ConfigurationError)
        assert text in str(error)
        del caught, error


def computed() -> torch.Tensor:
    return torch.ones(1, requires_grad=True) * 2


async def test_one_parameter_twice_is_an_error_as_in_torch(group):
    (rref,) = place([torch.zeros(2)], OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, [{"params": [rref]}, {"params": [rref]}], lr=1.0)
    with pytest.raises(arpc.WorkersFailedError) as caught:
        await opt
    assert "more than one parameter group" in str(caught.value.exceptions[0])
    del caught


async def test_a_lost_owner_fails_at_once_and_the_others_make_their_step():
    async with cluster(3, options=OPTIONS) as group:
        rrefs = place([torch.zeros(2)] * 3, OWNERS)
        opt = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        async with gradients(rrefs, [torch.ones(2)] * 3) as context_id:
            await group[2].shutdown(graceful=False)
            for steps in (1, 2):
                with pytest.raises(arpc.WorkersFailedError, match="failed on 'worker2'; done on") as caught:
                    await opt.step(context_id)
                assert caught.value.failed == ("worker2",)
                assert isinstance(caught.value.exceptions[0], arpc.OwnerLostError)
                assert torch.equal((await rrefs[0]).detach(), torch.full((2,), -float(steps)))
                assert torch.equal((await rrefs[2]).detach(), torch.full((2,), -float(steps)))
                del caught
        alone = await DistributedOptimizer(torch.optim.SGD, rrefs[:1], lr=1.0)
        await group[1].shutdown(graceful=False)
        for _ in range(2):
            with pytest.raises(arpc.WorkersFailedError, match=r"failed on 'worker1'$"):
                await alone.state_dict()
        await group.shutdown(graceful=False)


async def test_changes_reach_an_owner_that_failed_with_the_next_step(group):
    rrefs = place([torch.zeros(2)] * 2, OWNERS)
    opt = await DistributedOptimizer(Failing, rrefs, lr=1.0, on=["worker2"])
    opt.param_groups[0]["lr"] = 3.0
    with pytest.raises(arpc.WorkersFailedError):
        await step(opt, rrefs)
    assert [part.known[0]["lr"] for part in opt._parts] == [3.0, 1.0]
    assert opt._parts[1].changes(opt.param_groups) == [{"lr": 3.0}]


# -- cancellation


async def test_a_cancelled_step_that_has_begun_is_finished(group, stage):
    rrefs = place([torch.zeros(2)], OWNERS)
    opt = await DistributedOptimizer(Staged, rrefs, lr=1.0, stage="stage")
    async with gradients(rrefs, [torch.ones(2)]) as context_id:
        task = asyncio.create_task(opt.step(context_id))
        await asyncio.to_thread(stage.entered.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # without waiting for the owner
        assert stage.running == 1
        # the next one waits until the owner is done with the first
        following = asyncio.create_task(opt.step(context_id))
        stage.may_go_on.set()
        await following
    assert stage.most_running == 1
    assert torch.equal((await rrefs[0]).detach(), torch.full((2,), -2.0))


async def test_a_cancelled_step_that_has_not_begun_never_is(group, stage):
    rrefs = place([torch.zeros(2)], OWNERS)
    opt = await DistributedOptimizer(Staged, rrefs, lr=1.0, stage="stage")
    locks = group[1].keep(ParameterLocks)
    async with gradients(rrefs, [torch.ones(2)]) as context_id:
        first = asyncio.create_task(opt.step(context_id))
        await asyncio.to_thread(stage.entered.wait, 20)
        second = asyncio.create_task(opt.step(context_id))
        await until(lambda: len(locks._waiting) == 1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await until(lambda: not locks._waiting)
        stage.may_go_on.set()
        await first
    assert torch.equal((await rrefs[0]).detach(), -torch.ones(2))


async def test_a_step_past_its_deadline_says_so(group, stage):
    rrefs = place([torch.zeros(2)], OWNERS)
    opt = await DistributedOptimizer(Staged, rrefs, lr=1.0, stage="stage")
    async with gradients(rrefs, [torch.ones(2)]) as context_id:
        with pytest.raises(arpc.WorkersFailedError) as caught:
            await opt.step(context_id, timeout=0.01)
        assert isinstance(caught.value.exceptions[0], arpc.RpcTimeoutError)
        del caught
        stage.may_go_on.set()
        await opt.state_dict()  # after the step, which is finished
    assert group[1].keep(ParameterLocks).is_idle
