"""An isolated coroutine: its own state at every step, the thread's own in between, and however it ends."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpc.torchstate import DEFAULTS, Isolated, Rooted, capture, is_isolated, is_pristine, isolate, isolating_driver
from arpc.torchstate.steps import AllSteps, Stepped
from tests.torchstate.blocks import BLOCKS, LEAKS, Observation, observe


@types.coroutine
def pause() -> Generator[str, Any, Any]:
    """Suspend the coroutine and return what it is resumed with."""
    return (yield "paused")


async def do_not_pause() -> None:
    pass


def step(coro: Coroutine[Any, Any, Any]) -> Any:
    return coro.send(None)


def finish(coro: Coroutine[Any, Any, Any]) -> Any:
    with pytest.raises(StopIteration) as stopped:
        coro.send(None)
    return stopped.value.value


# -- random programs of several coroutines ----------------------------------------------------------------------------

# A program is a list of pauses (None) and of blocks, each a name and the program inside.
programs = st.recursive(
    st.lists(st.none(), max_size=2),
    lambda inner: st.lists(st.none() | st.tuples(st.sampled_from(sorted(BLOCKS)), inner), min_size=1, max_size=3),
    max_leaves=6,
)


async def play(program: list[Any], wait: Callable[[], Any], seen: list[Observation]) -> None:
    seen.append(observe())
    for item in program:
        if item is None:
            await wait()
        else:
            name, inner = item
            with BLOCKS[name]():
                await play(inner, wait, seen)
        seen.append(observe())


def play_alone(program: list[Any], base: list[str]) -> list[Observation]:
    """What torch itself shows to the program when nothing comes in between."""
    seen: list[Observation] = []

    def without_pauses() -> None:
        with ExitStack() as stack:
            for name in base:
                stack.enter_context(BLOCKS[name]())
            with pytest.raises(StopIteration):
                play(program, do_not_pause, seen).send(None)

    thread = threading.Thread(target=without_pauses)
    thread.start()
    thread.join()
    return seen


# Who runs next (counted among those still running) and how; when it is used up, each runs on to its end in turn.
schedules = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["next", "send", "throw", "close"])), max_size=12)


def resume(coro: Isolated[Any], way: str) -> None:
    if way == "next":
        next(coro)
    elif way == "send":
        coro.send(None)
    elif way == "throw":
        coro.throw(asyncio.CancelledError())
    else:
        coro.close()
        raise StopIteration


@given(
    base=st.lists(st.sampled_from(sorted(BLOCKS)), max_size=2),
    inherit=st.booleans(),
    programs_played=st.lists(programs, min_size=1, max_size=4),
    schedule=schedules,
)
def test_interleaved_coroutines_see_their_own_state_and_the_thread_its_own(base, inherit, programs_played, schedule):
    expected = [play_alone(program, base if inherit else []) for program in programs_played]
    records: list[list[Observation]] = [[] for _ in programs_played]
    interrupted = set()
    with ExitStack() as stack:
        for name in base:
            stack.enter_context(BLOCKS[name]())
        thread_state = capture()
        players = [
            (index, isolate(play(program, pause, records[index]), inherit=inherit))
            for index, program in enumerate(programs_played)
        ]
        turns = iter(schedule)
        while players:
            turn, way = next(turns, (0, "send"))
            index, player = players.pop(turn % len(players))
            if way in {"throw", "close"}:
                interrupted.add(index)
            with suppress(StopIteration, asyncio.CancelledError):
                resume(player, way)
                players.append((index, player))
            assert capture() == thread_state
    for index, record in enumerate(records):
        if index in interrupted:
            assert record == expected[index][: len(record)]
        else:
            assert record == expected[index]
    assert is_pristine()


# -- one coroutine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_block_stays_in_force_across_pauses_and_is_gone_between_them(name):
    async def work() -> tuple[Observation, Observation]:
        with BLOCKS[name]():
            before = observe()
            await pause()
            return before, observe()

    outside = observe()
    coro = isolate(work())
    step(coro)
    assert observe() == outside
    before, after = finish(coro)
    assert before == after
    assert observe() == outside


def test_state_left_behind_at_the_end_ends_with_the_coroutine():
    async def careless() -> None:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")

    finish(isolate(careless()))
    assert is_pristine()
    assert torch.ones(1).device.type == "cpu"


def test_dirty_thread_is_not_seen_inside_and_stays_dirty():
    async def work() -> None:
        assert is_pristine()
        await pause()
        assert is_pristine()

    coro = isolate(work())
    with torch.no_grad():
        step(coro)
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu"):
        finish(coro)
        assert torch.is_autocast_enabled("cpu")


def test_inherited_state_is_a_copy():
    async def child() -> None:
        assert not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        await pause()
        assert torch.is_grad_enabled()

    with torch.no_grad():
        coro = isolate(child(), inherit=True)
        step(coro)
        assert not torch.is_grad_enabled()
    finish(coro)


def test_not_inherited_state_is_torchs_default():
    with torch.no_grad(), torch.autocast("cpu"):
        assert isolate(pause()).state is DEFAULTS


def test_coroutine_may_move_between_threads():
    async def work() -> list[Observation]:
        seen = []
        with ExitStack() as stack:
            for name in LEAKS:
                stack.enter_context(BLOCKS[name]())
            for _ in range(3):
                seen.append(observe())
                await pause()
        return seen

    coro = isolate(work())
    left_behind = []

    def step_elsewhere() -> None:
        step(coro)
        left_behind.append(capture())

    for _ in range(3):
        thread = threading.Thread(target=step_elsewhere)
        thread.start()
        thread.join()
    assert left_behind == [DEFAULTS] * 3
    first, second, third = finish(coro)
    assert first == second == third


def test_awaited_inside_another_coroutine_it_keeps_its_state_from_it():
    async def inner() -> str:
        with torch.inference_mode():
            value = await pause()
            assert torch.is_inference_mode_enabled()
            return value

    async def outer() -> str:
        with torch.autocast("cpu"):
            result = await isolate(inner())
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
            return result

    coro = isolate(outer())
    assert step(coro) == "paused"
    assert is_pristine()
    with pytest.raises(StopIteration) as stopped:
        coro.send("value")
    assert stopped.value.value == "value"


@pytest.mark.parametrize("name", LEAKS)
def test_exception_thrown_in_is_handled_in_the_coroutines_state(name):
    async def work() -> tuple[Observation, Observation]:
        with BLOCKS[name]():
            before = observe()
            try:
                await pause()
            except ValueError:
                return before, observe()
        raise AssertionError

    coro = isolate(work())
    step(coro)
    with pytest.raises(StopIteration) as stopped:
        coro.throw(ValueError("thrown in"))
    before, after = stopped.value.value
    assert before == after


def test_exception_of_the_coroutine_comes_out_unchanged():
    error = ValueError("boom")

    async def work() -> None:
        with torch.no_grad():
            await pause()
            raise error

    coro = isolate(work())
    step(coro)
    with pytest.raises(ValueError, match="boom") as raised:
        step(coro)
    assert raised.value is error
    assert error.__context__ is None


@pytest.mark.parametrize("name", LEAKS)
def test_close_leaves_the_blocks_in_the_coroutines_state(name):
    seen = []

    async def work() -> None:
        with BLOCKS[name]():
            seen.append(observe())
            try:
                await pause()
            finally:
                seen.append(observe())

    coro = isolate(work())
    step(coro)
    coro.close()
    assert seen[0] == seen[1]
    with pytest.raises(RuntimeError, match="cannot reuse"):
        step(coro)


@pytest.mark.parametrize("name", LEAKS)
def test_dropped_while_paused_it_leaves_the_blocks_in_its_own_state(name):
    seen = []

    async def work() -> None:
        with BLOCKS[name]():
            seen.append(observe())
            try:
                await pause()
            finally:
                seen.append(observe())

    coro = isolate(work())
    step(coro)
    gone = weakref.ref(coro)
    del coro
    gc.collect()
    assert gone() is None
    assert seen[0] == seen[1]
    assert is_pristine()


def test_coroutine_that_nobody_awaits_is_reported_as_ever():
    async def forgotten() -> None:
        pass

    with pytest.warns(RuntimeWarning, match="forgotten' was never awaited"):
        isolate(forgotten())


def test_closing_or_throwing_before_the_first_step_warns_of_nothing():
    async def work() -> None:
        raise AssertionError

    isolate(work()).close()
    with pytest.raises(KeyError):
        isolate(work()).throw(KeyError("thrown in"))


def test_isolating_twice_is_isolating_once():
    coro = isolate(do_not_pause())
    assert isolate(coro, inherit=True) is coro
    coro.close()


# -- what debuggers read ----------------------------------------------------------------------------------------------


def test_it_looks_like_the_coroutine_inside():
    async def inner() -> None:
        await pause()

    async def work() -> None:
        await inner()

    native = work()
    coro = isolate(native)
    assert isinstance(coro, Coroutine)
    assert asyncio.iscoroutine(coro)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CREATED
    step(coro)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED
    assert (coro.__name__, coro.__qualname__) == ("work", work.__qualname__)
    assert coro.cr_code is work.__code__
    assert coro.cr_frame is native.cr_frame
    assert not coro.cr_running
    assert coro.cr_await.__name__ == "inner"
    assert repr(native) in repr(coro)
    assert not hasattr(coro, "gi_frame")
    finish(coro)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED


def test_stack_can_be_followed_through_it():
    async def inner() -> None:
        await pause()

    async def outer() -> None:
        await isolate(inner())

    coro: Any = outer()
    step(coro)
    names = []
    while hasattr(coro, "cr_await"):
        names.append((type(coro), coro.__name__))
        coro = coro.cr_await
    assert names == [(types.CoroutineType, "outer"), (Isolated, "inner")]


def test_wrong_construction_fails_cleanly():
    with pytest.raises(TypeError):
        Isolated()  # type: ignore[call-arg]


# -- who drives a coroutine -------------------------------------------------------------------------------------------


def test_is_isolated_in_a_coroutine_stepped_by_hand():
    async def work() -> bool:
        return is_isolated()

    assert finish(work()) is False
    assert finish(isolate(work())) is True
    coro = isolate(work())
    with pytest.raises(StopIteration, match="True"):
        next(coro)


def test_declared_driver_counts():
    async def work() -> bool:
        return is_isolated()

    @isolating_driver
    def drive(coro: Coroutine[Any, Any, Any]) -> Any:
        return finish(coro)

    assert drive(work()) is True


async def test_is_isolated_in_a_task():
    async def work() -> bool:
        await asyncio.sleep(0)
        return is_isolated()

    assert not await asyncio.create_task(work())
    assert await asyncio.create_task(isolate(work()))
    assert await isolate(work())


async def test_task_that_starts_inside_an_isolated_step_is_not_thereby_isolated():
    """As eager tasks do: the creator's driver is on the stack, but it does not drive the new task."""

    class EagerTask:
        def __init__(self, coro: Coroutine[Any, Any, bool]) -> None:
            self.coro = coro

        def get_coro(self) -> Coroutine[Any, Any, bool]:
            return self.coro

    async def started() -> bool:
        return is_isolated()

    async def creator() -> bool:
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()
        assert current is not None
        coro = started()
        asyncio.tasks._leave_task(loop, current)
        asyncio.tasks._enter_task(loop, EagerTask(coro))  # type: ignore[arg-type]
        try:
            return finish(coro)
        finally:
            asyncio.tasks._leave_task(loop, asyncio.current_task())  # type: ignore[arg-type]
            asyncio.tasks._enter_task(loop, current)

    assert await isolate(creator()) is False


