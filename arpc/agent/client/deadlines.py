"""Deadlines of any number of calls, with one timer.

A deadline is rounded up to a *tick* of 1/256 s, and further up by at most 1/64 of the time it is away. So calls made
about the same time with the same timeout share a tick, and whoever keeps them can keep them in one bucket per tick:
nothing is stored or removed for the deadline of a call itself.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Final, Protocol

from arpc.log import get_logger
from arpc.transport.timerfd import Alarm, CallAt

__all__ = ["NEVER", "Deadlines", "Expirable"]

NEVER: Final = 0
"""The tick of what has no deadline."""

_TICKS_PER_SECOND: Final = 256

logger = get_logger("arpc.deadlines")


class Expirable(Protocol):
    """Keeps something in buckets by tick."""

    def expire(self, tick: int) -> None:
        """The time of this tick has come: end what is left in its bucket."""


class Deadlines:
    """Tells `Expirable` objects when the ticks they asked for have come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call_at: CallAt | None = None) -> None:
        self.loop = loop
        self._call_at: CallAt = loop.call_at if call_at is None else call_at
        self.now = loop.time
        self._watchers: dict[int, list[Expirable]] = {}
        self._heap: list[int] = []
        self._timer: Alarm | None = None
        self._timer_tick = 0

    @staticmethod
    def tick(now: float, timeout_s: float) -> int:
        """The tick of a deadline that is ``timeout_s`` away."""
        away = int(timeout_s * _TICKS_PER_SECOND)
        grain = 1 << max(0, away.bit_length() - 7)
        return (int((now + timeout_s) * _TICKS_PER_SECOND) // grain + 1) * grain

    @staticmethod
    def time_of(tick: int) -> float:
        return tick / _TICKS_PER_SECOND

    def watch(self, tick: int, owner: Expirable) -> None:
        """Call ``owner.expire(tick)`` once, when its time has come."""
        watchers = self._watchers.get(tick)
        if watchers is not None:
            watchers.append(owner)
            return
        self._watchers[tick] = [owner]
        heapq.heappush(self._heap, tick)
        if self._timer is None or tick < self._timer_tick:
            self._arm(tick)

    def unwatch(self, tick: int, owner: Expirable) -> None:
        """Forget an owner for which a tick has no meaning any more, and with it all that the owner keeps."""
        watchers = self._watchers.get(tick)
        if watchers is not None and owner in watchers:
            watchers.remove(owner)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watchers.clear()
        self._heap.clear()

    def statistics(self) -> dict[str, int]:
        return {"ticks_watched": len(self._watchers)}

    def _arm(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_tick = tick
        self._timer = self._call_at(self.time_of(tick), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self.loop.time()
        heap = self._heap
        while heap and self.time_of(heap[0]) <= now:
            tick = heapq.heappop(heap)
            for owner in self._watchers.pop(tick):
                try:
                    owner.expire(tick)
                except Exception:
                    logger.exception("an internal error at a deadline")
        # expire() may have watched a new tick, and armed the timer for it
        if heap and (self._timer is None or heap[0] < self._timer_tick):
            self._arm(heap[0])
