"""Running a program: the fast loop, with torch's state kept apart per task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from arpc import torchstate

__all__ = ["new_event_loop", "run"]

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if it is installed, else asyncio's own; tasks on it keep torch's grad mode and the like to themselves."""
    try:
        import uvloop  # noqa: PLC0415 - optional: not there on every platform

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    torchstate.install_task_factory(loop)
    return loop


def run(main: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]], *, debug: bool | None = None) -> T:
    """Run a coroutine, or a function that makes one, to its end. Like `asyncio.run`, on `new_event_loop`.

    >>> async def main():
    ...     return 42
    >>> run(main)
    42
    """
    coroutine = main() if callable(main) else main
    with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)
