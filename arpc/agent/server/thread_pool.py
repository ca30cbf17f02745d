"""Threads that run plain functions, and send the replies themselves or hand results to the loop in batches.

For a small function, the switches to a thread and back cost more than the function. Six measures make them cheap:

- The loop wakes a thread by a write to a file descriptor, which releases the interpreter lock meanwhile. A thread woken
  by a lock or a queue would have to wait for the interpreter lock.
- Each thread has its own descriptor, and the loop wakes the thread that fell asleep last. A shared descriptor would
  wake all threads.
- A job may leave messages in an `Outbox`, which its thread sends. Then the loop is not woken at all.
- The loop yields the CPU to the thread at once if the function has proved to be *quick*. Otherwise the thread may have
  to wait until the loop has ended its turn.
- Quick functions share one thread, which sends the replies of many of them at once. If one of them blocks after all,
  other threads soon take over.
- That takes a timer, but not while a single job is under way: a timer that is due soon costs as much as a switch of
  threads, each time the loop goes to sleep.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from arpc import torchstate
from arpc.log import get_logger
from arpc.user_errors import is_a, set_cause, summary_of

__all__ = ["Outbox", "ThreadPool"]

logger = get_logger("arpc.threads")

# Longer than the system's own tick of 1 to 4 ms, because a timer beyond that tick costs little
_HELP_AFTER_S: Final = 0.01
_AWAY_S: Final = 0.0002
_MOST_YIELDS_SKIPPED: Final = 1 << 14
_clock = time.perf_counter
_yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Outbox:
    """A base class for queues of messages that jobs leave to their thread, to send once it has no other quick job.

    It is not an abstract class, because `isinstance`, which is called after each job, is slower for those.
    """

    __slots__ = ("answers_a_write", "is_watched")

    def __init__(self) -> None:
        self.answers_a_write = 32
        """The most replies that go into one write: the peer works on the first ones while the next are made."""
        self.is_watched = False
        """Whether the loop will check if its thread is stuck."""

    def send(self) -> None:
        """Send all messages, in the calling thread. Must neither raise nor block."""
        raise NotImplementedError

    def send_on_loop(self) -> None:
        """Send all messages, on the loop, because the thread may be stuck in another job."""
        raise NotImplementedError


Job = Callable[[], Callable[[], None] | Outbox | None]
"""A function to run in a thread. If it returns a function, that runs on the loop afterwards; if it returns an outbox,
that is sent, and the loop is not woken. It must not raise, and must leave torch's state as it was."""


class _WakeUp:
    """Wakes one thread: each `send` by the loop ends one `wait` of the thread."""

    def __init__(self) -> None:
        self.send: Callable[[], object]
        self.wait: Callable[[], object]
        if hasattr(os, "eventfd"):
            descriptor = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
            self.descriptors: tuple[int, ...] = (descriptor,)
            self.send = partial(os.eventfd_write, descriptor, 1)
            self.wait = partial(os.read, descriptor, 8)  # not `eventfd_read`, which a signal interrupts
        else:
            self.descriptors = read_from, write_to = os.pipe()
            self.send, self.wait = partial(os.write, write_to, b"1"), partial(os.read, read_from, 1)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class _Worker(threading.Thread):
    """One thread of a pool, with the state that the loop may read."""

    def __init__(self, work: Callable[[_Worker], None], name: str) -> None:
        super().__init__(target=work, args=(self,), name=name, daemon=True)
        self.wake_up = _WakeUp()
        self.answered = 0
        """The number of jobs that it has finished without the loop."""
        self.is_slow = False
        """Whether it runs a job that is not known to be quick."""
        self.clock: int | None = None
        """The id of the clock of its CPU time, while it runs; None if the system has no such clock."""

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError:
            self.wake_up.close()  # the system has no more threads
            raise

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            super().run()
        finally:
            self.clock = None
            self.wake_up.close()

    @property
    def cpu_s(self) -> float:
        clock = self.clock
        try:
            return 0.0 if clock is None else time.clock_gettime(clock)
        except OSError:
            return 0.0  # it has just ended


