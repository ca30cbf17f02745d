"""Profiles of torch have the calls made in them, and what these ran elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

import arpc
from arpc.profiler.sessions import open_sessions
from arpc.testing import Cluster, cluster

legacy_profile: Any = profiler_legacy.profile


@pytest.fixture
async def trio() -> AsyncIterator[Cluster]:
    async with cluster(3) as group:
        yield group
        assert open_sessions == []
        for worker in group:
            assert set(worker.statistics()["profiler"].values()) == {0}


def multiply(a: torch.Tensor) -> torch.Tensor:
    return a * a


def run(operator: str, times: int) -> int:
    """An operator, so many times, in a thread."""
    value = torch.full((3,), 0.5)
    for _ in range(times):
        getattr(torch, operator)(value)
    return times


async def run_in_turns(operator: str, times: int) -> int:
    """The same on the loop, where others run between two of them."""
    value = torch.full((3,), 0.5)
    for _ in range(times):
        getattr(torch, operator)(value)
        await asyncio.sleep(0)
    return times


async def run_in_tasks(operator: str, times: int) -> int:
    async with asyncio.TaskGroup() as group:
        for _ in range(times):
            group.create_task(run_in_turns(operator, 1))
    return times


async def run_in_threads(operator: str, times: int) -> int:
    for _ in range(times):
        await arpc.to_thread(run, operator, 1)
    return times


async def label_over_await() -> None:
    with torch.profiler.record_function("label"):
        await asyncio.sleep(0)
        torch.sin(torch.ones(2))


async def call_next(to: str) -> torch.Tensor:
    result: torch.Tensor = await arpc.rpc_async(to, multiply, args=(torch.ones(2),))
    return result


async def stream_of(count: int) -> AsyncIterator[torch.Tensor]:
    for _ in range(count):
        yield torch.cos(torch.ones(2))


async def fail() -> None:
    raise ValueError("no")


async def in_thread(function: Callable[[], Any]) -> Any:
    """Profiles of torch belong to a thread: in one of its own, the caller's holds nothing of the other workers."""
    return await arpc.to_thread(function)


def names(events: list[FunctionEvent]) -> list[str]:
    return [event.name for event in events]


@pytest.mark.parametrize("make", [legacy_profile, torch.autograd.profiler.profile, torch.profiler.profile])
async def test_a_call_and_what_it_ran(trio: Cluster, make: Any) -> None:
    def call() -> list[FunctionEvent]:
        with make() as prof:
            arpc.rpc_async("worker1", multiply, args=(torch.ones(2),)).wait()
            torch.sin(torch.ones(2))
        return list(getattr(prof, "function_events", None) or prof.events())

    events = await in_thread(call)
    key = "rpc_async#multiply(worker0 -> worker1)"
    (span,) = [event for event in events if event.name == key]
    (remote,) = [event for event in events if event.name == f"{key}#remote_op: aten::mul"]
    assert (span.node_id, span.is_remote) == (0, False)
    assert (remote.node_id, remote.is_remote) == (1, True)
    assert span.time_range.start <= remote.time_range.start <= remote.time_range.end <= span.time_range.end
    assert "arpc::clock" not in names(events)
    (local,) = [event for event in events if event.name == "aten::sin"]
    assert local.node_id == 0
    assert span.time_range.end <= local.time_range.start


async def test_spans_of_every_kind(trio: Cluster) -> None:
    with legacy_profile() as prof:
        await arpc.rpc_sync("worker1", multiply, args=(torch.ones(2),))
        rref = arpc.remote("worker1", multiply, args=(torch.ones(2),))
        await rref.to_here()
        await rref.rpc_sync().add(1)
        assert len([item async for item in arpc.stream("worker1", stream_of, args=(2,))]) == 2
        await arpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
    found = names(prof.function_events)
    for name in (
        "rpc_sync#multiply(worker0 -> worker1)",
        "remote#multiply(worker0 -> worker1)",
        "remote#multiply(worker0 -> worker1)#remote_op: aten::mul",
        "to_here#(worker0)->(worker1)",
        "rpc_async#add(worker0 -> worker1)",
        "stream#stream_of(worker0 -> worker1)",
        "rpc_async#aten::add(worker0 -> worker1)",
        "rpc_async#aten::add(worker0 -> worker1)#remote_op: aten::add",
    ):
        assert found.count(name) == 1, name
    assert prof.key_averages()


async def test_keys_of_nested_calls_are_concatenated(trio: Cluster) -> None:
    def call() -> list[FunctionEvent]:
        with legacy_profile() as prof:
            arpc.rpc_async("worker1", call_next, args=("worker2",)).wait()
        return list(prof.function_events)

    events = {event.name: event for event in await in_thread(call)}
    outer = "rpc_async#call_next(worker0 -> worker1)"
    inner = f"{outer}#remote_op: rpc_async#multiply(worker1 -> worker2)"
    assert events[outer].node_id == 0
    assert events[inner].node_id == 1
    assert events[f"{inner}#remote_op: aten::mul"].node_id == 2


