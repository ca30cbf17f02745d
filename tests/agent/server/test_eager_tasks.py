"""Handlers that share tasks cannot tell: each sees a task and a context of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest
import torch

import arpc
from arpc import torchstate
from arpc.agent.server.eager_tasks import EagerTasks
from tests.agent.leftovers import until, warm_up
from tests.agent.stage import echo, echo_later, the_stage, wait_if

variable: ContextVar[str] = ContextVar("variable", default="untouched")


# -- the task


async def test_a_handler_finds_itself_in_a_task(pair, wait_first):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", look_at_the_task, args=(wait_first,)) == "ok"


@pytest.mark.private_apis
async def test_a_handler_that_does_not_wait_takes_no_task_of_its_own(pair, wait_first):
    await warm_up(pair)
    before = pair[1].agent.dispatcher.tasks.carried
    assert await pair[0].rpc_sync("worker1", echo if not wait_first else echo_later, args=(1,)) == 1
    assert pair[1].agent.dispatcher.tasks.carried == before + wait_first


async def look_at_the_task(wait: bool) -> str:
    await wait_if(wait)
    task = asyncio.current_task()
    assert isinstance(task, asyncio.Task)
    assert task in asyncio.all_tasks()
    assert not task.done()
    assert task.cancelling() == 0
    assert task.get_loop() is asyncio.get_running_loop()
    if wait:
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
    return "ok"


async def test_the_task_stays_the_same_across_the_first_wait(pair):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", stays_the_same)


async def stays_the_same() -> bool:
    before = asyncio.current_task()
    await asyncio.sleep(0)
    return asyncio.current_task() is before


async def name_after_a_wait() -> str:
    task = asyncio.current_task()
    assert task is not None
    await asyncio.sleep(0)
    return task.get_name()


@pytest.mark.parametrize("is_warm", [True, False])
async def test_the_task_of_a_handler_that_waits_has_its_name(pair, is_warm):
    if is_warm:
        await warm_up(pair)  # an idle task is there: the handler begins on behalf of it
    assert await pair[0].rpc_sync("worker1", name_after_a_wait) == "name_after_a_wait"


async def test_concurrent_handlers_have_tasks_of_their_own(pair):
    await warm_up(pair)
    tasks = await asyncio.gather(*(pair[0].rpc_sync("worker1", number_of_the_task) for _ in range(40)))
    assert len(set(tasks)) == 40


async def number_of_the_task() -> int:
    await asyncio.sleep(0)
    return id(asyncio.current_task())


async def test_a_timeout_inside_a_handler(pair, wait_first):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", time_out, args=(wait_first, 0.01)) == "timed out"
    assert await pair[0].rpc_sync("worker1", time_out, args=(wait_first, 0)) == "timed out", "one that is due at once"
    assert await pair[0].rpc_sync("worker1", stay_in_time, args=(wait_first,)) == "in time"


async def time_out(wait: bool, delay_s: float) -> str:
    await wait_if(wait)
    try:
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()
    except TimeoutError:
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)
        return "timed out"
    return "not timed out"


async def stay_in_time(wait: bool) -> str:
    await wait_if(wait)
    async with asyncio.timeout(30):
        return await echo("in time")


async def test_a_task_group_inside_a_handler(pair, wait_first):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", group_tasks, args=(wait_first,)) == [1, 2]
    with pytest.raises(ExceptionGroup) as caught:
        await pair[0].rpc_sync("worker1", fail_in_a_group, args=(wait_first,))
    assert caught.group_contains(ZeroDivisionError)


async def group_tasks(wait: bool) -> list[int]:
    await wait_if(wait)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(echo_later(number)) for number in (1, 2)]
    return [task.result() for task in tasks]


async def fail_in_a_group(wait: bool) -> None:
    await wait_if(wait)

    async def divide() -> float:
        return 1 / 0

    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait())
        group.create_task(divide())


async def test_a_wait_that_is_cancelled_at_once_ends_as_in_any_task(pair):
    """Cancelled between the first step and the second: what the handler waits for decides when it hears of it."""
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", cancel_myself_then_wait_for_a_task) == [
        "child cleaned up",
        "parent cancelled",
    ]


async def cancel_myself_then_wait_for_a_task() -> list[str]:
    log: list[str] = []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            log.append("child cleaned up")
            raise

    task = asyncio.create_task(child())
    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
    try:
        await task
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
        log.append("parent cancelled")
    return log


# -- cancelling oneself


@pytest.mark.parametrize("times", [1, 2])
async def test_a_handler_that_cancels_its_own_task_affects_nobody_else(pair, wait_first, times):
    await warm_up(pair)
    for _ in range(times):
        with pytest.raises(arpc.CallCancelledError):
            await pair[0].rpc_sync("worker1", cancel_myself_and_wait, args=(wait_first,))
        assert await pair[0].rpc_sync("worker1", cancel_myself_and_return, args=(wait_first,)) == "returned"
    for function in (echo, echo_later):
        results = await asyncio.gather(*(pair[0].rpc_sync("worker1", function, args=(n,)) for n in range(40)))
        assert results == list(range(40))


async def test_a_handler_that_cancels_itself_among_others_of_one_read(pair):
    await warm_up(pair)
    calls: list[Any] = []
    for number in range(20):
        calls.append(pair[0].rpc_async("worker1", cancel_myself_and_return, args=(False,)))
        calls.append(pair[0].rpc_async("worker1", echo, args=(number,)))
        calls.append(pair[0].rpc_async("worker1", echo_later, args=(number,)))
    results = await asyncio.gather(*calls)
    assert results[1::3] == results[2::3] == list(range(20))


async def cancel_myself_and_wait(wait: bool) -> None:
    await wait_if(wait)
    asyncio.current_task().cancel()
    await asyncio.Event().wait()


async def cancel_myself_and_return(wait: bool) -> str:
    await wait_if(wait)
    asyncio.current_task().cancel()
    return "returned"


# -- context variables


async def test_a_context_variable_never_reaches_the_next_handler(pair, wait_first):
    await warm_up(pair)
    results = await asyncio.gather(
        *(pair[0].rpc_sync("worker1", exchange_the_variable, args=(f"number {n}", wait_first)) for n in range(20))
    )
    assert set(results) == {"untouched"}
    assert variable.get() == "untouched"


async def exchange_the_variable(value: str, wait: bool) -> str:
    before = variable.get()
    variable.set(value)
    await wait_if(wait)
    assert variable.get() == value
    return before


async def test_the_callers_context_does_not_reach_the_handler(pair, wait_first):
    await warm_up(pair)
    variable.set("the caller's")
    assert await pair[0].rpc_sync("worker1", read_the_variable, args=(wait_first,)) == "untouched"


async def read_the_variable(wait: bool) -> str:
    await wait_if(wait)
    return variable.get()


async def test_tokens_are_reset_across_waits(pair):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", set_and_reset) == ["untouched", "inner", "untouched"]


async def set_and_reset() -> list[str]:
    seen = [variable.get()]
    token = variable.set("inner")
    await asyncio.sleep(0)
    seen.append(variable.get())
    variable.reset(token)
    await asyncio.sleep(0)
    seen.append(variable.get())
    return seen


async def test_tokens_are_reset_when_the_handler_is_cancelled(pair, stage):
    future = pair[0].rpc_async("worker1", reset_in_the_end)
    await stage.wait_until("begun")
    future.cancel()
    await stage.wait_until("reset to untouched")


async def reset_in_the_end() -> None:
    stage = the_stage()
    token = variable.set("inner")
    stage.reached("begun")
    try:
        await stage.pass_gate()
    finally:
        variable.reset(token)
        stage.reached(f"reset to {variable.get()}")


async def test_a_task_of_a_handler_inherits_its_context(pair):
    assert await pair[0].rpc_sync("worker1", ask_a_task) == ("inner", "worker1")


async def ask_a_task() -> tuple[str, str]:
    variable.set("inner")

    async def ask() -> tuple[str, str]:
        return variable.get(), arpc.get_worker_info().name

    return await asyncio.create_task(ask())


# -- EagerTasks alone


class Recorded:
    """A request that remembers how it ended; it is its own dispatcher."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.context: Context = copy_context()
        self.coroutine: Any = None
        self.state = None
        self.task = None
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.suspensions = 0
        self.host: Any = self
        self.inbound: Any = self
        self.replies: Any = self
        self._function = function
        self._args = args

    def call(self) -> Any:
        return self._function(*self._args)

    def register(self, _: Any) -> None:
        self.suspensions += 1

    def returned(self, _: Any, result: Any) -> None:
        assert torchstate.is_pristine()
        self.ended.set_result(result)

    def raised(self, _: Any, error: BaseException) -> None:
        assert torchstate.is_pristine()
        self.ended.set_exception(LookupError(repr(error)))


