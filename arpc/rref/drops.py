"""Handles that were dropped: on any thread, in the middle of anything, one by one or by the thousand."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from arpc.rref.events import ForkId, OwnerHandleDropped
from arpc.rref.instructions import Instruction

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["DropQueue"]

# Nobody waits for a drop, and waking the loop for each takes longer than all the rest of it
_LINGER_S: Final = 0.005
_PER_TURN: Final = 2500
"""How many are handled before other callbacks of the loop have their turn."""


class DropQueue:
    """Brings drops to the loop, which wakes once for all of a few milliseconds."""

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._loop = context.agent.loop
        self._handles: deque[ForkId | OwnerHandleDropped] = deque()
        """Handles of users, by their forks, and handles of the owner."""
        self._is_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._is_closed = False

    def add(self, handle: ForkId | OwnerHandleDropped) -> None:
        """A handle is gone. Called by the garbage collector: on any thread, between any two instructions."""
        self._handles.append(handle)
        # A race costs a spare wake-up, never a lost one: the flag is cleared before the queue is emptied
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and the worker gone with it
                self._loop.call_soon_threadsafe(self._linger, context=self._context.fresh_context())

    def _linger(self) -> None:
        if not self._is_closed and self._timer is None:
            self._timer = self._loop.call_later(_LINGER_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._is_scheduled = False
        self._handle(_PER_TURN)
        if self._handles and not self._is_closed:
            self._is_scheduled = True
            self._timer = self._loop.call_soon(self._look)

    def drain(self) -> None:
        """Handle all of them now. On the loop."""
        self._handle(len(self._handles))

    def _handle(self, count: int) -> None:
        handles, forks = self._handles, self._context.forks
        following: list[Instruction] = []
        for _ in range(min(count, len(handles))):
            handle = handles.popleft()
            following += forks.handle_dropped(handle) if isinstance(handle, int) else forks.handle(handle)
        self._context.carry_out(following)

    def __len__(self) -> int:
        return len(self._handles)

    def close(self) -> None:
        """Ignore later drops."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
