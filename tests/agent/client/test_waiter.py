"""`ReplyWaiter`: a future for one reply that tasks of asyncio can await."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

import pytest

import arpc
from arpc import torchstate
from arpc.agent.client.waiter import ReplyWaiter, waiter_factory

color: ContextVar[str] = ContextVar("color", default="none")


@pytest.fixture(params=[False, True], ids=["scheduled", "direct"])
async def waiter(request: pytest.FixtureRequest) -> ReplyWaiter:
    return ReplyWaiter(asyncio.get_running_loop(), wakes_directly=request.param)


@pytest.fixture
async def scheduled() -> ReplyWaiter:
    return ReplyWaiter(asyncio.get_running_loop(), wakes_directly=False)


@pytest.fixture
async def direct() -> ReplyWaiter:
    return ReplyWaiter(asyncio.get_running_loop(), wakes_directly=True)


async def awaiting(waiter: ReplyWaiter) -> Any:
    return await waiter


async def in_a_callback(function: Callable[[], Any]) -> Any:
    """Call a function between the steps of tasks, as a read does; what it returns."""
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(function()))
    return await done


# -- before the end


async def test_it_is_a_future_to_asyncio(waiter):
    assert asyncio.isfuture(waiter)
    assert asyncio.ensure_future(waiter) is waiter
    assert waiter.get_loop() is asyncio.get_running_loop()


async def test_a_pending_one_has_no_outcome(waiter):
    assert not waiter.done()
    assert not waiter.cancelled()
    for look in (waiter.result, waiter.exception):
        with pytest.raises(asyncio.InvalidStateError, match="has not ended"):
            look()


# -- a result


@pytest.mark.parametrize("result", [7, None, ValueError("a result that is an error"), asyncio.CancelledError()])
async def test_a_task_that_awaits_it_has_the_result(waiter, result):
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    await in_a_callback(partial(waiter.set_result, result))
    assert await task is result
    assert waiter.done()
    assert not waiter.cancelled()
    assert waiter.result() is result
    assert waiter.exception() is None


async def test_no_attribute_of_a_result_is_looked_at(waiter):
    class Trap:
        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(f"somebody has asked for {name}")

    trap = Trap()
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    await in_a_callback(partial(waiter.set_result, trap))
    assert await task is trap


async def test_a_result_that_is_there_is_not_waited_for(waiter):
    await in_a_callback(partial(waiter.set_result, 7))
    with pytest.raises(StopIteration) as stopped:
        awaiting(waiter).send(None)
    assert stopped.value.value == 7


async def test_several_tasks_await_one(waiter):
    tasks = [asyncio.create_task(awaiting(waiter)) for _ in range(3)]
    await asyncio.sleep(0)
    await in_a_callback(partial(waiter.set_result, 7))
    assert await asyncio.gather(*tasks) == [7, 7, 7]


async def test_gather_waits_for_many(waiter):
    loop = asyncio.get_running_loop()
    waiters = [waiter, *(ReplyWaiter(loop, wakes_directly=waiter._wakes_directly) for _ in range(3))]
    gathered = asyncio.gather(*waiters, *map(awaiting, waiters))
    await asyncio.sleep(0)
    for number, each in enumerate(waiters):
        await in_a_callback(partial(each.set_result, number))
    assert await gathered == [0, 1, 2, 3] * 2


async def test_a_timeout_ends_the_wait(waiter):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(awaiting(waiter), 0.001)
    assert waiter.cancelled()


# -- when tasks go on


async def test_a_direct_one_wakes_its_task_within_the_call(direct):
    task = asyncio.create_task(awaiting(direct))
    await asyncio.sleep(0)

    def complete() -> bool:
        direct.set_result(7)
        return task.done()

    assert await in_a_callback(complete)


async def test_a_scheduled_one_wakes_its_task_in_a_turn_of_its_own(scheduled):
    task = asyncio.create_task(awaiting(scheduled))
    await asyncio.sleep(0)

    def complete() -> bool:
        scheduled.set_result(7)
        return task.done()

    assert not await in_a_callback(complete)
    assert await task == 7


async def test_a_task_goes_on_in_its_own_context_and_as_the_current_one(waiter):
    async def look() -> tuple[str, bool]:
        color.set("red")
        await waiter
        return color.get(), asyncio.current_task() is task

    task = asyncio.create_task(look())
    await asyncio.sleep(0)

    def complete() -> None:
        color.set("blue")
        waiter.set_result(None)

    await in_a_callback(complete)
    assert await task == ("red", True)


async def test_a_task_that_goes_on_may_await_again(direct):
    loop = asyncio.get_running_loop()
    second = ReplyWaiter(loop, wakes_directly=True)

    async def both() -> list[Any]:
        return [await direct, await second]

    task = asyncio.create_task(both())
    await asyncio.sleep(0)

    def complete() -> bool:
        direct.set_result(1)
        assert not task.done()
        second.set_result(2)
        return task.done()

    assert await in_a_callback(complete)
    assert await task == [1, 2]


# -- callbacks


async def test_callbacks_are_called_in_order_each_in_its_context(waiter):
    called: list[tuple[int, str, bool]] = []

    def note(number: int, done: Any) -> None:
        called.append((number, color.get(), done is waiter))

    context = context_with("green")
    waiter.add_done_callback(partial(note, 1), context=context)
    waiter.add_done_callback(partial(note, 2), context=context)
    await in_a_callback(partial(waiter.set_result, None))
    await asyncio.sleep(0)
    assert called == [(1, "green", True), (2, "green", True)]


def context_with(value: str) -> Context:
    """A context in which the variable has a value."""
    context = copy_context()
    context.run(color.set, value)
    return context


async def test_a_callback_that_comes_late_is_called_in_the_next_turn(waiter):
    called: list[Any] = []
    await in_a_callback(partial(waiter.set_result, None))
    waiter.add_done_callback(called.append)
    assert not called
    await asyncio.sleep(0)
    assert called == [waiter]


async def test_a_callback_can_be_removed(waiter):
    called: list[str] = []

    def first(_: Any) -> None:
        called.append("first")

    def second(_: Any) -> None:
        called.append("second")

    for callback in (first, second, first):
        waiter.add_done_callback(callback)
    assert waiter.remove_done_callback(first) == 2
    assert waiter.remove_done_callback(first) == 0
    await in_a_callback(partial(waiter.set_result, None))
    await asyncio.sleep(0)
    assert called == ["second"]


async def test_a_callback_that_raises_keeps_none_of_the_others_from_being_called(waiter):
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    error = LookupError("on purpose")

    def fail(_: Any) -> None:
        raise error

    called: list[Any] = []
    waiter.add_done_callback(fail)
    waiter.add_done_callback(called.append)
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    await in_a_callback(partial(waiter.set_result, 7))
    assert await task == 7
    await asyncio.sleep(0)
    assert called == [waiter]
    assert told == [error]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("wakes_directly", [False, True], ids=["scheduled", "direct"])
def test_what_must_end_the_loop_goes_to_the_loop(kind, wakes_directly):
    """Whoever completes the waiter goes on: a read must not end in the middle because a task of the user's ends."""
    log: list[str] = []

    async def interrupted(waiter: ReplyWaiter) -> None:
        await waiter
        raise kind("on purpose")

    def complete(waiter: ReplyWaiter) -> None:
        waiter.set_result(None)
        log.append("went on")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiter = ReplyWaiter(loop, wakes_directly=wakes_directly)
        tasks.append(loop.create_task(interrupted(waiter)))
        await asyncio.sleep(0)
        loop.call_soon(complete, waiter)
        await asyncio.Event().wait()

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(kind, match="on purpose"), asyncio.Runner() as runner:
        runner.run(main())
    assert log == ["went on"]
    assert isinstance(tasks[0].exception(), kind)


