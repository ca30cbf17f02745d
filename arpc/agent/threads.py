"""Threads that run plain functions, and hand results back to the loop in batches.

What costs time is not the function but the way there and back. Three things make it short:

- The loop wakes a thread by a write to a file descriptor, which lets go of the interpreter lock meanwhile. A lock or a
  queue would wake a thread that can do nothing but wait for the interpreter, and send it back to sleep.
- Functions that have shown to be *quick* are left to one thread, which takes one after another. Many threads would only
  get in each other's way. Should one of them be stuck after all, others come to help soon.
- All results that are ready when the loop looks come with one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.log import get_logger

__all__ = ["Outbox", "ThreadPool"]

logger = get_logger("arpc.threads")

_is_grad_enabled = torch.is_grad_enabled
_HELP_AFTER_S: Final = 0.002
# So that the peer is at work on the first while the next are made
_ANSWERS_A_WRITE: Final = 32


class Outbox(ABC):
    """Where jobs leave what their thread is to send when it has no other quick job left."""

    __slots__ = ()

    @abstractmethod
    def send(self) -> None:
        """Send all there is, in the thread that calls. Must not raise, nor block."""

    @abstractmethod
    def send_on_loop(self) -> None:
        """Send all there is, on the loop: the thread may be stuck in another job."""


Job = Callable[[], Callable[[], None] | Outbox | None]
"""Runs in a thread. If it returns a function, that runs on the loop afterwards; if an outbox, that is sent, and the
loop is not woken. Must not raise, nor end in the middle of a block that switches a state of torch."""


class _Doorbell:
    """Wakes as many sleeping threads as it is rung times. The loop rings, threads wait."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._waits = self._rings = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        else:
            self._waits, self._rings = os.pipe()
            os.set_blocking(self._rings, False)
        self._size = 8 if self._waits == self._rings else 1
        self._open = list({self._waits, self._rings})

    def ring(self, times: int) -> None:
        try:  # noqa: SIM105 - a block that suppresses costs more than the write
            os.write(self._rings, times.to_bytes(8, "little") if self._size > 1 else bytes(times))
        except BlockingIOError:
            pass  # the pipe is full of rings nobody has heard yet: those will do

    def wait(self) -> None:
        os.read(self._waits, self._size)

    def close(self) -> None:
        # Two threads may end at the same moment: each descriptor is closed by one of them. Closed twice, its number may
        # be that of something else by then.
        with contextlib.suppress(IndexError):
            while True:
                os.close(self._open.pop())


