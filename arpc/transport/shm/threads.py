"""Threads that copy and free memory while the loop goes on."""

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
"""Called on the loop when something was done, with what went wrong."""


class MemoryThreads:
    """A few threads, started when first needed. They run what releases the interpreter for most of its time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="arpc-memory")
        self._jobs = 0
        self._all_done = asyncio.Event()
        self._all_done.set()

    def run(self, job: Callable[[], None], done: _Done = lambda _: None) -> None:
        """Run a job; ``done`` is called in any case."""
        self._jobs += 1
        self._all_done.clear()
        # Not by the executor's future: with its callbacks it would be a cycle, and keep what was copied
        self._executor.submit(self._work, job, done)

    def _work(self, job: Callable[[], None], done: _Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:  # noqa: BLE001 - told to whoever waits, as all else
            error = raised
        with suppress(RuntimeError):  # the loop was closed without a shutdown: nobody waits any more
            self._loop.call_soon_threadsafe(self._worked, done, error)

    def _worked(self, done: _Done, error: BaseException | None) -> None:
        self._jobs -= 1
        if not self._jobs:
            self._all_done.set()
        done(error)

    async def aclose(self) -> None:
        """Wait for what is under way. Nothing may be begun any more."""
        await self._all_done.wait()
        self._executor.shutdown()
