"""Many calls at once, many calls in all, and a caller that does not read its replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, MB, SUBJECT, Cell, Metric, Point, Row, fresh_workload

__all__ = ["rows"]

CALLS_AT_ONCE: Final = 100_000

_FLOOD: Final[tuple[Metric, ...]] = (
    ("calls_per_s", "/s", "calls/s", "higher"),
    ("issue_s", "s", "starting them all", "lower"),
    ("stall_ms", "ms", "longest loop stall of the caller after that", "lower"),
    ("caller_bytes_per_call", "B", "caller's peak memory per call", "lower"),
    ("callee_growth_mb", "MB", "callee's peak memory growth", "lower"),
)
_SOAK: Final[tuple[Metric, ...]] = (
    ("calls_per_s", "/s", "calls/s, 256 in flight", "higher"),
    ("caller_growth_mb", "MB", "caller's memory afterwards", "lower"),
    ("callee_growth_mb", "MB", "callee's memory afterwards", "lower"),
)
_SLOW_READER: Final[tuple[Metric, ...]] = (
    ("callee_growth_mb", "MB", "callee's peak memory growth", "lower"),
    ("total_s", "s", "until all have arrived", "lower"),
)


def rows() -> Iterator[Row]:
    """Yield the flood, the soak and the slow reader."""
    # `Pair.measure` fills in the pid of its callee.
    flood = fresh_workload("flood", calls=CALLS_AT_ONCE, callee_pid=0)
    soak = fresh_workload("soak", calls=1_000_000, in_flight=256, callee_pid=0)
    slow = fresh_workload("slow_reader", replies=500, size_bytes=1 * MB, stopped_s=1.0, callee_pid=0)
    for name, work, title, metrics in (
        ("flood", flood, f"{CALLS_AT_ONCE:,} at once", _FLOOD),
        ("soak", soak, "1,000,000", _SOAK),
        ("slow-reader", slow, "500 replies of 1 MB to a caller stopped for 1 s", _SLOW_READER),
    ):
        for metric, unit, what, better in metrics:
            systems = {SUBJECT: "arpc-unix", FLOOR: "floor-unix", "torch": "torch"}
            if metric == "stall_ms":
                del systems["torch"]  # it has no loop
            if name == "slow-reader":
                del systems[FLOOR]  # it has no backpressure
            yield Row(
                f"{name}/{metric}",
                "Many calls",
                f"{title}: {what}",
                metric,
                unit,
                better,
                {column: Cell(system, work) for column, system in systems.items()},
                max_rounds=1 if name == "soak" else 3,
                in_quick=False,
                long=name == "soak",
                point=Point("in flight", CALLS_AT_ONCE) if (name, metric) == ("flood", "calls_per_s") else None,
            )
