"""Hooks and nodes that raise hostile exceptions in a backward pass: it fails, and no worker with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import arpc
from arpc.user_errors import stack_of, type_name_of
from tests.autograd import functions
from tests.autograd.test_failures import assert_no_pass
from tests.hostile import EXCEPTIONS, HOOK_REASONS, REASONS, raise_specimen

HOOKS = ("__str__", "__class__", "__reduce__", "__cause__")
HOSTILE = [f"{hook}-{reason}" for hook in HOOKS for reason in HOOK_REASONS]
OTHERS = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "UnrulyError", "hostile cause"]


class Raising(torch.autograd.Function):
    """Raises a specimen when gradients come."""

    @staticmethod
    def forward(ctx, x: Tensor, name: str) -> Tensor:
        ctx.specimen = name
        return x.clone()

    @staticmethod
    def backward(ctx, _: Tensor):
        raise_specimen(ctx.specimen)


def through_node(x: Tensor, name: str) -> Tensor:
    return Raising.apply(x, name)


def through_hook(x: Tensor, name: str) -> Tensor:
    made = x * 2
    made.register_hook(lambda _: raise_specimen(name))
    return made


@pytest.mark.parametrize("name", [*HOSTILE, *OTHERS])
async def test_a_pass_fails_with_what_a_hook_raises(group, name):
    kind = type_name_of(EXCEPTIONS[name]())
    complaints = []
    for function in (through_node, through_hook):
        for to in ("worker1", "worker0"):
            x = torch.ones(3, requires_grad=True)
            async with arpc.autograd.context() as ctx_id:
                y = await arpc.rpc_sync("worker2", functions.mul, (x, 2))
                z = await arpc.rpc_sync(to, function, (y, name))
                try:
                    await arpc.autograd.backward(ctx_id, [z.sum()])
                except arpc.AutogradError as error:
                    told = stack_of(error)
                    if kind not in told and not any(reason in told for reason in REASONS):
                        complaints.append(told)
                else:
                    complaints.append(f"{function.__name__} on {to} did not raise")
                assert_no_pass(group)
                # the context is as good as before
                again = await arpc.rpc_sync(to, functions.mul, (x, 2))
                await arpc.autograd.backward(ctx_id, [again.sum()])
                assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
    assert not complaints, "\n".join(complaints)
