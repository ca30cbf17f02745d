"""The queue of calls to be batched, for one function on one worker. Everything here belongs to the worker's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from arpc import torchstate
from arpc.agent.scope import current_scope
from arpc.agent.server.functions import Function, Mode
from arpc.autograd.contexts import current_context_id
from arpc.batching.gathering import gather, kind_of, scatter
from arpc.runtime import Worker
from arpc.user_errors import fresh, is_a, set_cause, summary_of, traceback_of, with_traceback

__all__ = ["Limits", "Queue"]


class Limits:
    """How large a batch may be, how long it waits for more, and how many run at once."""

    __slots__ = ("max_concurrent", "max_size", "max_wait_s")

    def __init__(self, max_size: int, max_wait_s: float, max_concurrent: int) -> None:
        self.max_size = max_size
        self.max_wait_s = max_wait_s
        self.max_concurrent = max_concurrent


class _Slot:
    """One call of a batch."""

    __slots__ = ("args", "deadline", "future", "kwargs")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None, future: asyncio.Future[Any]
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.deadline = deadline
        self.future = future


class _Batch:
    """Calls that run, or will run, as one."""

    __slots__ = ("context_id", "due", "is_due", "key", "slots", "task", "timer", "work")

    def __init__(self, key: tuple[Any, ...], context_id: int | None) -> None:
        self.key = key
        self.context_id = context_id
        self.slots: list[_Slot] = []
        self.due = float("inf")
        self.is_due = False
        """Whether it has waited long enough, and starts as soon as fewer other batches run."""
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.work: _Work | None = None
        """The work that a thread does for it, if the function is a plain one."""

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Work:
    """A batch in a thread, where it cannot be stopped: if it is given up, it calls ``ended`` when it is over."""

    __slots__ = ("_ended", "_run", "is_given_up", "is_over")

    def __init__(self, run: Callable[[], list[Any]], ended: Callable[[], None]) -> None:
        self.is_given_up = False
        self.is_over = False
        self._run = run
        self._ended = ended

    def __call__(self) -> list[Any]:
        try:
            return [] if self.is_given_up else self._run()  # it may have waited for a thread until now
        finally:
            # Sets is_over, then reads is_given_up; the loop does it the other way around: neither misses the other
            self.is_over = True
            if self.is_given_up:
                self._ended()


class _BatchScope:
    """The `Scope` of a batch: its deadline is the latest of its callers', and it belongs to none of them."""

    __slots__ = ("calls", "deadline", "worker")

    caller = None
    prerequisites = None

    def __init__(self, worker: Worker, deadline: float | None) -> None:
        self.worker = worker
        self.deadline = deadline
        self.calls: list[asyncio.Future[Any]] = []

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        self.calls = [call for call in self.calls if not call.done()]
        self.calls.append(future)

    def thread_call_begun(self) -> None:
        """Nothing to wait for: the results of a batch reach the loop after the calls that its thread has made."""

    def cancel_calls(self) -> None:
        for call in self.calls:
            call.cancel()


