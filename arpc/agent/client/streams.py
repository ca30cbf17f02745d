"""Streams at the caller: the items of a remote generator, at most a window of them ahead of the consumer."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar

from arpc.wire.frames import frame
from arpc.wire.messages import MessageType

if TYPE_CHECKING:
    from arpc.agent.client.pending_calls import Call

__all__ = ["ItemOrder", "Stream"]

T = TypeVar("T")

_CREDIT: Final = int(MessageType.CREDIT)
_PLACE_MASK: Final = (1 << 32) - 1


class ItemOrder:
    """Puts the items of one stream in order: later items overtake one with large tensors on the way."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take
        self._next = 0
        self._early: dict[int, Callable[[], None]] = {}

    def item_arrived(self, place: int, item: Any) -> None:
        self.arrived(place, partial(self._take, item))

    def arrived(self, place: int, step: Callable[[], None]) -> None:
        """Call ``step`` when it is an item's turn. For the end of the stream, ``place`` is the number of items."""
        # the number in a message has 32 bits; an item from before `_next` is a duplicate
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


class Stream(AsyncIterator[T], Generic[T]):
    """The caller's end of a stream: ``async for item in stream``.

    The remote generator is stopped when the ``async for`` is left early, when `aclose` is called, when the stream is
    dropped, and when a task that waits for an item is cancelled. At most ``window`` items are in flight or queued here.
    """

    anchor: object = None
    """An object that lives as long as the stream."""

    def __init__(self, call: Call, window: int) -> None:
        """``call``, which is not sent yet, calls the generator; its recipient is a `Future`."""
        if window < 1:
            raise ValueError(f"the window of a stream must be at least 1, not {window}")
        self._window = window
        self._call: Call | None = call
        """The call of the generator; None once it has ended."""
        self._loop: asyncio.AbstractEventLoop = call.recipient.get_loop()
        # The pending call must not keep the stream alive: code that leaves an `async for` just drops the stream
        me = weakref.ref(self)
        call.items = ItemOrder(partial(_item_received, me))
        call.recipient.add_done_callback(partial(_end_received, me))
        self._items: deque[tuple[T | None, BaseException | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._consumed = 0
        self._is_closed = False

    # -- called by the agent

    def item_received(self, item: T) -> None:
        if not self._is_closed:
            self._items.append((item, None))
            self._wake()

    def end_received(self, future: asyncio.Future[Any]) -> None:
        """End the stream, because its call has ended. The done callback of the call's future."""
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        # The call refers to its error, whose traceback may refer to this stream: a cycle that the garbage collector
        # cannot see through, and that would keep the anchor alive
        self._call = None
        if not self._is_closed:
            self._items.append((None, StopAsyncIteration() if error is None else error))
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for users

    def __aiter__(self) -> Self:
        return self

    if not TYPE_CHECKING:  # a type checker reports these uses anyway

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
                self._close()  # a call, or an async generator, does not survive a cancellation either
                raise
            finally:
                self._waiter = None
        item, error = self._items.popleft()
        if error is not None:
            self._is_closed = True
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle
        self._consumed += 1
        # return credit in portions: the other half of the window keeps the producer busy meanwhile
        if self._call is not None and self._consumed * 2 >= self._window:
            consumed, self._consumed = self._consumed, 0
            connection = self._call.connection
            if connection is not None and connection.is_open:
                connection.send(frame(_CREDIT, 0, self._call.recipient.call_id, consumed, 0, b""))
        return item  # type: ignore[return-value]

    async def aclose(self) -> None:
        """Stop the remote generator. Items that have not been consumed are lost."""
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._items.clear()
            self._wake()
            if self._call is not None:
                self._call.recipient.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` in an `async for` drops the stream without closing it. This may run on any thread.
        call = getattr(self, "_call", None)
        if call is not None and not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call.recipient.cancel)


def _item_received(reference: weakref.ref[Stream[Any]], item: Any) -> None:
    if (stream := reference()) is not None:
        stream.item_received(item)


def _end_received(reference: weakref.ref[Stream[Any]], future: asyncio.Future[Any]) -> None:
    if (stream := reference()) is not None:
        stream.end_received(future)
    elif not future.cancelled():
        future.exception()  # so that it counts as retrieved