class ThreadPool:
    """Up to ``size`` threads, started when there is work and no thread is free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, name: str) -> None:
        self._loop = loop
        self.size = size
        self._name = name
        self._jobs: deque[tuple[Job, bool]] = deque()
        """The jobs to do, each with whether it is quick."""
        self._threads: list[_Worker] = []
        self._sleepers: list[_WakeUp] = []
        """The wake-ups of sleeping threads. The last to fall asleep, whose memory is in the caches, is woken first."""
        self._submitted = 0
        self._collected = 0
        """The number of jobs that have ended on the loop."""
        self._wanted = 0
        """The number of jobs of this turn that need a thread of their own."""
        self._will_wake = False
        self._is_stuck = False
        """Whether a job that was submitted as quick is not, and may still run."""
        self._helper: asyncio.TimerHandle | None = None
        self._expected = 0
        """The number of jobs expected to have a thread when `_helper` fires. If there are no more, it adds threads."""
        self._tasks_are_isolated = torchstate.isolates_all_tasks(loop)
        self._done: deque[Callable[[], None] | None] = deque()
        self._wake_up_sent = False
        self._yields_to_skip = self._next_yields_to_skip = 0
        """The number of times that the loop does not yield the CPU: those left now, and those after the next yield."""
        self._unsent: deque[Outbox] = deque()
        """The outboxes that threads may still have to send while they run another job."""
        self._closed = False

    # -- on the loop

    def submit(self, job: Job, is_quick: bool = False, is_alone: bool = False) -> None:
        """Run a job in a thread, from the end of this turn of the loop on. Called on the loop.

        A quick job may wait for other quick jobs. ``is_alone``: no other job is about to be submitted in this turn, so
        this one may begin at once.
        """
        self._jobs.append((job, is_quick))
        self._submitted += 1
        sleepers = self._sleepers
        if is_alone and sleepers and len(sleepers) == len(self._threads):
            # A thread that is woken here often runs before this one continues. Jobs that it has finished by then need
            # no wake-up of the loop.
            self._wake_up_sent = True
            self._wake()
            if is_quick:
                self._give_way()
            self._wake_up_sent = False
            if self._done:
                self._loop.call_soon(self._collect)
            return
        if not is_quick:
            self._wanted += 1
        if self._closed:
            # A handler that ends late may still have to clean up when all threads have ended. This one ends when it
            # finds no other job.
            self._launch()
        elif not self._will_wake:
            # After the last read of this turn, the loop may as well let a thread run
            self._will_wake = True
            self._loop.call_soon(self._wake_threads)

    def _give_way(self) -> None:
        """Yield the CPU to the thread that was woken, unless other programs compete for it.

        The CPU comes back after a quick job. If it takes longer, another program has taken it: then the next attempt is
        made much later, and later still if that happens again.
        """
        if self._yields_to_skip:
            self._yields_to_skip -= 1
            return
        begun = _clock()
        _yield_cpu()
        if _clock() - begun > _AWAY_S:
            self._next_yields_to_skip = min(_MOST_YIELDS_SKIPPED, 4 * self._next_yields_to_skip + 64)
        else:
            self._next_yields_to_skip = 7 * self._next_yields_to_skip // 8
        self._yields_to_skip = self._next_yields_to_skip

    def _wake_threads(self) -> None:
        """Wake, or start, threads for the jobs of this turn."""
        self._will_wake = False
        if self._closed:
            return  # `close` has woken all
        jobs = len(self._jobs)
        taken = self._submitted - jobs
        awake = len(self._threads) - len(self._sleepers)
        # Each job that was taken and is not finished may keep a thread busy; threads that are awake and not busy are
        # about to take the first jobs of the queue
        busy = max(0, min(self._unfinished - jobs, awake))
        takers = awake - busy
        wanted, self._wanted = self._wanted, 0
        if not busy:
            self._is_stuck = False
        if not wanted and (self._is_stuck or awake <= self._slow_threads):
            wanted = 1  # otherwise a thread runs other quick jobs, and takes these soon
        wanted = max(0, min(wanted, jobs - takers, self.size - awake))
        if jobs > takers + wanted and busy < self.size and self._helper is None:
            # The threads that are to take them may get stuck. If all threads are busy, none could help: each takes the
            # next job before it sleeps.
            self._look_later(taken + takers + wanted)
        self._wake_up_sent = True  # as in `submit`
        try:
            while wanted and self._jobs:
                wanted -= 1
                if not self._wake() and len(self._threads) < self.size:
                    self._launch()
        finally:
            self._collect()

    def _wake(self) -> bool:
        """Wake the thread that fell asleep last; False if none is asleep."""
        try:
            wake_up = self._sleepers.pop()
        except IndexError:
            return False  # the last of them may just have found a job by itself
        wake_up.send()
        return True

    def _launch(self) -> None:
        thread = _Worker(self._work, f"arpc-{self._name}-{len(self._threads)}")
        thread.start()
        self._threads.append(thread)  # last: if the system has no more threads, the pool must not count this one

    def _look_later(self, expected: int) -> None:
        """Check later whether threads have taken more than the ``expected`` number of jobs."""
        self._expected = expected
        self._helper = self._loop.call_later(_HELP_AFTER_S, self._help)

    def _help(self) -> None:
        """Send the replies, and start the jobs, that may wait behind a thread that is stuck."""
        # First of all, so that from now on no thread relies on it
        self._helper = None
        self._send_unsent()
        if not self._jobs or self._closed:
            return
        taken = self._submitted - len(self._jobs)
        if taken == self._expected:
            self._is_stuck = True
            self._wanted += len(self._jobs)
            self._wake_threads()
        else:
            self._look_later(taken)

    def _send_unsent(self) -> None:
        while self._unsent:
            outbox = self._unsent.popleft()
            outbox.is_watched = False
            outbox.send_on_loop()

    def _collect(self) -> None:
        """Run the functions that finished jobs have returned for the loop."""
        if not self._tasks_are_isolated and not torchstate.is_pristine():
            # a suspended task, in a no_grad() block, say, has left its torch state on this thread
            torchstate.run_with(torchstate.DEFAULTS, self._collect)
            return
        self._wake_up_sent = False
        done = self._done
        while done:
            then = done.popleft()
            self._collected += 1
            if then is not None:
                then()

    def close(self) -> None:
        """End the threads as they become free. One that is stuck in user code is left behind: it is a daemon.

        Jobs submitted before that, or even later by a handler that could not be stopped, are still run.
        """
        if self._closed:
            return
        if self._jobs:
            self._wake_threads()  # so that there are threads to do them
        self._closed = True
        if self._helper is not None:
            self._helper.cancel()
            self._helper = None
        self._send_unsent()
        while self._wake():
            pass

    # -- state

    @property
    def jobs_answered(self) -> int:
        """The number of jobs that threads have finished without the loop."""
        return sum([thread.answered for thread in self._threads])

    @property
    def _unfinished(self) -> int:
        return self._submitted - self._collected - self.jobs_answered

    @property
    def _slow_threads(self) -> int:
        return sum([thread.is_slow for thread in self._threads])

    @property
    def idle_threads(self) -> int:
        return max(0, self.size - self._unfinished)

    @property
    def is_asleep(self) -> bool:
        """Whether all threads sleep."""
        return len(self._sleepers) == len(self._threads)

    @property
    def is_ahead(self) -> bool:
        """Whether more than `size` finished jobs wait for the loop, so that threads may as well wait for it."""
        return len(self._done) > self.size

    @property
    def is_in_slow_job(self) -> bool:
        """Whether a thread runs a job that is not known to be quick."""
        return bool(self._slow_threads)

    @property
    def cpu_s(self) -> float:
        """The CPU time of the threads in seconds; 0.0 where the system does not measure it."""
        return sum([thread.cpu_s for thread in self._threads])

    def statistics(self) -> dict[str, int]:
        return {
            "threads": len(self._threads),
            "threads_max": self.size,
            "jobs_unfinished": self._unfinished,
            "jobs_queued": len(self._jobs),
        }

    # -- in a thread

    def _work(self, thread: _Worker) -> None:
        """Run jobs, in a thread of the pool, until the pool is closed."""
        outbox: Outbox | None = None
        unsent = 0
        jobs = self._jobs
        while True:
            if not jobs:
                if outbox is not None:
                    outbox.send()
                    outbox = None
                elif self._closed:
                    return
                else:
                    self._sleep(thread.wake_up)
                continue
            try:
                job, is_quick = jobs.popleft()
            except IndexError:
                continue  # another thread was quicker
            if outbox is not None and not (
                is_quick
                and unsent < outbox.answers_a_write
                and (outbox.is_watched or self._watch(outbox))
                and self._helper is not None  # otherwise the loop would not send what is left
            ):
                outbox.send()
                outbox = None
            thread.is_slow = not is_quick
            try:
                result = job()
            except BaseException:
                # Jobs report their own errors; an error here is a bug, and must not cost the pool a thread
                logger.exception("an internal error in a worker thread")
                result = None
            thread.is_slow = False
            del job
            if isinstance(result, Outbox):
                if result is not outbox:
                    if outbox is not None:
                        outbox.send()
                    outbox = result
                    unsent = 0
                unsent += 1
                # Before the reply is sent: the next job may come as soon as it is out, and by then the loop must count
                # this thread as free
                thread.answered += 1
            elif not self._finish_on_loop(result):
                return
            del result  # the objects that it refers to must not live on while this thread sleeps

    def _sleep(self, wake_up: _WakeUp) -> None:
        """Wait until there is a job, in a thread that found none."""
        self._sleepers.append(wake_up)
        # Check again: the loop may have submitted a job before this thread counted as asleep
        if self._jobs or self._closed:
            try:
                self._sleepers.remove(wake_up)
            except ValueError:
                pass  # it is being woken
            else:
                return
        wake_up.wait()

    def _watch(self, outbox: Outbox) -> bool:
        """Let the loop send the outbox, should this thread get stuck in its next job. Returns True."""
        outbox.is_watched = True
        self._unsent.append(outbox)
        return True

    def _finish_on_loop(self, then: Callable[[], None] | None) -> bool:
        """Let the loop run the rest of a job; False if the loop is closed."""
        self._done.append(then)
        # Only the first result after the loop has emptied the queue needs to wake it. A race costs a spare wake-up, but
        # never loses one: the loop clears the flag before it empties the queue.
        if not self._wake_up_sent:
            self._wake_up_sent = True
            try:
                self._loop.call_soon_threadsafe(self._collect)
            except RuntimeError:
                return False
        return True

    # -- for coroutines

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run ``function(*args)`` in a thread, as a step of the calling work; returns a future for the result."""
        if (steps := torchstate.current_steps.get()) is not None:
            function = partial(torchstate.call_stepped, steps, function)
        call = _Call(self._loop.create_future(), function, args)
        # Few of these come in one turn, so the first begins at once, which saves a turn of the loop
        self.submit(call.work, is_alone=True)
        return call.future


class _Call:
    """One `ThreadPool.call`. It drops its outcome, because an error's frames refer to it and would live on."""

    __slots__ = ("_args", "_error", "_function", "_result", "future")

    def __init__(self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.future = future
        self._function = function
        self._args = args
        self._result: Any = None
        self._error: BaseException | None = None

    def work(self) -> Callable[[], None]:
        try:
            # a step of a generator may end inside a `with` block
            self._result = torchstate.call_isolated(self._function, *self._args)
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            # in the coroutine that awaits the future, these two would not act as ordinary errors
            is_special = is_a(error, (StopIteration, GeneratorExit))
            self._error = set_cause(RuntimeError(summary_of(error)), error) if is_special else error
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
