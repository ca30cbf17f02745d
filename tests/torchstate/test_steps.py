"""Something around each step of a coroutine, a generator, a task and a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from arpc.torchstate import AllSteps, Stepped, call_stepped, current_steps, step_result, task_factory, to_thread


class Log:
    """Counts the steps, and notes how they nest."""

    def __init__(self, name: str = "step", log: list[str] | None = None) -> None:
        self.name = name
        self.log: list[str] = [] if log is None else log

    def enter(self) -> str:
        self.log.append(f"+{self.name}")
        return self.name

    def leave(self, entered: str) -> None:
        self.log.append(f"-{entered}")


@pytest.fixture
def log() -> Iterator[Log]:
    yield Log()
    current_steps.set(None)


async def two_waits() -> str:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return "done"


async def test_each_step_of_a_coroutine(log: Log) -> None:
    assert await Stepped(two_waits(), log) == "done"
    assert log.log == ["+step", "-step"] * 3


async def test_what_is_raised_and_what_is_thrown_in(log: Log) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Stepped(fail(), log)
    task = asyncio.ensure_future(Stepped(two_waits(), log))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.log == ["+step", "-step"] * 4


def test_several_in_one(log: Log) -> None:
    both = AllSteps([Log("outer", log.log), Log("inner", log.log)])
    assert call_stepped(both, lambda: log.log.append("x")) is None
    assert log.log == ["+outer", "+inner", "x", "-inner", "-outer"]


async def test_an_async_generator_keeps_its_steps(log: Log) -> None:
    async def items() -> AsyncIterator[int]:
        for number in range(2):
            await asyncio.sleep(0)
            yield number

    assert [item async for item in step_result(log, items())] == [0, 1]
    assert log.log.count("+step") == log.log.count("-step") >= 5
    assert step_result(log, 5) == 5


async def test_threads_and_tasks_of_the_work(log: Log) -> None:
    current_steps.set(log)
    assert await to_thread(len, "four") == 4
    assert log.log == ["+step", "-step"]
    task = task_factory(asyncio.get_running_loop(), two_waits())
    assert await task == "done"
    assert log.log == ["+step", "-step"] * 4


async def test_tools_see_the_coroutine_inside(log: Log) -> None:
    coroutine = two_waits()
    stepped = Stepped(coroutine, log)
    assert stepped.__name__ == "two_waits"
    assert stepped.cr_frame is coroutine.cr_frame
    assert "two_waits" in repr(stepped)
    stepped.close()
    assert log.log == ["+step", "-step"]
