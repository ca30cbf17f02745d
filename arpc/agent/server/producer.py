"""Streams at the callee: takes items from a generator when there is credit, and sends them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from types import GeneratorType
from typing import Any, Final

from arpc import torchstate
from arpc.agent.server.thread_pool import ThreadPool
from arpc.errors import ConnectionClosedError
from arpc.log import get_logger
from arpc.transport.bulk import SMALL_MESSAGE_BYTES
from arpc.transport.connection import Connection
from arpc.user_errors import stack_of, type_name_of

__all__ = ["Producer"]

logger = get_logger("arpc.streams")

# After this time a generator gives its thread back, and waits for its next turn
_SLICE_S: Final = 0.0005
_LET_GO_S: Final = 0.05


class Producer:
    """The callee's end: takes items from a generator when there is credit, and sends them."""

    def __init__(
        self,
        iterable: Any,
        threads: ThreadPool,
        send: Callable[[Any], int],
        connection: Connection,
        window_bytes: int,
        credit: int,
    ) -> None:
        """``send`` returns how many bytes it has sent; ``credit`` is how many items the consumer takes at first."""
        self._is_async = hasattr(iterable, "__aiter__")
        if not self._is_async and not hasattr(iterable, "__iter__"):
            raise TypeError(f"a stream needs something to iterate over, not {type_name_of(iterable)}")
        self._iterable = iterable
        self._threads = threads
        self._send = send
        self._connection = connection
        self._window_bytes = window_bytes
        self._has_large_items = False
        self._credit = credit
        self._woken = asyncio.Event()

    def add_credit(self, items: int) -> None:
        self._credit += items
        self.wake()

    def wake(self) -> None:
        """Check again whether there is credit, and room."""
        self._woken.set()

    async def _have_credit(self) -> None:
        """Wait until the consumer wants another item, and has read enough bytes of the items before."""
        connection = self._connection
        while self._credit <= 0 or self._unsent_bytes() > self._window_bytes:
            if self._credit > 0 and not connection.is_congested:
                await asyncio.sleep(0)  # what was sent in this turn has not been written yet
                continue
            self._woken.clear()
            await self._woken.wait()

    def _unsent_bytes(self) -> int:
        """Return the unsent bytes that hold up items: small items do not wait for large tensors."""
        connection = self._connection
        return connection.unsent_bytes if self._has_large_items else connection.unsent_small_bytes

    def _offer(self, item: Any) -> bool:
        """Send an item; False if the connection is closed."""
        self._credit -= 1
        try:
            self._has_large_items = self._send(item) > SMALL_MESSAGE_BYTES
        except ConnectionClosedError:
            return False
        return True

    async def produce(self) -> None:
        """Send all items, once."""
        try:
            await (self._produce_async() if self._is_async else self._produce_in_threads())
        finally:
            # Both refer to the request, which refers to this: without the cycle, the generator is freed at once
            del self._send, self._iterable

    async def _produce_async(self) -> None:
        iterator = aiter(self._iterable)
        try:
            await self._have_credit()
            async for item in iterator:
                if not self._offer(item):
                    return
                await self._have_credit()
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()

    async def _produce_in_threads(self) -> None:
        steps = _GeneratorSteps(self._iterable, asyncio.get_running_loop())
        try:
            while True:
                await self._have_credit()
                job = self._threads.call(steps.make_items, self._credit)
                job.add_done_callback(steps.wake)
                while steps.made or not job.done():
                    while steps.made:
                        if not self._offer(steps.made.popleft()):
                            return
                    await steps.wait_for_more(job)
                is_over, error = job.result()
                if error is not None:
                    raise error
                if is_over:
                    return
        finally:
            # Not awaited: a step may be under way in a thread, which cannot be interrupted; `close` comes after it
            steps.stop()
            self._threads.submit(steps.close)


class _GeneratorSteps:
    """The steps of a plain generator, in threads, one at a time, all in the same context and torch state."""

    def __init__(self, iterable: Iterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.made: deque[Any] = deque()
        """Items that have not been sent yet."""
        self._loop = loop
        self._wake_up_sent = False
        self._more = asyncio.Event()
        self._iterable = iterable
        # for other iterables it is made in a thread, because `iter` may block
        self._iterator: Any = iterable if type(iterable) is GeneratorType else None
        self._context = copy_context()
        self._state = torchstate.DEFAULTS
        self._lock = threading.Lock()
        self._is_stopped = False

    async def wait_for_more(self, job: asyncio.Future[Any]) -> None:
        """Wait until there are items to send, or the job that makes them has ended."""
        while not (self.made or job.done()):
            self._more.clear()
            await self._more.wait()

    def wake(self, _: object = None) -> None:
        self._wake_up_sent = False
        self._more.set()

    def make_items(self, limit: int) -> tuple[bool, BaseException | None]:
        """Make up to ``limit`` items. Returns whether the generator has ended, and the error that ended it, if any.

        Each item can be sent at once, because the next may take long. Items made quickly share one wake-up of the loop.
        """
        with self._lock:
            if self._is_stopped:
                return True, None
            torchstate.restore(self._state)
            end = time.monotonic() + _SLICE_S
            try:
                if self._iterator is None:
                    self._iterator = self._context.run(iter, self._iterable)
                for _ in range(limit):
                    if self._is_stopped:
                        break
                    self.made.append(self._context.run(next, self._iterator))
                    if not self._wake_up_sent:
                        self._wake_up_sent = True
                        self._loop.call_soon_threadsafe(self.wake)
                    if time.monotonic() > end:
                        break
            except StopIteration:
                return True, None
            except BaseException as error:  # noqa: BLE001 - it is sent to the consumer, after the items before it
                return True, error
            finally:
                self._state = torchstate.save_and_reset()
                if self._is_stopped:
                    self._close_generator()
            return False, None

    def stop(self) -> None:
        """Begin no further step. Called in any thread."""
        self._is_stopped = True

    def close(self) -> None:
        """Close the generator where it stands.

        If a step is under way, that step closes it at its end: no thread waits for it.
        """
        # Wait for a step that has just checked `_is_stopped` and holds the lock; one that blocks checks at its end
        if self._lock.acquire(timeout=_LET_GO_S):
            try:
                self._close_generator()
            finally:
                self._lock.release()

    def _close_generator(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator = None
        if close is None:
            return
        torchstate.restore(self._state)
        try:
            self._context.run(close)
        except BaseException as error:  # noqa: BLE001 - its consumer has left
            # not as exc_info: formatting that would run the user's code
            logger.error("a generator raised when it was stopped\n%s", stack_of(error))  # noqa: TRY400
        finally:
            torchstate.save_and_reset()
