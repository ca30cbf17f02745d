"""How much the clocks of two workers differ, and how sure that is.

A worker is asked for its time. The answer was true at some moment between the question and its arrival; the best guess
is the middle, and it is wrong by at most half of the round trip. Of several round trips the shortest counts. Calls that
were made meanwhile narrow it down: a handler began after its call and ended before it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

__all__ = ["Clock", "measure_clock", "narrow"]

_now = time.perf_counter_ns
_ROUND_TRIPS: Final = 8


class Clock(NamedTuple):
    """Another worker's clock: its time minus ours, give or take the error."""

    offset_ns: int
    error_ns: int


HERE: Final = Clock(0, 0)


async def measure_clock(ask: Callable[[], Awaitable[int]], round_trips: int = _ROUND_TRIPS) -> Clock:
    """Ask a worker for its time, a few times."""
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
    """A better guess by calls, each as (beginning, end) here and (beginning, end) of its handler there."""
    low, high = clock.offset_ns - clock.error_ns, clock.offset_ns + clock.error_ns
    for (call_began, call_ended), (handler_began, handler_ended) in pairs:
        low = max(low, handler_ended - call_ended)
        high = min(high, handler_began - call_began)
    if low > high:  # the clocks do not run at the same pace; what was measured last is as good as anything
        return clock
    return Clock((low + high) // 2, (high - low + 1) // 2)
