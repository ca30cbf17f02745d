"""Small calls: one after another, and a window of them in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import FLAVOURS, PINNED, TRANSPORTS, Point, Row, by_flavour, spoken, three

__all__ = ["rows"]

WINDOWS: Final = (1, 16, 64, 256)


def rows() -> Iterator[Row]:
    """Latency, then rate."""
    yield from _latency_rows()
    yield from _rate_rows()
    yield from _large_window_rows()


def _latency_rows() -> Iterator[Row]:
    make = by_flavour("latency", function="noop", payload="none")
    for transport in TRANSPORTS:
        for flavour in FLAVOURS:
            for placement in PINNED:
                yield Row(
                    key=f"call/{flavour}/{transport}/{placement}",
                    section="Small call, one after another: median latency",
                    title=f"{spoken(flavour)}, {transport}, {placement}",
                    metric="p50_us",
                    unit="us",
                    better="lower",
                    cells=three(make, flavour, transport, placement),
                    in_quick=transport == "unix",
                )


_RATE_SECTION: Final = "Small calls, a sliding window in flight: calls per second"


def _rate_rows() -> Iterator[Row]:
    for transport in TRANSPORTS:
        for flavour in FLAVOURS:
            for placement in PINNED:
                if (transport, placement) == ("tcp", "same"):
                    continue  # the unix rows show what one CPU does; the time is better spent on rounds
                for in_flight in WINDOWS:
                    make = by_flavour("throughput", function="noop", payload="none", in_flight=in_flight)
                    on_curve = (transport, flavour, placement) == ("unix", "async", "split")
                    yield Row(
                        key=f"rate/{flavour}/{transport}/{placement}/{in_flight}",
                        section=_RATE_SECTION,
                        title=f"{spoken(flavour)}, {transport}, {placement}, {in_flight} in flight",
                        metric="calls_per_s",
                        unit="/s",
                        better="higher",
                        cells=three(make, flavour, transport, placement),
                        in_quick=in_flight == 64 and transport == "unix",
                        point=Point("in flight", in_flight) if on_curve else None,
                    )


def _large_window_rows() -> Iterator[Row]:
    # The last point of the curve, 100,000 at once, is a row of `many`.
    for in_flight in (1_000, 10_000):
        make = by_flavour("throughput", function="noop", payload="none", in_flight=in_flight)
        yield Row(
            key=f"rate/async/unix/split/{in_flight}",
            section=_RATE_SECTION,
            title=f"async def, unix, split, {in_flight:,} in flight",
            metric="calls_per_s",
            unit="/s",
            better="higher",
            cells=three(make, "async", "unix", "split"),
            max_rounds=3,
            in_quick=False,
            point=Point("in flight", in_flight),
        )
