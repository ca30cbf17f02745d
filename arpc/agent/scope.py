"""The scope of the code that runs now: its worker, its deadline and its caller.

One ContextVar holds all of it, so that starting a handler sets one variable and making a call reads one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from arpc.ids import WorkerInfo
from arpc.log import set_source

__all__ = ["Scope", "WorkerScope", "current_scope", "find_scope", "is_forked", "worker_began", "worker_ended"]


class Scope(Protocol):
    """The scope of a worker's own code, or of one handler that runs for a caller."""

    @property
    def worker(self) -> Any:
        """The worker that this code belongs to. The runtime, a higher layer, defines its type."""

    @property
    def deadline(self) -> float | None:
        """The time, by the loop's clock, after which the result is of no use; None for no deadline."""

    @property
    def caller(self) -> WorkerInfo | None:
        """The worker that called the handler; None outside of handlers."""

    @property
    def prerequisites(self) -> list[Awaitable[object]] | None:
        """The awaitables that a handler waits for before it starts; None outside of handlers.

        Code that unpickles one of the arguments may add to it.
        """

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """Record a call that was made in this scope. If a handler is cancelled, its calls are cancelled, too."""

    def thread_call_begun(self) -> None:
        """Record that a thread makes a call in this scope, which soon begins on the loop. Called in that thread."""


class WorkerScope(NamedTuple):
    """The scope of code that belongs to a worker and runs for no caller."""

    worker: Any
    deadline: float | None = None
    caller: WorkerInfo | None = None
    prerequisites: None = None

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """Do nothing: this scope is never cancelled."""

    def thread_call_begun(self) -> None:
        """Do nothing: no reply has to wait for the call."""


current_scope: ContextVar[Scope | None] = ContextVar("arpc.scope", default=None)


def _log_fields() -> dict[str, Any]:
    scope = current_scope.get()
    if scope is None:
        return {}
    caller = scope.caller
    return {
        "worker": getattr(scope.worker, "name", None),
        "peer": None if caller is None else caller.name,
        "call_id": getattr(scope, "id", None),
    }


set_source(_log_fields)

# Weak, because workers refer to their loop: strong references would keep both alive for ever
_living: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakSet[Any]] = WeakKeyDictionary()
"""The workers of each loop."""


_left_behind = False


def is_forked() -> bool:
    """Return whether this process was forked from one that had workers."""
    return _left_behind


def _leave_behind() -> None:
    """Drop all workers in a forked process, because their connections belong to the parent.

    If both processes wrote requests to one socket, the ids would collide, and each would get the other's replies.
    """
    global _left_behind  # noqa: PLW0603 - there is one process
    _left_behind = _left_behind or any(_living.values())
    current_scope.set(None)
    _living.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_behind)


def worker_began(worker: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Register a worker that can be used from now on, and make it the worker of this context."""
    current_scope.set(WorkerScope(worker))
    _living.setdefault(loop, WeakSet()).add(worker)


def worker_ended(worker: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Unregister a worker that cannot be used any more."""
    if (workers := _living.get(loop)) is not None:
        workers.discard(worker)


def find_scope() -> Scope | None:
    """Return the scope of this context; if it has none, that of the running loop's only worker, if there is just one.

    A notebook runs every cell in a context of its own: the worker that `init_rpc` made current in one cell is not
    current in the next.
    """
    scope = current_scope.get()
    if scope is not None:
        return scope
    try:
        workers = list(_living.get(asyncio.get_running_loop(), ()))
    except RuntimeError:
        return None
    return WorkerScope(workers[0]) if len(workers) == 1 else None
