"""Handlers that share tasks cannot tell: each sees a task, a context and a torch state of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest
import torch

import arpc
from arpc import torchstate
from arpc.agent.carriers import Carriers, Job
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import echo, echo_later, hold, the_stage

variable: ContextVar[str] = ContextVar("variable", default="untouched")


@pytest.fixture(autouse=True)
def nothing_switched() -> Iterator[None]:
    """A mode left on this thread is the failure of the test that left it, and must not become that of the next."""
    yield
    was_pristine = torchstate.is_pristine()
    torchstate.save_and_reset()
    assert was_pristine, "the test left torch's state changed"


@pytest.fixture(params=["first step", "later step"])
def wait_first(request) -> bool:
    """Whether the handler has waited before: it then runs in a task of its own."""
    return request.param == "later step"


async def settle(wait_first: bool) -> None:
    if wait_first:
        await asyncio.sleep(0)


async def warm_up(group: Any) -> None:
    """Have idle carriers ready, so that handlers run in their first step at once."""
    for _ in range(3):
        await group[0].rpc_sync("worker1", echo_later)
    await until(lambda: bool(group[1].agent.executor.carriers._idle))


# -- the task


async def test_a_handler_finds_itself_in_a_task(pair, wait_first):
    await warm_up(pair)
    before = pair[1].agent.executor.carriers.steps_without_wait
    assert await pair[0].rpc_sync("worker1", look_at_the_task, args=(wait_first,)) == "ok"
    assert pair[1].agent.executor.carriers.steps_without_wait == before + (not wait_first)


async def look_at_the_task(wait: bool) -> str:
    await settle(wait)
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
    await settle(wait)
    try:
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()
    except TimeoutError:
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)
        return "timed out"
    return "not timed out"


async def stay_in_time(wait: bool) -> str:
    await settle(wait)
    async with asyncio.timeout(10):
        return await echo("in time")


async def test_a_task_group_inside_a_handler(pair, wait_first):
    await warm_up(pair)
    assert await pair[0].rpc_sync("worker1", group_tasks, args=(wait_first,)) == [1, 2]
    with pytest.raises(ExceptionGroup) as caught:
        await pair[0].rpc_sync("worker1", fail_in_a_group, args=(wait_first,))
    assert caught.group_contains(ZeroDivisionError)


async def group_tasks(wait: bool) -> list[int]:
    await settle(wait)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(echo_later(number)) for number in (1, 2)]
    return [task.result() for task in tasks]


async def fail_in_a_group(wait: bool) -> None:
    await settle(wait)

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
    await settle(wait)
    asyncio.current_task().cancel()
    await asyncio.Event().wait()


async def cancel_myself_and_return(wait: bool) -> str:
    await settle(wait)
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
    await settle(wait)
    assert variable.get() == value
    return before


async def test_the_callers_context_does_not_reach_the_handler(pair, wait_first):
    await warm_up(pair)
    variable.set("the caller's")
    assert await pair[0].rpc_sync("worker1", read_the_variable, args=(wait_first,)) == "untouched"


async def read_the_variable(wait: bool) -> str:
    await settle(wait)
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


# -- torch's state


def torch_state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "device": torch.empty(0).device.type,
    }


DEFAULT_STATE = {"grad": True, "inference": False, "autocast": False, "device": "cpu"}

MODES = {
    "no_grad": (torch.no_grad, {"grad": False}),
    "arpc.no_grad": (arpc.no_grad, {"grad": False}),
    "inference_mode": (torch.inference_mode, {"inference": True, "grad": False}),
    "arpc.inference_mode": (arpc.inference_mode, {"inference": True, "grad": False}),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast": True}),
    "device": (lambda: torch.device("meta"), {"device": "meta"}),
}


async def look_at_torch() -> dict[str, Any]:
    return torch_state()


async def look_at_torch_later() -> dict[str, Any]:
    await asyncio.sleep(0)
    return torch_state()


def look_at_torch_in_thread() -> dict[str, Any]:
    return torch_state()


@arpc.inline
def look_at_torch_inline() -> dict[str, Any]:
    return torch_state()


async def look_at_torch_in_async_generator():
    yield torch_state()
    await asyncio.sleep(0)
    yield torch_state()


def look_at_torch_in_generator():
    yield torch_state()
    yield torch_state()


def hand_out_a_coroutine() -> Any:
    return look_at_torch()


class TellsGradMode:
    """Arrives as whether gradients were on when it was pickled, in the runtime's own hands."""

    def __reduce__(self) -> Any:
        return bool, (torch.is_grad_enabled(),)


async def give_teller() -> TellsGradMode:
    return TellsGradMode()


