"""Coroutines of handlers, stepped with a context and a torch state of their own.

**Why not simply a Task each.** Most handlers never wait for anything, and the Task is then the largest part of their
cost. So the first step of a handler runs at once, on behalf of an idle Task that is waiting for work (a *carrier*). If
the handler finishes in that step, nothing was scheduled and the carrier stays idle. If it waits, the carrier carries it
to its end like any Task. The handler cannot tell: ``asyncio.current_task()`` is the carrier from the first line to the
last, cancelling it works, and contextvars are its own because every step runs in a Context made for it. (Python 3.12
calls this eager start.)

**Torch's thread-local state** (grad mode and so on) is put in place before each step and taken away after it.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import GeneratorType
from types import coroutine as generator_coroutine
from typing import Any, Final, Protocol

import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.scope import Scope, current_scope
from arpc.log import get_logger

__all__ = ["Carrier", "Carriers", "Job"]

logger = get_logger("arpc.carriers")

_IDLE_MAX: Final = 16
_CLOSE_S: Final = 1.0
_is_pristine = torchstate.is_pristine
_is_grad_enabled = torch.is_grad_enabled
_set_scope = current_scope.set


class Job(Protocol):
    """A coroutine to be carried.

    `finished` or `failed` is called exactly once, at its end, with torch's state pristine.
    """

    context: Context
    coroutine: Coroutine[Any, Any, Any] | None
    """None until `first_step` has begun."""
    state: torchstate.SavedState | None
    """Torch's state of a coroutine that waits, if it is not the default."""
    task: asyncio.Task[Any] | None
    """Who carries it, once it had to wait."""

    def first_step(self) -> Any:
        """Make the coroutine, and send it None. Runs in the context."""

    def suspended(self) -> None:
        """It had to wait: from now on it can be cancelled."""

    def finished(self, result: Any) -> None: ...

    def failed(self, error: BaseException) -> None: ...


@torchstate.isolating_driver
def _step(job: Job, step: Callable[[Any], Any], value: Any) -> Any:
    """One further step. The thread's own state is set aside meanwhile, whatever it is."""
    outer = None if _is_pristine() else torchstate.save_and_reset()
    state = job.state
    if state is not None:
        job.state = None
        torchstate.restore(state)
    try:
        return job.context.run(step, value)
    finally:
        value = None  # an error that was thrown in has this frame in its traceback: they would keep each other
        if not _is_pristine():
            job.state = torchstate.save_and_reset()
        if outer is not None:
            torchstate.restore(outer)


class Called(Scope, Protocol):
    """A function to be called in the scope of its own call."""

    function: Any
    args: tuple[Any, ...] | None


@generator_coroutine
def conveyor() -> Generator[Any, Any, Any]:
    """Runs coroutines one after another: given a `Called`, it yields what its coroutine waits for or, at last, returns.

    Which of the two it was, ``gi_yieldfrom`` tells: that is None unless a coroutine waits. One that raises is the last.
    ``coroutine.send`` would raise StopIteration instead, and an exception takes longer than all the rest of a step.
    """
    called = yield
    while True:
        _set_scope(called)
        args = called.args
        if args is None:
            coroutine = called.function.call()
        else:
            coroutine = called.function.call(*args)
            called.args = args = None
        called = None  # nothing is kept until the next one comes
        called = yield (yield from coroutine)


@generator_coroutine
def _drive(job: Job, waits_for: Any, coroutine: Any) -> Generator[Any, Any, Any]:
    """Carry on with a coroutine that waits for something, or with its conveyor; what it waits for goes to the Task."""
    is_conveyed = coroutine.__class__ is GeneratorType
    step: Callable[[Any], Any]
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            # its blocks end in its own context and state, as in any other step
            _step(job, lambda _: coroutine.close(), None)
            raise
        except BaseException as error:  # noqa: BLE001 - thrown in by the Task, for the coroutine
            step, value = coroutine.throw, error
        else:
            step = coroutine.send
        waits_for = None  # a future that has failed leads to this frame, too, by the traceback of its error
        try:
            waits_for = _step(job, step, value)
        except StopIteration as stop:
            return stop.value
        finally:
            value = None  # as in `_step`
        if is_conveyed and coroutine.gi_yieldfrom is None:
            return waits_for  # which is the result


def _tell(told: Callable[[Any], None], outcome: Any) -> None:
    """Tell a job how it ended, from within a Task: on a thread whose state may be that of other code."""
    outer = None if _is_pristine() else torchstate.save_and_reset()
    try:
        told(outcome)
    finally:
        if outer is not None:
            torchstate.restore(outer)


class Carrier:
    """A Task that waits for a job that has to wait."""

    __slots__ = ("convey", "conveyor", "is_conveyed", "job", "task", "waits_for", "wake_up")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wake_up: asyncio.Future[None] = loop.create_future()
        self.job: Job | None = None
        self.waits_for: Any = None
        self.is_conveyed = False
        """Its job was begun by the conveyor, which goes on with it."""
        self.task: asyncio.Task[Any]
        self.renew()

    def renew(self) -> None:
        """Have a conveyor: the one before has ended with an exception."""
        made = conveyor()
        made.send(None)
        self.conveyor: Any = made
        self.convey: Callable[[Any], Any] = made.send


