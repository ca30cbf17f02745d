"""Calls of TorchScript functions: what is checked where, what arrives, and how errors look."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from arpc.agent.client.pending_calls import SEQUENCE_BITS
from arpc.testing import cluster
from tests.torchscript import functions


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
async def test_a_script_function_is_called_in_each_way(group, worker):
    x = torch.ones(2, 2)
    assert torch.equal(await arpc.rpc_sync(worker, functions.one_arg, (x,)), x + 1)
    assert torch.equal(await arpc.rpc_async(worker, functions.one_arg, kwargs={"value": x}), x + 1)
    assert torch.equal(await arpc.remote(worker, functions.one_arg, (x,)), x + 1)
    assert await arpc.rpc_sync(worker, functions.no_arg) == 7
    assert await arpc.remote(worker, functions.no_arg) == 7


async def test_defaults_are_filled_in(group):
    x = torch.ones(2)
    for args, kwargs, factor, name in (
        ((x,), None, 3, "none"),
        ((x, 4), None, 4, "none"),
        ((x,), {"name": "n"}, 3, "n"),
        ((), {"x": x, "factor": 5, "name": "n"}, 5, "n"),
    ):
        tensor, found = await arpc.rpc_sync("worker1", functions.with_defaults, args, kwargs)
        assert (tensor.tolist(), found) == ([factor, factor], name)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((10, 20), None, r"one_arg\(\) expected at most 1 argument\(s\) but received 2 argument\(s\)"),
        (("text",), None, r"one_arg\(\) Expected a value of type 'Tensor' for argument 'value'"),
        ((), None, r"one_arg\(\) is missing value for argument 'value'"),
        ((torch.ones(1),), {"other": 1}, r"expected at most 1 argument\(s\) but received 2"),
    ],
)
async def test_arguments_are_checked_before_anything_is_sent(group, args, kwargs, text):
    made = group[0].agent.calls_made
    with pytest.raises(RuntimeError, match=text) as caught:
        arpc.rpc_async("worker1", functions.one_arg, args, kwargs)
    assert isinstance(caught.value, arpc.ScriptError)
    assert "Declaration: one_arg(Tensor value) -> Tensor" in str(caught.value)
    with pytest.raises(arpc.ScriptError, match=text):
        await arpc.rpc_sync("worker1", functions.one_arg, args, kwargs)
    with pytest.raises(arpc.ScriptError, match=text):
        arpc.remote("worker1", functions.one_arg, args, kwargs)
    assert group[0].agent.calls_made == made
    assert group[0].rrefs() == []


async def test_a_parameter_may_be_called_self(group):
    five, two = torch.tensor(5), torch.tensor(2)
    assert (await arpc.rpc_sync("worker1", functions.of_self, (five, two))).item() == 3
    assert (await arpc.rpc_sync("worker1", functions.of_self, (five,), {"other": two})).item() == 3


async def test_the_future_knows_the_type_of_the_value(group):
    future = arpc.rpc_async("worker1", functions.with_defaults, (torch.ones(1),))
    assert arpc.torchscript.text_of(future.script_type) == "Tuple[Tensor, str]"
    await future
    plain = arpc.rpc_async("worker1", functions.double, (torch.ones(1),))
    assert plain.script_type is None
    await plain


async def test_containers_travel(group):
    by_name = {"a": torch.ones(1), "b": torch.zeros(1)}
    summed = await arpc.rpc_sync("worker1", functions.containers, ([1, 2], by_name, None))
    assert {name: value.item() for name, value in summed.items()} == {"a": 4.0, "b": 3.0}
    offset = await arpc.rpc_sync("worker1", functions.containers, ([], by_name, torch.tensor(9)))
    assert {name: value.item() for name, value in offset.items()} == {"a": 10.0, "b": 9.0}


async def test_named_tuples_are_of_the_users_own_class(group):
    x = torch.zeros(1)
    line, points, by_name, maybe, number = await arpc.rpc_sync("worker1", functions.make_line, (x,))
    assert type(line) is functions.Line
    assert {type(point) for point in (*line, *points, by_name["p"], maybe)} == {functions.Point}
    assert (line.end.label, number) == ("b", 3)
    assert (await arpc.rpc_sync("worker1", functions.length_of, (line,))).item() == 1


async def test_script_classes_travel(group):
    tally = await arpc.rpc_sync("worker1", functions.make_tally, (4,))
    assert (type(tally), tally.count) == (functions.Tally, 4)
    assert await arpc.rpc_sync("worker1", functions.read_tally, (tally,)) == 8
    assert await arpc.rpc_sync("worker1", functions.read_tally, (functions.Tally(5),)) == 10
    held = arpc.remote("worker1", functions.Tally, (6,))
    assert await held.rpc_sync().doubled() == 12
    assert await arpc.RRef(functions.Tally(1)).rpc_sync().doubled() == 2


async def test_futures_come_back_as_their_values(group):
    assert (await arpc.rpc_sync("worker1", functions.later, (torch.ones(1),))).item() == 2
    point = await arpc.rpc_sync("worker1", functions.marked_later, (torch.ones(1),))
    assert point == functions.Point(torch.ones(1), "made")
    assert type(point) is functions.Point
    assert (await arpc.remote("worker1", functions.later, (torch.ones(1),))).item() == 2


async def test_futures_as_arguments_have_to_be_done(group):
    done = arpc.rpc_async("worker1", functions.one_arg, (torch.ones(1),))
    with pytest.raises(arpc.NotReadyError, match="await it first"):
        arpc.rpc_async("worker1", functions.wait_in_script, (done, 1))
    await done
    assert (await arpc.rpc_sync("worker1", functions.wait_in_script, (done, 1))).item() == 3
    of_torch = functions.later(torch.ones(1))
    of_torch.wait()
    assert (
        await arpc.rpc_sync("worker1", functions.wait_in_script, kwargs={"future": of_torch, "more": 2})
    ).item() == 4
    with pytest.raises(arpc.ScriptError, match="Expected a value of type 'Tensor' for argument 'future'"):
        arpc.rpc_async("worker1", functions.wait_in_script, ("text", 1))


async def test_a_mark_on_a_function_that_returns_no_future(group):
    text = "Async functions must return an IValue of Future type, but got Tensor"
    with pytest.raises(RuntimeError, match=text):
        await arpc.rpc_sync("worker1", functions.marked_wrongly)
    rref = arpc.remote("worker1", functions.marked_wrongly)
    with pytest.raises(RuntimeError, match=text):
        await rref


async def test_what_a_script_function_raises_is_a_runtime_error(group):
    for start in (arpc.rpc_async, arpc.remote):
        with pytest.raises(RuntimeError, match="Expected error") as caught:
            await start("worker1", functions.fails, (torch.ones(2),))
        assert isinstance(caught.value, arpc.ScriptError)
    assert (await arpc.rpc_sync("worker1", functions.fails, (torch.ones(1),))).item() == 1
    with pytest.raises(arpc.ScriptError, match="Expected error"):
        await arpc.rpc_sync("worker1", functions.call, (functions.fails, torch.ones(2)))


async def test_the_names_of_script_functions_tell_them_apart(group):
    text = f"__torch__.{functions.__name__}.one_arg"
    future = arpc.rpc_async("worker1", functions.one_arg, (torch.ones(1),))
    calls = group[0].agent.peer("worker1").calls
    for tick in {call_id >> SEQUENCE_BITS for call_id, _ in calls}:
        calls.expire(tick)  # no answer can have come yet: nothing was awaited
    with pytest.raises(arpc.RpcTimeoutError, match=text):
        await future


async def test_a_function_of_no_module_goes_by_value(group):
    for weight, expected in ((1, 6.0), (2, 6.0), (1, 6.0)):
        function = functions.scripted(weight)
        assert (await arpc.rpc_sync("worker1", function, (torch.ones(1),))).item() == expected
        more = await arpc.remote("worker1", function, (torch.ones(1), 2))
        assert more.item() == (3.0 if weight == 1 else 2.0)


async def test_another_name_of_the_same_module_is_found(group):
    assert (await arpc.rpc_sync("worker1", functions.fast_double, (torch.ones(1),))).item() == 2


async def test_script_functions_are_arguments_and_results(group):
    assert (await arpc.rpc_sync("worker1", functions.call, (functions.one_arg, torch.ones(1)))).item() == 2
    assert await arpc.rpc_sync("worker1", functions.call, (functions.call, functions.no_arg)) == 7
    local = functions.scripted(1)
    assert (await arpc.rpc_sync("worker1", functions.call, (local, torch.ones(1), 3))).item() == 4


async def test_threads_and_other_tasks_call_them_too(group):
    def from_thread():
        return arpc.rpc_async("worker1", functions.one_arg, (torch.ones(1),)).wait()

    assert (await arpc.to_thread(from_thread)).item() == 2
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(arpc.rpc_sync("worker1", functions.one_arg, (torch.tensor(number),)))
            for number in range(20)
        ]
    assert [call.result().item() for call in calls] == list(range(1, 21))


async def test_gradients_flow_through_script_functions(group):
    x = torch.ones(3, requires_grad=True)
    weight = torch.arange(3.0, requires_grad=True)
    async with arpc.autograd.context() as context_id:
        loss = await arpc.rpc_sync("worker1", functions.scale, (x, weight))
        await arpc.autograd.backward(context_id, [loss])
        gradients = arpc.autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [0, 1, 2]
    assert gradients[weight].tolist() == [1, 1, 1]


# -- allow-list mode


@arpc.export
def run_one_arg(value):
    return functions.one_arg(value)


async def test_in_allow_list_mode_a_plain_function_calls_it():
    x = torch.ones(2)
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False, allow="exported")):
        assert torch.equal(await arpc.rpc_sync("worker1", run_one_arg, (x,)), x + 1)
        with pytest.raises(arpc.NotAllowedError, match=r"a TorchScript function .* has none\. Export a plain function"):
            await arpc.rpc_sync("worker1", functions.one_arg, (x,))


@pytest.mark.parametrize("compiled", [functions.one_arg, functions.Spinner().stop], ids=["function", "method"])
def test_it_cannot_be_exported_itself(compiled):
    with pytest.raises(arpc.ConfigurationError, match=f"{compiled.name} .*export a plain function that calls it"):
        arpc.export(compiled)
