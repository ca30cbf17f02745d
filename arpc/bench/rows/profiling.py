"""What watching calls costs: while nobody watches, and while somebody does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, SUBJECT, Cell, Row, workload

__all__ = ["rows"]

_SECTION: Final = "Profiling: what it adds to a small call"


def rows() -> Iterator[Row]:
    """Off, then on."""
    yield Row(
        key="profiler/off/share",
        section=_SECTION,
        title="profiler off, tracing off: what calls pay for them, as a part of a small call",
        metric="share",
        unit="of a call",
        better="lower",
        cells={SUBJECT: Cell("arpc-unix", workload("profiling_off"), "same")},
        in_quick=True,
    )
    for operators, title in ((0, "recording a trace without operators"), (1, "recording a trace with operators")):
        yield Row(
            key=f"profiler/on/{operators}",
            section=_SECTION,
            title=f"small call p50, {title}; floor: arpc, not recording",
            metric="p50_us",
            unit="us",
            better="lower",
            cells={
                SUBJECT: Cell("arpc-unix", workload("traced_latency", operators=operators), "same"),
                FLOOR: Cell("arpc-unix", workload("latency", function="noop", payload="none", flavour="async"), "same"),
            },
            in_quick=False,
        )
