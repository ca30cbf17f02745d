"""What is recorded, and what not."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest
import torch

import arpc
from arpc.autograd.contexts import Container, current_context_id
from arpc.autograd.recording import Recorder
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo
from tests.autograd import functions
from tests.autograd.functions import Pair
from tests.autograd.test_backward import leaf

RECV = "torch::distributed::autograd::RecvRpcBackward"


def of(group, worker, ctx_id):
    return group[worker].autograd.container.find(ctx_id)


async def test_send_and_recv_nodes_on_both_sides(group):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        z = await arpc.rpc_sync("worker1", functions.mul, (x, y))
        here, there = of(group, 0, ctx_id), of(group, 1, ctx_id)
        (sent,) = here.sends.values()
        assert sent.to == 1
        assert [node.variable for node, _ in sent.edges] == [x, y]
        (received,) = there.recvs.values()
        assert received.name() == RECV
        assert here.sends.keys() == there.recvs.keys()
        assert there.sends.keys() == here.recvs.keys()
        (reply,) = there.sends.values()
        assert reply.edges[0][0].name() == "MulBackward0"
        assert z.grad_fn.name() == RECV
        assert here.known_workers.keys() == {1}
        assert there.known_workers.keys() == {0}


async def test_all_tensors_of_a_message_have_one_recv_node(group):
    async with arpc.autograd.context():
        both = await arpc.rpc_sync("worker1", functions.give_back, ([leaf(), torch.ones(1), leaf() * 2],))
        assert both[0].grad_fn is both[2].grad_fn
        assert both[1].grad_fn is None
        assert not both[1].requires_grad
        assert not both[0].is_leaf
        assert not both[0]._is_view()


async def test_only_what_requires_grad_is_recorded(group):
    async with arpc.autograd.context() as ctx_id:
        pair = Pair(torch.ones(2), leaf())
        await arpc.rpc_sync("worker1", functions.give_back, ({"pair": pair, "numbers": [1, torch.ones(3)]},))
        (sent,) = of(group, 0, ctx_id).sends.values()
        assert len(sent.edges) == 1


async def test_a_context_goes_with_calls_whose_arguments_need_no_gradient(group):
    async with arpc.autograd.context() as ctx_id:
        made = await arpc.rpc_sync("worker1", functions.make_leaf, (1.0, 2.0))
        assert made.grad_fn.name() == RECV
        assert not of(group, 0, ctx_id).sends
        assert await arpc.rpc_sync("worker2", functions.context_id) == ctx_id


async def test_a_builtin_that_needs_no_gradient_does_not_take_it_along(group):
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        assert ctx_id not in group[1].autograd.container.contexts
        assert of(group, 0, ctx_id).known_workers == {}


async def test_a_fetch_always_records(group):
    rref = arpc.remote("worker1", functions.make_leaf, (1.0, 2.0))
    async with arpc.autograd.context() as ctx_id:
        value = await rref.to_here()
        assert value.grad_fn.name() == RECV
        assert of(group, 1, ctx_id).known_workers.keys() == {0}
    number = arpc.remote("worker1", int, (3,))
    async with arpc.autograd.context() as ctx_id:
        assert await number == 3
        assert group[1].autograd.container.has_left(ctx_id)  # it was there, and has kept nothing
    await rref.release()
    await number.release()


async def test_nothing_is_recorded_without_a_context(group):
    x = leaf()
    y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
    assert y.grad_fn is None
    assert await arpc.rpc_sync("worker1", functions.context_id) is None
    assert all(not worker.autograd.container.contexts for worker in group)


async def test_a_thread_records_in_the_context_of_its_handler(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", call_from_thread, (x, "worker2"))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3


async def test_a_thread_under_no_grad_records_nothing(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", call_from_thread_under_no_grad, (x, "worker2"))
        assert ctx_id not in group[2].autograd.container.contexts


def call_from_thread(x, to):
    return 3 * arpc.rpc_async(to, functions.mul, (x, 2)).wait()


def call_from_thread_under_no_grad(x, to):
    with torch.no_grad():
        arpc.rpc_async(to, functions.mul, (x, 2)).wait()


async def test_tasks_started_inside_record_in_the_context(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        products = await asyncio.gather(
            *(asyncio.create_task(arpc.rpc_sync(f"worker{n}", functions.mul, (x, n))) for n in range(3))
        )
        await arpc.autograd.backward(ctx_id, [sum(products).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3


@pytest.mark.parametrize("meta", [None, 5, [1], [1, "2"], [1, 2, 3], [1.0, 2]])
def test_malformed_ids_are_a_protocol_error(meta):
    recorder = Recorder(Container(0))
    with pytest.raises(ProtocolError):
        recorder.request_received(WorkerInfo("peer", 1), meta, [])
    with pytest.raises(ProtocolError):
        recorder.reply_received(WorkerInfo("peer", 1), meta, [])


async def test_recorded_without_tensors_is_a_protocol_error():
    recorder = Recorder(Container(0))
    with pytest.raises(ProtocolError):
        recorder.request_received(WorkerInfo("peer", 1), struct.pack("<QQQ", 1 << 48, 7, 1), [torch.ones(1)])
    assert current_context_id.get() == 1 << 48


@pytest.mark.parametrize("meta", [b"", b"12345678", [1 << 48, 7], 7, None], ids=repr)
async def test_ids_that_are_none_are_a_protocol_error(meta):
    recorder = Recorder(Container(0))
    with pytest.raises(ProtocolError):
        recorder.request_received(WorkerInfo("peer", 1), meta, [torch.ones(1, requires_grad=True)])
    assert current_context_id.get() is None


@pytest.mark.parametrize("elements", [4, 1 << 20], ids=["small", "large"])
@pytest.mark.parametrize("is_same", [False, True], ids=["two", "twice"])
async def test_a_call_is_recorded_once_whatever_way_it_goes(group, elements, is_same):
    x = torch.ones(elements, requires_grad=True)
    y = x if is_same else torch.ones(elements, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        z = await arpc.rpc_sync("worker1", functions.mul, (x, y))
        (sent,) = of(group, 0, ctx_id).sends.values()
        assert [node.variable for node, _ in sent.edges] == ([x] if is_same else [x, y])
        (replied,) = of(group, 1, ctx_id).sends.values()
        assert len(replied.edges) == 1
        await arpc.autograd.backward(ctx_id, [z.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert gradients.keys() == {x, y}
        assert gradients[x].unique().tolist() == [2.0 if is_same else 1.0]


async def test_memory_that_is_no_tensor_goes_along(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        numbers, z = await arpc.rpc_sync("worker1", functions.give_back, ([np.ones(3), x],))
        assert numbers.tolist() == [1.0] * 3
        assert z.grad_fn.name() == RECV
        (sent,) = of(group, 0, ctx_id).sends.values()
        assert [node.variable for node, _ in sent.edges] == [x]


@pytest.mark.parametrize("function", [functions.mul, functions.mul_in_thread])
async def test_creations_whose_values_stay_are_answered_calls_of_the_context(group, function):
    async with arpc.autograd.context():
        rref = arpc.remote("worker1", function, (leaf(1.0), 2))
        await rref._get_future()
        (caller,), (callee,) = (worker.autograd.container.contexts.values() for worker in group[:2])
        assert (caller.calls_made, caller.calls_answered) == (1, 1)
        assert (callee.handlers_begun, callee.handlers_answered) == (1, 1)
        await rref.release()
