"""One optimizer over parameters of many workers does what one does over all of them in one process."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import arpc
from arpc.optim import DistributedOptimizer
from tests.optim.parameters import (
    all_equal,
    grad_of,
    gradients,
    make_parameter,
    place,
    set_grad_of,
    values_of,
)

OWNERS = ["worker1", "worker2", "worker0"]
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
]
WITHOUT_CLOSURE = [cls for cls in CLASSES if cls is not torch.optim.LBFGS]
OPTIONS = {torch.optim.SGD: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


def tensors(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 + i, 4, generator=generator) for i in range(count)]


def as_gradient(cls: type, value: Tensor) -> Tensor:
    return value.to_sparse(1) if cls is torch.optim.SparseAdam else value


class Reference:
    """The same in one process."""

    def __init__(self, cls: type, values: list[Tensor], *args, **kwargs) -> None:
        self.parameters = [Parameter(value.clone()) for value in values]
        self.optimizer = cls(self.parameters, *args, **kwargs)

    def step(self, values: list[Tensor | None]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = value
        self.optimizer.step()


async def step(opt: DistributedOptimizer, rrefs: list, values: list[Tensor | None]) -> None:
    async with gradients(rrefs, values) as context_id:
        await opt.step(context_id)


def test_all_of_torch_are_tried():
    assert len(WITHOUT_CLOSURE) >= 13


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE, ids=lambda cls: cls.__name__)
async def test_it_is_equal_to_one_process(group, cls):
    values = tensors(4)
    options = {"lr": 0.05, **OPTIONS.get(cls, {})}
    reference = Reference(cls, values, **options)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(cls, rrefs, **options)
    for number in range(4):
        grads = [as_gradient(cls, value) for value in tensors(4, seed=number + 1)]
        reference.step(grads)
        await step(opt, rrefs, grads)
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])
    assert not all_equal(await values_of(rrefs), values)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}])
async def test_arguments_go_to_the_class(group, options):
    values = tensors(3)
    reference = Reference(torch.optim.Adam, values, 0.1, (0.8, 0.9), amsgrad=True, **options)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(torch.optim.Adam, rrefs, 0.1, (0.8, 0.9), amsgrad=True, **options)
    for number in range(3):
        reference.step(tensors(3, number))
        await step(opt, rrefs, tensors(3, number))
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])


async def test_what_needs_a_closure_is_refused(group):
    with pytest.raises(arpc.ConfigurationError, match=r"LBFGS.step needs closure"):
        DistributedOptimizer(torch.optim.LBFGS, place(tensors(1), OWNERS))


async def test_parameters_without_a_gradient_are_left_alone(group):
    values = tensors(3)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0, weight_decay=0.5)
    await step(opt, rrefs, [None, torch.ones_like(values[1]), None])
    after = await values_of(rrefs)
    assert [torch.equal(a, b) for a, b in zip(after, values, strict=True)] == [True, False, True]


async def test_an_owner_that_the_context_has_not_touched_leaves_all_alone(group):
    values = tensors(2)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    async with gradients(rrefs[:1], [torch.ones_like(values[0])]) as context_id:
        await opt.step(context_id)
    assert all_equal(await values_of(rrefs), [values[0] - 1, values[1]])


async def test_parameters_that_need_no_gradient_can_be_among_them(group):
    value = torch.ones(2)
    rrefs = [arpc.remote("worker1", make_parameter, (value, False)), *place([value], OWNERS)]
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    await step(opt, rrefs, [None, value])
    assert all_equal(await values_of(rrefs), [value, value - 1])


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
async def test_grad_of_a_parameter_is_nobody_elses(group, owner):
    (rref,) = rrefs = place([torch.zeros(2)], [owner])
    own = torch.tensor([5.0, 5.0])
    await arpc.rpc_sync(owner, set_grad_of, (rref, own))
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    await step(opt, rrefs, [torch.ones(2)])
    assert torch.equal(await arpc.rpc_sync(owner, grad_of, (rref,)), own)
    assert torch.equal((await rref).detach(), -torch.ones(2))


async def test_an_unknown_context_is_an_error(group):
    opt = DistributedOptimizer(torch.optim.SGD, place(tensors(1), OWNERS), lr=1.0)
    with pytest.raises(arpc.AutogradError, match="context"):
        await opt.step(12345)
    async with arpc.autograd.context() as context_id:
        pass
    with pytest.raises(arpc.AutogradError, match="context"):
        await opt.step(context_id)


async def test_a_parameter_whose_memory_was_replaced_is_followed(group):
    (rref,) = rrefs = place([torch.zeros(2)], OWNERS)
    opt = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    await arpc.rpc_sync("worker1", replace_memory, (rref,))
    await step(opt, rrefs, [torch.ones(2, dtype=torch.float64)])
    assert torch.equal((await rref).detach(), torch.full((2,), 6.0, dtype=torch.float64))


async def replace_memory(rref: arpc.RRef[Parameter]) -> None:
    (await rref.local_value()).data = torch.full((2,), 7.0, dtype=torch.float64)


# -- groups and schedulers


async def test_groups_have_hyperparameters_of_their_own(group):
    values = tensors(4)
    parameters = [Parameter(value.clone()) for value in values]
    reference = torch.optim.SGD([{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}], lr=0.1)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(
        torch.optim.SGD, [{"params": rrefs[:2], "lr": 0.5}, {"params": iter(rrefs[2:])}], lr=0.1
    )
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.1]
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]
    assert opt.defaults == reference.defaults
    grads = tensors(4, 1)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    reference.step()
    await step(opt, rrefs, grads)
    assert all_equal(await values_of(rrefs), [p.detach() for p in parameters])


async def test_a_group_can_be_added(group):
    values = tensors(4)
    reference = Reference(torch.optim.SGD, values[:2], lr=0.1, momentum=0.9)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(torch.optim.SGD, rrefs[:2], lr=0.1, momentum=0.9)
    reference.step(tensors(2, 1))
    await step(opt, rrefs[:2], tensors(2, 1))
    added = [Parameter(value.clone()) for value in values[2:]]
    reference.optimizer.add_param_group({"params": added, "lr": 0.7})
    reference.parameters += added
    opt.add_param_group({"params": rrefs[2:], "lr": 0.7})
    reference.step(tensors(4, 2))
    await step(opt, rrefs, tensors(4, 2))
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.7]
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])
    assert_same_state(await opt.state_dict(), reference.optimizer.state_dict())


async def test_a_group_can_be_added_while_others_wait(group):
    rrefs = place(tensors(4), OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs[:2], lr=1.0)
    async with gradients(rrefs, [torch.ones_like(value) for value in tensors(4)]) as context_id:
        waiting = asyncio.create_task(opt.step(context_id)), asyncio.create_task(opt.state_dict())
        await asyncio.sleep(0)
        opt.add_param_group({"params": rrefs[2:]})
        _, state = await asyncio.gather(*waiting)
    # the group is a part of whatever was still to be sent
    assert [entry["params"] for entry in state["param_groups"]] == [[0, 1], [2, 3]]
    assert all_equal(await values_of(rrefs), [value - 1 for value in tensors(4)])


async def test_a_parameter_that_is_in_another_group_is_refused(group):
    rrefs = place(tensors(2), OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    with pytest.raises(arpc.ConfigurationError, match="more than one parameter group"):
        opt.add_param_group({"params": rrefs[:1]})
    await opt
    assert len(opt.param_groups) == 1
    # the same parameter by another RRef: only its owner can tell
    again = arpc.remote(rrefs[0].owner_name(), give_back, (rrefs[0],))
    opt.add_param_group({"params": [again]})
    with pytest.raises(arpc.WorkersFailedError) as failed:
        await opt
    assert any("more than one parameter group" in str(error) for error in failed.value.exceptions)


async def give_back(rref):
    return await rref.local_value()


async def test_a_group_that_cannot_be_sent_is_not_added(group):
    rrefs = place(tensors(2), OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs[:1], lr=1.0)
    with pytest.raises(arpc.SerializationError):
        opt.add_param_group({"params": rrefs[1:], "lock": threading.Lock()})
    await opt
    assert len(opt.param_groups) == 1


SCHEDULERS = {
    "step": lambda opt: StepLR(opt, 2, gamma=0.5),
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=5),
    "lambda": lambda opt: LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
    "one cycle, which moves the momentum too": lambda opt: OneCycleLR(opt, max_lr=0.5, total_steps=8),
    "plateau": lambda opt: ReduceLROnPlateau(opt, patience=0, factor=0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
async def test_schedulers_of_torch_drive_it(group, name):
    values = tensors(3)
    reference = Reference(torch.optim.SGD, values, lr=0.3, momentum=0.9)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.3, momentum=0.9)
    schedulers = [SCHEDULERS[name](one) for one in (reference.optimizer, opt)]
    for number in range(5):
        reference.step(tensors(3, number))
        await step(opt, rrefs, tensors(3, number))
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])
    assert_same_state(await opt.state_dict(), reference.optimizer.state_dict())
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() != [0.3]


async def test_hyperparameters_can_be_set_by_hand(group):
    values = tensors(2)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.0)
    opt.param_groups[0]["lr"] = 2.0
    await step(opt, rrefs, [torch.ones_like(value) for value in values])
    assert all_equal(await values_of(rrefs), [value - 2 for value in values])


async def test_a_learning_rate_that_is_a_tensor(group):
    values = tensors(2)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(torch.optim.Adam, rrefs, lr=torch.tensor(0.1), foreach=False)
    reference = Reference(torch.optim.Adam, values, lr=torch.tensor(0.1), foreach=False)
    schedulers = [StepLR(one, 1, gamma=0.5) for one in (reference.optimizer, opt)]
    for number in range(3):
        reference.step(tensors(2, number))
        await step(opt, rrefs, tensors(2, number))
        for scheduler in schedulers:
            scheduler.step()
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])


class Counting(torch.optim.SGD):
    """Keeps something of its own among its hyperparameters, as some optimizers do."""

    def __init__(self, params, lr):
        super().__init__([{"count": 0, **group} for group in params], lr)

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


async def test_what_an_optimizer_keeps_among_its_hyperparameters_is_left_to_it(group):
    values = tensors(1)
    rrefs = place(values, OWNERS)
    opt = await DistributedOptimizer(Counting, rrefs, lr=0.1)
    for _ in range(3):
        opt.param_groups[0]["lr"] /= 2
        await step(opt, rrefs, tensors(1))
    (saved,) = (await opt.state_dict())["param_groups"]
    assert (saved["count"], saved["lr"]) == (3, 0.0125)


# -- state


def assert_same_state(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert one["param_groups"] == other["param_groups"]
    assert list(one["state"]) == list(other["state"])
    for key, state in one["state"].items():
        assert state.keys() == other["state"][key].keys()
        for name, value in state.items():
            expected = other["state"][key][name]
            assert torch.equal(value, expected) if isinstance(value, Tensor) else value == expected


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor])
async def test_the_state_is_that_of_one_process(group, cls):
    values = tensors(5)
    options = {"lr": 0.05, **OPTIONS.get(cls, {})}
    reference = Reference(cls, values, **options)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(cls, rrefs, **options)
    for number in range(2):
        reference.step(tensors(5, number))
        await step(opt, rrefs, tensors(5, number))
    state = await opt.state_dict()
    assert_same_state(state, reference.optimizer.state_dict())

    # from one process to many, and on from there
    other = place([p.detach() for p in reference.parameters], OWNERS[::-1])
    resumed = DistributedOptimizer(cls, other, lr=77.0)
    await resumed.load_state_dict(reference.optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 0.05
    reference.step(tensors(5, 9))
    await step(resumed, other, tensors(5, 9))
    assert all_equal(await values_of(other), [p.detach() for p in reference.parameters])

    # and from many to one
    single = Reference(cls, values, lr=1.0)
    single.optimizer.load_state_dict(state)
    assert_same_state(single.optimizer.state_dict(), state)


async def test_the_state_includes_what_the_owners_do_not_know_yet(group):
    opt = await DistributedOptimizer(torch.optim.SGD, place(tensors(2), OWNERS), lr=0.1)
    opt.param_groups[0]["lr"] = 0.9
    assert (await opt.state_dict())["param_groups"][0]["lr"] == 0.9


async def test_a_state_that_does_not_fit_is_refused(group):
    opt = DistributedOptimizer(torch.optim.SGD, place(tensors(2), OWNERS), lr=0.1)
    with pytest.raises(arpc.ConfigurationError, match="3 parameters in group 0"):
        await opt.load_state_dict(Reference(torch.optim.SGD, tensors(3), lr=0.1).optimizer.state_dict())
    parameters = [Parameter(value) for value in tensors(2)]
    two = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    with pytest.raises(arpc.ConfigurationError, match="2 parameter groups"):
        await opt.load_state_dict(two.state_dict())


# -- what it is


async def test_it_can_be_handed_to_others(group):
    """They share the owners' optimizers, momentum and all."""
    values = tensors(2)
    reference = Reference(torch.optim.SGD, values, lr=0.1, momentum=0.9)
    rrefs = place(values, OWNERS)
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1, momentum=0.9)
    for number in range(2):
        reference.step(tensors(2, number))
    await step(opt, rrefs, tensors(2, 0))
    await arpc.rpc_sync("worker2", step, (opt, rrefs, tensors(2, 1)))
    assert all_equal(await values_of(rrefs), [p.detach() for p in reference.parameters])


