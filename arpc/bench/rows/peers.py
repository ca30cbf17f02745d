"""arpc, torch and all other systems that are installed, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import MB, SUBJECT, BulkRow, Cell, LatencyRow, RateRow, Row, Workload, by_flavour, workload
from arpc.bench.systems import PEERS

__all__ = ["SECTION", "rows"]

SECTION: Final = "Side by side: small call, rate, large tensor"

_SESSION: Final = "peers"
"""A session of their own: some of them use a little CPU even when they are idle."""


def rows() -> Iterator[Row]:
    """Yield three figures of each system. Only arpc is pinned, to two CPUs: its slower placement."""
    latency = by_flavour("latency", function="noop", payload="none")
    rate = by_flavour("throughput", function="noop", payload="none", in_flight=64)
    send = workload("bulk", function="drop", size_bytes=64 * MB)
    yield LatencyRow(
        "peers/call",
        SECTION,
        "small call, p50",
        cells=_cells(Cell("arpc-unix", latency["async"], "split", _SESSION), "torch", latency["def"]),
        in_quick=False,
    )
    yield RateRow(
        "peers/rate",
        SECTION,
        "calls/s, 64 in flight",
        cells=_cells(Cell("arpc-unix", rate["async"], "split", _SESSION), "torch", rate["def"]),
        in_quick=False,
    )
    yield BulkRow(
        "peers/send",
        SECTION,
        "64 MB tensor sent, warm",
        cells=_cells(Cell("arpc-unix", send, session=_SESSION), "torch-default", send),
        in_quick=False,
    )


def _cells(ours: Cell, torch: str, of_torch: Workload) -> dict[str, Cell]:
    return {
        SUBJECT: ours,
        "torch": Cell(torch, of_torch, session=_SESSION),
        **{peer: Cell(peer, ours.workload, session=_SESSION) for peer in PEERS},
    }