async def give_teller_later() -> TellsGradMode:
    await asyncio.sleep(0)
    return TellsGradMode()


def give_teller_in_thread() -> TellsGradMode:
    return TellsGradMode()


LOOKERS = [
    look_at_torch,
    look_at_torch_later,
    look_at_torch_in_thread,
    look_at_torch_inline,
    look_at_torch_in_async_generator,
    look_at_torch_in_generator,
    hand_out_a_coroutine,
]


async def states_seen(worker: arpc.Worker) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    for looker in LOOKERS:
        if "generator" in looker.__name__:
            seen += [state async for state in worker.stream("worker1", looker)]
        else:
            seen.append(await worker.rpc_sync("worker1", looker))
    return seen


async def hold_in_mode(mode: str) -> dict[str, Any]:
    """Waits in a mode while others run, then looks whether it is still in it."""
    stage = the_stage()
    enter, _ = MODES[mode]
    with enter():
        stage.reached(f"{mode} entered")
        await stage.pass_gate()
        inside = torch_state()
    assert torch_state() == DEFAULT_STATE
    return inside


@pytest.mark.parametrize("mode", MODES)
async def test_a_mode_of_a_handler_that_waits_is_its_own(pair, stage, mode):
    future = pair[0].rpc_async("worker1", hold_in_mode, args=(mode,))
    await stage.wait_until(f"{mode} entered")
    assert torch_state() == DEFAULT_STATE, "the test itself is not in that mode"
    for seen in await states_seen(pair[0]):
        assert seen == DEFAULT_STATE
    stage.open()
    assert await future == DEFAULT_STATE | MODES[mode][1]
    assert torchstate.is_pristine()


async def test_modes_of_many_handlers_interleave(pair, stage):
    futures = {mode: pair[0].rpc_async("worker1", hold_in_mode, args=(mode,)) for mode in [*MODES, *reversed(MODES)]}
    await stage.wait_until(*(f"{mode} entered" for mode in MODES))
    stage.open()
    for mode, future in futures.items():
        assert await future == DEFAULT_STATE | MODES[mode][1]
    assert torchstate.is_pristine()


async def switch_grad_off_for_good(wait: bool) -> None:
    await settle(wait)
    torch.set_grad_enabled(False)


async def set_device_for_good(wait: bool) -> None:
    await settle(wait)
    torch.set_default_device("meta")


@arpc.inline
def switch_inline_for_good(wait: bool) -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")


@pytest.mark.parametrize("switch", [switch_grad_off_for_good, set_device_for_good, switch_inline_for_good])
async def test_what_a_handler_leaves_switched_ends_with_it(pair, wait_first, switch):
    await warm_up(pair)
    switched = pair[0].rpc_async("worker1", switch, args=(wait_first,))
    looked = pair[0].rpc_async("worker1", look_at_torch)
    await switched
    assert await looked == DEFAULT_STATE, "a handler of the same read"
    assert torch_state() == DEFAULT_STATE, "the code of the test"
    for seen in await states_seen(pair[0]):
        assert seen == DEFAULT_STATE


async def test_a_main_task_that_waits_in_a_mode_does_not_reach_handlers(pair):
    """This loop has no task factory of ours, so the mode is on the thread while the test waits."""
    assert asyncio.get_running_loop().get_task_factory() is None
    with torch.no_grad():
        for seen in await states_seen(pair[0]):
            assert seen == DEFAULT_STATE
        assert not torch.is_grad_enabled(), "its own mode is still on"
        for give in (give_teller, give_teller_later, give_teller_in_thread):
            assert await pair[0].rpc_sync("worker1", give) is True, "results are packed with a clean state as well"
    assert torch.is_grad_enabled()