class Carriers:
    """The carriers of one worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self.idle: list[Carrier] = []
        """Those that wait for work; whoever starts a step on behalf of the last one calls `carry_on` if it waits."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = 0
        self._closed = False
        self.steps_without_wait = 0
        self.carried = 0

    @torchstate.isolating_driver
    def start(self, job: Job) -> None:
        """Run a job, at once if possible. Must not be called from a Task. Torch's state must be pristine."""
        if not self.idle:
            self._start_task(job)
            return
        carrier = self.idle[-1]
        loop = self._loop
        try:
            _enter_task(loop, carrier.task)
        except RuntimeError:
            # called from within a Task after all: no harm, only slower
            self._start_task(job)
            return
        error: BaseException | None = None
        try:
            waits_for = job.context.run(job.first_step)
        except StopIteration as stop:
            result = stop.value
            waits_for = carrier
        except BaseException as raised:  # noqa: BLE001 - it is the caller's, see Job.failed
            error = raised
            waits_for = carrier
        finally:
            _leave_task(loop, carrier.task)
        if waits_for is not carrier:
            self.carry_on(job, waits_for)
            return
        # The blocks it was in have ended with it. Left are the two things that people switch without a block.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if carrier.wake_up.done():
            self.replace_idle()
        self.steps_without_wait += 1
        if error is not None:
            job.failed(error)
        else:
            job.finished(result)

    def replace_idle(self) -> None:
        """The handler cancelled its own task: that must not reach the next one."""
        self.idle.pop()
        self._more()

    def carry_on(self, job: Job, waits_for: Any, *, is_conveyed: bool = False) -> None:
        """The first step, taken on behalf of the last of `idle` or by its conveyor, was not the only one."""
        if not _is_pristine():
            job.state = torchstate.save_and_reset()
        self.carried += 1
        carrier = self.idle.pop()
        carrier.is_conveyed = is_conveyed
        carrier.job = job
        carrier.waits_for = waits_for
        job.task = carrier.task
        if not carrier.wake_up.done():
            carrier.wake_up.set_result(None)
        job.suspended()
        self._more()

    def _more(self) -> None:
        """Have an idle carrier ready for the next job. One at a time: a burst of jobs that wait gets plain Tasks."""
        if len(self.idle) + self._starting < _IDLE_MAX and not self._closed:
            self._starting += 1
            carrier = Carrier(self._loop)
            carrier.task = self._own(asyncio.Task(self._wait_for_job(carrier), loop=self._loop))

    def _own(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        # Tasks are made here without the loop's factory: it would keep torch's state apart a second time
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_for_job(self, carrier: Carrier) -> None:
        self._starting -= 1
        if self._closed:
            return
        self.idle.append(carrier)
        cancelled: asyncio.CancelledError | None = None
        try:
            await carrier.wake_up
        except asyncio.CancelledError as error:
            cancelled = error
        job = carrier.job
        if job is None:
            # closed, or cancelled by a handler that has finished since
            if carrier in self.idle:
                self.idle.remove(carrier)
            return
        if cancelled is not None:
            # cancelled between its first step and now: what it waits for is told, and then the handler
            waits_for = carrier.waits_for
            carrier.waits_for = self._cancelled_wait(waits_for)
        await self._finish(job, carrier.waits_for, carrier.conveyor if carrier.is_conveyed else job.coroutine)

    def _cancelled_wait(self, waits_for: Any) -> Any:
        if waits_for is not None:
            if waits_for.cancel():
                return waits_for  # which ends in its own time, and the handler hears of it then, as in any Task
            waits_for._asyncio_future_blocking = False  # noqa: SLF001 - asyncio's own mark of a future that is awaited
        stopped = self._loop.create_future()
        stopped.cancel()
        stopped._asyncio_future_blocking = True  # noqa: SLF001 - asyncio's own mark of a future that is awaited
        return stopped

    def _start_task(self, job: Job) -> None:
        if self._closed:
            job.failed(asyncio.CancelledError())
            return

        async def run() -> None:
            try:
                waits_for = _step(job, lambda _: job.first_step(), None)
            except StopIteration as stop:
                result = stop.value
            except BaseException as error:  # noqa: BLE001 - thrown in by the Task, for the coroutine
                _tell(job.failed, error)
                return
            else:
                await self._finish(job, waits_for, job.coroutine)
                return
            # not above: what cannot be sent must not be told of with all of the result that the exception shows
            _tell(job.finished, result)

        def never_ran(task: asyncio.Task[Any]) -> None:
            if task.cancelled() and job.coroutine is None:
                job.failed(asyncio.CancelledError())

        self.carried += 1
        job.task = self._own(asyncio.Task(run(), loop=self._loop))
        job.task.add_done_callback(never_ran)
        job.suspended()
        if not self.idle:
            self._more()

    async def _finish(self, job: Job, waits_for: Any, coroutine: Any) -> None:
        try:
            result = await _drive(job, waits_for, coroutine)
        except BaseException as error:  # noqa: BLE001 - thrown in by the Task, for the coroutine
            _tell(job.failed, error)
        else:
            _tell(job.finished, result)

    async def aclose(self) -> None:
        """Cancel whatever is carried, and wait for its end, but not for ever: a handler may refuse to be cancelled."""
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
            "handlers_without_wait": self.steps_without_wait,
            "handlers_carried": self.carried,
        }
