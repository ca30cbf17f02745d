"""The lines to one peer: connections that threads take turns to block on, beside the one that the loop has.

A thread takes a line out of `Lines.free` for the time of a call and puts it back: both are atomic, so nobody locks.
Everything else here belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final
from weakref import WeakSet

from arpc.compat.blocking_client.line import Line
from arpc.errors import ArpcError
from arpc.log import get_logger
from arpc.transport.base import Connection

__all__ = ["Lines"]

logger = get_logger("arpc.connections")

IDLE_S: Final = 60.0
"""A line that nobody has used for so long is closed."""
_LOOK_S: Final = 5.0
_RETRY_S: Final = 30.0
_LATE_S: Final = 1.0
MAX_OWED: Final = 32
"""So many unanswered calls that were given up set a line aside: a peer lets only so many of a line run at once."""
_NOBODY: Final = "nobody uses it"

MakeError = Callable[[str], Exception]
"""The error of a call that was under way when its line ended, by the name of the function."""


class Lines:
    """They belong to one connection to the peer, and end with it."""

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, open_line: Callable[[], Awaitable[Line]], limit: int
    ) -> None:
        self.name = name
        self.limit = limit
        """How many there may be."""
        self.free: list[Line] = []
        """Those that no thread uses, the last one used at the end. Another list after each `end`."""
        self.aside: list[Line] = []
        """Those on which so many calls have been given up, and not been answered, that the next could have to wait."""
        self.main: Connection | None = None
        """The connection that they belong to; None while there is none, and so no lines."""
        self.is_asked_for = False
        """Another line is being opened, or was tried in vain not long ago."""
        self.not_for: set[int] = set()
        """Functions, by number, whose results are better off on the connection itself."""
        self._loop = loop
        self._open_line = open_line
        self._all: set[Line] = set()
        self._made_before = 0
        self._ask_again_at = 0.0
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        _every_pool.add(self)

    @property
    def calls_made(self) -> int:
        """How many calls there have been."""
        return self._made_before + sum(line.calls_made for line in self._all)

    @property
    def under_way(self) -> list[Line]:
        """Those on which a call is being made. Not all that are not free: a thread may be interrupted at any point."""
        return [line for line in self._all if line.calling is not None]

    @property
    def all(self) -> frozenset[Line]:
        return frozenset(self._all)

    @property
    def count(self) -> int:
        return len(self._all)

    # -- opening

    def open_another(self, main: Connection | None) -> None:
        """A thread had to do without a line. ``main`` is the connection to the peer at this time."""
        is_other = self.main is not None and self.main is not main  # whose end is about to be told
        if main is None or not main.is_open or is_other or self._opening is not None or len(self._all) >= self.limit:
            self.is_asked_for = self._opening is not None
            return
        self.main = main
        self._opening = self._loop.create_task(self._run_open(main))

    async def _run_open(self, main: Connection) -> None:
        line: Line | None = None
        try:
            line = await self._open_line()
        except (OSError, ArpcError) as error:
            # calls go on without
            logger.debug("no line to worker %s: %s", self.name, error, extra={"peer": self.name})
        finally:
            self._opening = None
        # the connection may have been lost meanwhile
        if line is not None and main is self.main:
            self._all.add(line)
            self.free.append(line)
        elif line is not None:
            line.close(_NOBODY)
        self.is_asked_for = line is None
        if line is None:
            self._ask_again_at = monotonic() + _RETRY_S
        self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look_after)

    def _look_after(self) -> None:
        """Close what nobody uses, wake who has waited too long, and let threads ask again."""
        self._timer = None
        now = monotonic()
        if now >= self._ask_again_at:
            self.is_asked_for = self._opening is not None
        for line in self.under_way:
            # A signal that interrupts a socket makes it wait all the time again: where these are frequent, for ever
            if 0 < line.due_at < now - _LATE_S:
                line.wake()
        free = self.free
        for line in self.all.difference(free):
            # A thread that is interrupted between two steps may lose a line that it has just taken. Should one be about
            # to use it, it finds that it is closed, and sends nothing.
            if line.calling is None and not line.owed and now - line.used_at >= IDLE_S:
                line.close(_NOBODY)
                self.forget(line)
        for _ in range(len(self.aside)):
            resting = self.aside.pop(0)
            if not resting.is_sound():
                resting.close()
                self.forget(resting)
            else:
                (self.aside if len(resting.owed) >= MAX_OWED else free).append(resting)
        kept: list[Line] = []
        while (unused := self._take(free, 0)) is not None:  # the one that has not been used for longest
            if now - unused.used_at < IDLE_S:
                kept.append(unused)
                break
            if unused.is_sound() and unused.owed:
                kept.append(unused)  # its peer would take the end of it for a sign that nobody wants the answer
            else:
                unused.close(_NOBODY)
                self.forget(unused)
        free[:0] = kept
        if self._all or self.is_asked_for:
            self._arm()

    @staticmethod
    def _take(free: list[Line], index: int = -1) -> Line | None:
        """A line that no thread can take any more. To look at the list first would be to look too early."""
        try:
            return free.pop(index)
        except IndexError:
            return None

    def forget(self, line: Line) -> None:
        """A line has ended, by itself or because nobody used it."""
        if line in self._all:
            self._all.remove(line)
            self._made_before += line.calls_made

    # -- the end

    def end(self, make_error: MakeError) -> None:
        """The peer is lost, or this worker is shut down: let go of all lines, and end the calls under way on them."""
        self.main = None
        free, self.free = self.free, []
        lines, self._all = self._all, set()
        for line in lines:
            line.ending = make_error
            line.is_ended = True  # so a thread that puts it back now closes it
            self._made_before += line.calls_made
        while (unused := self._take(free) or self._take(self.aside)) is not None:
            unused.close()
            lines.discard(unused)
        for line in lines:
            line.wake()  # whoever uses it closes it

    async def aclose(self, make_error: MakeError) -> None:
        self.limit = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._opening
        self.end(make_error)

    def abandon(self) -> None:
        """In a forked child: the lines are the parent's."""
        self.limit = 0
        free, self.free = self.free, []
        free.clear()
        self.aside.clear()
        for line in self._all:
            line.abandon()
        self._all = set()


_every_pool: WeakSet[Lines] = WeakSet()


def _forked() -> None:
    for lines in list(_every_pool):
        lines.abandon()


os.register_at_fork(after_in_child=_forked)
