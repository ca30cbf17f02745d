"""Observers hear of every call and handler, send headers along, and surround each step of a handler."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.hooks.observers import Handling, Kind, Observer, Outcome, Outgoing
from arpc.errors import RpcTimeoutError
from arpc.ids import WorkerInfo
from arpc.testing import Cluster, cluster
from tests.agent.stage import Stage, call_on, call_on_in_thread, echo, the_stage

_inside: ContextVar[int] = ContextVar("inside", default=0)
_thread = threading.local()


class Log(Observer):
    """Writes down what it hears."""

    key = "log"

    def __init__(self) -> None:
        self.requests: list[Outgoing] = []
        self.ended: list[Outgoing] = []
        self.accepted: list[Handling] = []
        self.begun: list[Handling] = []
        self.handled: list[Handling] = []
        self.steps = 0
        self.replies: list[Any] = []
        self.threads: list[str] = []

    def thread_calls(self, context: Any, peer: str, function: Any) -> None:
        self.threads.append(peer)
        context.run(_inside.set, 7)

    def request_begins(self, request: Outgoing) -> None:
        self.requests.append(request)
        request.headers["log"] = ["hello", _inside.get()]

    def request_ends(self, request: Outgoing) -> None:
        self.ended.append(request)

    def reply_came(self, peer: WorkerInfo, header: Any) -> None:
        self.replies.append((peer.name, header))

    def handler_accepted(self, handling: Handling) -> None:
        self.accepted.append(handling)

    def handler_begins(self, handling: Handling) -> Log:
        self.begun.append(handling)
        _inside.set(handling.id)
        return self

    def enter(self) -> int:
        self.steps += 1
        depth: int = getattr(_thread, "depth", 0)
        _thread.depth = depth + 1
        return depth

    def leave(self, entered: int) -> None:
        _thread.depth = entered

    def reply_leaves(self, handling: Handling) -> Any:
        return [*handling.headers["log"], handling.function]

    def handler_ends(self, handling: Handling) -> None:
        self.handled.append(handling)


@contextmanager
def observing(worker: arpc.Worker, *logs: Log) -> Iterator[None]:
    for log in logs:
        worker.agent.observe(log)
    try:
        yield
    finally:
        for log in logs:
            worker.agent.unobserve(log)


def depth() -> int:
    return getattr(_thread, "depth", 0)


async def depths() -> list[int]:
    """Before and after a wait, in a child task, and in a thread."""
    before = depth()
    await asyncio.sleep(0)
    return [before, depth(), await arpc.to_thread(depth)]


async def depth_in_task() -> int:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(depth_later())
    return task.result()


async def depth_later() -> int:
    await asyncio.sleep(0)
    return depth()


def depth_in_thread() -> int:
    return depth()


async def count_depths() -> AsyncIterator[int]:
    for _ in range(3):
        await asyncio.sleep(0)
        yield depth()


def count_depths_in_thread() -> Iterator[int]:
    for _ in range(3):
        yield depth()


async def fail() -> None:
    raise ValueError("no")


async def wait_for_gate() -> None:
    the_stage().reached("handler")
    await the_stage().pass_gate()


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def test_a_call_is_told_on_both_sides(pair: Cluster) -> None:
    caller, callee = Log(), Log()
    with observing(pair[0], caller), observing(pair[1], callee):
        assert await pair[0].rpc_sync("worker1", echo, args=(5,)) == 5
        assert await pair[0].rpc_async("worker1", echo, args=(torch.ones(1 << 16),)) is not None
    (request, large), (handling, large_handling) = caller.ended, callee.handled
    assert (request.peer.name, request.function, request.kind, request.outcome) == (
        "worker1",
        "echo",
        Kind.CALL,
        Outcome.OK,
    )
    assert (request.is_awaited, large.is_awaited) == (True, False)
    assert handling.id == request.id
    assert (handling.peer.name, handling.function, handling.outcome) == ("worker0", "echo", Outcome.OK)
    assert request.began_ns <= handling.accepted_ns <= handling.began_ns <= handling.ended_ns <= request.ended_ns
    assert request.sent_bytes > 0
    assert request.received_bytes > 0
    for size in (large.sent_bytes, large.received_bytes, large_handling.sent_bytes, large_handling.received_bytes):
        assert size > 1 << 18
    assert caller.replies[0] == ("worker1", ["hello", 0, "echo"])


async def test_the_answer_to_a_creation_brings_headers_although_the_value_stays(pair: Cluster) -> None:
    caller, callee = Log(), Log()
    with observing(pair[0], caller), observing(pair[1], callee):
        for function in (depth_later, depth_in_thread):
            rref = pair[0].remote("worker1", function)
            await rref._get_future()
            await rref.release()
    names = [header[2] for _, header in caller.replies]
    assert [name for name in names if name.startswith("depth")] == ["depth_later", "depth_in_thread"]


async def test_every_step_of_a_handler_is_surrounded(pair: Cluster) -> None:
    log = Log()
    with observing(pair[1], log):
        assert await pair[0].rpc_sync("worker1", depths) == [1, 1, 1]
        assert await pair[0].rpc_sync("worker1", depth_in_thread) == 1
        assert [item async for item in pair[0].stream("worker1", count_depths)] == [1, 1, 1]
        assert [item async for item in pair[0].stream("worker1", count_depths_in_thread)] == [1, 1, 1]
        assert await pair[0].remote("worker1", depth_in_thread) == 1
        assert await pair[0].remote("worker1", depth_later) == 1
    assert await pair[0].rpc_sync("worker1", depths) == [0, 0, 0]
    kinds = [handling.kind for handling in log.handled if handling.kind is not Kind.CONTROL]
    assert kinds[:5] == [Kind.CALL, Kind.CALL, Kind.STREAM, Kind.STREAM, Kind.REMOTE]


def test_tasks_of_a_handler_are_surrounded() -> None:
    async def main() -> None:
        async with cluster(2) as group:
            log = Log()
            with observing(group[1], log):
                assert await group[0].rpc_sync("worker1", depth_in_task) == 1
            assert await group[0].rpc_sync("worker1", depth_in_task) == 0

    arpc.run(main())


async def test_several_observers_compose(pair: Cluster) -> None:
    first, second = Log(), Log()
    with observing(pair[1], first, second):
        assert await pair[0].rpc_sync("worker1", depths) == [2, 2, 2]
    assert first.steps == second.steps > 0
    assert len(first.handled) == len(second.handled) == 1


async def test_outcomes(pair: Cluster, stage: Stage) -> None:
    caller, callee = Log(), Log()
    with observing(pair[0], caller), observing(pair[1], callee):
        with pytest.raises(ValueError, match="no"):
            await pair[0].rpc_sync("worker1", fail)
        with pytest.raises(RpcTimeoutError):
            await pair[0].rpc_sync("worker1", wait_for_gate, timeout=0.05)
        waits = pair[0].rpc_async("worker1", wait_for_gate)
        await stage.wait_until("handler")
        waits.cancel()
        with pytest.raises(arpc.SerializationError):
            await pair[0].rpc_sync("worker1", echo, args=(threading.Lock(),))
        await pair[0].rpc_sync("worker1", echo)
    outcomes = Counter(request.outcome for request in caller.ended)
    assert outcomes == {Outcome.ERROR: 2, Outcome.TIMED_OUT: 1, Outcome.CANCELLED: 1, Outcome.OK: 1}
    assert len(caller.requests) == len(caller.ended)
    assert len(callee.accepted) == len(callee.handled)
    assert {handling.outcome for handling in callee.handled} >= {Outcome.ERROR, Outcome.CANCELLED, Outcome.OK}


async def test_what_waits_is_accepted_and_begins_later(stage: Stage) -> None:
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False, max_handlers_per_peer=1)) as group:
        log = Log()
        with observing(group[1], log):
            first = group[0].rpc_async("worker1", wait_for_gate)
            await stage.wait_until("handler")
            second = group[0].rpc_async("worker1", echo)
            third = group[0].rpc_async("worker1", echo)
            await turns_until(lambda: len(log.accepted) == 3)
            assert len(log.begun) == 1
            third.cancel()
            await turns_until(lambda: bool(log.handled))
            assert (log.handled[0].outcome, log.handled[0].began_ns) == (Outcome.CANCELLED, 0)
            stage.open()
            await asyncio.gather(first, second)
        assert len(log.handled) == 3
        assert log.handled[2].began_ns >= log.handled[1].ended_ns


async def test_what_is_refused_for_want_of_room_has_ended(stage: Stage) -> None:
    options = arpc.RpcOptions(gc_freeze=False, max_handlers_per_peer=1, max_requests_waiting=1)
    async with cluster(2, options=options) as group:
        log = Log()
        with observing(group[1], log):
            first = group[0].rpc_async("worker1", wait_for_gate)
            await stage.wait_until("handler")
            second = group[0].rpc_async("worker1", echo)
            with pytest.raises(arpc.OverloadedError):
                await group[0].rpc_sync("worker1", echo)
            (refused,) = log.handled
            assert (refused.outcome, refused.began_ns) == (Outcome.ERROR, 0)
            stage.open()
            await asyncio.gather(first, second)
            assert not any(group[1].agent.observers._waiting.values())


async def test_a_thread_may_set_what_the_loop_finds(pair: Cluster) -> None:
    log = Log()
    with observing(pair[1], log):
        await pair[0].rpc_sync("worker1", call_on_in_thread, args=("worker0", echo, 3))
    assert log.threads == ["worker0"]
    (request,) = log.ended
    assert request.headers == {"log": ["hello", 7]}


class Standing(Log):
    """Makes headers while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[None] = []

    @property
    def occasions(self) -> list[None]:
        return self.wanted