# -- errors


class WatchedError(Exception):
    """One that can be referred to weakly."""


async def test_a_task_that_awaits_it_has_the_error(waiter):
    error = LookupError("on purpose")
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    waiter.set_exception(error)
    assert not task.done(), "errors may be set in the middle of a task's step"
    with pytest.raises(LookupError, match="on purpose") as caught:
        await task
    assert caught.value is error
    assert waiter.done()
    assert waiter.exception() is error
    with pytest.raises(LookupError):
        waiter.result()


async def test_an_error_may_be_set_by_a_task(waiter):
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    asyncio.get_running_loop().create_task(set_in_a_task(waiter, LookupError("on purpose")))
    with pytest.raises(LookupError, match="on purpose"):
        await task


async def set_in_a_task(waiter: ReplyWaiter, error: Exception) -> None:
    waiter.set_exception(error)


async def test_an_error_that_nobody_asks_for_is_not_reported():
    """Nobody wants to hear of a call whose task was cancelled."""
    told: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    ReplyWaiter(loop, wakes_directly=False).set_exception(LookupError("on purpose"))
    gc.collect()
    assert not told


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_an_error_is_freed_with_those_who_have_it(is_waited_for):
    """Its traceback refers to frames, which must not refer to what keeps it: each failed call would be a cycle."""
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            waiter = ReplyWaiter(loop, wakes_directly=True)
            task = asyncio.create_task(await_and_forget(waiter))
            if is_waited_for:
                await asyncio.sleep(0)
            waiter.set_exception(WatchedError("on purpose"))
            reference = weakref.ref(waiter.exception())
            del waiter
            with suppress(WatchedError):
                await task
            del task
            await asyncio.sleep(0)
            assert reference() is None
    finally:
        gc.enable()


