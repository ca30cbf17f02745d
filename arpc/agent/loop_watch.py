"""Finds code that blocks the event loop: a thread checks the loop at intervals, and logs the function that blocks it.

A handler that blocks (``time.sleep``, a large computation in an ``async def``) stops every call of its worker, and
without this check nothing shows which handler it is. The cost is a timer of the loop, twice a second; calls cost
nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from arpc.log import get_logger
from arpc.private.interpreter import frames_of_threads

__all__ = ["LoopWatch", "unwatch_loop", "watch_loop"]

logger = get_logger("arpc.loop")

LIMIT_S = 1.0
"""The time after which a callback or a step of a coroutine that still runs is logged."""
_RUNTIME = frozenset({"arpc", "asyncio", "uvloop"})
_DEBUGGERS = frozenset({"bdb", "pdb", "debugpy", "pydevd", "_pydevd_bundle", "IPython"})


class LoopWatch:
    """Watches one loop, for all of its workers. Create and close it on that loop."""

    def __init__(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.workers: list[str] = []
        self._limit_s = limit_s
        self._interval_s = limit_s / 2
        self._over = threading.Event()
        self._thread_id = threading.get_ident()
        self._seen_s = time.monotonic()
        self._told_s = -1.0
        self._timer = loop.call_later(self._interval_s, self._tick, loop)
        # weak references, so that a loop that is dropped with its workers can be freed
        arguments = (weakref.ref(loop), weakref.ref(self), self._over, self._interval_s)
        threading.Thread(target=_watch, args=arguments, name="arpc-loop-watch", daemon=True).start()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._thread_id = threading.get_ident()
        self._seen_s = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._tick, loop)

    def close(self) -> None:
        self._timer.cancel()
        self._over.set()

    def look(self) -> None:
        """Log the function that blocks the loop, once for each time that it is blocked. Called by the thread."""
        seen_s = self._seen_s
        if time.monotonic() - seen_s < self._limit_s + self._interval_s or seen_s == self._told_s:
            return
        frame = frames_of_threads().get(self._thread_id)
        if frame is None or (found := _blocking(frame)) is None:
            return
        self._told_s = seen_s
        handler, place = found
        logger.warning(
            "%s has kept the event loop of worker %s for more than %g s, and no other call ran there. It is at %s. "
            "Let a plain `def`, which runs in a thread, do what takes long, or call `await arpc.to_thread(...)`",
            _name(handler),
            ", ".join(map(repr, sorted(self.workers))),
            self._limit_s,
            f"{place.f_code.co_filename}:{place.f_lineno}",
            extra={"worker": self.workers[0] if self.workers else None},
        )


def _watch(
    loop: weakref.ref[asyncio.AbstractEventLoop],
    watch: weakref.ref[LoopWatch],
    over: threading.Event,
    interval_s: float,
) -> None:
    before_s = time.monotonic()
    while not over.wait(interval_s):
        now_s = time.monotonic()
        # if the whole process was stopped, or got no CPU, its loop is not to blame
        was_stopped, before_s = now_s - before_s > 4 * interval_s, now_s
        watched, looked_after = loop(), watch()
        if watched is None or looked_after is None or watched.is_closed():
            return
        if watched.is_running() and not was_stopped:
            looked_after.look()
        del watched, looked_after


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _blocking(innermost: FrameType) -> tuple[FrameType, FrameType] | None:
    """Return the frame of the function that the loop runs, and the user's innermost frame; None in a debugger."""
    inner: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        name = _module(frame)
        if name in _DEBUGGERS:
            return None
        if name not in _RUNTIME:
            inner.append(frame)
        elif inner:
            break
        frame = frame.f_back
    return (inner[-1], inner[0]) if inner else (innermost, innermost)


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_code.co_firstlineno})"


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = WeakKeyDictionary()


def watch_loop(worker: Any) -> None:
    """Watch the running loop for a worker, until its last worker has ended."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = LoopWatch(LIMIT_S)
    watch.workers.append(worker.info.name)


def unwatch_loop(worker: Any) -> None:
    """Stop watching the running loop for a worker that has ended."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is not None and worker.info.name in watch.workers:
        watch.workers.remove(worker.info.name)
        if not watch.workers:
            watch.close()
            del _watches[loop]
