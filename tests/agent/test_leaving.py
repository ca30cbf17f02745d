"""A worker that leaves an elastic group takes no new calls, and ends its work whatever others go on asking of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import arpc
from arpc.errors import ShutdownError
from arpc.runtime import current
from arpc.testing import Cluster, cluster
from arpc.wire.messages import Request
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import Stage, echo, echo_in_thread, echo_inline, echo_later, hold, setting_stages, the_stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    with setting_stages() as set_stage:
        yield set_stage()


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    async with cluster(3, elastic=True) as made:
        yield made


async def numbers() -> AsyncIterator[int]:
    yield 1


async def call_back(to: str) -> Any:
    """Wait for the test, and then call the worker that this one was called by."""
    the_stage().reached("asked")
    await the_stage().pass_gate("ask back")
    return await current().rpc_sync(to, echo, args=("called back",))


async def ask(to: str) -> Any:
    """Call a worker that calls back."""
    return await current().rpc_sync(to, call_back, args=(current().name,))


async def hold_at(gate: str) -> None:
    the_stage().reached(f"{gate} begun")
    await the_stage().pass_gate(gate)


async def begin_to_leave(worker: arpc.Worker) -> asyncio.Task[None]:
    leaving = asyncio.create_task(worker.shutdown(timeout=20))
    takes_all = worker.agent.dispatcher.request_received
    await until(lambda: worker.agent._handlers[Request] != takes_all)
    return leaving


async def test_a_worker_leaves_while_others_go_on_calling_it(group):
    callee, outcomes = group[1], []

    async def call_on_and_on(caller: arpc.Worker, function: Any) -> None:
        while True:
            try:
                await caller.rpc_sync("worker1", function, args=(1,))
            except arpc.ArpcError as error:
                outcomes.append(error)
                if not isinstance(error, ShutdownError):
                    return

    functions = (echo, echo_later, echo_in_thread, echo_inline)
    calling = [asyncio.create_task(call_on_and_on(group[n], function)) for function in functions for n in (0, 2)]
    await until(lambda: callee.agent.dispatcher.calls_handled > 100)
    async with asyncio.timeout(30):
        await callee.shutdown(timeout=20)  # it raises if calls are under way when time is up
        await asyncio.gather(*calling)
    assert outcomes
    assert not any(error.may_have_run for error in outcomes if isinstance(error, ShutdownError))
    await assert_nothing_left([callee])


async def test_a_worker_leaves_while_there_is_always_a_call_under_way(group, stage):
    """Each call ends when the next one has begun, or was refused."""
    call = group[0].rpc_async("worker1", hold_at, args=("0",))
    await stage.wait_until("0 begun")
    leaving = asyncio.create_task(group[1].shutdown(timeout=20))
    refused: BaseException | None = None
    for number in range(1, 100):
        following = group[0].rpc_async("worker1", hold_at, args=(str(number),))
        begun = asyncio.create_task(stage.wait_until(f"{number} begun"))
        await asyncio.wait([following, begun], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        stage.open(str(number - 1))
        await call
        if following.done():
            refused = following.exception()
            break
        call = following
    assert isinstance(refused, ShutdownError)
    assert not refused.may_have_run
    await leaving


async def test_what_is_under_way_ends_and_what_comes_then_is_refused(group, stage):
    held = group[0].rpc_async("worker1", hold, args=("held", "value"))
    await stage.wait_until("held begun")
    leaving = await begin_to_leave(group[1])
    for function in (echo, echo_in_thread, echo_inline):
        expected = f"'worker1' is shutting down and did not run .*{function.__name__}"
        with pytest.raises(ShutdownError, match=expected) as caught:
            await group[2].rpc_sync("worker1", function)
        assert not caught.value.may_have_run
    with pytest.raises(ShutdownError):
        async for _ in group[2].stream("worker1", numbers):
            pass
    created = group[2].remote("worker1", echo)._get_future()
    assert created is not None
    with pytest.raises(arpc.ArpcError) as caught:
        await created
    assert not caught.value.may_have_run
    assert not leaving.done()
    stage.open()
    assert await held == "value"
    await leaving


async def test_a_call_that_work_under_way_has_caused_is_taken(group, stage):
    asked = group[0].rpc_async("worker1", ask, args=("worker2",))
    await stage.wait_until("asked")
    leaving = await begin_to_leave(group[1])
    stage.open("ask back")
    assert await asked == "called back"
    await leaving


async def test_a_call_that_the_worker_itself_has_caused_is_taken(group, stage):
    asked = group[1].rpc_async("worker2", call_back, args=("worker1",))
    await stage.wait_until("asked")
    leaving = await begin_to_leave(group[1])
    stage.open("ask back")
    assert await asked == "called back"
    await leaving


async def test_a_worker_that_is_metered_while_it_leaves_refuses_as_well(group, stage):
    held = group[0].rpc_async("worker1", hold, args=("held", "value"))
    await stage.wait_until("held begun")
    leaving = await begin_to_leave(group[1])
    group[1].agent.set_meter(None)
    with pytest.raises(ShutdownError):
        await group[2].rpc_sync("worker1", echo)
    stage.open()
    assert await held == "value"
    await leaving
