"""Small calls: one after another, and a window of them in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import (
    FLAVOURS,
    PINNED,
    TRANSPORTS,
    LatencyRow,
    Point,
    RateRow,
    Row,
    by_flavour,
    spoken,
    three,
)

__all__ = ["rows"]

WINDOWS: Final = (1, 16, 64, 256)
LARGE_WINDOWS: Final = (1_000, 10_000)
"""The last point of the curve, 100,000 at once, is a row of `many`."""


def rows() -> Iterator[Row]:
    """Yield latencies, then rates."""
    for transport in TRANSPORTS:
        for flavour in FLAVOURS:
            for placement in PINNED:
                where = f"{flavour}/{transport}/{placement}"
                spoken_where = f"{spoken(flavour)}, {transport}, {placement}"
                make = by_flavour("latency", function="noop", payload="none")
                yield LatencyRow(
                    f"call/{where}",
                    "Small call, one after another: median latency",
                    spoken_where,
                    cells=three(make, flavour, transport, placement),
                    in_quick=transport == "unix",
                )
                if (transport, placement) == ("tcp", "same"):
                    continue  # the unix rows show what one CPU does; the time is better spent on rounds
                on_curve = (transport, flavour, placement) == ("unix", "async", "split")
                for in_flight in (*WINDOWS, *LARGE_WINDOWS) if on_curve else WINDOWS:
                    make = by_flavour("throughput", function="noop", payload="none", in_flight=in_flight)
                    yield RateRow(
                        f"rate/{where}/{in_flight}",
                        "Small calls, a sliding window in flight: calls per second",
                        f"{spoken_where}, {in_flight:,} in flight",
                        cells=three(make, flavour, transport, placement),
                        max_rounds=3 if in_flight in LARGE_WINDOWS else None,
                        in_quick=in_flight == 64 and transport == "unix",
                        point=Point("in flight", in_flight) if on_curve else None,
                    )
