"""Coroutines of handlers, stepped with a context and a torch state of their own.

**Why not simply a Task each.** Most handlers never wait for anything, and the Task is then the largest part of their
cost. So the first step of a handler runs at once, on behalf of an idle Task that is waiting for work. If the handler
finishes in that step, nothing was scheduled and the Task stays idle. If it waits, the Task runs the rest of it. The
handler cannot tell: ``asyncio.current_task()`` is that Task from the first line to the last, cancelling it works, and
contextvars are its own because every step runs in a Context made for it. (Python 3.12 calls this eager start.)

**Torch's thread-local state** (grad mode and so on) is set before each step and removed after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from types import CoroutineType
from types import coroutine as generator_coroutine
from typing import Any, Final

import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.server.run import Run
from arpc.log import get_logger
from arpc.private.asyncio import ENTERS_TASKS, enter_task, leave_task, mark_awaited

__all__ = ["EagerTasks"]

logger = get_logger("arpc.tasks")

_IDLE_MAX: Final = 16
_CLOSE_S: Final = 1.0
_NOT_BEGUN: Final = object()
_is_pristine = torchstate.is_pristine
_is_grad_enabled = torch.is_grad_enabled


@torchstate.isolating_driver
def _step(run: Run, step: Callable[[Any], Any], value: Any) -> Any:
    """Run one further step of a coroutine. The thread's own torch state is saved before, and restored after it."""
    outer = None if _is_pristine() else torchstate.save_and_reset()
    state = run.state
    if state is not None:
        run.state = None
        torchstate.restore(state)
    try:
        return run.context.run(step, value)
    finally:
        value = None  # the traceback of an error that was thrown in refers to this frame: a cycle
        if not _is_pristine():
            run.state = torchstate.save_and_reset()
        if outer is not None:
            torchstate.restore(outer)


@generator_coroutine
def _drive(run: Run, waits_for: Any) -> Generator[Any, Any, Any]:
    """Run the rest of a coroutine that waits. The future that it waits for is yielded to the Task.

    Nothing else may keep that future: if it fails it keeps its error, and the error the frames that it has passed.
    """
    step: Callable[[Any], Any]
    coroutine: Any = run.coroutine
    if waits_for is _NOT_BEGUN:
        try:
            run.coroutine = coroutine = _step(run, lambda _: run.call(), None)
            waits_for = _step(run, coroutine.send, None)
        except StopIteration as stop:
            return stop.value
    if run.task is not None and type(coroutine) is CoroutineType:
        # `python -m asyncio ps` shows frames of the Task, but none of the coroutine that is stepped by hand
        run.task.set_name(coroutine.__qualname__)
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            # its `with` blocks end in its own context and state, as in any other step
            _step(run, lambda _: coroutine.close(), None)
            raise
        except BaseException as error:  # noqa: BLE001 - the Task throws it in, and it is passed to the coroutine
            step, value = coroutine.throw, error
        else:
            step = coroutine.send
        waits_for = None  # the traceback of a failed future's error refers to this frame, too
        try:
            waits_for = _step(run, step, value)
        except StopIteration as stop:
            return stop.value
        finally:
            value = None  # as in `_step`


def _report(report: Callable[[Any, Any], None], run: Run, outcome: Any) -> None:
    """Report the outcome of a request from within a Task, where the thread's torch state may be that of other code."""
    if _is_pristine():
        report(run, outcome)
    else:
        torchstate.run_with(torchstate.DEFAULTS, report, run, outcome)


class _IdleTask:
    """An idle Task, ready to run the rest of a request that has to wait."""

    __slots__ = ("run", "task", "waits_for", "wake_up")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wake_up: asyncio.Future[None] = loop.create_future()
        self.run: Run | None = None
        self.waits_for: Any = None
        self.task: asyncio.Task[Any]


