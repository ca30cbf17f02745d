"""Cancelling a call, at every step of its way: the handler stops, and so do the calls it made in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.peers.peer import PeerState
from arpc.errors import CallCancelledError
from arpc.testing import cluster
from arpc.wire.messages import Reply
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import call_on, call_on_in_thread, echo, hold, hold_in_thread, the_stage


async def cancel_and_wait(task: asyncio.Task[Any] | asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


# -- before it is sent


async def test_before_the_first_step(pair):
    task = asyncio.create_task(pair[0].rpc_sync("worker1", hold))
    await cancel_and_wait(task)
    assert pair[1].agent.dispatcher.calls_handled == 1, "only the call that connected them"


async def test_while_the_worker_is_being_looked_for():
    async with cluster(1, elastic=True) as group:
        future = group[0].rpc_async("unheard_of", echo)
        assert group[0].agent.caller.deferred
        await cancel_and_wait(future)
        await assert_nothing_left(group)


async def test_while_connecting(stage):
    async with cluster(2) as group:
        task = asyncio.create_task(group[0].rpc_sync("worker1", hold))
        await asyncio.sleep(0)
        peer = group[0].agent.peer("worker1")
        assert peer.state is PeerState.CONNECTING
        assert len(peer.backlog) == 1
        await cancel_and_wait(task)
        # the connection comes all the same, for the next call
        assert await group[0].rpc_sync("worker1", echo, args=("next",)) == "next"
        assert not stage.was_reached("held begun")
        await assert_nothing_left(group)


async def test_while_queued_for_the_window(stage):
    options = arpc.RpcOptions(window_bytes=64 << 10, gc_freeze=False)
    async with cluster(2, options=options) as group:
        peer = group[0].agent.peer("worker1")
        first = group[0].rpc_async("worker1", hold, args=("first", b"1" * (60 << 10)))
        await stage.wait_until("first begun")
        second = group[0].rpc_async("worker1", hold, args=("second", b"2" * (60 << 10)))
        third = group[0].rpc_async("worker1", hold, args=("third", b"3" * (60 << 10)))
        assert len(peer.backlog) == 2
        await cancel_and_wait(second)
        stage.open()
        assert await first == b"1" * (60 << 10)
        assert await third == b"3" * (60 << 10)
        assert not stage.was_reached("second begun")
        await assert_nothing_left(group)


async def test_while_its_tensors_are_sent(stage):
    """Half a message is on its way: the rest is dropped, and the connection stays in step."""
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        large = torch.ones(8 << 20, dtype=torch.uint8)
        future = group[0].rpc_async("worker1", hold, args=("large", large))
        connection = group[0].agent.peer("worker1").connection
        await until(lambda: connection.is_congested)
        assert connection.bulk
        await cancel_and_wait(future)
        assert torch.equal(await group[0].rpc_sync("worker1", echo, args=(large,)), large)
        assert not stage.was_reached("large begun")
        await assert_nothing_left(group)


# -- while the handler runs


async def test_the_task_that_awaits(pair, stage):
    task = asyncio.create_task(pair[0].rpc_sync("worker1", hold))
    await stage.wait_until("held begun")
    await cancel_and_wait(task)
    await stage.wait_until("held cancelled")


async def test_a_coroutine_that_is_closed_while_it_waits(pair, stage):
    coroutine = pair[0].rpc_sync("worker1", hold)
    coroutine.send(None)
    await stage.wait_until("held begun")
    coroutine.close()
    await stage.wait_until("held cancelled")


async def test_the_future(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    await stage.wait_until("held begun")
    await cancel_and_wait(future)
    await stage.wait_until("held cancelled")


async def test_the_task_that_awaits_a_future(pair, stage):
    future = pair[0].rpc_async("worker1", hold)

    async def wait_for_it() -> Any:
        return await future

    task = asyncio.create_task(wait_for_it())
    await stage.wait_until("held begun")
    await cancel_and_wait(task)
    assert future.cancelled()
    await stage.wait_until("held cancelled")


async def test_a_shielded_future_goes_on(pair, stage):
    future = pair[0].rpc_async("worker1", hold, args=("held", "value"))

    async def wait_for_it() -> Any:
        return await asyncio.shield(future)

    task = asyncio.create_task(wait_for_it())
    await stage.wait_until("held begun")
    await cancel_and_wait(task)
    stage.open()
    assert await future == "value"


async def test_by_a_timeout_of_asyncio(pair, stage):
    async def call() -> None:
        async with asyncio.timeout(30) as timeout:
            running.set_result(timeout)
            await pair[0].rpc_sync("worker1", hold)

    running: asyncio.Future[asyncio.Timeout] = asyncio.Future()
    task = asyncio.create_task(call())
    await stage.wait_until("held begun")
    running.result().reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await task
    await stage.wait_until("held cancelled")


async def test_by_a_task_group(pair, stage):
    async def fail_once_both_run() -> None:
        await stage.wait_until("one begun", "two begun")
        raise LookupError("the third of them")

    async def call_together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(pair[0].rpc_sync("worker1", hold, args=("one",)))
            group.create_task(pair[0].rpc_sync("worker1", hold, args=("two",)))
            group.create_task(fail_once_both_run())

    with pytest.raises(ExceptionGroup) as caught:
        await call_together()
    assert [str(error) for error in caught.value.exceptions] == ["the third of them"]
    await stage.wait_until("one cancelled", "two cancelled")


async def test_twice_is_once(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    await stage.wait_until("held begun")
    assert future.cancel()
    assert not future.cancel()
    await stage.wait_until("held cancelled")
    assert stage.log.count("held cancelled") == 1


async def test_from_another_thread(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    await stage.wait_until("held begun")
    assert await asyncio.to_thread(future.cancel)
    with pytest.raises(asyncio.CancelledError):
        await future
    await stage.wait_until("held cancelled")


async def test_a_handler_may_clean_up(pair, stage):
    """Even with calls of its own: only the one it was waiting in is cancelled."""
    task = asyncio.create_task(pair[0].rpc_sync("worker1", clean_up_remotely))
    await stage.wait_until("begun")
    await cancel_and_wait(task)
    await stage.wait_until("cleaned up")


async def clean_up_remotely() -> None:
    stage = the_stage()
    stage.reached("begun")
    try:
        await stage.pass_gate()
    finally:
        assert await arpc.rpc_sync("worker0", echo, args=(7,)) == 7
        stage.reached("cleaned up")


async def test_a_handler_cancelled_by_its_own_side_is_an_error_of_the_call(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    await stage.wait_until("held begun")
    (run,) = [run for link in pair[1].agent.connector._links.values() for run in link.running.values()]
    run.task.cancel()
    with pytest.raises(CallCancelledError, match=r"hold was cancelled on worker 'worker1'"):
        await future


# -- through nested calls


async def test_across_three_workers(trio, stage):
    task = asyncio.create_task(trio[0].rpc_sync("worker1", call_on, args=("worker2", hold, "innermost")))
    await stage.wait_until("innermost begun")
    await cancel_and_wait(task)
    await stage.wait_until("innermost cancelled")


async def test_across_three_workers_and_back(trio, stage):
    args = ("worker2", call_on, "worker0", hold, "innermost")
    future = trio[0].rpc_async("worker1", call_on, args=args)
    await stage.wait_until("innermost begun")
    await cancel_and_wait(future)
    await stage.wait_until("innermost cancelled")


async def test_all_branches_of_a_handler(trio, stage):
    future = trio[0].rpc_async("worker1", branch_out)
    await stage.wait_until("left begun", "right begun")
    await cancel_and_wait(future)
    await stage.wait_until("left cancelled", "right cancelled")


async def branch_out() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(arpc.rpc_sync("worker2", hold, args=("left",)))
        group.create_task(arpc.rpc_sync("worker0", hold, args=("right",)))


async def test_a_lost_caller_cancels_what_was_called_for_it(trio, stage):
    future = trio[0].rpc_async("worker1", call_on, args=("worker2", hold, "innermost"))
    await stage.wait_until("innermost begun")
    trio[0].agent.peer("worker1").connection.abort(arpc.WireError("cut by the test"))
    with pytest.raises(arpc.WorkerLostError):
        await future
    await stage.wait_until("innermost cancelled")


# -- in threads


async def test_a_function_that_waits_for_a_thread_never_runs(stage):
    options = arpc.RpcOptions(num_worker_threads=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        first = group[0].rpc_async("worker1", hold_in_thread, args=("first", 1))
        await stage.wait_until("first begun")
        second = group[0].rpc_async("worker1", hold_in_thread, args=("second", 2))
        third = group[0].rpc_async("worker1", hold_in_thread, args=("third", 3))
        await until(lambda: group[1].agent.dispatcher.threads.statistics()["jobs_unfinished"] == 3)
        await cancel_and_wait(second)
        await group[0].rpc_sync("worker1", echo)  # travels behind the cancellation
        stage.open()
        assert await first == 1
        assert await third == 3
        assert not stage.was_reached("second begun")
        await assert_nothing_left(group)


async def test_the_result_of_a_function_in_a_thread_is_discarded(pair, stage):
    future = pair[0].rpc_async("worker1", hold_in_thread, args=("held", "unwanted"))
    await stage.wait_until("held begun")
    await cancel_and_wait(future)
    await pair[0].rpc_sync("worker1", echo)
    assert pair[1].agent.dispatcher.replies.calls_failed == 1, "it was answered as cancelled"
    stage.open()
    await stage.wait_until("held ended")


async def test_a_call_made_in_a_thread(trio, stage):
    """The thread cannot be interrupted, but what it waits for can."""
    future = trio[0].rpc_async("worker1", call_on_in_thread, args=("worker2", hold, "innermost"))
    await stage.wait_until("innermost begun")
    await cancel_and_wait(future)
    await stage.wait_until("innermost cancelled")


# -- when it crosses the reply


async def test_in_the_callback_that_takes_the_reply(pair, monkeypatch):
    """A task that has not run since its result came ends as cancelled, as with any future."""
    agent = pair[0].agent
    on_reply = agent._handlers[Reply]
    task: asyncio.Task[Any] = asyncio.create_task(pair[0].rpc_sync("worker1", echo, args=("just in time",)))

    def cancel_with_the_reply(link: Any, message: Any) -> None:
        on_reply(link, message)
        assert task.cancel()

    monkeypatch.setitem(agent._handlers, Reply, cancel_with_the_reply)
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.setitem(agent._handlers, Reply, on_reply)
    assert await pair[0].rpc_sync("worker1", echo, args=("next",)) == "next"


async def test_after_the_reply_it_does_nothing(pair):
    future = pair[0].rpc_async("worker1", echo, args=(1,))
    assert await future == 1
    assert not future.cancel()
    assert future.value() == 1


async def test_of_many_at_once(pair, stage):
    futures = [pair[0].rpc_async("worker1", hold, args=(f"number {number}",)) for number in range(200)]
    await stage.wait_until("number 199 begun")
    for future in futures:
        future.cancel()
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await stage.wait_until(*(f"number {number} cancelled" for number in range(200)))
