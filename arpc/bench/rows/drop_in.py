"""Blocking calls by way of the drop-in, against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.placement import Placement
from arpc.bench.row import SUBJECT, Cell, LatencyRow, RateRow, Row, Workload, workload

__all__ = ["rows"]

_SECTION: Final = "Blocking calls through arpc.compat"
_PLACEMENTS: Final[tuple[Placement, ...]] = ("same", "free")


def rows() -> Iterator[Row]:
    """Yield calls of one thread, then of sixteen."""
    latency = workload("latency", flavour="def", function="noop", payload="none")
    for placement in _PLACEMENTS:
        yield LatencyRow(
            f"drop-in/call/{placement}", _SECTION, f"rpc_sync, def, {placement}", cells=_cells(latency, placement)
        )
    threads = workload("many_threads", flavour="def", function="noop", payload="none", threads=16)
    yield RateRow("drop-in/rate/threads", _SECTION, "rpc_sync, def, 16 threads, calls/s", cells=_cells(threads, "free"))


def _cells(work: Workload, placement: Placement) -> dict[str, Cell]:
    return {SUBJECT: Cell("arpc-compat", work, placement), "torch": Cell("torch", work)}
