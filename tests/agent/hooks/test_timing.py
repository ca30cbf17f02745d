"""Every call and every handler is timed once, whichever way it takes."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from arpc.agent.hooks.observers import Observer
from arpc.agent.hooks.timing import TimedSender
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until


class Meter:
    def __init__(self):
        self.calls = []
        self.handlers = []
        self.failures = []

    def call_ended(self, peer, function, duration_ns, error):
        assert duration_ns >= 0
        self.calls.append((peer, getattr(function, "__name__", "?"), type(error).__name__ if error else None))

    def handler_ended(self, caller, function, duration_ns):
        assert duration_ns >= 0
        self.handlers.append((caller, function))

    def handler_failed(self, caller, function, error):
        self.failures.append((caller, function, type(error).__name__))


@pytest.fixture
async def metered():
    async with cluster(2) as group:
        meters = Meter(), Meter()
        for worker, meter in zip(group, meters, strict=True):
            worker.agent.set_meter(meter)
        yield group, *meters
        for worker in group:
            worker.agent.set_meter(None)


async def at_once(value=None):
    return value


async def later(value):
    await asyncio.sleep(0)
    return value


async def for_ever():
    await asyncio.Event().wait()


def in_thread(value=None):
    return value


@arpc.inline
def on_loop(value):
    return value


async def fails():
    raise ZeroDivisionError


async def numbers(stop):
    for number in range(stop):
        yield number


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (at_once, ()),
        (at_once, (1,)),
        (later, (1,)),
        (in_thread, ()),
        (in_thread, (1,)),
        (on_loop, (1,)),
    ],
)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_call_is_timed_once_at_both_ends(metered, function, args, times):
    _, near, far = metered
    for _ in range(times):
        await arpc.rpc_sync("worker1", function, args=args)
    assert near.calls == [("worker1", function.__name__, None)] * times
    assert far.handlers == [("worker0", function.__name__)] * times
    assert not near.handlers
    assert not far.calls
    assert not far.failures


async def test_calls_with_a_future_are_timed(metered):
    _, near, far = metered
    await asyncio.gather(*(arpc.rpc_async("worker1", at_once, args=(n,)) for n in range(5)))
    await turns_until(lambda: len(near.calls) == 5)
    assert near.calls == [("worker1", "at_once", None)] * 5
    assert far.handlers == [("worker0", "at_once")] * 5


async def test_a_lambda_is_timed(metered):
    _, near, far = metered
    await arpc.rpc_sync("worker1", lambda: 1)
    assert [name for _, name, _ in near.calls] == ["<lambda>"]
    assert len(far.handlers) == 1


async def test_failures_are_told_at_both_ends(metered):
    _, near, far = metered
    with pytest.raises(ZeroDivisionError):
        await arpc.rpc_sync("worker1", fails)
    future = arpc.rpc_async("worker1", fails)
    with pytest.raises(ZeroDivisionError):
        await future
    await turns_until(lambda: len(near.calls) == 2)
    assert near.calls == [("worker1", "fails", "ZeroDivisionError")] * 2
    assert far.failures == [("worker0", "fails", "ZeroDivisionError")] * 2
    assert far.handlers == [("worker0", "fails")] * 2


async def test_what_is_cancelled_is_told(metered):
    group, near, far = metered
    task = asyncio.create_task(arpc.rpc_sync("worker1", for_ever))
    await turns_until(group[1].agent.connector.busy_links)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns_until(lambda: far.handlers)
    assert near.calls == [("worker1", "for_ever", "CancelledError")]
    assert far.failures == [("worker0", "for_ever", "CancelledError")]


async def test_a_stream_is_timed_to_its_end(metered):
    _, near, far = metered
    assert [n async for n in arpc.stream("worker1", numbers, args=(3,))] == [0, 1, 2]
    await turns_until(lambda: near.calls and far.handlers)
    assert near.calls == [("worker1", "numbers", None)]
    assert far.handlers == [("worker0", "numbers")]


async def test_a_remote_creation_is_timed(metered):
    _, near, far = metered
    assert await arpc.remote("worker1", at_once, args=(7,)) == 7
    await turns_until(lambda: near.calls and far.handlers)
    assert ("worker1", "at_once", None) in near.calls
    assert ("worker0", "at_once") in far.handlers


factor = torch.full((), 2.0, requires_grad=True)


@arpc.inline
def doubled(x):
    return x * factor  # whose gradient stays there until the context ends


@pytest.mark.parametrize("elements", [3, 100_000], ids=["small", "large"])
async def test_a_message_of_a_feature_is_not_taken_for_a_function_that_has_a_number(metered, elements):
    _, _, there = metered
    x = torch.ones(elements, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", doubled, (x,))
        await arpc.autograd.backward(ctx_id, [y.sum()])
    await turns_until(lambda: len(there.handlers) == 3)
    names = [function for _, function in there.handlers]
    assert names == ["doubled", "AutogradGradients", "AutogradRelease"]


async def test_requests_that_wait_for_room_are_timed_when_they_end():
    options = arpc.RpcOptions(gc_freeze=False, max_handlers_per_peer=1)
    async with cluster(2, options=options) as group:
        far = Meter()
        group[1].agent.set_meter(far)
        calls = [arpc.rpc_async("worker1", function, args=(n,)) for n in range(3) for function in (later, at_once)]
        await asyncio.gather(*calls)
        await turns_until(lambda: len(far.handlers) == 6)
        assert sorted(far.handlers) == [("worker0", "at_once")] * 3 + [("worker0", "later")] * 3


async def test_an_observer_beside_it_makes_nothing_count_twice(metered):
    group, near, far = metered
    for worker in group:
        worker.agent.observe(Observer())
    await arpc.rpc_sync("worker1", later, args=(1,))
    await arpc.rpc_async("worker1", at_once, args=(1,))
    await turns_until(lambda: len(near.calls) == 2)
    assert sorted(near.calls) == [("worker1", "at_once", None), ("worker1", "later", None)]
    assert sorted(far.handlers) == [("worker0", "at_once"), ("worker0", "later")]


async def test_nothing_is_in_place_before_and_after():
    async with cluster(2) as group:
        agent = group[0].agent
        agent.set_meter(Meter())
        assert isinstance(agent.sender, TimedSender)
        await arpc.rpc_sync("worker1", at_once)
        agent.set_meter(None)
        assert not isinstance(agent.sender, TimedSender)
        assert agent.dispatcher.replies.meter is None
        assert await arpc.rpc_sync("worker1", at_once, args=(1,)) == 1


async def test_a_call_that_began_before_is_not_told_of(metered):
    group, near, far = metered
    for worker in group:
        worker.agent.set_meter(None)
    future = arpc.rpc_async("worker1", for_ever)
    await turns_until(group[1].agent.connector.busy_links)
    for worker, meter in zip(group, (near, far), strict=True):
        worker.agent.set_meter(meter)
    future.cancel()
    await turns_until(lambda: not group[1].agent.connector.busy_links())
    assert not near.calls
    assert not far.handlers


async def test_a_worker_that_came_back_under_its_name_is_found():
    async with cluster(2, elastic=True) as group:
        meter = Meter()
        group[0].agent.set_meter(meter)
        assert await group[0].rpc_sync("worker1", at_once, args=(1,)) == 1
        await group[1].shutdown()
        await group.add("worker1")
        # it is asked for first: what is packed for the one before cannot be sent to this one
        assert await group[0].rpc_sync("worker1", at_once, args=(2,)) == 2
        await turns_until(lambda: len(meter.calls) == 2)
        assert meter.calls == [("worker1", "at_once", None)] * 2
        group[0].agent.set_meter(None)


@pytest.mark.parametrize("elements", [3, 20_000], ids=["small", "large"])
async def test_messages_of_features_are_calls_too_on_both_sides(metered, elements):
    _, here, there = metered
    x = torch.ones(elements, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", doubled, (x,))
        await arpc.autograd.backward(ctx_id, [y.sum()])
    await turns_until(lambda: len(here.calls) == 3)
    names = ["doubled", "AutogradGradients", "AutogradRelease"]
    assert here.calls == [("worker1", name, None) for name in names]
    assert [name.split(".")[-1] for _, name in there.handlers] == names
    assert not here.handlers
    assert not there.calls
    assert not there.failures


async def test_a_message_of_a_feature_that_fails_is_counted_as_that(metered):
    _, here, there = metered
    x = torch.ones(3, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", refusing, (x,))
        with pytest.raises(arpc.BackwardError):
            await arpc.autograd.backward(ctx_id, [y.sum()])
    await turns_until(lambda: len(here.calls) == 4)
    assert ("worker1", "AutogradGradients", "BackwardError") in here.calls
    assert ("worker0", "AutogradGradients", "BackwardError") in there.failures


@arpc.inline
def refusing(x):
    def refuse(_):
        raise ValueError

    y = x * 2
    y.register_hook(refuse)
    return y