# -- the one of a task on a pristine thread ----------------------------------------------------------------------------


def test_rooted_keeps_its_state_however_it_is_resumed():
    async def in_a_block() -> str:
        with torch.no_grad():
            try:
                await pause()
            except ValueError:
                seen.append(torch.is_grad_enabled())
            await pause()
            seen.append(torch.is_grad_enabled())
            await pause()
        seen.append(torch.is_grad_enabled())
        return "result"

    seen: list[bool] = []
    rooted = Rooted(in_a_block())
    next(rooted)
    assert rooted.state.grad is False
    rooted.throw(ValueError("on purpose"))
    next(rooted)
    assert is_pristine()
    with pytest.raises(StopIteration) as end:
        next(rooted)
    assert end.value.value == "result"
    assert seen == [False, False, True]
    with pytest.raises(RuntimeError, match="cannot reuse"):
        rooted.__await__()


def test_rooted_that_is_dropped_or_closed_leaves_its_blocks():
    async def in_a_block() -> None:
        try:
            with torch.inference_mode():
                await pause()
        finally:
            seen.append(torch.is_inference_mode_enabled())

    seen: list[bool] = []
    for end in (lambda rooted: rooted.close(), lambda rooted: None):
        rooted = Rooted(in_a_block())
        next(rooted)
        assert is_pristine()
        end(rooted)
        del rooted
        assert is_pristine()
    assert seen == [False, False]


