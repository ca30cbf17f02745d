"""Large tensors, one transfer after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from arpc.bench.row import (
    FLOOR,
    MB,
    SUBJECT,
    TRANSPORTS,
    BulkRow,
    Cell,
    Metric,
    Point,
    Row,
    Transport,
    by_flavour,
    workload,
)

__all__ = ["SECTION", "rows"]

SECTION: Final = "Large tensors, one after another, unpinned"
SIZES_MB: Final = (1, 4, 16, 64, 256)
SMALL_SIZES: Final = {"64 B": 64, "1 KB": 1_000, "16 KB": 16_000, "64 KB": 64_000, "256 KB": 256_000}
IN_QUICK: Final = {"send/1MB/unix", "send/16MB/unix", "send/64MB/unix", "send-cold/64MB/unix"}

_LOADED: Final[tuple[Metric, ...]] = (
    ("p50_us", "us", "small call p50 while 64 MB transfers run", "lower"),
    ("times_idle", "x idle", "small call p50 while 64 MB transfers run, in multiples of the idle one", "lower"),
)
_AMONG_RESULTS: Final[tuple[Metric, ...]] = (
    ("p50_us", "us", "p50", "lower"),
    ("p99_us", "us", "p99", "lower"),
    ("unanswered_percent", "%", "large ones that are still out when the first is answered", "higher"),
)


def rows() -> Iterator[Row]:
    """Yield sends, echoes, and small calls during transfers."""
    for name, size_bytes in SMALL_SIZES.items():
        row = _row(f"send/{name.replace(' ', '')}/unix", f"send {name}", "drop", size_bytes, "unix", max_rounds=5)
        yield replace(row, metric="p50_us", unit="us", better="lower")
    for function, word in (("drop", "send"), ("echo", "echo")):
        for transport in TRANSPORTS:
            for size_mb in SIZES_MB:
                key = f"{word}/{size_mb}MB/{transport}"
                yield _row(key, f"{word} {size_mb} MB", function, size_mb * MB, transport)
    yield _row("send/1GB/unix", "send 1 GB", "drop", 1000 * MB, "unix", max_rounds=3)
    for size_mb in (4, 16, 64):
        row = _row(f"send/{size_mb}MB/socket", f"send {size_mb} MB", "drop", size_mb * MB, "unix")
        ours = Cell("arpc-socket", row.cells[SUBJECT].workload)
        yield replace(
            row, title=f"{row.title}, not through shared memory", cells={**row.cells, SUBJECT: ours}, point=None
        )
    for transport in TRANSPORTS:
        yield _row(f"send-cold/64MB/{transport}", "send 64 MB, cold", "keep", 64 * MB, transport)
    loaded = by_flavour("latency_under_load", size_bytes=64 * MB)
    for metric, unit, title, better in _LOADED:
        cells = {SUBJECT: Cell("arpc-unix", loaded["async"]), "torch": Cell("torch-default", loaded["def"])}
        yield Row(f"loaded/{metric}", SECTION, title, metric, unit, better, cells)
    among = by_flavour("latency_among_results", size_bytes=4 * MB, calls=1000)
    cells = {SUBJECT: Cell("arpc-unix", among["def"]), "tcp": Cell("arpc-tcp", among["def"])}
    for metric, unit, what, better in _AMONG_RESULTS:
        title = f"small def call while 1,000 results of 4 MB come back: {what}"
        yield Row(f"loaded/results/{metric}", SECTION, title, metric, unit, better, cells, max_rounds=3, in_quick=False)


def _row(
    key: str, title: str, function: str, size_bytes: int, transport: Transport, max_rounds: int | None = None
) -> Row:
    transfer = workload("bulk", function=function, size_bytes=size_bytes)
    cells = {
        SUBJECT: Cell(f"arpc-{transport}", transfer),
        FLOOR: Cell(f"floor-{transport}", transfer),
        "torch": Cell("torch-default", transfer),
    }
    if transport == "tcp":
        cells["torch-tcp"] = Cell("torch-tcp", transfer)
    return BulkRow(
        key=key,
        section=SECTION,
        title=f"{title}, {transport}",
        cells=cells,
        max_rounds=max_rounds,
        in_quick=key in IN_QUICK,
        point=Point("payload", size_bytes) if (function, transport) == ("drop", "unix") else None,
    )
