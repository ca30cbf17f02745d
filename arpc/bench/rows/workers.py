"""The cost of a call as the group grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, SUBJECT, Cell, Point, Row, workload
from arpc.bench.systems import GROUP_SIZES, TORCH_GROUP_SIZES

__all__ = ["rows"]


_SECTION: Final = "Workers: one calls all the others in turn, from one CPU to the other"


def rows() -> Iterator[Row]:
    """One caller and all the others, called in turn."""
    for metric, unit, what in (
        ("p50_us", "us", "p50"),
        ("calls_per_s", "/s", "calls/s, 64 in flight"),
        ("caller_cpu_us", "us", "CPU time of the caller per call, 64 in flight"),
    ):
        for workers in GROUP_SIZES:
            work = workload("in_turn", peers=workers - 1, in_flight=64)
            cells = {
                SUBJECT: Cell(f"arpc-group-{workers}", work, "split"),
                FLOOR: Cell(f"floor-group-{workers}", work, "split"),
            }
            if workers in TORCH_GROUP_SIZES:
                cells["torch"] = Cell(f"torch-group-{workers}", work)
            yield Row(
                key=f"workers/{metric}/{workers}",
                section=_SECTION,
                title=f"{workers} workers, {what}",
                metric=metric,
                unit=unit,
                better="higher" if metric == "calls_per_s" else "lower",
                cells=cells,
                max_rounds=3,
                in_quick=False,
                point=Point("workers", workers) if metric == "p50_us" else None,
            )
    few, many = (
        Cell(f"arpc-group-{workers}", workload("in_turn", peers=workers - 1, in_flight=64), "split")
        for workers in (GROUP_SIZES[0], GROUP_SIZES[-1])
    )
    yield Row(
        key="workers/growth",
        section=_SECTION,
        title=f"{GROUP_SIZES[-1]} workers, p50; floor: arpc with {GROUP_SIZES[0]}",
        metric="p50_us",
        unit="us",
        better="lower",
        cells={SUBJECT: many, FLOOR: few},
        max_rounds=3,
        in_quick=False,
    )
