"""What a coroutine awaits until its call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from functools import partial
from typing import Any, Final

from arpc import torchstate
from arpc.private.asyncio import WAKES_DIRECTLY

__all__ = ["ReplyWaiter", "waiter_factory"]

_PENDING: Final = 0
_DONE: Final = 1
_FAILED: Final = 2
_CANCELLED: Final = 3

_Callback = Callable[[Any], object]


class ReplyWaiter:
    """The result of one call, as asyncio's tasks can await it: a future with little to it.

    A task that awaits it goes on within the read that brought the result, and not in the next turn of the loop. That
    takes tasks that keep torch's state to themselves (``wakes_directly``), because the read runs between two steps of
    any other task.
    """

    __slots__ = ("_asyncio_future_blocking", "_callbacks", "_loop", "_outcome", "_state", "_wakes_directly")

    _outcome: Any

    def __init__(self, loop: asyncio.AbstractEventLoop, wakes_directly: bool) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._wakes_directly = wakes_directly
        self._state = _PENDING
        self._callbacks: tuple[tuple[_Callback, Context | None], ...] = ()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            if self._state == _PENDING:
                self._asyncio_future_blocking = True
                yield self  # a task throws the error of the call in here
            return self._outcome if self._state == _DONE else self.result()
        finally:
            del self  # which keeps the error, whose traceback refers to this frame

    __iter__ = __await__

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._state != _PENDING

    def cancelled(self) -> bool:
        return self._state == _CANCELLED

    def result(self) -> Any:
        """The result; raises the error of the call, or `asyncio.InvalidStateError` before its end."""
        if self._state == _DONE:
            return self._outcome
        try:
            raise self._error()
        finally:
            del self  # the error's traceback refers to this frame

    def exception(self) -> BaseException | None:
        """The error of the call, None if it has none."""
        if self._state == _DONE:
            return None
        if self._state == _FAILED:
            return self._error()
        raise self._error()

    def _error(self) -> BaseException:
        if self._state == _PENDING:
            return asyncio.InvalidStateError("the call has not ended")
        if self._state == _CANCELLED:
            return asyncio.CancelledError()
        error: BaseException = self._outcome
        return error

    def add_done_callback(self, callback: _Callback, *, context: Context | None = None) -> None:
        if self._state == _PENDING:
            self._callbacks += ((callback, context),)
        else:
            self._loop.call_soon(callback, self, context=context)

    def remove_done_callback(self, callback: _Callback) -> int:
        kept = tuple([entry for entry in self._callbacks if entry[0] != callback])
        removed = len(self._callbacks) - len(kept)
        self._callbacks = kept
        return removed

    def cancel(self, msg: Any = None) -> bool:
        """End the wait. The maker of the call tells the peer."""
        if self._state != _PENDING:
            return False
        self._state = _CANCELLED
        self._schedule()
        return True

    def set_result(self, result: Any) -> None:
        """The call has ended. Called in a callback of the loop, and by no task."""
        self._state = _DONE
        self._outcome = result
        if not self._wakes_directly:
            self._schedule()
            return
        callbacks, self._callbacks = self._callbacks, ()
        for callback, context in callbacks:
            try:
                if context is None:
                    callback(self)
                else:
                    context.run(callback, self)
            except BaseException as error:  # noqa: BLE001 - Ctrl-C in a task is for the loop, not for the read
                self._loop.call_soon(_raise, error)

    def set_exception(self, exception: BaseException) -> None:
        """The call has failed. Called anywhere on the loop."""
        self._state = _FAILED
        self._outcome = exception
        self._schedule()

    def _schedule(self) -> None:
        callbacks, self._callbacks = self._callbacks, ()
        for callback, context in callbacks:
            self._loop.call_soon(callback, self, context=context)


def waiter_factory(loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    """What makes the recipients of calls that a coroutine of this loop awaits.

    Without the attribute by which asyncio's tasks know a future, these are futures of asyncio itself.
    """
    if not WAKES_DIRECTLY:
        return loop.create_future
    return partial(ReplyWaiter, loop, torchstate.isolates_all_tasks(loop))


def _raise(error: BaseException) -> None:
    raise error
