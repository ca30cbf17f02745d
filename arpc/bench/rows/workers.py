"""The cost of a call as the group grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, SUBJECT, Cell, LatencyRow, Metric, Point, Row, workload
from arpc.bench.systems import GROUP_SIZES, TORCH_GROUP_SIZES

__all__ = ["rows"]


_SECTION: Final = "Workers: one calls all the others in turn, from one CPU to the other"
_METRICS: Final[tuple[Metric, ...]] = (
    ("p50_us", "us", "p50", "lower"),
    ("calls_per_s", "/s", "calls/s, 64 in flight", "higher"),
    ("caller_cpu_us", "us", "CPU time of the caller per call, 64 in flight", "lower"),
)


def rows() -> Iterator[Row]:
    """Yield one caller that calls all other workers in turn."""
    for metric, unit, what, better in _METRICS:
        for workers in GROUP_SIZES:
            yield Row(
                f"workers/{metric}/{workers}",
                _SECTION,
                f"{workers} workers, {what}",
                metric,
                unit,
                better,
                _cells(workers),
                max_rounds=3,
                in_quick=False,
                point=Point("workers", workers) if metric == "p50_us" else None,
            )
    few, many = (_cells(workers)[SUBJECT] for workers in (GROUP_SIZES[0], GROUP_SIZES[-1]))
    yield LatencyRow(
        "workers/growth",
        _SECTION,
        f"{GROUP_SIZES[-1]} workers, p50; floor: arpc with {GROUP_SIZES[0]}",
        cells={SUBJECT: many, FLOOR: few},
        max_rounds=3,
        in_quick=False,
    )


def _cells(workers: int) -> dict[str, Cell]:
    work = workload("in_turn", peers=workers - 1, in_flight=64)
    cells = {
        SUBJECT: Cell(f"arpc-group-{workers}", work, "split"),
        FLOOR: Cell(f"floor-group-{workers}", work, "split"),
    }
    return cells | ({"torch": Cell(f"torch-group-{workers}", work)} if workers in TORCH_GROUP_SIZES else {})
