"""The best configuration of torch.distributed.rpc, so that the comparison is fair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import Cell, LatencyRow, RateRow, Row, Workload, workload
from arpc.bench.systems import TORCH_THREADS, TORCH_THREADS_TRIED

__all__ = ["rows"]

_SECTION: Final = "torch.distributed.rpc by its number of worker threads"


def rows() -> Iterator[Row]:
    """Yield torch alone, with more and fewer worker threads."""
    latency = workload("latency", flavour="def", function="noop", payload="none")
    rate = workload("throughput", flavour="def", function="noop", payload="none", in_flight=64)
    yield LatencyRow("torch-threads/call", _SECTION, "small call, p50", cells=_cells(latency), in_quick=False)
    title = "small calls, calls/s, 64 in flight"
    yield RateRow("torch-threads/rate", _SECTION, title, cells=_cells(rate), in_quick=False)


def _cells(work: Workload) -> dict[str, Cell]:
    names = {threads: f"torch-{threads}threads" for threads in TORCH_THREADS_TRIED} | {TORCH_THREADS: "torch"}
    cells = {f"{threads} threads": Cell(names[threads], work) for threads in TORCH_THREADS_TRIED}
    return cells | {"as it comes": Cell("torch-default", work)}