class Queue:
    """Gathers the calls of one function, of one object if it is a method, and runs them together.

    It exists only while there are calls. ``retire`` is called when there are none left.
    """

    def __init__(
        self, worker: Worker, function: Callable[..., Any], name: str, limits: Limits, retire: Callable[[], None]
    ) -> None:
        self.batches_run = 0
        self.calls_run = 0
        self._worker = worker
        self._loop = worker.agent.loop
        self._executor = worker.agent.dispatcher
        self._function = function
        self._mode = Function(function).mode
        self._name = name
        self._limits = limits
        self._retire = retire
        self._open: dict[tuple[Any, ...], _Batch] = {}
        """The batches that more calls may join, by the key that their calls have in common."""
        self._due: deque[_Batch] = deque()
        self._running: set[_Batch] = set()

    async def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add one call to a batch, and return its result."""
        scope = current_scope.get()
        slot = _Slot(args, kwargs, None if scope is None else scope.deadline, self._loop.create_future())
        try:
            batch = self._join(slot)
        except BaseException:
            self._look_for_end()  # this may have been the queue's only call
            raise
        try:
            return await slot.future
        except asyncio.CancelledError:
            # After the await, the batch may be waiting, running, or over
            task = self._leave(batch, slot)
            if task is not None:
                await asyncio.wait([task])
            raise
        finally:
            del slot  # the exception of its future refers to this frame

    # -- gathering

    def _join(self, slot: _Slot) -> _Batch:
        # Backward passes of different contexts consume their graphs independently: no graph may belong to two contexts
        context_id = current_context_id.get()
        key = (context_id, *kind_of(slot.args, slot.kwargs))
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch(key, context_id)
        batch.slots.append(slot)
        if len(batch.slots) >= self._limits.max_size:
            del self._open[key]
            self._set_due(batch)
        elif not batch.is_due:
            self._set_timer(batch, slot)
        return batch

    def _set_timer(self, batch: _Batch, slot: _Slot) -> None:
        """Wait for more calls, but at most half of the time that this call has left, so that it can still run."""
        now = self._loop.time()
        wait_s = self._limits.max_wait_s
        if slot.deadline is not None:
            wait_s = min(wait_s, max(0.0, slot.deadline - now) / 2)
        if now + wait_s < batch.due:
            batch.stop_timer()
            batch.due = now + wait_s
            batch.timer = self._loop.call_at(batch.due, self._set_due, batch)

    def _set_due(self, batch: _Batch) -> None:
        batch.stop_timer()
        if not batch.is_due:
            batch.is_due = True
            self._due.append(batch)
        self._start_due()

    def _leave(self, batch: _Batch, slot: _Slot) -> asyncio.Task[None] | None:
        """Remove a call whose caller was cancelled. Returns the task of the batch if that is cancelled with it."""
        if slot in batch.slots:
            batch.slots.remove(slot)
        if batch.slots:
            return None
        if batch.task is not None:
            batch.task.cancel()
            return batch.task if batch in self._running else None
        batch.stop_timer()
        self._close(batch)
        if batch.is_due:
            self._due.remove(batch)
        self._look_for_end()
        return None

    def _close(self, batch: _Batch) -> None:
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]

    # -- running

    def _start_due(self) -> None:
        while self._due and len(self._running) < self._limits.max_concurrent:
            batch = self._due.popleft()
            self._close(batch)
            self._running.add(batch)
            deadlines = [slot.deadline for slot in batch.slots]
            latest = None if None in deadlines else max(deadline for deadline in deadlines if deadline is not None)
            scope = _BatchScope(self._worker, latest)
            # the worker's own context: variables that one caller has set are not for the other callers
            context = self._executor.context.copy()
            context.run(_enter, scope, batch.context_id)
            batch.task = self._loop.create_task(torchstate.isolate(self._run(batch, scope)), context=context)
            # not at the end of `_run`: a task that is cancelled before its first step never runs it
            batch.task.add_done_callback(partial(self._ended, batch))

    async def _run(self, batch: _Batch, scope: _BatchScope) -> None:
        slots = list(batch.slots)  # calls that leave from now on still run, and their results are dropped
        self.batches_run += 1
        self.calls_run += len(slots)
        try:
            results = await self._results(batch, [(slot.args, slot.kwargs) for slot in slots])
        except asyncio.CancelledError:
            scope.cancel_calls()
            _settle(slots, [asyncio.CancelledError()] * len(slots))
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the callers
            _settle(slots, [error] * len(slots))
        else:
            _settle(slots, results)
        finally:
            batch.slots.clear()
            slots.clear()  # their futures have errors that refer to this frame, and so to the arguments

    def _ended(self, batch: _Batch, _: object) -> None:
        if batch.work is not None:
            batch.work.is_given_up = True
            if not batch.work.is_over:
                return  # its thread is still busy, and the next batch has to wait for it
        self._make_room(batch)

    def _make_room(self, batch: _Batch) -> None:
        if batch in self._running:
            self._running.discard(batch)
            batch.work = None  # breaks a reference cycle
            self._start_due()
            self._look_for_end()

    async def _results(self, batch: _Batch, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        count = len(calls)
        if self._mode is Mode.COROUTINE:
            args, kwargs = gather(calls)
            return scatter(await self._function(*args, **kwargs), count, self._name)

        def run() -> list[Any]:
            # stacking copies the tensors, so it runs in the thread as well
            args, kwargs = gather(calls)
            return scatter(self._function(*args, **kwargs), count, self._name)

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed: no batch waits for room any more
                self._loop.call_soon_threadsafe(self._make_room, batch)

        batch.work = _Work(run, ended)
        results: list[Any] = await self._executor.call(Function(batch.work), (), {})
        return results

    def _look_for_end(self) -> None:
        if not (self._open or self._due or self._running):
            self._retire()


def _enter(scope: Any, context_id: int | None) -> None:
    current_scope.set(scope)
    current_context_id.set(context_id)


def _settle(slots: list[_Slot], results: list[Any]) -> None:
    for slot, result in zip(slots, results, strict=True):
        if slot.future.done():
            continue  # the caller was cancelled
        if is_a(result, BaseException):
            _fail(slot.future, result)
        else:
            slot.future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future with a copy of an error: an exception collects the traceback of every frame that raises it."""
    if is_a(error, asyncio.CancelledError):
        future.cancel()
    elif is_a(error, (StopIteration, GeneratorExit)):
        # raised by a future, these would have another meaning
        future.set_exception(set_cause(RuntimeError(summary_of(error)), error))
    else:
        future.set_exception(with_traceback(fresh(error), traceback_of(error)))
