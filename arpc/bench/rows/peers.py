"""arpc, torch and everything else that is installed, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import MB, SUBJECT, Cell, Row, workload
from arpc.bench.systems import PEERS

__all__ = ["SECTION", "rows"]

SECTION: Final = "Side by side: small call, rate, large tensor"

_SESSION: Final = "peers"
"""Of their own: some of them are a little busy even when nothing is asked of them."""


def rows() -> Iterator[Row]:
    """Three figures of each. Only arpc is pinned, to two CPUs: its slower placement."""
    for name, title, metric, unit, measure, settings in (
        ("call", "small call, p50", "p50_us", "us", "latency", {}),
        ("rate", "calls/s, 64 in flight", "calls_per_s", "/s", "throughput", {"in_flight": 64}),
    ):
        ours = workload(measure, function="noop", payload="none", flavour="async", **settings)
        theirs = workload(measure, function="noop", payload="none", flavour="def", **settings)
        yield Row(
            key=f"peers/{name}",
            section=SECTION,
            title=title,
            metric=metric,
            unit=unit,
            better="lower" if metric == "p50_us" else "higher",
            cells={
                SUBJECT: Cell("arpc-unix", ours, "split", _SESSION),
                "torch": Cell("torch", theirs, session=_SESSION),
                **{peer: Cell(peer, ours, session=_SESSION) for peer in PEERS},
            },
            in_quick=False,
        )
    send = workload("bulk", function="drop", size_bytes=64 * MB)
    yield Row(
        key="peers/send",
        section=SECTION,
        title="64 MB tensor sent, warm",
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells={
            SUBJECT: Cell("arpc-unix", send, session=_SESSION),
            "torch": Cell("torch-default", send, session=_SESSION),
            **{peer: Cell(peer, send, session=_SESSION) for peer in PEERS},
        },
        in_quick=False,
    )
