"""What waits, and for what."""

from __future__ import annotations

import asyncio
import doctest
import threading

import torch

import arpc
from arpc.autograd.engine.run_policy import ThreadsOnly
from arpc.metrics import stacks as module
from arpc.metrics.stacks import await_chain
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until

RELEASED = threading.Event()


async def innermost():
    await asyncio.Event().wait()


async def waits():
    await innermost()


async def calls_on():
    return await arpc.rpc_sync("worker2", waits, timeout=0)


async def makes_an_rref():
    return await arpc.remote("worker2", waits)


def blocks():
    RELEASED.wait(30)


async def ticks():
    while True:
        yield 1
        await innermost()


def names(frames):
    return [frame.rsplit(" ", 1)[1] for frame in frames]


def test_the_examples_of_the_module_hold():
    assert doctest.testmod(module).failed == 0


async def test_a_chain_of_awaits_is_followed_through_three_workers():
    async with cluster(3) as group:
        task = asyncio.create_task(arpc.rpc_sync("worker1", calls_on), name="mine")
        await turns_until(group[2].agent.connector.busy_links)
        found = {worker.name: worker for worker in await group[0].metrics.stacks(30)}
        (call,) = found["worker0"].calls
        assert (call.to, call.function, call.state) == ("worker1", "calls_on", "sent")
        assert 0 < call.left_s <= 61
        (middle,) = found["worker1"].handlers
        assert (middle.caller, middle.function, middle.kind, middle.id) == ("worker0", "calls_on", "coroutine", call.id)
        assert names(middle.frames) == ["calls_on"]
        assert 0 < middle.left_s <= 61
        assert middle.age_s >= 0
        (last,) = found["worker2"].handlers
        assert (middle.awaits.to, middle.awaits.id, middle.awaits.function) == ("worker2", last.id, "waits")
        assert names(last.frames) == ["waits", "innermost", "wait"]
        task.cancel()
        await asyncio.wait([task])


async def test_who_waits_for_the_value_of_an_rref_waits_for_its_creation():
    async with cluster(3) as group:
        await arpc.rpc_sync("worker2", names, ((),))
        await group[1].rpc_sync("worker2", names, ((),))
        mine = asyncio.create_task(makes_an_rref(), name="mine")  # on the short way, and the one of a handler is not
        handler = arpc.rpc_async("worker1", makes_an_rref)
        await turns_until(lambda: len(group[2].metrics.stack().handlers) == 2)
        (task,) = [task for task in group[0].metrics.stack().tasks if task.name == "mine"]
        (middle,) = group[1].metrics.stack().handlers
        for awaits in (task.awaits, middle.awaits):
            assert (awaits.to, awaits.function) == ("worker2", "waits")
        handler.cancel()
        mine.cancel()
        await asyncio.wait([mine])
        await group.shutdown(graceful=False)  # what was created is still under way


class Stuck(torch.autograd.Function):
    """A node whose backward waits for the test."""

    go_on = threading.Event()
    entered = threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Stuck.entered.set()
        assert Stuck.go_on.wait(30)
        return gradient


async def through_stuck(x):
    return Stuck.apply(x).sum()


async def go_back(ctx_id, loss):
    await arpc.autograd.backward(ctx_id, [loss])


async def test_a_backward_pass_waits_for_the_worker_that_has_its_gradients(monkeypatch):
    async with cluster(2) as group:
        monkeypatch.setattr(group[1].autograd, "run_policy", ThreadsOnly())
        async with arpc.autograd.context() as ctx_id:
            loss = await arpc.rpc_sync("worker1", through_stuck, (torch.ones(2, requires_grad=True),))
            task = asyncio.create_task(go_back(ctx_id, loss), name="the pass")
            await turns_until(Stuck.entered.is_set)
            (worker,) = [worker for worker in await group[0].metrics.stacks(30) if worker.name == "worker0"]
            (found,) = [one for one in worker.tasks if one.name == "the pass"]
            assert (found.awaits.to, found.awaits.function) == ("worker1", "AutogradGradients")
            Stuck.go_on.set()
            await task


async def test_tasks_of_the_program_are_told_and_those_of_the_runtime_are_not():
    async with cluster(1) as group:
        task = asyncio.create_task(waits(), name="mine")
        await asyncio.sleep(0)
        (worker,) = await group[0].metrics.stacks(30)
        told = {one.name: names(one.frames) for one in worker.tasks}
        assert told["mine"] == ["waits", "innermost", "wait"]
        assert not any(name.startswith("arpc-") for name in told)
        assert all(frames for frames in told.values())
        task.cancel()
        await asyncio.wait([task])


async def test_a_plain_function_shows_the_stack_of_its_thread_and_one_without_a_thread_waits():
    RELEASED.clear()
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False, num_worker_threads=1)) as group:
        futures = [arpc.rpc_async("worker1", blocks) for _ in range(2)]
        try:
            await turns_until(lambda: group[1].agent.dispatcher.statistics()["jobs_queued"] == 1)
            await turns_until(lambda: any(h.kind == "thread" for h in group[1].metrics.stack().handlers))
            kinds = {handler.kind: names(handler.frames) for handler in group[1].metrics.stack().handlers}
            assert kinds["thread"][0] == "blocks"
            assert kinds["queued"] == []
        finally:
            RELEASED.set()
        await asyncio.gather(*futures)


async def test_a_stream_shows_its_generator():
    async with cluster(2) as group:
        stream = arpc.stream("worker1", ticks)
        assert await anext(stream) == 1
        (handler,) = group[1].metrics.stack().handlers
        assert handler.kind == "stream"
        assert "ticks" in names(handler.frames)
        await stream.aclose()


async def test_what_is_too_much_is_counted(monkeypatch):
    monkeypatch.setattr(module, "_MAX_ROWS", 2)
    async with cluster(2) as group:
        futures = [arpc.rpc_async("worker1", waits) for _ in range(5)]
        await turns_until(lambda: sum(len(link.running) for link in group[1].agent.connector.links) == 5)
        worker = group[1].metrics.stack()
        assert len(worker.handlers) == 2
        assert worker.not_told >= 3
        for future in futures:
            future.cancel()


def test_what_is_nothing_has_no_chain():
    assert await_chain(None) == []
    assert await_chain(object()) == []
