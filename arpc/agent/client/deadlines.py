"""Deadlines of calls, computed from their timeouts. Any number of them share one timer.

A deadline is rounded up to a *tick* of 1/256 s, and further up by at most 1/64 of the time until then. So calls made at
about the same time with the same timeout share a tick, and their owner can keep them in one bucket per tick: nothing is
stored or removed for the deadline of a single call.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from math import inf
from typing import Any, Final, Protocol

from arpc.agent.server.functions import name_of
from arpc.errors import RpcTimeoutError, not_run
from arpc.log import get_logger
from arpc.options import UNSET, Unset
from arpc.transport.timerfd import Alarm, CallAt
from arpc.wire.frames import MAX_TIMEOUT_MS

__all__ = ["NEVER", "Deadlines", "Expirable", "Timeouts"]

NEVER: Final = 0
"""The tick of calls without a deadline."""

_TICKS_PER_SECOND: Final = 256
_MAX_TIMEOUT_S: Final = MAX_TIMEOUT_MS / 1000  # seven weeks: as good as none
_MAX_KEPT: Final = 16

Deadline = tuple[int, int, float]
"""The tick at which a call expires, the timeout in ms sent to the peer (0: none), the time until which both hold."""

_NONE_KEPT: Final[Deadline] = (NEVER, 0, -inf)

logger = get_logger("arpc.deadlines")


class Expirable(Protocol):
    """An owner of calls or requests that expire at certain ticks."""

    def expire(self, tick: int) -> None:
        """End the calls or requests that expire at this tick, whose time has come."""


class Deadlines:
    """Notifies `Expirable` objects when the ticks that they watch have come."""

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
        """Return the tick of a deadline that is ``timeout_s`` away."""
        away = int(timeout_s * _TICKS_PER_SECOND)
        grain = 1 << max(0, away.bit_length() - 7)
        return (int((now + timeout_s) * _TICKS_PER_SECOND) // grain + 1) * grain

    @staticmethod
    def time_of(tick: int) -> float:
        return tick / _TICKS_PER_SECOND

    def watch(self, tick: int, owner: Expirable) -> None:
        """Call ``owner.expire(tick)`` once, when the time of the tick has come."""
        watchers = self._watchers.get(tick)
        if watchers is not None:
            watchers.append(owner)
            return
        self._watchers[tick] = [owner]
        heapq.heappush(self._heap, tick)
        if self._timer is None or tick < self._timer_tick:
            self._arm(tick)

    def unwatch(self, tick: int, owner: Expirable) -> None:
        """Stop watching a tick for an owner that no longer needs it, and drop the reference to the owner."""
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


class Timeouts:
    """The deadlines of the calls of one worker."""

    def __init__(self, deadlines: Deadlines, default_s: float, *, are_sent: bool) -> None:
        """``are_sent``: requests carry the timeout of the call to the peer."""
        self._deadlines = deadlines
        self._time: Callable[[], float] = deadlines.now
        self._are_sent = are_sent
        self._default_s = default_s
        # Calls with the same timeout made at about the same time have the same tick, which is computed once for all
        self._of_default = _NONE_KEPT
        self._kept: dict[float, Deadline] = {}

    @property
    def default_s(self) -> float:
        """The timeout in seconds of calls that specify none; 0 for no timeout."""
        return self._default_s

    @default_s.setter
    def default_s(self, timeout_s: float) -> None:
        self._default_s = checked_timeout(timeout_s)
        self._of_default = _NONE_KEPT

    def deadline(self, timeout: float | Unset) -> Deadline:
        """Return the deadline of a call that inherits none."""
        kept = self._of_default if timeout is UNSET else self._kept.get(checked_timeout(timeout), _NONE_KEPT)
        if (now := self._time()) >= kept[2]:
            timeout_s = self._seconds(timeout)
            kept = self._find(now, timeout_s)
            if timeout is UNSET:
                self._of_default = kept
            else:
                if len(self._kept) > _MAX_KEPT:
                    self._kept.clear()
                self._kept[timeout_s] = kept
        return kept

    def within(self, inherited: float | None, timeout: float | Unset, function: Any) -> Deadline:
        """Return the deadline of a call by a handler whose own deadline is ``inherited``; None if it has none.

        Raises `RpcTimeoutError` if the handler's deadline has passed.
        """
        if inherited is None:
            return self.deadline(timeout)
        timeout_s = self._seconds(timeout)
        now = self._time()
        left = inherited - now
        if left <= 0:
            text = f"no time is left to call {name_of(function)}: the caller's own deadline has passed"
            raise not_run(RpcTimeoutError(text))
        return self._find(now, min(timeout_s, left) if timeout_s else left)

    def _seconds(self, timeout: float | Unset) -> float:
        return self._default_s if timeout is UNSET else checked_timeout(timeout)

    def _find(self, now: float, timeout_s: float) -> Deadline:
        if not timeout_s:
            return NEVER, 0, inf
        timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
        tick = self._deadlines.tick(now, timeout_s)
        timeout_ms = max(1, int(timeout_s * 1000)) if self._are_sent else 0
        return tick, timeout_ms, self._deadlines.time_of(tick) - timeout_s


def checked_timeout(timeout: Any) -> float:
    """Return a timeout in seconds. Raises `TypeError` or `ValueError` if it is not valid."""
    if not isinstance(timeout, int | float):
        raise TypeError(f"a timeout is a number of seconds, 0 for none, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout!r}")
    return float(timeout)
