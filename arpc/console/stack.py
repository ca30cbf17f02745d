"""``arpc stack``: every handler and call in progress in the group, and what each of them waits for."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence

import msgspec

from arpc.console.attachment import attach
from arpc.console.numbers import duration
from arpc.errors import ArpcError
from arpc.metrics.stacks import AwaitedCall, CallStack, HandlerStack, TaskStack, WorkerStack

__all__ = ["describe", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Ask the group once, and print the stacks; return the exit status."""
    try:
        stacks = asyncio.run(_ask(arguments))
    except ArpcError as error:
        sys.stderr.write(f"arpc stack: {error}\n")
        return 1
    text = msgspec.json.encode(stacks).decode() if arguments.json else "\n".join(describe(stacks))
    sys.stdout.write(text + "\n")
    return 0


async def _ask(arguments: argparse.Namespace) -> list[WorkerStack]:
    async with attach(arguments) as group:
        return await group.stacks()


def describe(stacks: Sequence[WorkerStack]) -> Iterator[str]:
    """Yield the dump as text: what each worker's own tasks wait for, followed through the handlers of other workers.

    A handler is shown under the call that waits for it. If its caller has not answered, or no longer waits, it is shown
    under its own worker.
    """
    shown = _Dump(stacks)
    for worker in stacks:
        yield from shown.worker(worker)


_Seen = frozenset[tuple[str, int]]
"""The handlers above, by worker and call id: two that wait for each other would repeat forever."""


class _Dump:
    def __init__(self, stacks: Sequence[WorkerStack]) -> None:
        self._handlers = {
            (handler.caller, worker.name, handler.id): (worker.name, handler)
            for worker in stacks
            for handler in worker.handlers
        }
        self._calls = {(worker.name, call.to, call.id) for worker in stacks for call in worker.calls}

    def worker(self, worker: WorkerStack) -> Iterator[str]:
        counted = f"{len(worker.handlers)} handlers, {len(worker.calls)} calls, {len(worker.tasks)} tasks"
        yield f"{worker.name} (process {worker.pid}): {counted}"
        if worker.requests_waiting:
            yield f"  {worker.requests_waiting} requests wait for their turn"
        awaited = [*(task.awaits for task in worker.tasks), *(handler.awaits for handler in worker.handlers)]
        claimed = {(one.to, one.id) for one in awaited if one is not None}
        for task in worker.tasks:
            yield from self._task(worker.name, task)
        for call in worker.calls:
            if (call.to, call.id) not in claimed:
                yield from self._call(worker.name, call)
        for handler in worker.handlers:
            if (handler.caller, worker.name, handler.id) not in self._calls:
                yield from self._handler(worker.name, handler, "  ", frozenset())
        if worker.not_told:
            yield f"  and {worker.not_told} more"
        yield ""

    def _task(self, here: str, task: TaskStack) -> Iterator[str]:
        yield f"  task {task.name}"
        yield from self._below(here, task.frames, task.awaits, "    ", frozenset())

    def _call(self, here: str, call: CallStack) -> Iterator[str]:
        how = "" if call.state == "sent" else ", waiting to be sent"
        yield f"  call of {call.function} to {call.to}{how}{_left(call.left_s)}"
        yield from self._awaited(here, AwaitedCall(call.to, call.id, call.function), "    ", frozenset())

    def _handler(
        self, here: str, handler: HandlerStack, indent: str, seen: frozenset[tuple[str, int]]
    ) -> Iterator[str]:
        state = {"queued": ", waiting for a thread", "thread": ", in a thread", "stream": ", a stream"}
        since = "" if handler.age_s is None else f", for {duration(max(0.0, handler.age_s))}"
        about = f"{state.get(handler.kind, '')}{since}{_left(handler.left_s)}"
        yield f"{indent}{handler.function} on {here} for {handler.caller}{about}"
        yield from self._below(here, handler.frames, handler.awaits, indent + "  ", seen | {(here, handler.id)})

    def _below(
        self,
        here: str,
        frames: Sequence[str],
        awaits: AwaitedCall | None,
        indent: str,
        seen: _Seen,
    ) -> Iterator[str]:
        for frame in frames:
            yield f"{indent}{frame}"
        if awaits is not None:
            yield f"{indent}awaits {awaits.function} on {awaits.to}"
            yield from self._awaited(here, awaits, indent + "  ", seen)

    def _awaited(self, here: str, awaits: AwaitedCall, indent: str, seen: _Seen) -> Iterator[str]:
        found = self._handlers.get((here, awaits.to, awaits.id))
        if found is None:
            yield f"{indent}(no handler: it is on its way, or has just ended)"
        elif (found[0], found[1].id) not in seen:
            yield from self._handler(*found, indent, seen)


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {duration(max(0.0, seconds))} left"
