"""Backward passes over processes of their own, and what is left when one of them is killed in the middle."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import arpc
from tests.autograd import functions as remote
from tests.integration import functions
from tests.integration.processes import QUICK, Processes

OPTIONS = QUICK.replace(rref_grace=0.3, control_backoff=0.05)

reached = threading.Event()


class Halt(torch.autograd.Function):
    """Holds up a backward pass for good; its process is about to be killed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        reached.set()
        threading.Event().wait(60)
        return gradient


@arpc.inline
def halt(x):
    return Halt.apply(x.expand(200_000)).sum()  # large enough for a thread


async def has_halted() -> bool:
    return await asyncio.to_thread(reached.wait, 30)


@arpc.inline
def statistics():
    return arpc.runtime.current().autograd.statistics()


@arpc.inline
def count_gradients(ctx_id):
    return len(arpc.autograd.get_gradients(ctx_id))


async def test_a_pass_over_processes(processes: Processes):
    async with processes.group("one", "two", main=functions.serve, options=OPTIONS):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        model = arpc.remote("two", remote.Model, (2.0, 3.0, 4.0))
        for _ in range(20):
            async with arpc.autograd.context() as ctx_id:
                y = await arpc.rpc_sync("one", remote.nested, (x, "two", "test", "one"))
                z = await model.rpc_sync().forward(y)
                await arpc.autograd.backward(ctx_id, [z.sum()])
                assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [32.0, 48.0, 64.0]
                assert (await model.rpc_sync().gradient(ctx_id)).tolist() == [16.0, 32.0, 48.0]
        for name in ("one", "two", "test"):
            assert (await arpc.rpc_sync(name, statistics))["contexts"] == 0


async def test_a_worker_killed_in_the_middle_of_a_pass_fails_it_everywhere(processes: Processes):
    async with processes.group("victim", "other", main=functions.serve, options=OPTIONS) as worker:
        x = torch.tensor(1.0, requires_grad=True)
        weight = arpc.remote("other", remote.make_leaf, (3.0,))
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("victim", halt, (x,))
            z = await arpc.rpc_sync("other", remote.mul, (y, 2))
            started = asyncio.create_task(arpc.autograd.backward(ctx_id, [z * (await weight).sum()]))
            assert await arpc.rpc_sync("victim", has_halted)
            # its part of the pass is over
            processes["victim"].kill()
            with pytest.raises(arpc.WorkerLostError, match="'victim'"):
                await started
            assert worker.autograd.gradients(ctx_id) == {}
            assert await arpc.rpc_sync("other", count_gradients, (ctx_id,)) == 0
            assert (await arpc.rpc_sync("other", statistics))["passes"] == 0
        assert (await arpc.rpc_sync("other", statistics))["contexts"] == 0
        assert worker.autograd.statistics()["contexts"] == 0


async def test_contexts_of_a_killed_worker_are_reclaimed(processes: Processes):
    async with processes.group("victim", "other", main=functions.serve, options=OPTIONS) as worker:
        lost = worker.rpc_async("victim", start_and_stay, args=("other", "test"), timeout=0)
        async with asyncio.timeout(30):
            while not worker.autograd.statistics()["contexts"]:  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
            assert (await arpc.rpc_sync("other", statistics))["contexts"] == 1
            processes["victim"].kill()
            with pytest.raises(arpc.WorkerLostError):
                await lost
            while worker.autograd.statistics()["contexts"]:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            while (await arpc.rpc_sync("other", statistics))["contexts"]:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)


async def start_and_stay(inside: str, further: str) -> None:
    async with arpc.autograd.context():
        await arpc.rpc_sync(inside, remote.nested, (torch.ones(2, requires_grad=True), further))
        await asyncio.Event().wait()