# -- what is kept ------------------------------------------------------------------------------------------------------


class Kept:
    """Something whose end can be seen."""


def stepped(coro: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    return Isolated(Stepped(coro, AllSteps([])))


@pytest.mark.parametrize("kind", [Isolated, Rooted, stepped])
@pytest.mark.parametrize("is_raised_later", [False, True])
async def test_an_error_that_ends_a_task_keeps_none_of_its_frames(kind, is_raised_later):
    async def fail() -> None:
        kept = Kept()
        references.append(weakref.ref(kept))
        errors = []
        try:
            await futures[0]
        except ValueError as error:
            if not is_raised_later:
                raise
            errors.append(error)
        await asyncio.sleep(0)
        raise errors.pop()

    loop = asyncio.get_running_loop()
    references: list[weakref.ref[Kept]] = []
    futures = [loop.create_future()]
    gc.disable()
    try:
        task = asyncio.Task(kind(fail()))
        await asyncio.sleep(0)
        futures.pop().set_exception(ValueError("on purpose"))
        await asyncio.wait([task])
        assert isinstance(task.exception(), ValueError)
        del task
        await asyncio.sleep(0)
        assert references[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Isolated, Rooted])
async def test_a_task_that_has_handled_an_error_keeps_none_of_its_frames(kind):
    async def wait() -> None:
        kept = Kept()
        references.append(weakref.ref(kept))
        await futures[0]

    async def handle() -> str:
        try:
            await wait()
        except LookupError:
            return "handled"
        return "not raised"

    references: list[weakref.ref[Kept]] = []
    futures = [asyncio.get_running_loop().create_future()]
    task = asyncio.Task(kind(handle()))
    await asyncio.sleep(0)
    futures.pop().set_exception(LookupError("on purpose"))
    assert await task == "handled"
    # the task is done, and all that could still have the future
    assert references[0]() is None
