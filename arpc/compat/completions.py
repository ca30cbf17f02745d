"""Completes torch futures in threads of their own, where callbacks may block and make calls."""

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
"""The most callbacks that can block at once. Threads are started when they are needed."""


class Completions:
    """Completes futures off the loop. Belongs to the loop, except for the futures themselves."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._threads = ThreadPool(loop, _THREADS, f"{name}-callbacks")

    def complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        # Most futures have no callback, or a quick one: one thread completes them one after the other, and other
        # threads help if that one blocks
        self._threads.submit(partial(torchstate.call_isolated, future.set_result, value), is_quick=True)

    def fail(self, future: torch.futures.Future[Any], error: BaseException) -> None:
        self._threads.submit(partial(torchstate.call_isolated, future.set_exception, error), is_quick=True)

    def run(self, work: Callable[[], None]) -> None:
        """Run a function that may block."""
        self._threads.submit(partial(torchstate.call_isolated, work))

    def close(self) -> None:
        self._threads.close()
