"""ScriptModules: made remotely, called where they are, and copied if their type does not forbid it."""

from __future__ import annotations

import pytest
import torch

import arpc
from tests.torchscript import functions


async def test_the_interpreter_holds_up_neither_the_loop_nor_other_threads(group):
    spinner = arpc.remote("worker1", functions.Spinner)
    spinning = spinner.rpc_async().spin()
    # with the interpreter in possession of the GIL, neither call would ever be answered
    assert await arpc.rpc_sync("worker1", functions.no_arg) == 7
    await spinner.rpc_sync().stop()
    assert await spinning >= 0


async def test_methods_are_called_through_the_rref(group):
    spinner = arpc.remote("worker1", functions.Spinner)
    point = await spinner.rpc_sync().point(torch.ones(1))
    assert (point.x.item(), point.label) == (1, "method")
    assert (await spinner.remote().point(torch.ones(1))).label == "method"
    with pytest.raises(arpc.ScriptError, match="Expected error"):
        await spinner.rpc_sync().fail()
    with pytest.raises(RuntimeError, match=r"point\(\) is missing value for argument 'x'"):
        await spinner.rpc_sync().point()


async def test_a_module_that_python_code_makes_can_be_copied(group):
    made = await arpc.rpc_sync("worker1", functions.Spinner)
    assert isinstance(made, torch.jit.ScriptModule)
    made.stop()
    assert made.spin() == 0
    remote = arpc.remote("worker1", functions.Spinner)
    await remote.rpc_sync().stop()
    for _ in range(2):
        copy = await remote
        assert isinstance(copy, torch.jit.ScriptModule)
        assert copy.spin() == 0
    assert issubclass(await remote._get_type(), torch.jit.ScriptModule)
    assert await arpc.rpc_sync("worker1", functions.type_name, (made,)) == "RecursiveScriptModule"


async def test_a_module_by_its_type_stays_where_it_is(group):
    text = r"is an RRef to a ScriptModule. It can't be sent through RPC from owner,"
    remote = arpc.remote("worker1", functions.make_spinner)
    await remote.rpc_sync().stop()
    assert await remote.rpc_sync().spin() == 0
    with pytest.raises(arpc.RRefError, match=text):
        await remote
    with pytest.raises(arpc.RRefError, match=text):
        await arpc.remote("worker1", functions.make_spinner)  # nor does it come with the answer

    hinted = arpc.RRef(functions.Spinner(), type_hint=functions.Spinning)
    assert isinstance(await hinted, functions.Spinner)  # on its owner, it is at hand
    with pytest.raises(arpc.RRefError, match=text):
        await arpc.rpc_sync("worker1", fetch, (hinted,))


async def fetch(rref):
    return await rref


async def test_a_method_of_a_module_that_is_here_cannot_be_called_elsewhere(group):
    with pytest.raises(TypeError, match="pickle") as caught:
        arpc.rpc_async("worker1", functions.Spinner().spin)
    assert isinstance(caught.value, arpc.SerializationError)
    with pytest.raises(TypeError, match="call its method through the RRef"):
        arpc.remote("worker1", functions.Spinner().spin)
    assert group[0].rrefs() == []


async def test_a_module_is_a_callable_that_goes_by_value(group):
    linear = torch.jit.script(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(await arpc.rpc_sync("worker1", linear, (x,)), linear(x))