@pytest.fixture
async def tasks() -> AsyncIterator[EagerTasks]:
    tasks = EagerTasks(asyncio.get_running_loop(), "test")
    yield tasks
    await tasks.aclose()
    assert not tasks._tasks


async def start(tasks: EagerTasks, job: Any) -> None:
    """Outside of any task, as messages do."""
    done = asyncio.Event()

    def begin() -> None:
        tasks.start(job)
        done.set()

    asyncio.get_running_loop().call_soon(begin)
    await done.wait()


@pytest.mark.private_apis
async def test_the_first_job_runs_in_a_task_and_later_ones_at_once(tasks):
    first = Recorded(echo, 1)
    await start(tasks, first)
    assert await first.ended == 1
    await until(lambda: bool(tasks.idle))
    second = Recorded(echo, 2)
    await start(tasks, second)
    assert second.ended.done()
    assert await second.ended == 2
    assert (first.suspensions, second.suspensions) == (1, 0)
    assert tasks.statistics() == {"handlers_waiting": 0, "handlers_carried": 1}


@pytest.mark.private_apis
async def test_a_job_started_from_within_a_task_runs_too(tasks):
    await test_the_first_job_runs_in_a_task_and_later_ones_at_once(tasks)
    job = Recorded(echo, 3)
    tasks.start(job)
    assert not job.ended.done()
    assert await job.ended == 3


