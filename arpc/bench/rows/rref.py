"""Remote references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import (
    FLOOR,
    MB,
    PINNED,
    SUBJECT,
    BulkRow,
    Cell,
    LatencyRow,
    Metric,
    Row,
    fresh_workload,
    workload,
)

__all__ = ["rows"]

_SECTION: Final = "Remote references"
_CHAIN: Final[tuple[Metric, ...]] = (
    ("p50_us", "us", "p50", "lower"),
    ("round_trips", "x", "in multiples of one small call", "lower"),
    ("of_calls", "x", "in multiples of eleven small calls made at once", "lower"),
)
_CHURN: Final[tuple[Metric, ...]] = (
    ("rrefs_per_s", "/s", "made, forked and dropped per second", "higher"),
    ("caller_growth_mb", "MB", "caller's memory afterwards", "lower"),
    ("callee_growth_mb", "MB", "owner's memory afterwards", "lower"),
)


def rows() -> Iterator[Row]:
    """Yield the creation and fetch of one RRef, chains, large values, and many RRefs."""
    pair = workload("rref_latency")
    for placement in PINNED:
        yield LatencyRow(
            f"rref/latency/{placement}",
            _SECTION,
            f"remote() and to_here(), p50, {placement}",
            cells={SUBJECT: Cell("arpc-unix", pair, placement), "torch": Cell("torch", pair)},
        )
    chain = {SUBJECT: Cell("arpc-unix", workload("rref_chain", length=10), "same")}
    for metric, unit, what, better in _CHAIN:
        title = f"chain of ten remote(), {what}, same"
        yield Row(f"rref/chain/{metric}", _SECTION, title, metric, unit, better, chain)
    fetch = workload("rref_fetch", size_bytes=256 * MB)
    yield BulkRow(
        "rref/fetch/256MB",
        _SECTION,
        "fetch 256 MB; floor: a plain send of arpc",
        cells={
            SUBJECT: Cell("arpc-unix", fetch),
            FLOOR: Cell("arpc-unix", workload("bulk", function="drop", size_bytes=256 * MB)),
            "torch": Cell("torch-default", fetch),
        },
        in_quick=False,
    )
    churn = {SUBJECT: Cell("arpc-unix", fresh_workload("rref_churn", rrefs=100_000, callee_pid=0))}
    for metric, unit, what, better in _CHURN:
        title = f"100,000 RRefs: {what}"
        yield Row(f"rref/churn/{metric}", _SECTION, title, metric, unit, better, churn, max_rounds=3, in_quick=False)
