"""Undocumented APIs of asyncio.

Those in `private_apis` are probed at import, and arpc works without them. ``ARPC_PUBLIC_APIS=1`` in the environment
turns them off; `private_apis` reports which are on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from arpc.private.switch import PUBLIC_ONLY

__all__ = [
    "ENTERS_TASKS",
    "awaited_by",
    "enter_task",
    "leave_task",
    "mark_awaited",
    "private_apis",
    "running_loop",
]

_Switch = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], None]


def _unavailable(_loop: asyncio.AbstractEventLoop, _task: asyncio.Task[Any]) -> None:
    raise RuntimeError("asyncio has no way to run code on behalf of a task")


enter_task: _Switch = _unavailable
"""Makes a task current outside of its own steps. Raises `RuntimeError` if another one is current, or if unavailable."""
leave_task: _Switch = _unavailable
"""Undoes `enter_task`."""
try:
    from asyncio.tasks import _enter_task, _leave_task
except ImportError:
    ENTERS_TASKS: Final = False
else:
    ENTERS_TASKS: Final = not PUBLIC_ONLY  # type: ignore[misc]  # it is one of the two
    if ENTERS_TASKS:
        enter_task, leave_task = _enter_task, _leave_task


def find_running_loop() -> asyncio.AbstractEventLoop | None:
    """Do what `running_loop` does, by documented APIs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = (
    find_running_loop if PUBLIC_ONLY else getattr(asyncio, "_get_running_loop", find_running_loop)
)
"""Return the loop that runs in this thread, None if there is none.

Unlike ``asyncio.get_running_loop`` it raises no error, which would cost as much as a small call.
"""


def private_apis() -> dict[str, bool]:
    """Return which undocumented APIs of asyncio are in use."""
    return {
        "enter_task": ENTERS_TASKS,
        "running_loop": running_loop is not find_running_loop,
    }


def mark_awaited(future: Any, *, is_awaited: bool) -> None:
    """Set the flag that a coroutine sets on the future it awaits, and that its task clears."""
    future._asyncio_future_blocking = is_awaited


def awaited_by(task: asyncio.Task[Any]) -> object:
    """Return the future that a task waits for, None if there is none or it is unknown."""
    return getattr(task, "_fut_waiter", None)
