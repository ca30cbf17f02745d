"""Memory that is released in any thread and taken back on the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

__all__ = ["Lease", "ReleaseQueue"]

T = TypeVar("T")
_getpid = os.getpid


class Lease:
    """Owns an item, and releases it when this object dies, in whatever thread that happens."""

    __slots__ = ("_item", "_queue")

    def __init__(self, queue: ReleaseQueue[Any], item: object) -> None:
        self._queue = queue
        self._item = item

    def __del__(self) -> None:
        self._queue.release(self._item)


class ReleaseQueue(Generic[T]):
    """Collects released items, and calls ``notify`` on the loop, once for all items that are there by then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
        self._is_notified = False
        self._loop = loop
        self._notify = notify
        self._released: deque[T] = deque()
        self._pid = os.getpid()
        self._is_closed = False

    def release(self, item: T) -> None:
        # Runs in any thread and at any point, even in a garbage collection: it must take no lock
        if self._is_closed:
            return
        self._released.append(item)
        if not self._is_notified and self._pid == _getpid():
            self._is_notified = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._notify)

    def notify_soon(self) -> None:
        """Call ``notify`` in the next turn of the loop, even if nothing is released until then. For the loop only."""
        if not self._is_notified:
            self._is_notified = True
            self._loop.call_soon(self._notify)

    def take(self) -> list[T]:
        """Return the items that were released since the last call."""
        self._is_notified = False  # first: items that are released from now on need a new notification
        if self._is_closed:
            self._released.clear()  # from a thread that was about to release an item when this was closed
        items: list[T] = []
        while self._released:
            items.append(self._released.popleft())
        return items

    def close(self) -> None:
        """Drop the released items, now and from now on."""
        self._is_closed = True
        self._released.clear()