class ThreadPool:
    """Up to ``size`` threads, started when there is work and no thread is free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, name: str) -> None:
        self._loop = loop
        self._size = size
        self._name = name
        self._bell = _Doorbell()
        self._jobs: deque[tuple[Job, bool]] = deque()
        self._answered: deque[int] = deque()
        self._jobs_answered = 0
        self._unsent: deque[Outbox] = deque()
        self._threads: list[threading.Thread] = []
        self._done_with_bell: list[None] = []
        """One for each thread that has ended, and one for the loop, which rings no more."""
        self._unfinished = 0
        self._wanted = 0
        """Threads that the jobs submitted in this turn want for themselves."""
        self._will_ring = False
        self._helper: asyncio.TimerHandle | None = None
        self._tasks_are_isolated = torchstate.isolates_all_tasks(loop)
        self._done: deque[Callable[[], None] | None] = deque()
        self._wake_up_sent = False
        self._closed = False

    def submit(self, job: Job, *, is_quick: bool = False) -> None:
        """Run a job in a thread, from the end of this turn of the loop on. Called on the loop.

        One that is quick may wait for others that are.
        """
        self._unfinished += 1
        if self._closed:
            # what ends late may have something to clear away still, when the others have gone
            threading.Thread(target=self._do_late, args=(job,), name=f"arpc-{self._name}-late", daemon=True).start()
            return
        self._jobs.append((job, is_quick))
        if not is_quick:
            self._wanted += 1
        if not self._will_ring:
            # With the last read of this turn done, the loop has nothing better to do than to let a thread run
            self._will_ring = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        if self._closed:
            return  # `close` has rung for all
        self._will_ring = False
        self._count_answered()
        wanted = min(max(self._wanted, 1), self._size)
        self._wanted = 0
        # What was taken and is not finished may keep a thread busy each
        busy = max(0, self._unfinished - len(self._jobs))
        for _ in range(len(self._threads), min(self._size, self._unfinished, busy + wanted)):
            self._start_thread()
        # A thread that is woken here often runs before this one goes on. What it has finished by then needs no wake-up.
        self._wake_up_sent = True
        self._bell.ring(wanted)
        self._collect()
        if self._helper is None:
            self._helper = self._loop.call_later(_HELP_AFTER_S, self._help)

    def _count_answered(self) -> None:
        answered = self._answered
        while answered:
            count = answered.popleft()
            self._unfinished -= count
            self._jobs_answered += count

    @property
    def jobs_answered(self) -> int:
        self._count_answered()
        return self._jobs_answered

    def _help(self) -> None:
        """Jobs have been waiting for a while: let others take them."""
        self._helper = None
        while self._unsent:
            self._unsent.popleft().send_on_loop()
        self._count_answered()
        if self._jobs and not self._closed:
            self._wanted += len(self._jobs)
            self._ring()

    @property
    def idle_threads(self) -> int:
        return max(0, self._size - self._unfinished)

    def close(self) -> None:
        """End the threads as they become free. One that is stuck in user code is left behind: it is a daemon.

        What is submitted before that, or even later by a handler that could not be stopped, is still run.
        """
        if self._closed:
            return
        if self._jobs:
            self._ring()  # so that there are threads to do them
        self._closed = True
        if self._helper is not None:
            self._helper.cancel()
        if self._threads:
            self._bell.ring(len(self._threads))
        self._leave_bell()

    async def join(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; False if some are still busy."""
        deadline = self._loop.time() + timeout_s
        while any(thread.is_alive() for thread in self._threads):
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def statistics(self) -> dict[str, int]:
        self._count_answered()
        return {
            "threads": len(self._threads),
            "threads_max": self._size,
            "jobs_unfinished": self._unfinished,
            "jobs_queued": len(self._jobs),
        }

    def _start_thread(self) -> None:
        name = f"arpc-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.pop()  # the system has no more: the pool must not count on this one
            raise

    def _work(self) -> None:
        take = self._jobs.popleft
        outbox: Outbox | None = None
        answered = 0
        while True:
            try:
                job, is_quick = take()
            except IndexError:
                if outbox is not None:
                    self._send(outbox, answered)
                    outbox = None
                    answered = 0
                    continue  # more may have come meanwhile
                if self._closed:
                    break
                self._bell.wait()
                continue
            if outbox is not None and not is_quick:
                # it may take its time
                self._send(outbox, answered)
                outbox = None
                answered = 0
            result = self._run(job)
            del job
            if isinstance(result, Outbox):
                if result is not outbox:
                    if outbox is not None:
                        self._send(outbox, answered)
                        answered = 0
                    outbox = result
                    self._unsent.append(result)
                answered += 1
                if answered == _ANSWERS_A_WRITE:
                    self._send(result, answered)
                    outbox = None
                    answered = 0
            elif not self._tell(result):
                break
        self._leave_bell()

    def _send(self, outbox: Outbox, answered: int) -> None:
        # First this: when the next job comes, which may be as soon as the answer is out, the loop shall know that a
        # thread is free
        self._answered.append(answered)
        outbox.send()

    def _run(self, job: Job) -> Callable[[], None] | Outbox | None:
        try:
            result = job()
        except BaseException:
            # Jobs report their own errors; whatever arrives here is a bug, and must not cost the pool a thread
            logger.exception("an internal error in a worker thread")
            result = None
        # The blocks it was in have ended with it. Left are the two things that people switch without a block.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        return result

    def _tell(self, then: Callable[[], None] | None) -> bool:
        """Let the loop do the rest of a job; False if it is closed, so that nobody waits any more."""
        self._done.append(then)
        # Only the first result after the loop looked needs to wake it. A race costs a spare wake-up, never a lost one:
        # the loop clears the flag before it empties the queue.
        if not self._wake_up_sent:
            self._wake_up_sent = True
            try:
                self._loop.call_soon_threadsafe(self._collect)
            except RuntimeError:
                return False
        return True

    def _do_late(self, job: Job) -> None:
        """Run a job in a thread that ends with it."""
        result = self._run(job)
        if isinstance(result, Outbox):
            self._send(result, 1)
        else:
            self._tell(result)

    def _leave_bell(self) -> None:
        # Closed by the last one: a number that is closed too early may be that of another file when it is used
        self._done_with_bell.append(None)
        if len(self._done_with_bell) > len(self._threads):
            self._bell.close()

    def _collect(self) -> None:
        self._wake_up_sent = False
        done = self._done
        # The loop may be between two steps of a task that has switched something off for itself, unless tasks are
        # isolated
        outer = None if self._tasks_are_isolated or torchstate.is_pristine() else torchstate.save_and_reset()
        try:
            while done:
                then = done.popleft()
                self._unfinished -= 1
                if then is not None:
                    then()
        finally:
            if outer is not None:
                torchstate.restore(outer)
        # With all threads at work there is nobody to wake: whoever is done takes the next job before it sleeps
        waiting = len(self._jobs)
        if waiting and self._unfinished - waiting < self._size and self._helper is None and not self._closed:
            # Whoever finished last may have gone to sleep before these came, or be stuck
            self._helper = self._loop.call_later(_HELP_AFTER_S, self._help)

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A future for ``function(*args)`` run in a thread, as a step of the work that calls it."""
        if (steps := torchstate.current_steps.get()) is not None:
            function = partial(torchstate.call_stepped, steps, function)
        call = _Call(self._loop.create_future(), function, args)
        self.submit(call.work)
        return call.future


class _Call:
    """One `ThreadPool.call`. It forgets how it went: the frames of an error lead here, and so would never be freed."""

    __slots__ = ("_args", "_error", "_function", "_result", "future")

    def __init__(self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.future = future
        self._function = function
        self._args = args
        self._result: Any = None
        self._error: BaseException | None = None

    def work(self) -> Callable[[], None]:
        try:
            # a step of a generator may end in the middle of a block
            self._result = torchstate.call_isolated(self._function, *self._args)
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            # raised where the future is awaited, these two would end the coroutine there in another way
            is_special = isinstance(error, StopIteration | GeneratorExit)
            self._error = RuntimeError(repr(error)) if is_special else error
        return self._settle

    def _settle(self) -> None:
        future, result, error = self.future, self._result, self._error
        del self.future, self._result, self._error
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