async def test_a_main_task_that_waits_in_a_mode_does_not_reach_handlers_that_had_to_wait(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        await warm_up(group)
        first = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        others = [group[0].rpc_async("worker1", look) for look in LOOKERS if "generator" not in look.__name__]
        with torch.no_grad():
            stage.open()
            await first
            for seen in await asyncio.gather(*others):
                assert seen == DEFAULT_STATE
            assert not torch.is_grad_enabled()
        await assert_nothing_left(group)
    assert torchstate.is_pristine()


def test_with_the_task_factory_modes_stay_in_their_tasks(make_stage):
    async def main() -> None:
        stage = make_stage()
        async with cluster(2) as group:
            for switch in (switch_grad_off_for_good, set_device_for_good, switch_inline_for_good):
                await group[0].rpc_sync("worker1", switch, args=(False,))
            with torch.no_grad():
                for seen in await states_seen(group[0]):
                    assert seen == DEFAULT_STATE
                future = group[0].rpc_async("worker1", hold_in_mode, args=("inference_mode",))
                await stage.wait_until("inference_mode entered")
                assert not torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
                stage.open()
                assert await future == DEFAULT_STATE | MODES["inference_mode"][1]
            await assert_nothing_left(group)

    arpc.run(main)
    assert torchstate.is_pristine()


async def test_a_generator_keeps_its_mode_from_item_to_item(pair):
    for function in (generate_in_mode, generate_in_mode_later):
        seen = [grad async for grad in pair[0].stream("worker1", function, window=1)]
        assert seen == [False] * 5 + [True]
    assert torchstate.is_pristine()


def generate_in_mode():
    with torch.no_grad():
        for _ in range(5):
            yield torch.is_grad_enabled()
    yield torch.is_grad_enabled()


async def generate_in_mode_later():
    with torch.no_grad():
        for _ in range(5):
            yield torch.is_grad_enabled()
            await asyncio.sleep(0)
    yield torch.is_grad_enabled()


# -- the carriers themselves


class Recorded(Job):
    """A job that remembers how it ended."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.context: Context = copy_context()
        self.coroutine: Any = None
        self.state = None
        self.task = None
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.suspensions = 0
        self._function = function
        self._args = args

    def first_step(self) -> Any:
        self.coroutine = self._function(*self._args)
        return self.coroutine.send(None)

    def suspended(self) -> None:
        self.suspensions += 1

    def finished(self, result: Any) -> None:
        assert torchstate.is_pristine()
        self.ended.set_result(result)

    def failed(self, error: BaseException) -> None:
        assert torchstate.is_pristine()
        self.ended.set_exception(LookupError(repr(error)))


@pytest.fixture
async def carriers() -> AsyncIterator[Carriers]:
    carriers = Carriers(asyncio.get_running_loop(), "test")
    yield carriers
    await carriers.aclose()
    assert not carriers._tasks


async def start(carriers: Carriers, job: Job) -> None:
    """Outside of any task, as messages do."""
    done = asyncio.Event()

    def begin() -> None:
        carriers.start(job)
        done.set()

    asyncio.get_running_loop().call_soon(begin)
    await done.wait()


async def test_the_first_job_runs_in_a_task_and_later_ones_at_once(carriers):
    first = Recorded(echo, 1)
    await start(carriers, first)
    assert await first.ended == 1
    await until(lambda: bool(carriers._idle))
    second = Recorded(echo, 2)
    await start(carriers, second)
    assert second.ended.done()
    assert await second.ended == 2
    assert (first.suspensions, second.suspensions) == (1, 0)
    assert carriers.statistics() == {"handlers_waiting": 0, "handlers_without_wait": 1, "handlers_carried": 1}


async def test_a_job_started_from_within_a_task_runs_too(carriers):
    await test_the_first_job_runs_in_a_task_and_later_ones_at_once(carriers)
    job = Recorded(echo, 3)
    carriers.start(job)
    assert not job.ended.done()
    assert await job.ended == 3


async def test_a_task_cancelled_before_it_began_fails_its_job(carriers):
    job = Recorded(echo, 1)
    await start(carriers, job)
    job = Recorded(echo, 2)
    carriers._idle.clear()
    carriers.start(job)
    job.task.cancel()
    with pytest.raises(LookupError, match="CancelledError"):
        await job.ended


async def test_closing_cancels_what_is_carried(carriers):
    jobs = [Recorded(asyncio.Event().wait) for _ in range(5)]
    for job in jobs:
        await start(carriers, job)
    assert carriers.statistics()["handlers_waiting"] == 5
    await carriers.aclose()
    for job in jobs:
        with pytest.raises(LookupError, match="CancelledError"):
            await job.ended
    late = Recorded(echo, 1)
    await start(carriers, late)
    with pytest.raises(LookupError, match="CancelledError"):
        await late.ended


async def test_closing_does_not_wait_for_ever(carriers, monkeypatch, caplog):
    monkeypatch.setattr("arpc.agent.carriers._CLOSE_S", 0.01)
    release = asyncio.Event()

    async def refuse() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "in the end"

    job = Recorded(refuse)
    await start(carriers, job)
    await asyncio.sleep(0)
    await carriers.aclose()
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
        def failed(self, error: BaseException) -> None:
            log.append(type(error).__name__)

    async def main(carriers: Carriers) -> None:
        await start(carriers, Forgotten(wait_for_ever))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    carriers = Carriers(loop, "test")
    loop.run_until_complete(main(carriers))
    for task in carriers._tasks:
        task._log_destroy_pending = False
    loop.close()
    del carriers, task
    gc.collect()
    assert log == [("untouched", False), "GeneratorExit"]
    assert torchstate.is_pristine()