class EagerTasks:
    """The Tasks in which the handlers of one worker run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self.idle: list[_IdleTask] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = 0
        self._closed = False
        self.carried = 0

    @torchstate.isolating_driver
    def start(self, run: Run) -> None:
        """Run a request, at once if possible, which it is not within a Task. Torch's state must be pristine."""
        loop = self._loop
        try:
            idle_task = self.idle[-1]
            task = idle_task.task
            enter_task(loop, task)
        except (IndexError, RuntimeError):
            # There is no idle Task, or this was called from within a Task: no harm, only slower
            self._start_task(run)
            return
        report: Callable[[Any, Any], None]
        try:
            run.coroutine = coroutine = run.context.run(run.call)
            waits_for = run.context.run(coroutine.send, None)
        except StopIteration as stop:
            report, outcome = run.host.replies.returned, stop.value
        except BaseException as error:  # noqa: BLE001 - it is sent to the caller
            report, outcome = run.host.replies.raised, error
        else:
            leave_task(loop, task)
            self._carry_on(run, waits_for)
            return
        leave_task(loop, task)
        # Its `with` blocks have ended. Users change only two settings without a block: grad mode and default device.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if idle_task.wake_up.done():
            # The handler has cancelled its own Task, which must not affect the next handler
            self.idle.pop()
            self._more()
        report(run, outcome)

    def _carry_on(self, run: Run, waits_for: Any) -> None:
        """Let the last Task of `idle`, on behalf of which the first step ran, run the rest of a request."""
        if not _is_pristine():
            run.state = torchstate.save_and_reset()
        self.carried += 1
        idle_task = self.idle.pop()
        idle_task.run = run
        idle_task.waits_for = waits_for
        run.task = idle_task.task
        if not idle_task.wake_up.done():
            idle_task.wake_up.set_result(None)
        if not run.ended:
            run.inbound.register(run)  # from now on it can be cancelled
        self._more()

    def _more(self) -> None:
        """Start an idle Task for the next request. One at a time: a burst of waiting requests gets plain Tasks."""
        if ENTERS_TASKS and len(self.idle) + self._starting < _IDLE_MAX and not self._closed:
            self._starting += 1
            idle_task = _IdleTask(self._loop)
            idle_task.task = self._own(asyncio.Task(self._wait_for_run(idle_task), loop=self._loop))

    def _own(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        # Tasks are created without the loop's factory, which would isolate torch's state a second time
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_for_run(self, idle_task: _IdleTask) -> None:
        self._starting -= 1
        if self._closed:
            return
        self.idle.append(idle_task)
        cancelled: asyncio.CancelledError | None = None
        try:
            await idle_task.wake_up
        except asyncio.CancelledError as error:
            cancelled = error
        run = idle_task.run
        if run is None:
            # closed, or cancelled by a handler that has finished since
            if idle_task in self.idle:
                self.idle.remove(idle_task)
            return
        if cancelled is not None:
            # cancelled between its first step and now: the future that it waits for is cancelled, then the handler
            idle_task.waits_for = self._cancelled_wait(idle_task.waits_for)
        steps = _drive(run, idle_task.waits_for)
        idle_task.waits_for = None  # see `_drive`
        await self._finish(run, steps)

    def _cancelled_wait(self, waits_for: Any) -> Any:
        if waits_for is not None:
            if waits_for.cancel():
                return waits_for  # when it ends, which may take a while, the handler is cancelled, as in any Task
            mark_awaited(waits_for, is_awaited=False)
        stopped = self._loop.create_future()
        stopped.cancel()
        mark_awaited(stopped, is_awaited=True)
        return stopped

    def _start_task(self, run: Run) -> None:
        if self._closed:
            run.host.replies.raised(run, asyncio.CancelledError())
            return

        def never_ran(task: asyncio.Task[Any]) -> None:
            if task.cancelled() and run.coroutine is None:
                run.host.replies.raised(run, asyncio.CancelledError())

        self.carried += 1
        run.task = self._own(asyncio.Task(self._finish(run, _drive(run, _NOT_BEGUN)), loop=self._loop))
        run.task.add_done_callback(never_ran)
        run.inbound.register(run)
        if not self.idle:
            self._more()

    @staticmethod
    async def _finish(run: Run, steps: Awaitable[Any]) -> None:
        try:
            result = await steps
        except BaseException as error:  # noqa: BLE001 - it is sent to the caller
            _report(run.host.replies.raised, run, error)
        else:
            _report(run.host.replies.returned, run, result)

    async def aclose(self) -> None:
        """Cancel all handlers, and wait for their end, but not for ever: a handler may refuse to be cancelled."""
        self._closed = True
        self.idle.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=_CLOSE_S)
            if stubborn:
                text = "worker %s leaves %d handlers behind that went on when cancelled"
                logger.warning(text, self._name, len(stubborn))

    def statistics(self) -> dict[str, int]:
        return {
            "handlers_waiting": len(self._tasks) - len(self.idle) - self._starting,
            "handlers_carried": self.carried,
        }
