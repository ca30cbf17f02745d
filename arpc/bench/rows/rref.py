"""Remote references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, MB, PINNED, SUBJECT, Cell, Row, fresh_workload, workload

__all__ = ["rows"]

_SECTION: Final = "Remote references"


def rows() -> Iterator[Row]:
    """Making and fetching one, chains, large values, and many of them."""
    pair = workload("rref_latency")
    for placement in PINNED:
        yield Row(
            key=f"rref/latency/{placement}",
            section=_SECTION,
            title=f"remote() and to_here(), p50, {placement}",
            metric="p50_us",
            unit="us",
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", pair, placement), "torch": Cell("torch", pair)},
        )
    for metric, unit, title in (
        ("p50_us", "us", "p50"),
        ("round_trips", "x", "in multiples of one small call"),
        ("of_calls", "x", "in multiples of eleven small calls made at once"),
    ):
        yield Row(
            key=f"rref/chain/{metric}",
            section=_SECTION,
            title=f"chain of ten remote(), {title}, same",
            metric=metric,
            unit=unit,
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", workload("rref_chain", length=10), "same")},
        )
    fetch = workload("rref_fetch", size_bytes=256 * MB)
    send = workload("bulk", function="drop", size_bytes=256 * MB)
    yield Row(
        key="rref/fetch/256MB",
        section=_SECTION,
        title="fetch 256 MB; floor: a plain send of arpc",
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells={
            SUBJECT: Cell("arpc-unix", fetch),
            FLOOR: Cell("arpc-unix", send),
            "torch": Cell("torch-default", fetch),
        },
        in_quick=False,
    )
    churn = fresh_workload("rref_churn", rrefs=100_000, callee_pid=0)
    for metric, unit, title, better in (
        ("rrefs_per_s", "/s", "made, forked and dropped per second", "higher"),
        ("caller_growth_mb", "MB", "caller's memory afterwards", "lower"),
        ("callee_growth_mb", "MB", "owner's memory afterwards", "lower"),
    ):
        yield Row(
            key=f"rref/churn/{metric}",
            section=_SECTION,
            title=f"100,000 RRefs: {title}",
            metric=metric,
            unit=unit,
            better="lower" if better == "lower" else "higher",
            cells={SUBJECT: Cell("arpc-unix", churn)},
            max_rounds=3,
            in_quick=False,
        )
