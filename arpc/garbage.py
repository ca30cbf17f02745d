"""How often Python collects garbage in a process that makes and serves calls, and among which objects.

Python examines all new objects whenever there are 700 more than before. Thousands of calls in flight are many new
objects and no garbage: examining them again and again takes a third of the time. So collections become rarer as long as
they find nothing, and as soon as one finds garbage, Python's usual threshold applies again. A program that leaves no
reference cycles behind is not disturbed; one that does has no more of them than before, except those of one delay.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any, Final, NamedTuple

__all__ = ["BACKOFF", "FREEZER", "Backoff", "Freezer"]


_MOST: Final = 1 << 30
"""About the largest threshold that Python accepts."""


class _Request(NamedTuple):
    """The factor that a worker asks for, as long as its loop is not closed."""

    factor: int
    loop: weakref.ref[asyncio.AbstractEventLoop]

    @property
    def is_current(self) -> bool:
        loop = self.loop()
        return loop is not None and not loop.is_closed()


class Freezer:
    """Excludes the objects that existed before the first worker of the process from collections.

    No object of a worker itself is frozen: a frozen reference cycle is never freed, nor is anything that it refers to,
    such as the arguments of a call.
    """

    def __init__(self) -> None:
        self._loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
        self._lock = threading.Lock()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Freeze the objects that exist before a worker is built, unless there are other workers already.

        In effect until `end`, or until the loop is closed: a worker may be abandoned without a shutdown.
        """
        with self._lock:
            self._loops = [one for one in self._loops if (known := one()) is not None and not known.is_closed()]
            if not self._loops:
                gc.collect()
                gc.freeze()
            self._loops.append(weakref.ref(loop))

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo one `begin`, if there was one; the last one unfreezes all objects."""
        with self._lock:
            ended = weakref.ref(loop)
            if ended in self._loops:
                self._loops.remove(ended)
                if not self._loops:
                    gc.unfreeze()


class Backoff:
    """Makes collections rarer while they find nothing, up to a factor, as long as a worker asks for it."""

    def __init__(self) -> None:
        self._requests: tuple[_Request, ...] = ()
        """Replaced, never mutated: a collection may run at any moment."""
        self._lock = threading.Lock()
        self._usual = 0
        """The first value of `gc.get_threshold`, as the program has set it."""
        self._last = 0
        """The threshold that was set last here. If Python's differs, the program has set it meanwhile."""

    def begin(self, factor: int, loop: asyncio.AbstractEventLoop) -> None:
        """Allow up to ``factor`` times as many new objects before Python examines them; 1 changes nothing.

        In effect until `end`, or until the loop is closed: a worker may be abandoned without a shutdown.
        """
        if factor > 1:
            with self._lock:
                if self._looked not in gc.callbacks:
                    self._usual = self._last = gc.get_threshold()[0]
                    gc.callbacks.append(self._looked)
                self._requests = (*filter(_is_current, self._requests), _Request(factor, weakref.ref(loop)))

    def end(self, factor: int, loop: asyncio.AbstractEventLoop) -> None:
        """Undo one `begin` with the same factor, if there was one; the last one restores the program's threshold."""
        if factor > 1:
            with self._lock:
                requests, ended = list(self._requests), _Request(factor, weakref.ref(loop))
                if ended in requests:  # a worker may be shut down before its start has called `begin`
                    requests.remove(ended)
                self._requests = tuple(filter(_is_current, requests))
                if not self._requests and self._looked in gc.callbacks:
                    gc.callbacks.remove(self._looked)
                    self._set(self._program_threshold())

    def _looked(self, phase: str, info: dict[str, Any]) -> None:
        """Called by Python in any thread, in the middle of the code that made the last object: takes no lock."""
        if phase != "stop":
            return
        try:
            usual = self._program_threshold()
            factor = max((request.factor for request in self._requests if request.is_current), default=1)
            most = max(usual, min(usual * factor, _MOST))
            self._set(usual if info["collected"] else min(2 * self._last, most))
        except RecursionError:
            pass  # the interrupted code is at the recursion limit: the next collection is soon enough

    def _program_threshold(self) -> int:
        """Return the usual threshold: the one that the program has set, if it has changed it meanwhile."""
        now = gc.get_threshold()[0]
        if now != self._last:
            self._usual = self._last = now
        return self._usual

    def _set(self, threshold: int) -> None:
        if threshold != self._last:
            gc.set_threshold(threshold, *gc.get_threshold()[1:])
            self._last = threshold


def _is_current(request: _Request) -> bool:
    return request.is_current


BACKOFF: Final = Backoff()
"""The only instance of this process, for all its workers."""
FREEZER: Final = Freezer()
"""The only instance of this process, for all its workers."""
