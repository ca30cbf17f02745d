"""The Future of a call: awaitable, chainable, and usable from threads that have no loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from types import CodeType
from typing import Any, Final, Generic, TypeVar, cast

from arpc import torchstate
from arpc.errors import ShutdownError
from arpc.private.asyncio import running_loop
from arpc.private.interpreter import caller_frame
from arpc.user_errors import is_a, is_coroutine, set_cause, summary_of

__all__ = ["Future", "collect_all", "wait_all"]

T = TypeVar("T")
S = TypeVar("S")

# The interval at which a thread that waits checks whether the loop was closed
_LOOK_S: Final = 0.5

_complete = asyncio.Future.set_result
_fail = asyncio.Future.set_exception


class Future(asyncio.Future[T], Generic[T]):
    """The future value of a call.

    An `asyncio.Future` with the methods that users of ``torch.futures`` know: `then`, `value`, `wait`. `set_result`,
    `set_exception`, `cancel` and `wait` may be used from any thread; the rest belongs to the loop. Cancelling the
    future of a call cancels its handler.

    An error that is never retrieved is logged once, when the future is dropped, with the line that made the call.
    """

    script_type: Any = None
    """The type of the value according to the schema, if the call is of a TorchScript function."""
    on_cancel: Callable[[], object] | None = None
    callee: Any = None
    """The peer whose ``cancel(call_id)`` is called if this is cancelled. Unlike `on_cancel`, it needs no closure."""
    call_id = 0
    _code: CodeType | None = None
    _lasti = -1

    # -- completion

    def _on_loop(self) -> bool:
        """Return whether this is the thread of the loop, where the future may be changed directly."""
        return running_loop() is self.get_loop()

    def set_result(self, result: T) -> None:
        if running_loop() is self.get_loop():
            _complete(self, result)
        else:
            _soon(self.get_loop(), _complete, self, result)

    def set_exception(self, exception: type | BaseException) -> None:
        if self._on_loop():
            _fail(self, exception)
        else:
            _soon(self.get_loop(), _fail, self, exception)

    def cancel(self, msg: Any = None) -> bool:
        if self.done():
            return False
        if not self._on_loop():
            _soon(self.get_loop(), self.cancel, msg)
            return True
        cancelled = super().cancel(msg)
        self.withdraw()
        return cancelled

    def withdraw(self) -> None:
        """End the call that this future stands for, because its value is no longer needed. Called on the loop."""
        on_cancel, self.on_cancel = self.on_cancel, None
        callee, self.callee = self.callee, None
        if on_cancel is not None:
            on_cancel()
        if callee is not None:
            callee.cancel(self.call_id)

    # -- the value

    def value(self) -> T:
        """Return the value of a future that is done. Raises its error, or `asyncio.InvalidStateError` before that."""
        return self.result()

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the value is there, and return it. Raises `TimeoutError`, or the future's error.

        Raises `RuntimeError` on the thread of the loop, which must `await` instead, and `ShutdownError` if the loop is
        closed.
        """
        if self._on_loop():
            raise RuntimeError("wait() would block the event loop it waits for: use `await future`")
        if not self.done():
            self._block(timeout)
        try:
            return self.result()
        finally:
            del self  # its error refers to this frame

    def _block(self, timeout_s: float | None) -> None:
        arrived = threading.Event()

        def watch() -> None:
            self.add_done_callback(lambda _: arrived.set())

        loop = self.get_loop()
        _soon(loop, watch)
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not arrived.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            # if the loop was closed meanwhile, no code will set the event
            if loop.is_closed():
                raise _closed_loop()
            if time.monotonic() >= end:
                raise TimeoutError(f"no value after {timeout_s} s")

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future for ``callback(self)``, which runs on the loop once this one has a value or an error.

        If the callback is an ``async def``, its result is awaited. Cancelling the new future cancels this one too.
        """
        if not callable(callback):
            raise TypeError(f"then() takes a function, not {type(callback).__name__}")
        loop = self.get_loop()
        chained: Future[S] = Future(loop=loop)
        running: list[asyncio.Future[Any]] = []

        def stop() -> None:
            awaited: list[asyncio.Future[Any]] = running or [self]
            for future in awaited:
                future.cancel()

        def run(_: asyncio.Future[T]) -> None:
            if chained.done():
                return
            try:
                # torch state that it changes without a `with` block must not reach the next task's step
                result = torchstate.run_with(torchstate.DEFAULTS, callback, self)
            except BaseException as error:  # noqa: BLE001 - it is raised where the new future is awaited
                chained._adopt_exception(error)
                return
            if is_coroutine(result):
                task = loop.create_task(chained._follow(cast("Any", result)))
                running.append(task)
                task.add_done_callback(chained._followed)
            else:
                _complete(chained, result)

        chained.on_cancel = stop
        if self._on_loop():
            self.add_done_callback(run)
        else:
            _soon(loop, self.add_done_callback, run)
        return chained

    async def _follow(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Adopt the outcome of a coroutine, whose error must not end the task: SystemExit in a task ends the loop."""
        try:
            result = await coroutine
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised where this future is awaited
            if not self.done():
                self._adopt_exception(error)
        else:
            if not self.done():
                _complete(self, result)

    def _followed(self, task: asyncio.Future[None]) -> None:
        if task.cancelled() and not self.done():
            self.on_cancel = None
            super().cancel()

    def _adopt_exception(self, error: BaseException) -> None:
        if is_a(error, asyncio.CancelledError):
            self.on_cancel = None
            super().cancel()
        elif is_a(error, StopIteration):
            _fail(self, set_cause(RuntimeError(f"a callback raised {summary_of(error)}"), error))
        else:
            _fail(self, error)

    # -- origin

    def made_at(self, depth: int) -> None:
        """Record the line of code ``depth`` frames up as the one that made the call."""
        frame = caller_frame(depth)
        self._code = frame.f_code
        self._lasti = frame.f_lasti

    def __repr__(self) -> str:
        text = super().__repr__()
        if self._code is None:
            return text
        line = next(islice(self._code.co_positions(), self._lasti // 2, None))[0]
        return f"{text[:-1]} called at {self._code.co_filename}:{line}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Future cannot be pickled: send its value, or an RRef to it")


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function on the loop, from another thread. Raises `ShutdownError` if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        raise _closed_loop() from None


def _closed_loop() -> ShutdownError:
    return ShutdownError(
        "the event loop of this future is closed, so that no value can come and no callback can run: wait for calls "
        "before the loop of their worker ends"
    )


def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]:
    """Return a future for the list of these futures, which completes once each has a value or an error."""
    waited = list(futures)
    collected: Future[list[Future[T]]] = Future(loop=waited[0].get_loop() if waited else asyncio.get_running_loop())
    left = len(waited)

    def one_done(_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0 and not collected.done():
            _complete(collected, waited)

    def watch() -> None:
        for future in waited:
            future.add_done_callback(one_done)

    if not waited:
        collected.set_result(waited)
    elif collected._on_loop():  # noqa: SLF001 - of this module
        watch()
    else:
        _soon(collected.get_loop(), watch)
    return collected


async def wait_all(futures: Iterable[Future[T]]) -> list[T]:
    """Return the values of all futures, in order. Raises the first error as soon as it happens."""
    return list(await asyncio.gather(*futures))
