"""What the machine itself gives: blocking sockets and the memmove of libc, with what arpc makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLOOR, MB, PINNED, SUBJECT, TRANSPORTS, Cell, Row, by_flavour, workload

__all__ = ["rows"]

_SECTION: Final = "What the machine gives, and what arpc makes of it"


def rows() -> Iterator[Row]:
    """Round trips, then bytes."""
    call = by_flavour("latency", function="noop", payload="none")
    for transport in TRANSPORTS:
        for placement in PINNED:
            yield Row(
                key=f"raw/call/{transport}/{placement}",
                section=_SECTION,
                title=f"small call; floor: ping-pong on blocking sockets, {transport}, {placement}",
                metric="p50_us",
                unit="us",
                better="lower",
                cells={
                    SUBJECT: Cell(f"arpc-{transport}", call["async"], placement),
                    FLOOR: Cell(f"raw-{transport}", call["def"], placement),
                },
                in_quick=transport == "unix",
            )
    send = workload("bulk", function="drop", size_bytes=64 * MB)
    for transport in TRANSPORTS:
        yield _send_row(
            f"raw/send/64MB/{transport}",
            f"send 64 MB, {transport}; floor: blocking sockets into warm memory",
            f"arpc-{transport}",
            Cell(f"raw-{transport}", send),
            in_quick=False,
        )
    for key, pages, title in (
        ("send-of-memmove/64MB", "private", "memmove between warm buffers"),
        ("send-of-memmove/64MB/shared", "shared", "memmove into warm shared memory"),
        ("send-of-memmove/64MB/fresh", "fresh", "memmove into fresh pages of shared memory"),
    ):
        copy = workload("memory_copy", size_bytes=64 * MB, pages=pages)
        yield _send_row(key, f"send 64 MB, unix, warm; floor: {title}", "arpc-unix", Cell("raw-unix", copy))


def _send_row(key: str, title: str, system: str, floor: Cell, *, in_quick: bool = True) -> Row:
    return Row(
        key=key,
        section=_SECTION,
        title=title,
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells={SUBJECT: Cell(system, workload("bulk", function="drop", size_bytes=64 * MB)), FLOOR: floor},
        in_quick=in_quick,
    )
