"""Streams: the items of a remote generator, as many at a time as the consumer has asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import copy_context
from functools import partial
from types import GeneratorType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from arpc import torchstate
from arpc.agent.threads import ThreadPool
from arpc.errors import ConnectionClosedError
from arpc.log import get_logger
from arpc.transport.base import SMALL_MESSAGE_BYTES, Connection
from arpc.user_errors import stack_of, type_name_of

__all__ = ["ItemOrder", "Producer", "Stream"]

logger = get_logger("arpc.streams")

T = TypeVar("T")

# After this time a generator gives its thread back, and waits for its next turn
_SLICE_S: Final = 0.0005
_LET_GO_S: Final = 0.05
_PLACE_MASK: Final = (1 << 32) - 1


class Producer:
    """The callee's end: takes items from a generator when there is credit, and sends them."""

    def __init__(
        self, iterable: Any, threads: ThreadPool, send: Callable[[Any], int], connection: Connection, window_bytes: int
    ) -> None:
        """``send`` returns how many bytes it has sent."""
        self._is_async = hasattr(iterable, "__aiter__")
        if not self._is_async and not hasattr(iterable, "__iter__"):
            raise TypeError(f"a stream needs something to iterate over, not {type_name_of(iterable)}")
        self._iterable = iterable
        self._threads = threads
        self._send = send
        self._connection = connection
        self._window_bytes = window_bytes
        self._has_large_items = False
        self._credit = 0
        self._credit_came: asyncio.Future[None] | None = None

    def add_credit(self, items: int) -> None:
        self._credit += items
        self.wake()

    def wake(self) -> None:
        """There may be credit, or room, again."""
        if self._credit_came is not None and not self._credit_came.done():
            self._credit_came.set_result(None)

    async def _have_credit(self) -> None:
        """Until the consumer wants another item, and has taken enough of the bytes of those before."""
        connection = self._connection
        while self._credit <= 0 or self._unsent_bytes() > self._window_bytes:
            if self._credit > 0 and not connection.is_congested:
                await asyncio.sleep(0)  # what was sent in this turn has not been written yet
                continue
            self._credit_came = asyncio.get_running_loop().create_future()
            await self._credit_came

    def _unsent_bytes(self) -> int:
        """What the items wait for: small ones do not wait for large tensors."""
        connection = self._connection
        return connection.unsent_bytes if self._has_large_items else connection.unsent_small_bytes

    def _offer(self, item: Any) -> bool:
        """Send an item; False if nobody listens any more."""
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
            # Both lead to the request, which leads here: what the generator held is to go now, not with the next cycles
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
            # Not awaited: a step may be under way in a thread that cannot be interrupted; it is closed after that
            steps.stop()
            self._threads.submit(steps.close)


