"""Three times as many calls as a worker can take, with and without a limit on calls in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import SUBJECT, Cell, Metric, Row, fresh_workload

__all__ = ["rows"]

UNLIMITED: Final = "no-limit"

_METRICS: Final[tuple[Metric, ...]] = (
    ("of_peak_percent", "%", "answered in time, of what it can take", "higher"),
    ("p99_ms", "ms", "p99 of what was answered", "lower"),
    ("caller_growth_mb", "MB", "caller's peak memory growth", "lower"),
    ("callee_growth_mb", "MB", "callee's peak memory growth", "lower"),
)


def rows() -> Iterator[Row]:
    """Yield goodput, latency and memory under overload."""
    work = fresh_workload("overload", times=3, in_flight=64, callee_pid=0)
    cells = {SUBJECT: Cell("arpc-limited", work), UNLIMITED: Cell("arpc-unix", work)}
    for metric, unit, what, better in _METRICS:
        title = f"3 times what a worker can take: {what}"
        yield Row(f"overload/{metric}", "Overload", title, metric, unit, better, cells, max_rounds=3, in_quick=False)