async def test_one_that_stands_by_hears_of_what_brings_its_header(pair: Cluster) -> None:
    standing = [Standing(), Standing()]
    for worker, log in zip(pair, standing, strict=True):
        worker.agent.observers.standing = (log,)
        worker.agent._wrap_sender()  # as if it had been made with it
    await pair[0].rpc_sync("worker1", depths)
    assert not standing[1].accepted
    standing[0].wanted.append(None)
    assert await pair[0].rpc_sync("worker1", depths) == [1, 1, 1]
    assert await pair[0].rpc_sync("worker1", depth_in_thread) == 1
    standing[0].wanted.clear()
    assert await pair[0].rpc_sync("worker1", depths) == [0, 0, 0]
    assert [handling.outcome for handling in standing[1].handled] == [Outcome.OK] * 2
    assert [reply for _, reply in standing[0].replies] == [["hello", 0, "depths"], ["hello", 0, "depth_in_thread"]]


async def test_installed_while_calls_are_under_way(pair: Cluster, stage: Stage) -> None:
    waits = pair[0].rpc_async("worker1", wait_for_gate)
    await stage.wait_until("handler")
    log = Log()
    with observing(pair[0], log), observing(pair[1], log):
        stage.open()
        await waits
        begun = pair[0].rpc_async("worker1", call_on, args=("worker0", echo, 1))
    await begun
    assert len(log.requests) == len(log.ended) == 1
    assert not any(call.observed for _, call in pair[0].agent.known_peer("worker1").calls)
