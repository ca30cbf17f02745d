"""The cost of observing calls: while no observer is active, and while a trace is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, SUBJECT, Cell, LatencyRow, Row, workload

__all__ = ["rows"]

_SECTION: Final = "Profiling: what it adds to a small call"


def rows() -> Iterator[Row]:
    """Yield calls with profiling off, then on."""
    title = "profiler off, tracing off: what calls pay for them, as a part of a small call"
    off = {SUBJECT: Cell("arpc-unix", workload("profiling_off"), "same")}
    yield Row("profiler/off/share", _SECTION, title, "share", "of a call", "lower", off)
    plain = Cell("arpc-unix", workload("latency", function="noop", payload="none", flavour="async"), "same")
    for operators, title in ((0, "recording a trace without operators"), (1, "recording a trace with operators")):
        yield LatencyRow(
            f"profiler/on/{operators}",
            _SECTION,
            f"small call p50, {title}; floor: arpc, not recording",
            cells={
                SUBJECT: Cell("arpc-unix", workload("traced_latency", operators=operators), "same"),
                FLOOR: plain,
            },
            in_quick=False,
        )
