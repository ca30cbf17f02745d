"""What a piece of code runs on behalf of: which worker, within which deadline, for which caller.

One ContextVar for all of it, so that starting a handler sets one variable and making a call reads one.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from arpc.ids import WorkerInfo

__all__ = ["Scope", "current_scope"]


class Scope:
    """The scope of a worker's own code, or of one handler that runs for a caller."""

    __slots__ = ("caller", "deadline", "worker")

    def __init__(self, worker: Any, deadline: float | None = None, caller: WorkerInfo | None = None) -> None:
        self.worker = worker
        """The worker this code belongs to; typed by the runtime, which alone knows what a worker is."""
        self.deadline = deadline
        """When the result is of no use any more, in the loop's time."""
        self.caller = caller
        """Who called the handler; None outside of handlers."""


current_scope: ContextVar[Scope | None] = ContextVar("arpc.scope", default=None)
