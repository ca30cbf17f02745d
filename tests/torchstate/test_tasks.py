"""With the task factory, torch's blocks follow each task across every await, on both kinds of loop."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpc.torchstate import Isolated, install_task_factory, is_isolated, is_pristine, isolate, task_factory
from tests.torchstate.blocks import BLOCKS, LEAKS, Observation, observe
from tests.torchstate.conftest import LOOP_FACTORIES, Run

requires_eager_tasks = pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")


async def hold(name: str, entered: asyncio.Event, leave: asyncio.Event) -> list[Observation]:
    """ElasticPresence in a block from one event to another; what is seen before, inside (twice) and after."""
    seen = [observe()]
    with BLOCKS[name]():
        seen.append(observe())
        entered.set()
        await leave.wait()
        seen.append(observe())
    seen.append(observe())
    return seen


async def observe_while_another_task_is_in(name: str) -> Observation:
    entered, leave = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold(name, entered, leave))
    await entered.wait()
    observation = observe()
    leave.set()
    await holder
    return observation


@pytest.mark.parametrize("name", LEAKS)
def test_without_the_factory_a_block_leaks(run: Run, name):
    """What all this is for, and the proof that the observer would notice."""
    assert run(lambda: observe_while_another_task_is_in(name), isolating=False) != observe()


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_block_reaches_no_other_task(run: Run, name):
    assert run(lambda: observe_while_another_task_is_in(name)) == observe()


@pytest.mark.parametrize("second", LEAKS)
@pytest.mark.parametrize("first", LEAKS)
def test_overlapping_blocks_of_two_tasks(run: Run, first, second):
    async def main() -> None:
        events = [asyncio.Event() for _ in range(4)]
        one = asyncio.create_task(hold(first, events[0], events[1]))
        await events[0].wait()
        two = asyncio.create_task(hold(second, events[2], events[3]))
        await events[2].wait()
        events[1].set()  # the one that entered first also leaves first
        before, inside, still_inside, after = await one
        assert before == after
        assert inside == still_inside
        events[3].set()
        before, inside, still_inside, after = await two
        assert before == after
        assert inside == still_inside
        assert is_pristine()

    run(main)


@pytest.mark.parametrize("name", LEAKS)
def test_cancelled_in_the_middle_of_a_block(run: Run, name):
    async def main() -> None:
        entered = asyncio.Event()
        task = asyncio.create_task(hold(name, entered, asyncio.Event()))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_pristine()

    run(main)


def test_cancelled_before_the_first_step(run: Run):
    async def never() -> None:
        raise AssertionError

    async def main() -> None:
        task = asyncio.create_task(never())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)


@pytest.mark.parametrize("name", LEAKS)
def test_exception_out_of_a_block(run: Run, name):
    async def fail() -> None:
        with BLOCKS[name]():
            await asyncio.sleep(0)
            raise ValueError("boom")

    async def main() -> None:
        before = observe()
        with pytest.raises(ValueError, match="boom"):
            await asyncio.create_task(fail())
        assert observe() == before

    run(main)


def test_nested_blocks(run: Run):
    async def main() -> None:
        with torch.no_grad():
            await asyncio.sleep(0)
            with torch.enable_grad():
                await asyncio.sleep(0)
                assert torch.is_grad_enabled()
                with torch.inference_mode(), torch.autocast("cpu"):
                    await asyncio.sleep(0)
                    assert torch.is_inference_mode_enabled()
                    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                        await asyncio.sleep(0)
                        assert torch.is_grad_enabled()
                        assert torch.is_inference_mode_enabled()
                        assert not torch.is_autocast_enabled("cpu")
                    assert torch.is_autocast_enabled("cpu")
                await asyncio.sleep(0)
                assert torch.is_grad_enabled()
            await asyncio.sleep(0)
            assert not torch.is_grad_enabled()
        assert is_pristine()

    run(main)


def test_blocks_inside_task_groups_and_timeouts(run: Run):
    async def child(name: str) -> list[Observation]:
        with BLOCKS[name]():
            seen = [observe()]
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
                seen.append(observe())
        return seen

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(child(name)) for name in sorted(BLOCKS) for _ in range(3)]
        for task in children:
            first, second = task.result()
            assert first == second
        with torch.no_grad(), pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        assert is_pristine()

    run(main)


def test_failing_task_group_cancels_its_members_cleanly(run: Run):
    async def wait_in(name: str) -> None:
        with BLOCKS[name]():
            await asyncio.Event().wait()

    async def fail() -> None:
        with torch.inference_mode():
            await asyncio.sleep(0)
            raise ValueError("boom")

    async def run_group() -> None:
        with torch.no_grad():
            async with asyncio.TaskGroup() as group:
                for name in sorted(BLOCKS):
                    group.create_task(wait_in(name))
                group.create_task(fail())

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await run_group()
        assert [str(error) for error in raised.value.exceptions] == ["boom"]
        assert is_pristine()

    run(main)


def test_block_around_a_yield_of_an_async_generator_stays_in_the_consuming_task(run: Run):
    async def numbers() -> AsyncIterator[int]:
        with torch.no_grad(), torch.device("meta"):
            for number in range(3):
                await asyncio.sleep(0)
                assert not torch.is_grad_enabled()
                yield number

    async def watch(done: asyncio.Event) -> None:
        while not done.is_set():
            assert is_pristine()
            await asyncio.sleep(0)

    async def consume() -> None:
        async with aclosing(numbers()) as stream:
            async for number in stream:
                await asyncio.sleep(0)
                assert torch.ones(1).is_meta  # as for any generator, the block spans its consumer's turn
                if number == 1:
                    break
        assert is_pristine()

    async def main() -> None:
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(done))
            consumers = [group.create_task(consume()) for _ in range(3)]
            await asyncio.wait(consumers)
            done.set()

    run(main)


def test_callbacks_between_steps_find_a_pristine_thread(run: Run):
    async def main() -> None:
        found: list[bool] = []
        loop = asyncio.get_running_loop()
        with torch.inference_mode(), torch.device("meta"):
            loop.call_soon(lambda: found.append(is_pristine()))
            await asyncio.sleep(0)
            future = loop.create_future()
            future.add_done_callback(lambda _: found.append(is_pristine()))
            loop.call_soon(future.set_result, None)
            await future
        assert found == [True, True]

    run(main)


def test_task_starts_from_a_copy_of_its_creators_state(run: Run):
    async def child() -> Observation:
        await asyncio.sleep(0)
        return observe()

    async def main() -> None:
        for block in BLOCKS.values():
            with block():
                here = observe()
                started_inside = asyncio.create_task(child())
            started_outside = asyncio.create_task(child())
            assert await started_inside == here
            assert await started_outside == observe()

    run(main)


def test_state_around_the_loop_is_that_of_the_main_task_alone(run: Run):
    async def main() -> None:
        await asyncio.sleep(0)
        assert not torch.is_grad_enabled()
        with torch.enable_grad():
            task = asyncio.create_task(asyncio.sleep(0, result=None))
            await task
        torch.set_grad_enabled(True)
        await asyncio.sleep(0)
        assert torch.is_grad_enabled()

    with torch.no_grad():
        run(main)
        assert not torch.is_grad_enabled()


# -- random programs on a real loop -----------------------------------------------------------------------------------

steps = st.lists(st.none() | st.sampled_from(sorted(BLOCKS)), max_size=5)


@given(programs=st.lists(steps, min_size=2, max_size=5), loop_name=st.sampled_from(sorted(LOOP_FACTORIES)))
def test_random_tasks_see_what_they_would_see_alone(programs, loop_name):
    async def play(program: list[str | None], *, alone: bool) -> list[Observation]:
        if not program:
            return [observe()]
        first, *rest = program
        if first is None:
            if not alone:
                await asyncio.sleep(0)
            return [observe(), *await play(rest, alone=alone)]
        with BLOCKS[first]():
            seen = [observe(), *await play(rest, alone=alone)]
        return [*seen, observe()]

    async def main() -> None:
        expected = [await play(program, alone=True) for program in programs]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(program, alone=False)) for program in programs]
            while not all(task.done() for task in tasks):
                assert is_pristine()
                await asyncio.sleep(0)
        assert [task.result() for task in tasks] == expected

    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop_name]) as runner:
        install_task_factory(runner.get_loop())
        runner.run(main())


# -- the factory itself -----------------------------------------------------------------------------------------------


def test_task_still_names_the_users_coroutine(run: Run):
    async def users_coroutine() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(users_coroutine(), name="mine")
        await asyncio.sleep(0)
        assert task.get_name() == "mine"
        assert "users_coroutine() running at" in repr(task)
        assert __file__ in repr(task)
        coro = task.get_coro()
        assert isinstance(coro, Isolated)
        assert coro.__qualname__ == users_coroutine.__qualname__
        assert [frame.f_code for frame in task.get_stack()] == [users_coroutine.__code__]
        task.cancel()
        await asyncio.wait([task])

    run(main)


def test_task_gets_its_context(run: Run):
    variable = contextvars.ContextVar("variable", default="default")

    async def read() -> str:
        await asyncio.sleep(0)
        return variable.get()

    async def main() -> None:
        context = contextvars.copy_context()
        context.run(variable.set, "in the context")
        assert await asyncio.create_task(read(), context=context) == "in the context"
        assert await asyncio.create_task(read()) == "default"

    run(main)


def test_factory_takes_the_keywords_of_a_task(run: Run):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        task = task_factory(loop, asyncio.sleep(0, "result"), name="mine", context=context)
        assert task.get_name() == "mine"
        assert await task == "result"

    run(main)


def test_keywords_that_are_not_set_are_not_passed_on():
    """A loop may know keywords that the task, or the factory that was there before, does not."""

    def users_factory(loop, coro):
        return asyncio.Task(coro, loop=loop)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await task_factory(loop, asyncio.sleep(0, 1), name=None, context=None, unknown=None) == 1
        loop.set_task_factory(users_factory)
        install_task_factory(loop)
        factory: Any = loop.get_task_factory()
        assert await factory(loop, asyncio.sleep(0, 2), context=None, unknown=None) == 2

    asyncio.run(main())


def test_what_is_no_coroutine_is_refused_by_asyncio(run: Run):
    async def main() -> None:
        with pytest.raises(TypeError, match="a coroutine was expected"):
            task_factory(asyncio.get_running_loop(), 42)  # type: ignore[arg-type]

    run(main)


def test_isolated_coroutine_is_not_wrapped_again(run: Run):
    async def main() -> None:
        coro = isolate(asyncio.sleep(0))
        task = asyncio.create_task(coro)
        assert task.get_coro() is coro
        await task

    run(main)


async def test_installing_is_idempotent():
    loop = asyncio.get_running_loop()
    install_task_factory()
    assert loop.get_task_factory() is task_factory
    install_task_factory(loop)
    assert loop.get_task_factory() is task_factory


async def test_installing_keeps_the_factory_that_was_there():
    made = []

    def users_factory(loop, coro, **kwargs):
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **kwargs)

    async def work() -> bool:
        await asyncio.sleep(0)
        return is_isolated()

    loop = asyncio.get_running_loop()
    loop.set_task_factory(users_factory)
    install_task_factory(loop)
    chained = loop.get_task_factory()
    install_task_factory(loop)
    assert loop.get_task_factory() is chained
    assert await asyncio.create_task(work())
    assert await asyncio.create_task(work(), context=contextvars.copy_context())
    assert [type(coro) for coro in made] == [Isolated, Isolated]


@requires_eager_tasks
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_eager_task_leaves_its_creator_alone(run: Run, name):
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        install_task_factory()
        entered, leave = asyncio.Event(), asyncio.Event()
        before = observe()
        task = asyncio.create_task(hold(name, entered, leave))
        assert entered.is_set()
        assert observe() == before
        leave.set()
        outside, inside, still_inside, after = await task
        assert outside == after
        assert inside == still_inside

    run(main, isolating=False)


@requires_eager_tasks
def test_factory_passes_eager_start_on(run: Run):
    async def main() -> None:
        async def immediate() -> str:
            return "done"

        task = task_factory(asyncio.get_running_loop(), immediate(), eager_start=True)
        assert task.done()
        assert await task == "done"

    run(main)
