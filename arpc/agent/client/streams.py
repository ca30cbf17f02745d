"""Streams at the caller: the items of a remote generator, as many at a time as the consumer has asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar

__all__ = ["ItemOrder", "Stream"]

T = TypeVar("T")

_PLACE_MASK: Final = (1 << 32) - 1


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

    The remote generator is stopped when the loop is left early, when `aclose` is called, when the stream is dropped,
    and when a task that waits for an item is cancelled. At most ``window`` items are in flight or waiting here.
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

    if not TYPE_CHECKING:  # a type checker says so before

        def __iter__(self) -> NoReturn:
            raise TypeError("the items of a stream come from another worker: use `async for item in arpc.stream(...)`")

        def __await__(self) -> NoReturn:
            raise TypeError("a stream is not awaited: use `async for item in arpc.stream(...)`")

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

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` in an `async for` drops the stream without a word. This may run on any thread.
        if not getattr(self, "_is_over", True) and not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)
