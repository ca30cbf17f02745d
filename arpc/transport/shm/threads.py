"""Threads that copy and free memory while the event loop runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

__all__ = ["MemoryThreads"]

_MAX_THREADS: Final = 4

_Done = Callable[[BaseException | None], None]
"""The callback for the end of a job: called on the loop with the job's exception, or None."""


class MemoryThreads:
    """A few threads, started when first needed, for jobs that release the interpreter lock most of the time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="arpc-memory")
        self._jobs = 0
        self._all_done = asyncio.Event()
        self._all_done.set()

    def run(self, job: Callable[[], None], done: _Done = lambda _: None) -> None:
        """Run a job in a thread; ``done`` is called whether it succeeds or fails."""
        self._jobs += 1
        self._all_done.clear()
        # Not by callbacks of the executor's future: they would form a cycle that keeps the copied memory alive
        self._executor.submit(self._work, job, done)

    def _work(self, job: Callable[[], None], done: _Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:  # noqa: BLE001 - passed to the job's callback
            error = raised
        with suppress(RuntimeError):  # the loop was closed without a shutdown: no caller waits any more
            self._loop.call_soon_threadsafe(self._worked, done, error)

    def _worked(self, done: _Done, error: BaseException | None) -> None:
        self._jobs -= 1
        if not self._jobs:
            self._all_done.set()
        done(error)

    async def aclose(self) -> None:
        """Wait for the running jobs and end the threads. No job may be started any more."""
        await self._all_done.wait()
        self._executor.shutdown()
