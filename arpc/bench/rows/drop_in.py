"""Blocking calls by way of the drop-in, against torch's own."""

from __future__ import annotations

from collections.abc import Iterator

from arpc.bench.row import SUBJECT, Cell, Row, workload

__all__ = ["rows"]

_SECTION = "Blocking calls through arpc.compat"


def rows() -> Iterator[Row]:
    """One thread that calls, and sixteen."""
    latency = workload("latency", flavour="def", function="noop", payload="none")
    for placement in ("same", "free"):
        yield Row(
            key=f"drop-in/call/{placement}",
            section=_SECTION,
            title=f"rpc_sync, def, {placement}",
            metric="p50_us",
            unit="us",
            better="lower",
            cells={SUBJECT: Cell("arpc-compat", latency, placement), "torch": Cell("torch", latency)},
        )
    threads = workload("many_threads", flavour="def", function="noop", payload="none", threads=16)
    yield Row(
        key="drop-in/rate/threads",
        section=_SECTION,
        title="rpc_sync, def, 16 threads, calls/s",
        metric="calls_per_s",
        unit="/s",
        better="higher",
        cells={SUBJECT: Cell("arpc-compat", threads), "torch": Cell("torch", threads)},
    )
