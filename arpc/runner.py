"""Running a program: on a fast loop, with separate torch state for each task and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from arpc import torchstate
from arpc.errors import ShutdownError, WorkerLostError

__all__ = ["new_event_loop", "run"]

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if it is installed, else asyncio's own.

    Each task on it has its own grad mode and similar torch state.
    """
    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    torchstate.install_task_factory(loop)
    return loop


def _new_rooted_loop() -> asyncio.AbstractEventLoop:
    loop = new_event_loop()
    loop.set_task_factory(torchstate.rooted_task_factory)
    return loop


def run(main: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]], *, debug: bool | None = None) -> T:
    """Run a coroutine, or a function that makes one, to its end. Like `asyncio.run`, on a loop of `new_event_loop`.

    SIGTERM cancels it, as SIGINT does: workers leave their group instead of being lost. A second SIGTERM ends the
    process. If the coroutine then ends because of the signal, or because the rest of its group left at the same time,
    no traceback is printed.

    >>> async def main():
    ...     return 42
    >>> run(main)
    42
    """
    _refuse_to_nest()
    coroutine = main() if callable(main) else main
    if not asyncio.iscoroutine(coroutine):
        raise TypeError(f"run takes an async function or a coroutine, and {main!r} is neither")
    termination = _Termination()
    # The coroutine inherits the torch state around this call; everything else on the loop starts from the defaults
    rooted = torchstate.Rooted(
        termination.cancelling(coroutine) if termination.can_handle() else coroutine, torchstate.capture()
    )
    try:
        with torchstate.pristine_thread(), asyncio.Runner(debug=debug, loop_factory=_new_rooted_loop) as runner:
            return runner.run(rooted)
    except BaseException as error:
        if termination.came and _is_departure(error):
            signal.raise_signal(signal.SIGTERM)  # so that the parent process sees which signal ended this one
        raise


def _refuse_to_nest() -> None:
    """Raise RuntimeError inside a running loop: asyncio would raise it too, but without saying what to do instead."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("arpc.run() cannot be called from a running event loop, as that of a notebook: use await there")


def _is_departure(error: BaseException) -> bool:
    """Return whether an exception only shows that this worker was terminated, or the workers that it called."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_departure, error.exceptions))
    return isinstance(error, asyncio.CancelledError | WorkerLostError | ShutdownError)


class _Termination:
    """Cancels a coroutine on SIGTERM."""

    def __init__(self) -> None:
        self.came = False

    @staticmethod
    def can_handle() -> bool:
        """Return whether this thread receives signals, and the program has no handler of its own for SIGTERM."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        return is_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def cancelling(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            self.came = True
            loop.remove_signal_handler(signal.SIGTERM)
            task.cancel()

        try:
            loop.add_signal_handler(signal.SIGTERM, terminate)
        except NotImplementedError:
            return await coroutine  # a loop without signal handlers, as on Windows
        try:
            return await coroutine
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
