"""What a piece of code runs on behalf of: which worker, within which deadline, for which caller.

One ContextVar for all of it, so that starting a handler sets one variable and making a call reads one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from arpc.ids import WorkerInfo

__all__ = ["Scope", "WorkerScope", "current_scope"]


class Scope(Protocol):
    """The scope of a worker's own code, or of one handler that runs for a caller."""

    @property
    def worker(self) -> Any:
        """The worker this code belongs to; typed by the runtime, which alone knows what a worker is."""

    @property
    def deadline(self) -> float | None:
        """When the result is of no use any more, in the loop's time."""

    @property
    def caller(self) -> WorkerInfo | None:
        """Who called the handler; None outside of handlers."""

    @property
    def prerequisites(self) -> list[Awaitable[object]] | None:
        """What a handler waits for before it starts. What is unpacked as one of its arguments may add to it."""

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """A call was made in this scope; one of a handler ends with the handler if that is cancelled."""


class WorkerScope(NamedTuple):
    """The scope of code that belongs to a worker and runs for no caller."""

    worker: Any
    deadline: float | None = None
    caller: WorkerInfo | None = None
    prerequisites: None = None

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """Nothing to keep: this scope has no end of its own."""


current_scope: ContextVar[Scope | None] = ContextVar("arpc.scope", default=None)
