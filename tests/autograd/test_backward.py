"""Backward passes as people see them: values, gradients, and where they are."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from tests.autograd import functions
from tests.autograd.functions import Model, Pair

OTHERS = ["worker1", "worker0"]


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


@pytest.mark.parametrize("to", OTHERS)
@pytest.mark.parametrize("function", [functions.mul, functions.mul_in_thread, torch.mul])
async def test_one_remote_operation(group, to, function):
    x, y = leaf(), leaf(4.0, 5.0, 6.0)
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync(to, function, (x, y))
        await arpc.autograd.backward(ctx_id, [product.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
    assert gradients.keys() == {x, y}
    assert torch.equal(gradients[x], y.detach())
    assert torch.equal(gradients[y], x.detach())
    assert x.grad is None
    assert y.grad is None


@pytest.mark.parametrize("to", OTHERS)
async def test_tensors_inside_of_anything(group, to):
    x, y, z = leaf(), leaf(4.0, 5.0, 6.0), torch.ones(3)
    async with arpc.autograd.context() as ctx_id:
        made = await arpc.rpc_sync(to, functions.mul_inside, (Pair(x, z), {"x": [y]}))
        assert made["plain"] == 3
        assert made["pair"].second.requires_grad is False
        await arpc.autograd.backward(ctx_id, [made["pair"].first.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
    assert torch.equal(gradients[x], y.detach())
    assert torch.equal(gradients[y], x.detach())
    assert z not in gradients


async def test_a_parameter_as_argument_keeps_its_gradient(group):
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", functions.mul, (weight, 4))
        await arpc.autograd.backward(ctx_id, [product.sum()])
        (key,) = arpc.autograd.get_gradients(ctx_id)
        assert key is weight
        assert arpc.autograd.get_gradients(ctx_id)[weight].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("to", OTHERS)
async def test_views_and_in_place_changes_of_what_was_received(group, to):
    x = leaf(1.0, 2.0, 3.0, 4.0)
    async with arpc.autograd.context() as ctx_id:
        # on both sides
        changed = await arpc.rpc_sync(to, functions.change_in_place, (x * 1,))
        assert changed.tolist() == [2.0, 6.0, 9.0, 12.0]
        changed.mul_(2)
        changed[2:].zero_()
        await arpc.autograd.backward(ctx_id, [changed.view(2, 2).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0, 6.0, 0.0, 0.0]


async def test_an_in_place_change_after_the_send_does_not_change_its_gradient(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = x * 1
        sent = await arpc.rpc_sync("worker1", functions.mul, (y, 2))
        y.mul_(5)
        await arpc.autograd.backward(ctx_id, [sent.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0, 2.0, 2.0]


async def test_nested_calls_record_in_the_same_context(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.nested, (x, "worker2", "worker1", "worker0"))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [16.0] * 3


@pytest.mark.parametrize("turns", [1, 2, 7, 20])
async def test_ping_pong(group, turns):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await functions.ping_pong(x, turns, "worker1", "worker0", "worker2")
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 ** (turns + 1) - 1] * 3


async def test_parameters_stay_where_they_are(group):
    model = arpc.remote("worker1", Model, (2.0, 3.0, 4.0))
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await model.rpc_sync().forward(x)
        z = await model.remote().forward(y)
        await arpc.autograd.backward(ctx_id, [z.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0, 9.0, 16.0]
        assert (await model.rpc_sync().gradient(ctx_id)).tolist() == [4.0, 12.0, 24.0]
    await model.release()


@pytest.mark.parametrize(
    "function", [functions.count_up, functions.count_up_in_thread, functions.count_up_under_no_grad]
)
@pytest.mark.parametrize("to", OTHERS)
async def test_streams(group, to, function):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        total = torch.zeros(3)
        async for item in arpc.stream(to, function, (x, 40), window=4):
            total = total + item
        await arpc.autograd.backward(ctx_id, [total.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [sum(range(40))] * 3


async def test_only_some_items_of_a_stream(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        items = [item async for item in arpc.stream("worker1", functions.count_up, (x, 10))]
        await arpc.autograd.backward(ctx_id, [(items[3] + items[5]).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [8.0] * 3


async def test_unused_results_do_no_harm(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        await arpc.rpc_sync("worker2", functions.nested, (x, "worker1"))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3


async def test_a_result_that_nobody_waited_for_does_no_harm(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        lost = arpc.rpc_async("worker1", functions.mul_in_thread, (x, 2))
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        lost.cancel()
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3


async def test_a_tensor_of_a_result_that_is_not_used_gets_no_gradient(group):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        both = await arpc.rpc_sync("worker1", functions.give_back, ([x * 2, y * 2],))
        await arpc.autograd.backward(ctx_id, [both[0].sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
    assert gradients.keys() == {x}


async def test_gradients_accumulate_in_the_context(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        for factor in (2, 3):
            y = await arpc.rpc_sync("worker1", functions.mul, (x, factor))
            before = arpc.autograd.get_gradients(ctx_id)
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [5.0] * 3
        assert before[x].tolist() == [2.0] * 3


async def test_retain_graph(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", functions.mul, (x * x, 2))).sum()
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [8.0, 16.0, 24.0]
        with pytest.raises(arpc.AutogradError, match=r"second time.*retain_graph=True"):
            await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [8.0, 16.0, 24.0]


async def test_two_losses_with_one_after_the_other(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        first = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        second = await arpc.rpc_sync("worker1", functions.mul, (x, 3))
        await arpc.autograd.backward(ctx_id, [second.sum()])
        await arpc.autograd.backward(ctx_id, [first.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [5.0] * 3


async def test_several_roots(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        await arpc.autograd.backward(ctx_id, [y[0], y[1], (y * x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 + 4.0, 2.0 + 8.0, 12.0]


frozen = torch.full((3,), 2.0)


@arpc.inline
def thaw_and_scale(x):
    return x * frozen.requires_grad_()


@pytest.mark.parametrize("nodes", [0, 300])
async def test_leaves_that_were_frozen_since_get_no_gradient(group, nodes):
    x, used, sent = leaf(), leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", thaw_and_scale, (x,)) * used
        y = y + await arpc.rpc_sync("worker2", thaw_and_scale, (sent,))
        for _ in range(nodes):
            y = y + 0
        for one in (used, sent, frozen):
            one.requires_grad_(False)
        await arpc.autograd.backward(ctx_id, [y.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert list(gradients) == [x]
        assert gradients[x].tolist() == (2 * used).tolist()
        assert not any(worker.autograd.gradients(ctx_id) for worker in group[1:])


async def test_a_purely_local_graph(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(x * x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0, 4.0, 6.0]


async def test_concurrent_contexts_do_not_see_each_other(group):
    async def train(number):
        x = leaf()
        async with arpc.autograd.context() as ctx_id:
            y = await functions.ping_pong(x * number, 4, "worker1", "worker2")
            assert await arpc.rpc_sync("worker1", functions.context_id) == ctx_id
            await arpc.autograd.backward(ctx_id, [y.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [31.0 * number] * 3
            return ctx_id

    ids = await asyncio.gather(*(train(number) for number in range(8)))
    assert len(set(ids)) == 8
    assert await arpc.rpc_sync("worker1", functions.context_id) is None


@pytest.mark.parametrize("layout", ["sparse", "complex", "half", "empty", "zero_stride"])
async def test_kinds_of_tensors(group, layout):
    match layout:
        case "sparse":
            x = torch.eye(3).to_sparse().requires_grad_()
        case "complex":
            x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
        case "half":
            x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
        case "empty":
            x = torch.ones(0, 3, requires_grad=True)
        case _:
            x = torch.ones(1).expand(3).requires_grad_()

    def loss(y):
        total = torch.sparse.sum(y) if y.is_sparse else y.sum()
        return total.real if y.is_complex() else total

    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        await arpc.autograd.backward(ctx_id, [loss(y)])
        gradient = arpc.autograd.get_gradients(ctx_id)[x]
    (expected,) = torch.autograd.grad(loss(x * 2), x)
    assert gradient.layout is expected.layout
    assert torch.equal(gradient.to_dense(), expected.to_dense())


async def test_gradients_are_memory_of_their_own(group):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        z = await arpc.rpc_sync("worker1", functions.give_back, ([x * 1, y * 1],))
        await arpc.autograd.backward(ctx_id, [(z[0] + z[1] + (x + y)).sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        gradients[x].mul_(10)
        assert gradients[y].tolist() == [2.0] * 3
        assert gradients[x].is_contiguous()


async def test_hooks_run_once_with_the_total(group):
    x = leaf()
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.tolist()) or gradient * 2)
    async with arpc.autograd.context() as ctx_id:
        y = x * 3
        y.register_hook(lambda gradient: seen.append("y"))
        # y reaches the loss through this worker and through two others
        total = y + await arpc.rpc_sync("worker1", functions.mul, (y, 2))
        total = total + await arpc.rpc_sync("worker2", functions.mul, (y, x))
        await arpc.autograd.backward(ctx_id, [total.sum()])
        gradient = arpc.autograd.get_gradients(ctx_id)[x]
    expected = [3 * (1 + 2 + value) + 3 * value for value in (1.0, 2.0, 3.0)]
    assert seen == ["y", expected]
    assert gradient.tolist() == [2 * value for value in expected]


async def test_a_large_graph_runs_in_a_thread_and_the_loop_keeps_serving(group):
    x = leaf()
    served = 0
    is_over = asyncio.Event()

    async def serve():
        nonlocal served
        while not is_over.is_set():
            assert await arpc.rpc_sync("worker0", functions.give_back, (1,)) == 1
            served += 1

    async with arpc.autograd.context() as ctx_id:
        y = x
        for _ in range(5000):
            y = y + 1
        y = await arpc.rpc_sync("worker1", functions.mul, (y, 2))
        for _ in range(5000):
            y = y + 1
        serving = asyncio.create_task(serve())
        await asyncio.sleep(0)
        await arpc.autograd.backward(ctx_id, [y.sum()])
        is_over.set()
        await serving
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
    assert served > 0


# -- grad mode


async def test_nothing_is_recorded_under_no_grad(group):
    x = leaf()

    @arpc.no_grad()
    async def evaluate():
        await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        assert await arpc.rpc_sync("worker1", functions.is_grad_enabled)

    async with arpc.autograd.context() as ctx_id:
        await evaluate()
        assert not group[0].autograd.container.find(ctx_id).sends
        assert ctx_id not in group[1].autograd.container.contexts


async def test_grad_mode_of_one_task_is_not_that_of_another(group):
    x = leaf()

    @arpc.no_grad()
    async def evaluate():
        for _ in range(5):
            await arpc.rpc_sync("worker1", functions.mul, (x, 2))

    async def train():
        async with arpc.autograd.context() as ctx_id:
            y = x
            for _ in range(5):
                y = await arpc.rpc_sync("worker1", functions.mul, (y, 2))
            await arpc.autograd.backward(ctx_id, [y.sum()])
            return arpc.autograd.get_gradients(ctx_id)[x].tolist()

    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(train())
        tasks.create_task(evaluate())
    assert training.result() == [32.0] * 3


# -- RRefs as roots


@pytest.mark.parametrize("to", OTHERS)
async def test_backward_from_an_rref(group, to):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker2", functions.mul, (x, 3))
        loss = arpc.remote(to, torch.sum, (product,))
        await loss.backward(ctx_id)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3
        await loss.release()


async def test_backward_from_an_rref_needs_a_context_and_a_tensor(group):
    loss = arpc.remote("worker1", functions.make_leaf, (1.0,))
    number = arpc.remote("worker1", int, (3,))
    with pytest.raises(arpc.AutogradError, match="require 'dist_autograd_ctx_id'"):
        await loss.backward()
    with pytest.raises(arpc.AutogradError, match="Could not find autograd context"):
        await loss.backward(5)
    async with arpc.autograd.context() as ctx_id:
        with pytest.raises(arpc.AutogradError, match=r"should contain a tensor for .backward\(\), not int"):
            await number.backward(ctx_id)
        with pytest.raises(arpc.AutogradError, match="does not have a valid gradient function"):
            await loss.backward(ctx_id)
    await loss.release()
    await number.release()


async def test_an_owner_may_do_without_a_context(group):
    x = leaf()
    await arpc.RRef((x * x).sum()).backward()
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
