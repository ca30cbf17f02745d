"""Await stacks: every handler and every call of a worker, with its chain of awaits, its deadline and its caller.

asyncio can print the stack of a task, but it stops at the first awaitable that is not a coroutine, and does not have
the call that the task waits for on another worker. Here the chain is followed through coroutines, generators and async
generators, and its end is matched with the calls in flight. So the dumps of two workers can be joined: the handler that
a call waits for has the same caller and the same call id.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.pending_calls import SEQUENCE_BITS, Call
from arpc.agent.peers.link import Link
from arpc.agent.server.functions import Mode
from arpc.agent.server.run import Run
from arpc.agent.server.thread_job import ThreadJob
from arpc.ids import WorkerInfo
from arpc.private.asyncio import awaited_by
from arpc.private.interpreter import frames_of_threads
from arpc.wire.messages import Inspect

__all__ = ["AwaitedCall", "CallStack", "HandlerStack", "TaskStack", "WorkerStack", "await_chain", "dump"]

_MAX_FRAMES: Final = 64
_MAX_ROWS: Final = 2_000
"""A worker with a hundred thousand calls in flight reports some of them, and how many it leaves out."""
_OWN: Final = str(Path(__file__).parents[1]) + os.sep
_ASYNCIO: Final = str(Path(asyncio.__file__).parent) + os.sep
_SERVER: Final = f"{os.sep}aiohttp{os.sep}web_"


class AwaitedCall(msgspec.Struct, frozen=True):
    """The call that a handler or a task waits for."""

    to: str
    id: int
    function: str


class HandlerStack(msgspec.Struct, frozen=True):
    """A handler that has not ended."""

    id: int
    caller: str
    function: str
    kind: str
    """coroutine, thread, stream, or queued if it has not begun."""
    age_s: float | None
    """Seconds since its timeout began; None if it has no deadline, because the clock is then not read."""
    left_s: float | None
    """Seconds until its deadline; None if it has none."""
    frames: list[str]
    """The frames of its chain of awaits, or of its thread, outermost first."""
    awaits: AwaitedCall | None


class CallStack(msgspec.Struct, frozen=True):
    """A call that has not ended."""

    id: int
    to: str
    function: str
    state: str
    """sent, or waiting: for a connection, or for room in the window."""
    left_s: float | None


class TaskStack(msgspec.Struct, frozen=True):
    """A task of the program itself, which runs no handler."""

    name: str
    frames: list[str]
    awaits: AwaitedCall | None


class WorkerStack(msgspec.Struct, frozen=True):
    """All handlers, calls and tasks of one worker."""

    name: str
    id: int
    pid: int
    time_s: float
    handlers: list[HandlerStack]
    calls: list[CallStack]
    tasks: list[TaskStack]
    requests_waiting: int
    """The number of requests that have not begun because their callers have too many others running."""
    not_told: int
    """The number of handlers, calls and tasks left out: those beyond the first two thousand of each."""


def dump(agent: Agent, info: WorkerInfo, pid: int) -> WorkerStack:
    """Return all handlers, calls and tasks that wait on this worker now. Must be called on its loop."""
    now = agent.loop.time()
    awaited = {
        id(future): AwaitedCall(peer.info.name, call_id, call.name)
        for peer in agent.peers
        for call_id, call in peer.calls
        for future in _futures_of(call)
    }
    runs = [
        (link, run) for link in agent.connector.links if not link.is_onlooker for run in list(link.running.values())
    ]
    threads = _frames_by_run() if any(run.function.mode is Mode.THREAD for _, run in runs) else {}
    calls = [
        (peer.info.name, call_id, call)
        for peer in agent.peers
        for call_id, call in peer.calls
        if call.function is not Inspect
    ]
    blocking = [
        CallStack(call_id, peer.info.name, name, "sent", left_s)
        for peer in agent.peers
        for call_id, name, left_s in peer.calls_of_threads()
    ]
    carriers = {id(run.task) for _, run in runs if run.task is not None}
    tasks = [
        task
        for task in asyncio.all_tasks(agent.loop)
        if id(task) not in carriers and task is not asyncio.current_task() and not _is_internal(task)
    ]
    return WorkerStack(
        name=info.name,
        id=info.id,
        pid=pid,
        time_s=time.time(),
        handlers=[_handler(link, run, now, awaited, threads) for link, run in runs[:_MAX_ROWS]],
        calls=[_call(to, call_id, call, now) for to, call_id, call in calls[:_MAX_ROWS]] + blocking,
        tasks=[
            TaskStack(task.get_name(), list(_chain_of(task.get_coro())), _awaited_by(task, awaited))
            for task in sorted(tasks, key=lambda task: task.get_name())[:_MAX_ROWS]
        ],
        requests_waiting=sum(len(link.waiting) for link in agent.connector.links),
        not_told=sum(max(0, len(rows) - _MAX_ROWS) for rows in (runs, calls, tasks)),
    )


def _handler(
    link: Link, run: Run, now: float, awaited: Mapping[int, AwaitedCall], threads: Mapping[int, list[str]]
) -> HandlerStack:
    deadline = run.due  # reading `deadline` could start the timeout now
    left_s = None if deadline is None else deadline - now
    frames = list(_chain_of(run.coroutine))
    kind = "stream" if run.producer is not None else "coroutine"
    if run.function.mode is Mode.THREAD and run.coroutine is None:
        frames = threads.get(id(run), [])
        kind = "thread" if frames else "queued"
    elif run.producer is not None:
        frames = [*frames, *_chain_of(run.producer._iterable)]  # noqa: SLF001 - only to read it
    return HandlerStack(
        id=run.id,
        caller=link.caller.name,
        function=run.name,
        kind=kind,
        age_s=None if left_s is None else run.timeout_ms / 1000 - left_s,
        left_s=left_s,
        frames=frames,
        awaits=None if run.task is None else _awaited_by(run.task, awaited),
    )


def _call(to: str, call_id: int, call: Call, now: float) -> CallStack:
    tick = call_id >> SEQUENCE_BITS
    left_s = None if tick == NEVER else Deadlines.time_of(tick) - now
    return CallStack(call_id, to, call.name, "waiting" if call.connection is None else "sent", left_s)


def _futures_of(call: Call) -> Iterator[object]:
    """Yield the futures that code may await for a call: its own, and those of the objects that its callbacks notify."""
    future = call.recipient
    yield future
    hearers = [getattr(callback, "__self__", None) for callback, _ in getattr(future, "_callbacks", None) or ()]
    for hearer in (future, *hearers):
        waiter = getattr(hearer, "waiter", None)
        if waiter is not None:
            yield waiter


def _awaited_by(task: asyncio.Task[Any], awaited: Mapping[int, AwaitedCall]) -> AwaitedCall | None:
    return awaited.get(id(awaited_by(task)))


def _is_internal(task: asyncio.Task[Any]) -> bool:
    """Return whether a task belongs to the runtime, or to the server of its dashboard."""
    files = [frame.f_code.co_filename for frame, _ in _frames(task.get_coro())]
    if not files or task.get_name().startswith("arpc-"):
        return True
    return _SERVER in files[0] or all(file.startswith((_OWN, _ASYNCIO)) for file in files)


def await_chain(awaitable: Any) -> list[str]:
    """Return the frames of a suspended coroutine and of everything that it awaits, outermost first.

    >>> import asyncio
    >>> async def inner():
    ...     await asyncio.sleep(60)
    >>> async def outer():
    ...     await inner()
    >>> async def main():
    ...     task = asyncio.create_task(outer(), name="one")
    ...     await asyncio.sleep(0)
    ...     names = [line.split()[-1] for line in await_chain(task.get_coro())]
    ...     task.cancel()
    ...     return names
    >>> asyncio.run(main())
    ['outer', 'inner', 'sleep']
    """
    return list(_chain_of(awaitable))


def _chain_of(awaitable: Any) -> Iterator[str]:
    """Yield the frames of the program only: those of the runtime around and below them do not help its author."""
    for frame, line in _frames(awaitable):
        if not frame.f_code.co_filename.startswith(_OWN):
            yield _describe(frame, line)


def _frames(awaitable: Any) -> Iterator[tuple[FrameType, int]]:
    """Follow a chain of awaits. It ends at an awaitable that runs at this moment, or has ended."""
    for _ in range(_MAX_FRAMES):
        for frame_name, next_name in (
            ("cr_frame", "cr_await"),
            ("gi_frame", "gi_yieldfrom"),
            ("ag_frame", "ag_await"),
        ):
            frame = getattr(awaitable, frame_name, None)
            if frame is not None:
                yield frame, frame.f_lineno
                awaitable = getattr(awaitable, next_name, None)
                break
        else:
            # Python does not show what a step of an async generator awaits, nor what a future waits for
            return


def _describe(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{_short(code.co_filename)}:{line} {code.co_name}"


def _short(path: str) -> str:
    """Return the last parts of a path, enough to find the file."""
    return "/".join(path.replace("\\", "/").split("/")[-3:])


def _frames_by_run() -> dict[int, list[str]]:
    """Return the stacks of threads that run a plain function, by the request that each runs it for."""
    found: dict[int, list[str]] = {}
    for top in frames_of_threads().values():
        stack: list[str] = []
        for frame in _outwards(top):
            if frame.f_code is ThreadJob.work.__code__:
                found[id(frame.f_locals["self"].run)] = stack[::-1]
                break
            if not frame.f_code.co_filename.startswith(_OWN):
                stack.append(_describe(frame, frame.f_lineno))
    return found


def _outwards(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
