"""The event loop in a thread of its own, and the calls with which other threads run code on it."""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from threading import get_ident
from typing import Any, Generic, TypeVar, cast

from arpc import torchstate
from arpc.agent.scope import Scope, current_scope
from arpc.errors import ShutdownError
from arpc.log import get_logger
from arpc.runner import new_event_loop

__all__ = ["LoopThread", "Outcome", "refuse_loop_thread"]

logger = get_logger("arpc.compat")

T = TypeVar("T")

_END_S = 5.0
"""Seconds that the loop may take to end the tasks that still run on it."""


_loop_threads: set[int] = set()


def refuse_loop_thread(awaitable: str) -> None:
    """Raise RuntimeError if this thread runs the loop of a drop-in: blocking it would be a deadlock.

    A loop of the script itself is accepted: a notebook has one, and may block it.
    """
    if get_ident() in _loop_threads:
        raise RuntimeError(
            f"a blocking function of arpc.compat was called on the thread of the event loop, which would wait for "
            f"itself: write `{awaitable}` in an async function"
        )


class Outcome(Generic[T]):
    """A result that one thread sets and another waits for: one lock, so for a single waiter."""

    __slots__ = ("_error", "_lock", "_value")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        self._value = value
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._lock.release()

    def wait(self) -> T:
        """Block until it is set. Ctrl-C interrupts it."""
        self._lock.acquire()
        error = self._error
        if error is None:
            return cast("T", self._value)
        try:
            raise error
        finally:
            self._error = error = None  # an error refers to this frame


class LoopThread:
    """A running loop in a thread. Everything but `stop` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self.loop.set_task_factory(torchstate.rooted_task_factory)
        self.scope: Scope | None = None
        """The scope of code that runs for no caller: of the script, and of the threads that it started."""
        self._jobs: deque[tuple[Context, Callable[[], None]]] = deque()
        self._is_called = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"arpc-loop-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        _loop_threads.add(get_ident())
        with torchstate.pristine_thread():
            try:
                self.loop.run_forever()
                self.loop.run_until_complete(self._end())
            finally:
                _loop_threads.discard(get_ident())
                self.loop.close()

    async def _end(self) -> None:
        self._take_jobs()  # those submitted after the call of `loop.stop`
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_END_S)
        await self.loop.shutdown_asyncgens()

    # -- calls from other threads

    @property
    def is_this(self) -> bool:
        """Whether the calling code runs on the loop."""
        return get_ident() == self._thread.ident

    def caller_context(self) -> Context:
        """Return the context variables of this thread, for work on the loop on its behalf.

        Each thread has its own: other threads do not see what it sets, such as an autograd context. In a handler they
        are those of the handler.
        """
        context = copy_context()
        scope = current_scope.get()
        if scope is None:
            context.run(current_scope.set, self.scope)
        else:
            scope.thread_call_begun()
        return context

    def submit(self, context: Context, job: Callable[[], None]) -> None:
        """Run a job on the loop, soon. The job must not raise. Raises `ShutdownError` after `stop`."""
        if self._is_closed:
            raise ShutdownError("the worker has been shut down")
        self._jobs.append((context, job))
        # One wake-up runs all jobs that are in the queue by then. A race may cost a spare wake-up, but never loses one:
        # the loop clears the flag before it empties the queue.
        if not self._is_called:
            self._is_called = True
            try:
                self.loop.call_soon_threadsafe(self._take_jobs)
            except RuntimeError:
                raise ShutdownError("the worker has been shut down") from None

    def _take_jobs(self) -> None:
        self._is_called = False
        jobs = self._jobs
        while jobs:
            context, job = jobs.popleft()
            try:
                context.run(job)
            except BaseException:
                logger.exception("an internal error on the event loop")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop, and return its result."""
        outcome: Outcome[T] = Outcome()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                outcome.fail(error)
            else:
                outcome.set(result)

        self.submit(self.caller_context(), job)
        return outcome.wait()

    def run(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        context: Context | None = None,
        outcome: Outcome[T] | None = None,
    ) -> T:
        """Run a coroutine on the loop, with this thread's context and torch modes, and return its result.

        Ctrl-C during the wait cancels the coroutine. ``outcome``, if given, is used to wait for the result.
        """
        outcome = Outcome() if outcome is None else outcome
        state = None if torchstate.is_pristine() else torchstate.capture()
        tasks: list[asyncio.Task[T]] = []

        def done(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.fail(ShutdownError("the worker was shut down meanwhile"))
            elif (error := task.exception()) is not None:
                outcome.fail(error)
            else:
                outcome.set(task.result())
            tasks.clear()

        def start() -> None:
            try:
                tasks.append(self.loop.create_task(make()))
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                outcome.fail(error)
            else:
                tasks[0].add_done_callback(done)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        def start_with_state() -> None:
            if state is None:
                start()
            else:
                torchstate.run_with(state, start)

        self.submit(self.caller_context() if context is None else context, start_with_state)
        try:
            return outcome.wait()
        except KeyboardInterrupt:
            self.submit(copy_context(), cancel)
            raise

    def stop(self) -> None:
        """End the loop and its remaining tasks. Not from a thread that the loop waits for."""
        if self._is_closed:
            return
        self._is_closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_this:
            self._thread.join(_END_S)
