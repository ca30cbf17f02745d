"""Gradients of batched calls: each caller's pass gets its own, whoever else was in the batch."""

from __future__ import annotations

import asyncio

import torch

import arpc
from tests.batching import functions


async def test_calls_of_one_context_share_a_batch_and_its_graph(group, sizes):
    model = arpc.remote("worker1", functions.Model, (3.0,))
    inputs = [torch.full((2,), float(number), requires_grad=True) for number in (1, 2)]
    async with arpc.autograd.context() as context_id:
        one, two = await asyncio.gather(*[model.rpc_async().forward(x) for x in inputs])
        assert sizes == [2]
        await arpc.autograd.backward(context_id, [(one + 10 * two).sum()])
        gradients = arpc.autograd.get_gradients(context_id)
        assert [gradients[x].tolist() for x in inputs] == [[3, 3], [30, 30]]
        assert await model.rpc_sync().gradients(context_id) == [21, 21]


async def test_a_result_that_is_not_used_does_no_harm(group, sizes):
    model = arpc.remote("worker1", functions.Model, (3.0,))
    inputs = [torch.full((2,), float(number), requires_grad=True) for number in (1, 2)]
    async with arpc.autograd.context() as context_id:
        one, _ = await asyncio.gather(*[model.rpc_async().forward(x) for x in inputs])
        assert sizes == [2]
        await arpc.autograd.backward(context_id, [one.sum()])
        gradients = arpc.autograd.get_gradients(context_id)
        assert gradients[inputs[0]].tolist() == [3, 3]
        assert await model.rpc_sync().gradients(context_id) == [1, 1]


async def test_callers_of_different_contexts_are_kept_apart(group, sizes):
    model = arpc.remote("worker1", functions.Model, (3.0,))
    meeting = asyncio.Barrier(4)

    async def train(number: float) -> None:
        x = torch.full((2,), number, requires_grad=True)
        async with arpc.autograd.context() as context_id:
            calls = [model.rpc_async().forward(x) for _ in range(2)]
            await meeting.wait()  # the calls of all are on their way
            one, two = await asyncio.gather(*calls)
            await arpc.autograd.backward(context_id, [one + number * two])
            assert arpc.autograd.get_gradients(context_id)[x].tolist() == [3 + 3 * number] * 2
            assert await model.rpc_sync().gradients(context_id) == [number + number * number] * 2

    async with asyncio.TaskGroup() as tasks:
        for number in (1.0, 2.0, 3.0, 4.0):
            tasks.create_task(train(number))
    assert sizes == [2] * 4


async def test_callers_without_a_context_share_a_batch(group, sizes):
    model = arpc.remote("worker1", functions.Model, (3.0,))

    async def one_call() -> None:
        assert (await model.rpc_sync().forward(torch.ones(2))).item() == 6

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(one_call())
    assert sizes == [2]
