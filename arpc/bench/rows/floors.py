"""arpc against the limits of the machine: blocking sockets and the memmove of libc."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, MB, PINNED, SUBJECT, TRANSPORTS, BulkRow, Cell, LatencyRow, Row, by_flavour, workload

__all__ = ["rows"]

_SECTION: Final = "What the machine gives, and what arpc makes of it"
_COPIES: Final = (
    ("send-of-memmove/64MB", "private", "memmove between warm buffers"),
    ("send-of-memmove/64MB/shared", "shared", "memmove into warm shared memory"),
    ("send-of-memmove/64MB/fresh", "fresh", "memmove into fresh pages of shared memory"),
)


def rows() -> Iterator[Row]:
    """Yield round trips, then transfers."""
    call = by_flavour("latency", function="noop", payload="none")
    send = workload("bulk", function="drop", size_bytes=64 * MB)
    for transport in TRANSPORTS:
        for placement in PINNED:
            yield LatencyRow(
                f"raw/call/{transport}/{placement}",
                _SECTION,
                f"small call; floor: ping-pong on blocking sockets, {transport}, {placement}",
                cells={
                    SUBJECT: Cell(f"arpc-{transport}", call["async"], placement),
                    FLOOR: Cell(f"raw-{transport}", call["def"], placement),
                },
                in_quick=transport == "unix",
            )
    for transport in TRANSPORTS:
        yield BulkRow(
            f"raw/send/64MB/{transport}",
            _SECTION,
            f"send 64 MB, {transport}; floor: blocking sockets into warm memory",
            cells={SUBJECT: Cell(f"arpc-{transport}", send), FLOOR: Cell(f"raw-{transport}", send)},
            in_quick=False,
        )
    for key, pages, title in _COPIES:
        copy = workload("memory_copy", size_bytes=64 * MB, pages=pages)
        cells = {SUBJECT: Cell("arpc-unix", send), FLOOR: Cell("raw-unix", copy)}
        yield BulkRow(key, _SECTION, f"send 64 MB, unix, warm; floor: {title}", cells=cells)
