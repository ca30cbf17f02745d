"""Threads that run plain functions, and hand results back to the loop in batches.

`concurrent.futures` wakes the loop once per result; here all results that are ready when the loop looks come with one
wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from arpc import torchstate

__all__ = ["ThreadPool"]

logger = logging.getLogger("arpc.threads")

Job = Callable[[], Callable[[], None] | None]
"""Runs in a thread; what it returns runs on the loop afterwards. Must not raise."""


class ThreadPool:
    """Up to ``size`` threads, started when there is work and no thread is free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, name: str) -> None:
        self._loop = loop
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._done: deque[Callable[[], None] | None] = deque()
        self._wake_up_sent = False
        self._closed = False

    def submit(self, job: Job) -> None:
        """Run a job in a thread. Called on the loop."""
        self._unfinished += 1
        # more unfinished jobs than threads: none can be idle
        if self._unfinished > len(self._threads) < self._size:
            self._start_thread()
        self._jobs.put(job)

    @property
    def idle_threads(self) -> int:
        return max(0, self._size - self._unfinished)

    def close(self) -> None:
        """End the threads as they become free. One that is stuck in user code is left behind: it is a daemon."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    async def join(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; False if some are still busy."""
        deadline = self._loop.time() + timeout_s
        while any(thread.is_alive() for thread in self._threads):
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def statistics(self) -> dict[str, int]:
        return {
            "threads": len(self._threads),
            "threads_max": self._size,
            "jobs_unfinished": self._unfinished,
            "jobs_queued": self._jobs.qsize(),
        }

    def _start_thread(self) -> None:
        name = f"arpc-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        get = self._jobs.get
        done = self._done
        while True:
            job = get()
            if job is None:
                return
            try:
                result = torchstate.call_isolated(job)
            except BaseException:
                # Jobs report their own errors; whatever arrives here is a bug, and must not cost the pool a thread
                logger.exception("an internal error in a worker thread")
                result = None
            done.append(result)
            del job, result
            # Only the first result after the loop looked needs to wake it. A race costs a spare wake-up, never a lost
            # one: the loop clears the flag before it empties the queue.
            if not self._wake_up_sent:
                self._wake_up_sent = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:
                    return  # the loop is closed, so nobody waits any more

    def _collect(self) -> None:
        self._wake_up_sent = False
        done = self._done
        # The loop may be between two steps of a task that has switched something off for itself
        outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
        try:
            while done:
                then = done.popleft()
                self._unfinished -= 1
                if then is not None:
                    then()
        finally:
            if outer is not None:
                torchstate.restore(outer)

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A future for ``function(*args)`` run in a thread."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def job() -> Callable[[], None]:
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
                failure = error if not isinstance(error, StopIteration) else RuntimeError(repr(error))
                return lambda: None if future.done() else future.set_exception(failure)
            return lambda: None if future.done() else future.set_result(result)

        self.submit(job)
        return future
