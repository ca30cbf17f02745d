"""The loop in its thread, and the door to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest
import torch

from arpc.agent.scope import WorkerScope, current_scope
from arpc.compat.loop_thread import LoopThread, Outcome, refuse_loop_thread
from arpc.errors import ShutdownError

variable: ContextVar[str] = ContextVar("variable", default="unset")


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("test")
    yield made
    made.stop()


async def read() -> tuple[str, bool, str]:
    await asyncio.sleep(0)
    return variable.get(), torch.is_grad_enabled(), threading.current_thread().name


def test_a_coroutine_has_the_context_and_the_state_of_the_thread_that_waits(thread: LoopThread) -> None:
    token = variable.set("mine")
    try:
        assert thread.run(read) == ("mine", True, "arpc-loop-test")
        with torch.no_grad():
            assert thread.run(read) == ("mine", False, "arpc-loop-test")
    finally:
        variable.reset(token)
    assert thread.run(read) == ("unset", True, "arpc-loop-test")


def test_each_thread_has_variables_of_its_own(thread: LoopThread) -> None:
    found: dict[str, str] = {}

    def work(name: str) -> None:
        variable.set(name)
        found[name] = thread.run(read)[0]

    workers = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {str(number): str(number) for number in range(4)}
    assert variable.get() == "unset"


def test_errors_are_raised_where_they_are_waited_for(thread: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("there")

    with pytest.raises(KeyError, match="there"):
        thread.run(fail)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    assert thread.call(lambda: 1) == 1


def test_what_is_under_way_at_the_end_is_ended() -> None:
    thread = LoopThread("short")
    begun = threading.Event()
    errors: list[BaseException] = []

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(3600)

    def work() -> None:
        try:
            thread.run(wait)
        except ShutdownError as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(30)
    thread.stop()
    worker.join(30)
    assert len(errors) == 1
    with pytest.raises(ShutdownError):
        thread.run(wait)
    thread.stop()


def test_blocking_is_refused_on_its_own_thread_only(thread: LoopThread) -> None:
    refuse_loop_thread("await this")
    with pytest.raises(RuntimeError, match="await this"):
        thread.call(lambda: refuse_loop_thread("await this"))


def test_an_outcome_is_handed_from_thread_to_thread() -> None:
    outcome: Outcome[int] = Outcome()
    threading.Thread(target=outcome.set, args=(3,)).start()
    assert outcome.wait() == 3


def test_a_handler_that_enters_has_called(thread: LoopThread) -> None:
    class Handler(WorkerScope):
        calls = 0

        def thread_call_begun(self) -> None:
            Handler.calls += 1

    token = current_scope.set(Handler("worker"))
    try:
        assert thread.call(current_scope.get) == Handler("worker")
        assert thread.caller_context()[current_scope] == Handler("worker")
    finally:
        current_scope.reset(token)
    assert Handler.calls == 2
    thread.scope = WorkerScope("another")
    assert thread.call(current_scope.get) == WorkerScope("another")
