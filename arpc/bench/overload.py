"""Calls at a fixed rate, whether or not earlier ones have been answered: an open loop, to show overload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal, NamedTuple

from arpc.bench.systems import Measurement

__all__ = ["Attempt", "open_loop"]

_TURN_S: Final = 0.002


class Attempt(NamedTuple):
    """The outcome of one call."""

    outcome: Literal["ok", "refused", "late"]
    latency_s: float


async def open_loop(attempt: Callable[[], Awaitable[Attempt]], rate_per_s: float, duration_s: float) -> Measurement:
    """Make `rate_per_s` attempts a second for `duration_s`; return figures of those that ended within that time."""
    ended: list[Attempt] = []
    tasks: set[asyncio.Task[None]] = set()

    async def make() -> None:
        ended.append(await attempt())

    begun = 0
    started = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started) < duration_s:
        while begun < elapsed_s * rate_per_s:
            task = asyncio.create_task(make())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            begun += 1
        await asyncio.sleep(_TURN_S)
    in_time = list(ended)
    await asyncio.gather(*tasks)
    latencies_s = sorted(one.latency_s for one in in_time if one.outcome == "ok") or [0.0]
    return {
        "offered_per_s": begun / elapsed_s,
        "goodput_per_s": sum(one.outcome == "ok" for one in in_time) / elapsed_s,
        "refused_per_s": sum(one.outcome == "refused" for one in in_time) / elapsed_s,
        "late_per_s": sum(one.outcome == "late" for one in in_time) / elapsed_s,
        "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
        "p99_ms": latencies_s[min(len(latencies_s) - 1, len(latencies_s) * 99 // 100)] * 1e3,
    }