class _GeneratorSteps:
    """The steps of a plain generator, in threads, one at a time, all in the same context and torch state."""

    def __init__(self, iterable: Iterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.made: deque[Any] = deque()
        """Items that have not been sent yet."""
        self._loop = loop
        self._wake_up_sent = False
        self._more: asyncio.Future[None] | None = None
        self._iterable = iterable
        # of anything but a generator it is made in a thread, since that may block
        self._iterator: Any = iterable if type(iterable) is GeneratorType else None
        self._context = copy_context()
        self._state = torchstate.DEFAULTS
        self._lock = threading.Lock()
        self._is_stopped = False

    async def wait_for_more(self, job: asyncio.Future[Any]) -> None:
        """Until there are items to send, or the job that makes them has ended."""
        while not (self.made or job.done()):
            self._more = self._loop.create_future()
            await self._more

    def wake(self, _: object = None) -> None:
        self._wake_up_sent = False
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def make_items(self, limit: int) -> tuple[bool, BaseException | None]:
        """Make up to ``limit`` items; whether the last of them has been made, and the error that ended it.

        Each can be sent at once: the next may take its time. Many that are made quickly share one wake-up of the loop.
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
            except BaseException as error:  # noqa: BLE001 - the consumer's, after the items that came before
                return True, error
            finally:
                self._state = torchstate.save_and_reset()
                if self._is_stopped:
                    self._close_generator()
            return False, None

    def stop(self) -> None:
        """Begin no further step. From any thread."""
        self._is_stopped = True

    def close(self) -> None:
        """Let the generator end where it stands.

        A step that is under way does it on its way out: no thread waits for it.
        """
        # The wait is for a step that has just looked and not let go yet; one that blocks will look when it ends
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
            # not as the exception of the record: whoever formats that runs code of the user
            logger.error("a generator raised when it was stopped\n%s", stack_of(error))  # noqa: TRY400
        finally:
            torchstate.save_and_reset()


class ItemOrder:
    """Lets what arrives of one stream happen in order: an item with large tensors is overtaken by those behind it."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take
        self._next = 0
        self._early: dict[int, Callable[[], None]] = {}

    def item_arrived(self, place: int, item: Any) -> None:
        self._arrived(place, partial(self._take, item))

    def end_arrived(self, place: int, end: Callable[[], None]) -> None:
        """What comes behind the last item: ``place`` is how many there are."""
        self._arrived(place, end)

    def _arrived(self, place: int, step: Callable[[], None]) -> None:
        # the number in a message has 32 bits; what is behind came twice
        ahead = (place - self._next) & _PLACE_MASK
        if ahead:
            if ahead <= _PLACE_MASK >> 1:
                self._early[place] = step
            return
        due: Callable[[], None] | None = step
        while due is not None:
            self._next = (self._next + 1) & _PLACE_MASK
            due()
            due = self._early.pop(self._next, None)


def _call_is_over(*_: object) -> None:
    """In the place of what a stream does with its call."""


class Stream(AsyncIterator[T], Generic[T]):
    """The caller's end: ``async for item in stream``.

    Leaving the loop early, `aclose`, dropping the stream or cancelling who waits for an item stops the remote
    generator. At most ``window`` items are on their way or waiting here.
    """

    anchor: object = None
    """Lives as long as the stream."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        window: int,
        give_credit: Callable[[int], None],
        cancel: Callable[[], None],
    ) -> None:
        if window < 1:
            raise ValueError(f"the window of a stream must be at least 1, not {window}")
        self._window = window
        self._give_credit = give_credit
        self._cancel = cancel
        self._loop = loop
        self._items: deque[tuple[T | None, BaseException | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._consumed = 0
        self._is_over = False
        self._is_closed = False

    # -- fed by the agent

    def item_received(self, item: T) -> None:
        if not self._is_closed:
            self._items.append((item, None))
            self._wake()

    def end_received(self, future: asyncio.Future[Any]) -> None:
        """The call behind the stream has ended: done callback of its future."""
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        self._is_over = True
        # These refer to the call, and so to its error, whose traceback may refer to this stream: a cycle that the
        # garbage collector cannot see through, and that would keep the anchor
        self._cancel = self._give_credit = _call_is_over
        if not self._is_closed:
            self._items.append((None, StopAsyncIteration() if error is None else error))
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- used by people

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._is_closed:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("another task is waiting for the next item of this stream already")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._close()  # whoever is cancelled in a call, or in an async generator, does not go on with it either
                raise
            finally:
                self._waiter = None
        item, error = self._items.popleft()
        if error is not None:
            self._is_closed = True
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and together they would keep each other
        self._consumed += 1
        # give credit back in portions: half a window keeps the producer busy meanwhile
        if not self._is_over and self._consumed * 2 >= self._window:
            consumed, self._consumed = self._consumed, 0
            self._give_credit(consumed)
        return item  # type: ignore[return-value]

    async def aclose(self) -> None:
        """Stop the remote generator. Items that have not been taken are lost."""
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._items.clear()
            self._wake()
            if not self._is_over:
                self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` in an `async for` drops the stream without a word. This may run on any thread.
        if not getattr(self, "_is_over", True) and not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)
