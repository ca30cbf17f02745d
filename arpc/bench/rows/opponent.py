"""What torch.distributed.rpc does best with: nobody is to be beaten in a bad configuration."""

from __future__ import annotations

from collections.abc import Iterator

from arpc.bench.row import Cell, Row, workload
from arpc.bench.systems import TORCH_THREADS, TORCH_THREADS_TRIED

__all__ = ["rows"]


def rows() -> Iterator[Row]:
    """Torch alone, with more and fewer worker threads."""
    latency = workload("latency", flavour="def", function="noop", payload="none")
    rate = workload("throughput", flavour="def", function="noop", payload="none", in_flight=64)
    for name, metric, unit, title, work in (
        ("call", "p50_us", "us", "small call, p50", latency),
        ("rate", "calls_per_s", "/s", "small calls, calls/s, 64 in flight", rate),
    ):
        cells = {
            f"{threads} threads": Cell("torch" if threads == TORCH_THREADS else f"torch-{threads}threads", work)
            for threads in TORCH_THREADS_TRIED
        }
        yield Row(
            key=f"torch-threads/{name}",
            section="torch.distributed.rpc by its number of worker threads",
            title=title,
            metric=metric,
            unit=unit,
            better="lower" if metric == "p50_us" else "higher",
            cells=cells | {"as it comes": Cell("torch-default", work)},
            in_quick=False,
        )
