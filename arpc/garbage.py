"""How often Python looks for garbage in a process that makes and serves calls, and at what.

Python looks at all new objects whenever there are 700 more than before. Thousands of calls in flight are many new
objects and no garbage: to look at them again and again takes a third of the time there is. So as long as Python finds
nothing it is let to look less often, and as soon as it finds something, as often as it would by itself. Whoever leaves
no cycles behind is not disturbed, and whoever does sees no more of them than before, but for those of one delay.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any, Final, NamedTuple

__all__ = ["BACKOFF", "FREEZER", "Backoff", "Freezer"]


_MOST: Final = 1 << 30
"""About the largest threshold that Python takes."""


class _Wish(NamedTuple):
    """What somebody wants, as long as their loop is not closed."""

    factor: int
    loop: weakref.ref[asyncio.AbstractEventLoop]

    @property
    def is_current(self) -> bool:
        loop = self.loop()
        return loop is not None and not loop.is_closed()


class Freezer:
    """Keeps collections from looking at what was there before the first worker of the process.

    Nothing of a worker itself is frozen: a frozen object that refers to itself is never freed, nor is anything that it
    refers to, such as the arguments of a call.
    """

    def __init__(self) -> None:
        self._loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
        self._lock = threading.Lock()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A worker is about to be built. Freezes what there is, unless there are other workers already.

        It is over with `end`, or when the loop is closed: a worker may be abandoned, and never be shut down.
        """
        with self._lock:
            self._loops = [one for one in self._loops if (known := one()) is not None and not known.is_closed()]
            if not self._loops:
                gc.collect()
                gc.freeze()
            self._loops.append(weakref.ref(loop))

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take back one `begin`, if there was one; the last lets collections look at everything again."""
        with self._lock:
            ended = weakref.ref(loop)
            if ended in self._loops:
                self._loops.remove(ended)
                if not self._loops:
                    gc.unfreeze()


class Backoff:
    """Lets collections that find nothing be rarer, up to a factor, while somebody wants that."""

    def __init__(self) -> None:
        self._wishes: tuple[_Wish, ...] = ()
        """Replaced, never changed: a collection may come at any moment."""
        self._lock = threading.Lock()
        self._usual = 0
        """The first of `gc.get_threshold`, as the program wants it."""
        self._last = 0
        """The threshold as it was set here. If it is another, the program has set it meanwhile."""

    def begin(self, factor: int, loop: asyncio.AbstractEventLoop) -> None:
        """Let there be up to ``factor`` times as many new objects before Python looks at them; 1 changes nothing.

        It is over with `end`, or when the loop is closed: a worker may be abandoned, and never be shut down.
        """
        if factor > 1:
            with self._lock:
                if self._looked not in gc.callbacks:
                    self._usual = self._last = gc.get_threshold()[0]
                    gc.callbacks.append(self._looked)
                self._wishes = (*filter(_is_current, self._wishes), _Wish(factor, weakref.ref(loop)))

    def end(self, factor: int, loop: asyncio.AbstractEventLoop) -> None:
        """Take back one `begin` with the same factor, if there was one; the last brings back what was before."""
        if factor > 1:
            with self._lock:
                wishes, ended = list(self._wishes), _Wish(factor, weakref.ref(loop))
                if ended in wishes:  # a worker may be shut down before its start has come that far
                    wishes.remove(ended)
                self._wishes = tuple(filter(_is_current, wishes))
                if not self._wishes and self._looked in gc.callbacks:
                    gc.callbacks.remove(self._looked)
                    self._set(self._heed_program())

    def _looked(self, phase: str, info: dict[str, Any]) -> None:
        """Called by Python, in the midst of whatever made the last of the objects, in any thread: takes no lock."""
        if phase != "stop":
            return
        try:
            usual = self._heed_program()
            factor = max((wish.factor for wish in self._wishes if wish.is_current), default=1)
            most = max(usual, min(usual * factor, _MOST))
            self._set(usual if info["collected"] else min(2 * self._last, most))
        except RecursionError:
            pass  # what made the last object has come to the limit itself: the next collection is soon enough

    def _heed_program(self) -> int:
        """The usual threshold, which is that of the program if it has set one."""
        now = gc.get_threshold()[0]
        if now != self._last:
            self._usual = self._last = now
        return self._usual

    def _set(self, threshold: int) -> None:
        if threshold != self._last:
            gc.set_threshold(threshold, *gc.get_threshold()[1:])
            self._last = threshold


def _is_current(wish: _Wish) -> bool:
    return wish.is_current


BACKOFF: Final = Backoff()
"""The one of this process, for all its workers."""
FREEZER: Final = Freezer()
"""The one of this process, for all its workers."""