@pytest.mark.parametrize("function", [run, run_in_turns, run_in_threads])
async def test_operators_belong_to_the_call_that_ran_them(trio: Cluster, function: Any) -> None:
    operators = ["sin", "cos", "exp", "tanh", "neg", "sqrt"]

    def call() -> list[FunctionEvent]:
        with legacy_profile() as prof:
            calls = []
            for count, operator in enumerate(operators, 1):
                arpc.profiler.current().manager.set_current_key(operator)
                calls.append(arpc.rpc_async("worker1", function, args=(operator, count)))
                arpc.profiler.current().manager.unset_current_key()
            for future in calls:
                future.wait()
        return list(prof.function_events)

    found = names(await in_thread(call))
    for count, operator in enumerate(operators, 1):
        ran = [name.partition("#remote_op: aten::")[2] for name in found if name.startswith(f"{operator}#remote_op: ")]
        assert ran.count(operator) == count
        assert not set(operators) - {operator} & set(ran), (operator, ran)


def test_operators_of_tasks_of_a_handler() -> None:
    async def main() -> None:
        async with cluster(2):

            def call() -> list[FunctionEvent]:
                with legacy_profile() as prof:
                    first = arpc.rpc_async("worker1", run_in_tasks, args=("sin", 3))
                    second = arpc.rpc_async("worker1", run_in_tasks, args=("cos", 4))
                    first.wait(), second.wait()
                return list(prof.function_events)

            found = names(await in_thread(call))
            key = "rpc_async#run_in_tasks(worker0 -> worker1)#remote_op: aten::"
            assert (found.count(key + "sin"), found.count(key + "cos")) == (3, 4)

    arpc.run(main())


async def test_a_label_may_cover_an_await(trio: Cluster) -> None:
    def call() -> dict[str, FunctionEvent]:
        with legacy_profile() as prof:
            arpc.rpc_async("worker1", label_over_await).wait()
        return {event.name.rpartition(" ")[2]: event for event in prof.function_events}

    events = await in_thread(call)
    label, sine = events["label"], events["aten::sin"]
    assert label.time_range.start <= sine.time_range.start <= sine.time_range.end <= label.time_range.end


async def test_shapes_and_memory_are_asked_for_by_the_caller(trio: Cluster) -> None:
    def call(**config: bool) -> Any:
        with legacy_profile(**config) as prof:
            arpc.rpc_async("worker1", multiply, args=(torch.ones(5, 7),)).wait()
        (event,) = [event for event in prof.function_events if event.name.endswith("aten::mul")]
        return event

    plain = await in_thread(call)
    assert (plain.input_shapes, plain.cpu_memory_usage) == ([], 0)
    full = await arpc.to_thread(call, record_shapes=True, profile_memory=True)
    assert full.input_shapes == [[5, 7], [5, 7]]
    assert full.cpu_memory_usage == 5 * 7 * 4


async def test_tasks_do_not_see_each_others_profile(trio: Cluster) -> None:
    begun, done = asyncio.Event(), asyncio.Event()

    async def profiled() -> list[str]:
        with legacy_profile() as prof:
            await arpc.rpc_sync("worker1", multiply, args=(torch.ones(2),))
            begun.set()
            await done.wait()
        return names(prof.function_events)

    async def other() -> None:
        await begun.wait()
        await arpc.rpc_sync("worker2", multiply, args=(torch.ones(2),))
        done.set()

    found, _ = await asyncio.gather(asyncio.create_task(profiled()), asyncio.create_task(other()))
    assert "rpc_sync#multiply(worker0 -> worker1)" in found
    assert not [name for name in found if "worker2" in name]


async def test_a_call_that_fails_or_is_cancelled_has_its_span(trio: Cluster) -> None:
    with legacy_profile() as prof:
        with pytest.raises(ValueError, match="no"):
            await arpc.rpc_sync("worker1", fail)
        future = arpc.rpc_async("worker1", run, args=("sin", 1))
        future.cancel()
        await asyncio.sleep(0)
    found = names(prof.function_events)
    assert "rpc_sync#fail(worker0 -> worker1)" in found
    assert "rpc_async#run(worker0 -> worker1)" in found


async def test_a_reply_that_comes_after_the_profile_is_not_in_it(trio: Cluster) -> None:
    with legacy_profile() as prof:
        future = arpc.rpc_async("worker1", run, args=("sin", 1))
    await future
    assert "rpc_async#run(worker0 -> worker1)" not in names(prof.function_events)


def profile_something() -> list[str]:
    with legacy_profile() as prof:
        torch.exp(torch.ones(2))
    torch.sin(torch.ones(2))
    return names(prof.function_events)


async def test_a_handler_may_profile_itself_while_its_caller_does(trio: Cluster) -> None:
    def call() -> tuple[list[str], list[str]]:
        with legacy_profile() as prof:
            inner = arpc.rpc_async("worker1", profile_something).wait()
        return inner, names(prof.function_events)

    inner, outer = await in_thread(call)
    assert "aten::exp" in inner
    assert "rpc_async#profile_something(worker0 -> worker1)#remote_op: aten::sin" in outer
    assert not [name for name in outer if name.endswith("aten::exp")]


async def test_kineto_can_be_left_out(trio: Cluster) -> None:
    trio[0].profiler.remote.includes_kineto = False
    with torch.profiler.profile() as prof:
        await arpc.rpc_sync("worker1", multiply, args=(torch.ones(2),))
    assert not [event.name for event in prof.events() if "rpc_" in event.name]