async def test_a_task_cancelled_before_it_began_fails_its_job(tasks):
    job = Recorded(echo, 1)
    await start(tasks, job)
    job = Recorded(echo, 2)
    tasks.idle.clear()
    tasks.start(job)
    job.task.cancel()
    with pytest.raises(LookupError, match="CancelledError"):
        await job.ended


async def test_closing_cancels_what_is_carried(tasks):
    jobs = [Recorded(asyncio.Event().wait) for _ in range(5)]
    for job in jobs:
        await start(tasks, job)
    assert tasks.statistics()["handlers_waiting"] == 5
    await tasks.aclose()
    for job in jobs:
        with pytest.raises(LookupError, match="CancelledError"):
            await job.ended
    late = Recorded(echo, 1)
    await start(tasks, late)
    with pytest.raises(LookupError, match="CancelledError"):
        await late.ended


async def test_closing_does_not_wait_for_ever(tasks, monkeypatch, caplog):
    monkeypatch.setattr("arpc.agent.server.eager_tasks._CLOSE_S", 0.01)
    release = asyncio.Event()

    async def refuse() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "in the end"

    job = Recorded(refuse)
    await start(tasks, job)
    await asyncio.sleep(0)
    await tasks.aclose()
    assert not job.ended.done()
    assert "leaves 1 handlers behind" in caplog.text
    release.set()
    assert await job.ended == "in the end"


def test_a_loop_that_is_dropped_ends_coroutines_in_their_own_context():
    """Their blocks close when they are freed: context variables and torch's state must be theirs even then."""
    log: list[Any] = []

    async def wait_for_ever() -> None:
        token = variable.set("inner")
        with torch.no_grad():
            try:
                await asyncio.Event().wait()
            finally:
                variable.reset(token)
                log.append((variable.get(), torch.is_grad_enabled()))

    class Forgotten(Recorded):
        def raised(self, _: Any, error: BaseException) -> None:
            log.append(type(error).__name__)

    async def main(tasks: EagerTasks) -> None:
        await start(tasks, Forgotten(wait_for_ever))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    tasks = EagerTasks(loop, "test")
    loop.run_until_complete(main(tasks))
    for task in tasks._tasks:
        task._log_destroy_pending = False
    loop.close()
    del tasks, task
    gc.collect()
    assert log == [("untouched", False), "GeneratorExit"]
    assert torchstate.is_pristine()
