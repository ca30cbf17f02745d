"""Estimates of the offset between the clocks of two workers, and of its error.

A worker is asked for its time. It read its clock at some moment between request and reply; the best estimate is the
middle, which is off by at most half of the round trip. The shortest of several round trips is used. Calls that were
made meanwhile narrow the estimate: a handler began after its call and ended before it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

__all__ = ["Clock", "measure_clock", "narrow"]

_now = time.perf_counter_ns
_ROUND_TRIPS: Final = 8


class Clock(NamedTuple):
    """Another worker's clock: its time minus this worker's, plus or minus the error."""

    offset_ns: int
    error_ns: int


HERE: Final = Clock(0, 0)


async def measure_clock(ask: Callable[[], Awaitable[int]], round_trips: int = _ROUND_TRIPS) -> Clock:
    """Ask a worker for its time, a few times, and return the best estimate of its clock."""
    best: Clock | None = None
    for _ in range(round_trips):
        before_ns = _now()
        there_ns = await ask()
        after_ns = _now()
        error_ns = (after_ns - before_ns + 1) // 2
        if best is None or error_ns < best.error_ns:
            best = Clock(there_ns - (before_ns + after_ns) // 2, error_ns)
    assert best is not None
    return best


def narrow(clock: Clock, pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> Clock:
    """Narrow an estimate by calls, each as (beginning, end) here and (beginning, end) of its handler there."""
    low, high = clock.offset_ns - clock.error_ns, clock.offset_ns + clock.error_ns
    for (call_began, call_ended), (handler_began, handler_ended) in pairs:
        low = max(low, handler_ended - call_ended)
        high = min(high, handler_began - call_began)
    if low > high:  # the clocks do not run at the same pace: keep the measured estimate
        return clock
    return Clock((low + high) // 2, (high - low + 1) // 2)
