"""Methods of remote values are known by their own names, to callers and owners, wherever people look."""

from __future__ import annotations

import asyncio

import pytest

import arpc
from arpc.metrics.stacks import WorkerStack
from arpc.testing import Cluster
from arpc.testing.endpoints import turns_until
from tests.rref import objects
from tests.rref.objects import Counter


class Gated(Counter):
    """A counter whose methods wait until a test lets them go on."""

    async def wait(self) -> object:
        return await objects.pass_gate("gate", 5)

    async def wait_and_yield(self):
        yield await objects.pass_gate("gate", 5)

    async def fails(self) -> None:
        raise ValueError("no luck")

    def give_generator(self) -> object:
        return (number for number in range(3))


@pytest.fixture
def gate():
    objects.gates["gate"] = objects.Gate()
    yield objects.gates["gate"]
    del objects.gates["gate"]


def stacks(group: Cluster) -> tuple[WorkerStack, WorkerStack]:
    return group[0].metrics.stack(), group[1].metrics.stack()


async def test_the_stacks_of_both_workers_say_class_and_method(group, gate):
    rref = arpc.remote("worker1", Gated)
    await rref.rpc_sync().add(1)
    future = rref.rpc_async().wait()
    await gate.entered.wait()
    here, there = stacks(group)
    assert [call.function for call in here.calls] == ["Gated.wait"]
    assert [handler.function for handler in there.handlers] == ["Gated.wait"]
    gate.event.set()
    assert await future == 5


async def test_a_method_of_a_value_that_is_not_there_yet(group, gate):
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", Counter(3)))
    await gate.entered.wait()
    future = rref.rpc_async().add(4)
    # nobody knows its class, and nobody the method before the handler has begun
    await turns_until(lambda: sorted(row.function for row in stacks(group)[1].handlers) == ["add", "pass_gate"])
    assert sorted(call.function for call in stacks(group)[0].calls) == ["add", "pass_gate"]
    gate.event.set()
    assert await future == 7


async def test_a_stream_of_a_method(group, gate):
    rref = arpc.remote("worker1", Gated)
    await rref.rpc_sync().add(1)
    items = rref.stream().wait_and_yield()
    first = asyncio.ensure_future(anext(items))
    await gate.entered.wait()
    here, there = stacks(group)
    assert [call.function for call in here.calls] == ["Gated.wait_and_yield"]
    assert [handler.function for handler in there.handlers] == ["Gated.wait_and_yield"]
    gate.event.set()
    assert await first == 5
    await items.aclose()


async def test_metrics_count_each_method_of_each_class(group):
    for worker in group:
        await worker.metrics.summary(patience_s=30)
    rref = arpc.remote("worker1", Gated)
    for _ in range(3):
        await rref.rpc_sync().add(1)
    with pytest.raises(ValueError, match="no luck"):
        await rref.rpc_sync().fails()
    await rref.remote().next()
    calls = {(row.peer, row.function): row for row in group[0].metrics.snapshot().calls}
    handlers = {(row.peer, row.function): row for row in group[1].metrics.snapshot().handlers}
    assert calls["worker1", "Gated.add"].count == handlers["worker0", "Gated.add"].count == 3
    assert calls["worker1", "Gated.fails"].errors == handlers["worker0", "Gated.fails"].errors == {"ValueError": 1}
    assert ("worker1", "Gated.next") in calls
    assert ("worker0", "Gated.next") in handlers
    assert not any("call_method" in function for _, function in (*calls, *handlers))


async def test_errors_say_class_and_method(group, gate):
    rref = arpc.remote("worker1", Gated)
    await rref.rpc_sync().add(1)
    with pytest.raises(arpc.RpcTimeoutError, match=r"Gated\.wait "):
        await rref.rpc_sync(timeout=0.05).wait()
    with pytest.raises(arpc.SerializationError, match=r"the result of Gated\.give_generator "):
        await rref.rpc_sync().give_generator()
    await gate.cancelled.wait()


async def test_the_list_of_rrefs_says_class_and_method(group):
    rref = arpc.remote("worker1", Counter)
    following = rref.remote().next()
    assert (await following).total == 1
    assert {str(row.made) for row in group[0].rrefs()} == {"Counter", "Counter.next"}
    assert {row.made for row in group[1].rrefs()} == {
        "Counter for worker worker0",
        "Counter.next for worker worker0",
    }
