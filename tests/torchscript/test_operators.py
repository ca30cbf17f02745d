"""Operators of torch by name."""

from __future__ import annotations

import pytest
import torch

import arpc
from arpc.torchscript import Operator, builtin_operator, operators
from tests.torchscript import functions

ADD = torch.ops.aten.add


@pytest.mark.parametrize("operator", [ADD, ADD.Tensor, Operator("aten::add")])
async def test_operators_are_called_and_sent(group, operator):
    x = torch.ones(2)
    assert (await arpc.rpc_sync("worker1", operator, (x, x))).tolist() == [2, 2]
    assert (await arpc.remote("worker1", operator, (x, x))).tolist() == [2, 2]
    assert (await arpc.rpc_sync("worker1", functions.call, (operator, x, x))).tolist() == [2, 2]


async def test_an_operator_is_the_peers_own(group):
    assert await arpc.rpc_sync("worker1", one_of, (ADD,)) is ADD
    assert await arpc.rpc_sync("worker1", one_of, (ADD.Tensor,)) is ADD.Tensor
    assert await arpc.rpc_sync("worker1", one_of, (Operator("aten::mul"),)) == Operator("aten::mul")


def one_of(value):
    return value


def test_builtins_are_found():
    assert builtin_operator(torch.add) == Operator("aten::add")
    assert len({builtin_operator(torch.add), Operator("aten::add"), Operator("aten::mul")}) == 2
    assert repr(builtin_operator(torch.mul)) == "Operator('aten::mul')"
    assert builtin_operator(one_of) is None


async def test_an_operator_that_does_not_fit_says_so(group):
    with pytest.raises(RuntimeError, match="Overloaded torch operator invoked from Python failed to match any schema"):
        await arpc.rpc_sync("worker1", Operator("aten::add"), ("text",))


def test_an_operator_that_is_not_there():
    with pytest.raises(arpc.SerializationError, match="import what registers it"):
        Operator("nowhere::nothing")
    with pytest.raises(arpc.SerializationError, match="import what registers it"):
        operators._packet("nowhere::nothing")
