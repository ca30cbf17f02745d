"""Handles that were dropped: on any thread, in the middle of anything, one by one or by the thousand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context
from typing import Final, TypeAlias

from arpc.rref.events import ForkId, OwnerHandleDropped

__all__ = ["DropQueue", "Dropped"]

Dropped: TypeAlias = ForkId | OwnerHandleDropped
"""A user's handle, by its fork, or one of the owner."""

# Nobody waits for a drop, and waking the loop for each takes longer than all the rest of it
_LINGER_S: Final = 0.005
_PER_TURN: Final = 2500
"""How many are handled before other callbacks of the loop have their turn."""


class DropQueue:
    """Brings drops to the loop, which wakes once for all of a few milliseconds; ``dropped`` is told of them there."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, dropped: Callable[[Iterator[Dropped]], object]
    ) -> None:
        self._loop = loop
        self._context = context
        self._dropped = dropped
        self._handles: deque[Dropped] = deque()
        self._is_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._is_closed = False

    def add(self, handle: Dropped) -> None:
        """A handle is gone. Called by the garbage collector: on any thread, between any two instructions."""
        self._handles.append(handle)
        # A race costs a spare wake-up, never a lost one: the flag is cleared before the queue is emptied
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and the worker gone with it
                self._loop.call_soon_threadsafe(self._linger, context=self._context.copy())

    def _linger(self) -> None:
        if not self._is_closed and self._timer is None:
            self._timer = self._loop.call_later(_LINGER_S, self._look, context=self._context.copy())

    def _look(self) -> None:
        self._timer = None
        self._is_scheduled = False
        self._dropped(self._take(_PER_TURN))
        if self._handles and not self._is_closed:
            self._is_scheduled = True
            self._timer = self._loop.call_soon(self._look, context=self._context.copy())

    def drain(self) -> None:
        """Handle all of them now. On the loop."""
        self._dropped(self._take(len(self._handles)))

    def _take(self, count: int) -> Iterator[Dropped]:
        for _ in range(min(count, len(self._handles))):
            if self._is_closed:
                return
            yield self._handles.popleft()

    def __len__(self) -> int:
        return len(self._handles)

    def close(self) -> None:
        """Ignore later drops."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
