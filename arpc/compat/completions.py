"""Futures of torch for what arpc does: completed in threads of their own, where callbacks may block and call on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from arpc import torchstate
from arpc.agent.server.thread_pool import ThreadPool

__all__ = ["Completions"]

_THREADS: Final = 256
"""At most so many callbacks can block at once. Threads are started when they are needed."""


class Completions:
    """Completes futures off the loop. Belongs to the loop, but for the futures themselves."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._threads = ThreadPool(loop, _THREADS, f"{name}-callbacks")

    def complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        # Most futures have no callback, or a quick one: these are completed one after the other by one thread, and
        # others come to help if that is stuck
        self._threads.submit(partial(torchstate.call_isolated, future.set_result, value), is_quick=True)

    def fail(self, future: torch.futures.Future[Any], error: BaseException) -> None:
        self._threads.submit(partial(torchstate.call_isolated, future.set_exception, error), is_quick=True)

    def run(self, work: Callable[[], None]) -> None:
        """Run something that may block."""
        self._threads.submit(partial(torchstate.call_isolated, work))

    def close(self) -> None:
        self._threads.close()
