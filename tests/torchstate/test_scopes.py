"""no_grad() and its siblings: right in every task, or a clear error at the await that would leak."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
import torch

from arpc.errors import ArpcError, TorchStateError
from arpc.torchstate import (
    GradScope,
    enable_grad,
    inference_mode,
    is_pristine,
    isolate,
    no_grad,
    set_grad_enabled,
)
from tests.torchstate.conftest import Run

# name: (arpc's scope, torch's block), entered from inside torch.no_grad() where they would otherwise change nothing
SCOPES: dict[str, tuple[Callable[[], GradScope], Callable[[], Any]]] = {
    "no_grad": (no_grad, torch.no_grad),
    "enable_grad": (enable_grad, torch.enable_grad),
    "set_grad_enabled_true": (lambda: set_grad_enabled(True), torch.enable_grad),
    "set_grad_enabled_false": (lambda: set_grad_enabled(False), torch.no_grad),
    "inference_mode": (inference_mode, torch.inference_mode),
    "inference_mode_false": (lambda: inference_mode(False), lambda: torch.inference_mode(False)),
}
every_scope = pytest.mark.parametrize(("scope", "block"), SCOPES.values(), ids=SCOPES)
both_bases = pytest.mark.parametrize("base", [torch.enable_grad, torch.no_grad])


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def modes_in(block: Any) -> tuple[bool, bool]:
    with block:
        return modes()


# -- blocks -----------------------------------------------------------------------------------------------------------


@both_bases
@every_scope
def test_in_synchronous_code_a_scope_is_torchs_block(scope, block, base):
    with base():
        expected = modes_in(block())
        reused = scope()
        assert modes_in(reused) == expected
        assert modes_in(reused) == expected


@both_bases
@every_scope
def test_in_an_isolated_task_a_scope_follows_the_coroutine(run: Run, scope, block, base):
    async def main() -> None:
        with base():
            expected = modes_in(block())
            outside = modes()
            with scope():
                await asyncio.sleep(0)
                assert modes() == expected
            assert modes() == outside
            async with scope():
                await asyncio.sleep(0)
                assert modes() == expected
            assert modes() == outside

    run(main)


def test_calling_set_grad_enabled_changes_nothing_by_itself():
    set_grad_enabled(False)
    assert torch.is_grad_enabled()


def test_scope_entered_twice_at_a_time_is_refused():
    scope = no_grad()
    with scope, pytest.raises(TorchStateError, match="already entered"):
        scope.__enter__()
    assert is_pristine()


async def test_in_a_callback_a_scope_is_torchs_block():
    done: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(modes_in(no_grad())))
    assert await done == (False, False)


# -- a task that nobody isolates --------------------------------------------------------------------------------------


def test_block_without_await_is_fine_in_any_task(run: Run):
    async def main() -> None:
        for _ in range(3):
            with no_grad():
                assert not torch.is_grad_enabled()
            async with inference_mode():
                assert torch.is_inference_mode_enabled()
            await asyncio.sleep(0)
        assert is_pristine()

    run(main, isolating=False)


@pytest.mark.parametrize("asynchronously", [False, True])
@pytest.mark.parametrize("scope", [no_grad, inference_mode])
def test_await_in_a_block_of_a_task_that_nobody_isolates_is_an_error(run: Run, scope, asynchronously):
    reached = []

    async def leaky() -> None:
        if asynchronously:
            async with scope():
                await asyncio.Event().wait()
                reached.append("after the await")
        else:
            with scope():
                await asyncio.Event().wait()
                reached.append("after the await")

    async def main() -> None:
        task = asyncio.create_task(leaky(), name="trainer")
        with pytest.raises(
            TorchStateError, match=r"'trainer' awaited inside .*arpc\.run.*install_task_factory"
        ) as error:
            await task
        assert isinstance(error.value, ArpcError)
        assert isinstance(error.value.__cause__, asyncio.CancelledError)
        assert not task.cancelled()
        assert task.cancelling() == 0
        assert is_pristine()

    run(main, isolating=False)
    assert reached == []


def test_the_state_is_taken_back_at_once(run: Run):
    async def leaky() -> None:
        with no_grad(), inference_mode():
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(leaky())
        await asyncio.sleep(0)  # it runs into its blocks
        await asyncio.sleep(0)  # the watch runs; the task will hear of it in its next step
        assert not task.done()
        assert is_pristine()
        with pytest.raises(TorchStateError):
            await task

    run(main, isolating=False)


def test_of_nested_blocks_the_outermost_raises(run: Run):
    async def leaky() -> None:
        with no_grad():
            with suppress(TorchStateError), inference_mode():
                await asyncio.sleep(0)
            raise AssertionError

    async def main() -> None:
        with pytest.raises(TorchStateError, match=r"inside no_grad\(\)"):
            await asyncio.create_task(leaky())
        assert is_pristine()

    run(main, isolating=False)


def test_block_that_hides_the_interruption_raises_all_the_same(run: Run):
    async def leaky(error: Exception | None) -> None:
        with no_grad():
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if error is not None:
                    raise error from None

    async def main() -> None:
        with pytest.raises(TorchStateError) as raised:
            await asyncio.create_task(leaky(None))
        assert raised.value.__cause__ is None
        error = ValueError("boom")
        with pytest.raises(TorchStateError) as raised:
            await asyncio.create_task(leaky(error))
        assert raised.value.__cause__ is error

    run(main, isolating=False)


def test_cancellation_from_outside_wins(run: Run):
    async def leaky() -> None:
        with no_grad():
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(leaky())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert is_pristine()

    run(main, isolating=False)


def test_base_state_of_the_thread_comes_back(run: Run):
    async def leaky() -> None:
        with enable_grad():
            await asyncio.sleep(0)

    async def main() -> None:
        with pytest.raises(TorchStateError):
            await asyncio.create_task(leaky())
        assert not torch.is_grad_enabled()

    with torch.no_grad():
        run(main, isolating=False)


def test_block_in_an_isolated_coroutine_of_such_a_task_may_await(run: Run):
    async def work() -> None:
        with no_grad():
            await asyncio.sleep(0)
            assert not torch.is_grad_enabled()

    run(lambda: isolate(work()), isolating=False)


# -- decorators -------------------------------------------------------------------------------------------------------


@both_bases
@every_scope
def test_decorated_coroutine_function_is_exact_in_any_task(run: Run, scope, block, base):
    @scope()
    async def decorated(entered: asyncio.Event, leave: asyncio.Event) -> list[tuple[bool, bool]]:
        seen = [modes()]
        entered.set()
        await leave.wait()
        return [*seen, modes()]

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        with base():  # around the first step only: what a decorated function starts from
            expected = modes_in(block())
            task = asyncio.create_task(decorated(entered, leave))
            await asyncio.sleep(0)
        assert entered.is_set()
        assert is_pristine()
        leave.set()
        assert await task == [expected, expected]
        assert is_pristine()

    run(main, isolating=False)


def test_decorated_coroutine_function_stays_one():
    @no_grad()
    async def evaluate(x: int, *, y: int = 1) -> int:
        """Docs."""

    assert inspect.iscoroutinefunction(evaluate)
    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Docs.")
    assert str(inspect.signature(evaluate)) == "(x: 'int', *, y: 'int' = 1) -> 'int'"


async def test_decorated_coroutine_function_passes_arguments_results_and_exceptions():
    @inference_mode
    async def divide(a: int, *, by: int) -> float:
        await asyncio.sleep(0)
        return a / by

    assert await divide(1, by=2) == 0.5
    with pytest.raises(ZeroDivisionError):
        await divide(1, by=0)
    assert is_pristine()


async def test_decorated_coroutine_function_can_be_cancelled():
    cleaned_up_in = []

    @no_grad
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up_in.append(modes())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert is_pristine()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up_in == [(False, False)]
    assert is_pristine()


@pytest.mark.parametrize("decorator", [no_grad, no_grad(), set_grad_enabled(False)])
def test_decorated_function_and_generator(decorator):
    @decorator
    def function() -> bool:
        return torch.is_grad_enabled()

    @decorator
    def generator() -> Iterator[bool]:
        yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()

    assert function() is False
    for enabled in generator():
        assert not enabled
        assert torch.is_grad_enabled()


def test_enable_grad_as_a_bare_decorator():
    @enable_grad
    def function() -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert function() is True


@every_scope
def test_decorated_async_generator_keeps_its_mode_from_its_consumer(run: Run, scope, block):
    @scope()
    async def generator() -> AsyncIterator[tuple[bool, bool]]:
        for _ in range(3):
            await asyncio.sleep(0)
            yield modes()

    async def main() -> None:
        expected = modes_in(block())
        async for seen in generator():
            assert seen == expected
            assert is_pristine()
            await asyncio.sleep(0)

    assert inspect.isasyncgenfunction(generator)
    run(main, isolating=False)


async def test_decorated_async_generator_keeps_its_own_blocks_across_yields():
    @no_grad()
    async def generator() -> AsyncIterator[bool]:
        with torch.device("meta"), torch.autocast("cpu"):
            for _ in range(2):
                yield torch.ones(1).is_meta and torch.is_autocast_enabled("cpu")
        yield torch.ones(1).is_meta

    seen = []
    async for value in generator():
        assert is_pristine()
        seen.append(value)
    assert seen == [True, True, False]


async def test_decorated_async_generator_speaks_the_whole_protocol():
    events = []

    @no_grad()
    async def generator() -> AsyncGenerator[Any, Any]:
        received = yield "first"
        events.append(("sent", received, modes()))
        try:
            yield "second"
        except ValueError as error:
            events.append(("thrown", str(error), modes()))
        try:
            yield "third"
        finally:
            await asyncio.sleep(0)
            events.append(("closed", None, modes()))

    stream = generator()
    assert await anext(stream) == "first"
    assert await stream.asend("hello") == "second"
    assert await stream.athrow(ValueError("boom")) == "third"
    await stream.aclose()
    off = (False, False)
    assert events == [("sent", "hello", off), ("thrown", "boom", off), ("closed", None, off)]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_decorated_async_generator_passes_exceptions_on():
    @no_grad()
    async def failing() -> AsyncIterator[int]:
        yield 1
        raise ValueError("boom")

    @no_grad()
    async def passive() -> AsyncIterator[int]:
        yield 1

    async with aclosing(failing()) as stream:
        assert await anext(stream) == 1
        with pytest.raises(ValueError, match="boom"):
            await anext(stream)
    stream = passive()
    assert await anext(stream) == 1
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("thrown in"))
    assert is_pristine()


def test_generator_based_scopes_nest():
    @no_grad()
    def outer() -> Generator[bool, None, None]:
        with enable_grad():
            yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()

    assert list(outer()) == [True, False]
