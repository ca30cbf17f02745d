"""Running a program: the loop it gets, and what tasks on it keep to themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import pytest
import torch

import arpc
from arpc.testing import cluster
from tests.agent.stage import echo


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_it_runs_a_function_or_a_coroutine():
    assert arpc.run(answer) == 42
    assert arpc.run(answer()) == 42


def test_it_raises_what_the_program_raises():
    async def fail() -> None:
        raise LookupError("why")

    with pytest.raises(LookupError, match="why"):
        arpc.run(fail)


@pytest.mark.parametrize("main", [3, None, lambda: 3])
def test_it_takes_nothing_else(main):
    with pytest.raises(TypeError, match="takes an async function or a coroutine"):
        arpc.run(main)


async def test_it_says_what_to_do_where_a_loop_runs_already():
    with pytest.raises(RuntimeError, match=r"from a running event loop.*use await"):
        arpc.run(answer)


def test_a_request_to_terminate_cancels_the_program(monkeypatch):
    """The program ends its blocks first; then the process ends as whoever asked for it expects."""
    log: list[Any] = []
    monkeypatch.setattr(signal, "raise_signal", log.append)

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            log.append("left")

    with pytest.raises(asyncio.CancelledError):
        arpc.run(main)
    assert log == ["left", signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_with_plans_for_that_signal_keeps_them(monkeypatch):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:

        async def main() -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return await answer()

        assert arpc.run(main) == 42
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("debug", [True, False])
def test_debugging_is_up_to_the_caller(debug):
    async def is_debugging() -> bool:
        return asyncio.get_running_loop().get_debug()

    assert arpc.run(is_debugging, debug=debug) is debug


def test_the_loop_is_the_fast_one():
    uvloop = pytest.importorskip("uvloop")
    loop = arpc.new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_without_the_fast_one_there_is_asyncios(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = arpc.new_event_loop()
    assert isinstance(loop, asyncio.BaseEventLoop)
    loop.close()
    assert arpc.run(answer) == 42


def test_a_mode_of_torch_stays_in_its_task():
    async def main() -> list[bool]:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def wait_in_mode() -> bool:
            with torch.no_grad():
                entered.set()
                await leave.wait()
                return torch.is_grad_enabled()

        task = asyncio.create_task(wait_in_mode())
        await entered.wait()
        seen = torch.is_grad_enabled()
        leave.set()
        return [seen, await task, torch.is_grad_enabled()]

    assert arpc.run(main) == [True, False, True]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("runner", [arpc.run, asyncio.run])
def test_workers_run_on_either(runner):
    async def main() -> int:
        async with cluster(2):
            return await arpc.rpc_sync("worker1", echo, args=(42,))

    assert runner(main()) == 42


def test_a_block_around_the_run_is_around_its_coroutine_and_the_tasks_it_makes_only():
    seen: dict[str, bool] = {}

    async def note(name: str) -> None:
        seen[name] = torch.is_grad_enabled()
        await asyncio.sleep(0)
        seen[f"{name}, later"] = torch.is_grad_enabled()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        callback = loop.create_future()
        loop.call_soon(lambda: callback.set_result(torch.is_grad_enabled()))
        seen["callback"] = await callback
        await note("main")
        await asyncio.create_task(note("task"))
        with torch.enable_grad():
            await asyncio.create_task(note("task in a block"))
        await note("main again")

    with torch.no_grad():
        arpc.run(main)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert {name for name, is_enabled in seen.items() if is_enabled} == {
        "callback",
        "task in a block",
        "task in a block, later",
    }


@pytest.mark.parametrize(
    ("error", "is_quiet"),
    [
        (arpc.WorkerLostError("it left as well", "worker1"), True),
        (ExceptionGroup("calls", [arpc.WorkerLostError("gone", "ps"), arpc.ShutdownError("closed")]), True),
        (ExceptionGroup("calls", [arpc.WorkerLostError("gone", "ps"), ValueError("a mistake")]), False),
        (ValueError("a mistake"), False),
    ],
)
def test_when_a_whole_group_is_told_to_go_lost_peers_are_no_news(error, is_quiet, monkeypatch):
    log: list[Any] = []
    monkeypatch.setattr(signal, "raise_signal", log.append)

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error from None

    with pytest.raises(type(error)):
        arpc.run(main)
    assert log == ([signal.SIGTERM] if is_quiet else [])
