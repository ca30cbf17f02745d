"""What a piece of code runs on behalf of: which worker, within which deadline, for which caller.

One ContextVar for all of it, so that starting a handler sets one variable and making a call reads one.
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
        """The worker this code belongs to; typed by the runtime, which alone knows what a worker is."""

    @property
    def deadline(self) -> float | None:
        """When the result is of no use any more, in the loop's time."""

    @property
    def caller(self) -> WorkerInfo | None:
        """The worker that called the handler; None outside of handlers."""

    @property
    def prerequisites(self) -> list[Awaitable[object]] | None:
        """What a handler waits for before it starts. What is unpacked as one of its arguments may add to it."""

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """A call was made in this scope; one of a handler ends with the handler if that is cancelled."""

    def call_comes(self) -> None:
        """A thread makes a call in this scope, which begins on the loop, soon. In that thread."""


class WorkerScope(NamedTuple):
    """The scope of code that belongs to a worker and runs for no caller."""

    worker: Any
    deadline: float | None = None
    caller: WorkerInfo | None = None
    prerequisites: None = None

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """Nothing to keep: this scope has no end of its own."""

    def call_comes(self) -> None:
        """Nothing to wait for."""


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

# Workers refer to their loop: were they kept here, neither would ever go
_living: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakSet[Any]] = WeakKeyDictionary()
"""The workers of each loop."""


_left_behind = False


def is_forked() -> bool:
    """Whether workers were left behind in the process that this one was forked from."""
    return _left_behind


def _leave_behind() -> None:
    """Let a forked process have no worker: its parent's connections are those of its parent.

    Requests that both write to one socket would have the same ids, and each the other's answers.
    """
    global _left_behind  # noqa: PLW0603 - there is one process
    _left_behind = _left_behind or any(_living.values())
    current_scope.set(None)
    _living.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_behind)


def worker_began(worker: Any, loop: asyncio.AbstractEventLoop) -> None:
    """A worker can be used from now on, and is the one of this context."""
    current_scope.set(WorkerScope(worker))
    _living.setdefault(loop, WeakSet()).add(worker)


def worker_ended(worker: Any, loop: asyncio.AbstractEventLoop) -> None:
    """It cannot be used any more."""
    if (workers := _living.get(loop)) is not None:
        workers.discard(worker)


def find_scope() -> Scope | None:
    """The scope of this context; in a context that has none, that of the running loop's only worker.

    A notebook runs every cell in a context of its own: what `init_rpc` made current in one is not so in the next.
    """
    scope = current_scope.get()
    if scope is not None:
        return scope
    try:
        workers = list(_living.get(asyncio.get_running_loop(), ()))
    except RuntimeError:
        return None
    return WorkerScope(workers[0]) if len(workers) == 1 else None
