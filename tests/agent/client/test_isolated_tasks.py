"""Calls under `arpc.run`, where every task keeps torch's state to itself: those who wait go on within the read."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.hooks.observers import Observer
from arpc.agent.scope import current_scope
from arpc.errors import RpcTimeoutError
from arpc.testing import cluster
from arpc.torchstate import is_pristine
from arpc.transport.sockets import UnixTransport
from tests.agent.leftovers import until
from tests.agent.stage import echo

OPTIONS = arpc.RpcOptions(gc_freeze=False)
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


async def nothing() -> None:
    seen.append("called")


async def number() -> int:
    return 7


async def fail() -> None:
    raise ValueError("on purpose")


async def pause() -> None:
    await asyncio.sleep(0)


async def wait_for_ever() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("ended")


async def remaining() -> None:
    seen.append(arpc.remaining_time())


async def forget_to_switch_back() -> None:
    seen.append(torch.is_grad_enabled())
    torch.set_grad_enabled(False)


async def who_runs() -> None:
    seen.append(asyncio.current_task())


def nothing_in_thread() -> None:
    seen.append(threading.current_thread())


def number_in_thread() -> int:
    return 7


def fail_in_thread() -> None:
    raise ValueError("on purpose")


def remaining_in_thread() -> None:
    seen.append((arpc.remaining_time(), current_scope.get().caller.name))


gate = threading.Event()


def wait_in_thread() -> None:
    seen.append("waits")
    assert gate.wait(40), "nobody opened it"


def run(
    main: Callable[[Any, Any], Coroutine[Any, Any, None]],
    transports: Callable[[], dict[str, Any]] = dict,
    options: arpc.RpcOptions = OPTIONS,
) -> None:
    """As a program does: under `arpc.run`, where tasks are isolated."""

    async def in_a_group() -> None:
        async with cluster(2, options=options, transports=transports() or None) as group:
            await group[0].rpc_sync("worker1", nothing)
            seen.clear()
            await main(group[0], group[1])

    arpc.run(in_a_group())


def link_between(here: Any, there: Any) -> Any:
    """What a worker knows about its connection to another."""
    return here.agent.peer(there.name).connection.owner


def test_they_end_in_every_way():
    async def main(here: Any, _: Any) -> None:
        for _ in range(3):
            await here.rpc_sync("worker1", nothing)
            assert await here.rpc_sync("worker1", number) == 7
            with pytest.raises(ValueError, match="on purpose"):
                await here.rpc_sync("worker1", fail)
            await here.rpc_sync("worker1", pause)
            with pytest.raises(RpcTimeoutError):
                await here.rpc_sync("worker1", wait_for_ever, timeout=0.01)
        assert seen.count("called") == 3

    run(main)


# -- plain functions, in threads

SOCKET = OPTIONS.replace(shared_memory_bytes=0, listen=("unix://",))


def run_over_socket(main: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
    run(main, lambda: {"unix": UnixTransport()}, SOCKET)


@pytest.mark.parametrize("run", [run, run_over_socket])
def test_plain_functions_end_in_every_way(run):
    async def main(here: Any, there: Any) -> None:
        for _ in range(3):
            for count in (1, 40):  # alone, and many in one read

                async def call(function: Any, count: int = count) -> list[Any]:
                    calls = (here.rpc_sync("worker1", function) for _ in range(count))
                    return await asyncio.gather(*calls, return_exceptions=True)

                assert await call(nothing_in_thread) == [None] * count
                assert await call(number_in_thread) == [7] * count
                assert set(map(repr, await call(fail_in_thread))) == {"ValueError('on purpose')"}
        inbound = link_between(there, here)
        assert len(seen) == 3 * 41
        assert threading.current_thread() not in seen
        assert there.agent.dispatcher.threads.statistics()["jobs_unfinished"] == 0
        assert inbound.running == {}

    run(main)


@pytest.mark.parametrize("run", [run, run_over_socket])
def test_a_plain_function_that_is_stuck_holds_up_no_other(run):
    async def main(here: Any, _: Any) -> None:
        gate.clear()
        for _ in range(60):
            await here.rpc_sync("worker1", number_in_thread)
        stuck = asyncio.create_task(here.rpc_sync("worker1", wait_in_thread))
        try:
            others = [here.rpc_sync("worker1", number_in_thread) for _ in range(40)]
            assert await asyncio.gather(*others) == [7] * 40
            assert not stuck.done()
        finally:
            gate.set()
        await stuck

    run(main)


def test_a_plain_function_knows_its_caller_and_its_deadline():
    async def main(here: Any, _: Any) -> None:
        here.agent.timeouts.default_s = 40
        for _ in range(3):
            await here.rpc_sync("worker1", remaining_in_thread)
        assert [(round(left, -1), caller) for left, caller in seen] == [(40, "worker0")] * 3

    run(main)


def test_cancelling_a_plain_function_ends_it_for_its_caller():
    async def main(here: Any, there: Any) -> None:
        for _ in range(2):
            seen.clear()
            gate.clear()
            task = asyncio.create_task(here.rpc_sync("worker1", wait_in_thread))
            await until(lambda: seen == ["waits"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not link_between(there, here).running)
            gate.set()

    run_over_socket(main)


def test_cancelling_reaches_the_handler():
    async def main(here: Any, _: Any) -> None:
        here.agent.timeouts.default_s = 0
        for _ in range(2):
            task = asyncio.create_task(here.rpc_sync("worker1", wait_for_ever))
            await here.rpc_sync("worker1", pause)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while "ended" not in seen:  # noqa: ASYNC110 - it ends on another worker
                await asyncio.sleep(0.001)
            seen.clear()

    run(main)


def test_a_new_default_timeout_holds_from_the_next_call_on():
    async def main(here: Any, _: Any) -> None:
        for timeout_s in (40, 0, 20):
            here.agent.timeouts.default_s = timeout_s
            for _ in range(3):
                await here.rpc_sync("worker1", remaining)
        assert [None if left is None else round(left, -1) for left in seen] == [40] * 3 + [None] * 3 + [20] * 3

    run(main)


def test_torch_is_as_it_was_for_the_next_handler():
    async def main(here: Any, _: Any) -> None:
        for _ in range(3):
            await here.rpc_sync("worker1", forget_to_switch_back)
        assert seen == [True] * 3
        assert torch.is_grad_enabled()

    run(main)


def test_each_runs_in_a_task_and_the_caller_in_another():
    async def main(here: Any, _: Any) -> None:
        await here.rpc_sync("worker1", who_runs)
        await here.rpc_sync("worker1", who_runs)
        assert all(isinstance(task, asyncio.Task) and task is not asyncio.current_task() for task in seen)

    run(main)


def test_whoever_meters_or_observes_sees_them():
    class Meter:
        def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
            seen.append("call")

        def handler_ended(self, peer: str, function: str, duration_ns: int) -> None:
            seen.append("handler")

        def handler_failed(self, peer: str, function: str, error: BaseException) -> None:
            seen.append("failure")

    class Watcher(Observer):
        key = "watcher"

        def handler_begins(self, handling: Any) -> None:
            seen.append("observed")

    async def main(here: Any, there: Any) -> None:
        for worker in (here, there):
            worker.agent.set_meter(Meter())
        await here.rpc_sync("worker1", number)
        assert sorted(seen) == ["call", "handler"]
        for worker in (here, there):
            worker.agent.set_meter(None)
        seen.clear()
        watcher = Watcher()
        there.agent.observe(watcher)
        await here.rpc_sync("worker1", nothing)
        assert "observed" in seen
        there.agent.unobserve(watcher)
        seen.clear()
        await here.rpc_sync("worker1", nothing)
        assert seen == ["called"]

    run(main)


def test_a_connection_that_was_lost_is_made_again():
    async def main(here: Any, there: Any) -> None:
        peer = here.agent.peer("worker1")
        await here.rpc_sync("worker1", nothing)
        assert nothing in peer.function_ids
        peer.connection.abort(ConnectionError("on purpose"))
        while peer.connection is not None:  # noqa: ASYNC110 - it ends in a turn of the loop or two
            await asyncio.sleep(0)
        assert not peer.function_ids
        await here.rpc_sync("worker1", nothing)
        await here.rpc_sync("worker1", nothing)
        assert peer.connects == 2
        assert nothing in peer.function_ids

    run(main)


def test_who_waits_for_one_goes_on_in_its_own_context_and_state():
    color = contextvars.ContextVar("color", default="none")

    async def call(here: Any, name: str) -> None:
        color.set(name)
        with torch.no_grad():
            for _ in range(2):
                await here.rpc_sync("worker1", pause)
                seen.append((color.get(), asyncio.current_task() is tasks[name], is_pristine()))

    async def main(here: Any, _: Any) -> None:
        await here.rpc_sync("worker1", pause)
        tasks["red"] = asyncio.create_task(call(here, "red"))
        await tasks["red"]
        assert seen == [("red", True, False)] * 2
        assert is_pristine()

    tasks: dict[str, asyncio.Task[None]] = {}
    run(main)


def test_those_whose_replies_come_together_each_have_their_own():
    async def main(here: Any, _: Any) -> None:
        for _ in range(2):
            await asyncio.gather(*(here.rpc_sync("worker1", function) for function in (pause, number)))
        results = await asyncio.gather(
            *(here.rpc_sync("worker1", function) for _ in range(20) for function in (pause, number, pause))
        )
        assert results == [None, 7, None] * 20

    run(main)


def test_one_that_goes_on_may_cancel_those_that_came_with_it():
    async def call(here: Any) -> None:
        await here.rpc_sync("worker1", pause)
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def main(here: Any, there: Any) -> None:
        await here.rpc_sync("worker1", pause)
        for _ in range(2):
            tasks[:] = [asyncio.create_task(call(here)) for _ in range(20)]
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [False] + [True] * 19
        await here.rpc_sync("worker1", pause)
        assert not len(link_between(here, there).peer.calls)

    tasks: list[asyncio.Task[None]] = []
    run(main)


def test_one_that_goes_on_may_end_the_connection():
    async def call(here: Any, connection: Any) -> None:
        await here.rpc_sync("worker1", pause)
        connection.abort(ConnectionError("on purpose"))

    async def main(here: Any, there: Any) -> None:
        await here.rpc_sync("worker1", pause)
        connection = link_between(here, there).connection
        calls = [call(here, connection) for _ in range(20)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert first is None
        # those whose replies came with the first have theirs; the rest is lost
        assert all(outcome is None or isinstance(outcome, arpc.WorkerLostError) for outcome in others)
        assert isinstance(others[-1], arpc.WorkerLostError)
        await here.rpc_sync("worker1", pause)

    run(main)


def test_what_must_end_the_loop_after_a_call_does_so():
    async def leave(here: Any) -> None:
        await here.rpc_sync("worker1", nothing)
        raise SystemExit(3)

    async def main(here: Any, _: Any) -> None:
        await here.rpc_sync("worker1", nothing)
        tasks.append(asyncio.create_task(leave(here)))
        await asyncio.Event().wait()

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(SystemExit) as raised:
        run(main)
    assert raised.value is tasks[0].exception()
    assert seen == ["called", "called"]


@pytest.mark.parametrize("args", [(), (torch.ones(2),)], ids=["no arguments", "a tensor"])
def test_who_finds_what_a_task_waits_for_may_wait_for_it_too(args):
    async def main(here: Any, there: Any) -> None:
        function = echo if args else pause
        for _ in range(2):
            await here.rpc_sync("worker1", function, args=args)
        task = asyncio.create_task(here.rpc_sync("worker1", function, args=args))
        await asyncio.sleep(0)
        task._fut_waiter.add_done_callback(lambda _: seen.append("heard"))  # type: ignore[attr-defined]
        connection = link_between(here, there).connection
        async with asyncio.timeout(30):
            assert (await task) is (None if not args else task.result())
        assert seen == ["heard"]
        assert connection.is_open

    run(main)