async def test_parameters_of_this_worker_are_given_as_rrefs(group):
    parameter = Parameter(torch.zeros(2))
    rrefs = [arpc.RRef(parameter), *place([torch.zeros(2)], OWNERS)]
    opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    assert repr(opt) == "DistributedOptimizer(SGD of 2 parameters on worker0, worker1)"
    await step(opt, rrefs, [torch.ones(2), torch.ones(2)])
    assert torch.equal(parameter.detach(), -torch.ones(2))
    assert parameter.grad is None


async def test_arguments_that_cannot_be(group):
    with pytest.raises(arpc.ConfigurationError, match="empty list"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with pytest.raises(arpc.ConfigurationError, match=r"not Parameter.*arpc.RRef\(parameter\)"):
        DistributedOptimizer(torch.optim.SGD, [Parameter(torch.zeros(1))], lr=0.1)
    opt = DistributedOptimizer(torch.optim.SGD, place(tensors(1), OWNERS), lr=0.1)
    with pytest.raises(arpc.ConfigurationError, match="a parameter group is a dict"):
        opt.add_param_group({"lr": 1.0})
    with pytest.raises(arpc.ConfigurationError, match="is empty"):
        opt.add_param_group({"params": []})


async def test_what_has_no_meaning_says_so(group):
    opt = DistributedOptimizer(torch.optim.SGD, place(tensors(1), OWNERS), lr=0.1)
    with pytest.raises(arpc.NotReadyError, match="await"):
        StepLR(opt, 1)
    with pytest.raises(arpc.UnsupportedError, match=r"Leave zero_grad\(\) out"):
        opt.zero_grad()
    with pytest.raises(arpc.UnsupportedError, match=r"state_dict\(\)"):
        _ = opt.state
    with pytest.raises(arpc.UnsupportedError, match="around"):
        opt.register_step_post_hook(print)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = opt.nothing
    assert await opt is opt