async def await_and_forget(waiter: ReplyWaiter) -> Any:
    try:
        return await waiter
    finally:
        del waiter


# -- cancelling


async def test_cancelling_the_task_cancels_it(waiter):
    task = asyncio.create_task(awaiting(waiter))
    await asyncio.sleep(0)
    task.cancel("a reason")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiter.done()
    assert waiter.cancelled()
    for look in (waiter.result, waiter.exception):
        with pytest.raises(asyncio.CancelledError):
            look()


async def test_a_task_that_is_cancelled_before_it_waits(waiter):
    task = asyncio.create_task(awaiting(waiter))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waiter.done(), "the task has not begun"


async def test_cancelling_it_cancels_all_who_wait(waiter):
    tasks = [asyncio.create_task(awaiting(waiter)) for _ in range(2)]
    await asyncio.sleep(0)
    assert waiter.cancel()
    assert not waiter.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("error", [None, LookupError("on purpose")], ids=["result", "error"])
async def test_after_the_end_it_cannot_be_cancelled(waiter, error):
    if error is None:
        await in_a_callback(partial(waiter.set_result, 7))
    else:
        waiter.set_exception(error)
    assert not waiter.cancel()
    assert not waiter.cancelled()
    assert waiter.exception() is error


async def test_a_task_that_is_cancelled_when_the_result_is_there(scheduled):
    """The task has not run since: it ends as cancelled, as with any future."""
    task = asyncio.create_task(awaiting(scheduled))
    await asyncio.sleep(0)

    def complete_and_cancel() -> None:
        scheduled.set_result(7)
        assert task.cancel()

    await in_a_callback(complete_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_shield_protects_it(waiter):
    task = asyncio.create_task(shielded(waiter))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waiter.done()
    await in_a_callback(partial(waiter.set_result, 7))
    assert await waiter == 7


async def shielded(waiter: ReplyWaiter) -> Any:
    return await asyncio.shield(waiter)


# -- which kind a worker uses


@pytest.mark.private_apis
async def test_tasks_that_share_torch_state_are_woken_in_turns_of_their_own():
    assert not torchstate.isolates_all_tasks(asyncio.get_running_loop())
    waiter = waiter_factory(asyncio.get_running_loop())()
    assert isinstance(waiter, ReplyWaiter)
    assert not waiter._wakes_directly


@pytest.mark.private_apis
def test_isolated_tasks_are_woken_directly():
    async def main() -> bool:
        return bool(waiter_factory(asyncio.get_running_loop())()._wakes_directly)

    assert arpc.run(main())


async def test_without_private_apis_it_is_a_future_of_asyncio(monkeypatch):
    monkeypatch.setattr("arpc.agent.client.waiter.WAKES_DIRECTLY", False)
    waiter = waiter_factory(asyncio.get_running_loop())()
    assert isinstance(waiter, asyncio.Future)
