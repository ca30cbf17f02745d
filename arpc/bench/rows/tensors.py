"""Small tensors, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import PINNED, LatencyRow, Point, RateRow, Row, by_flavour, three

__all__ = ["rows"]

_SECTION: Final = "Small tensors, echo"


def rows() -> Iterator[Row]:
    """Yield few tensors, then more and more of them."""
    for payload, title in (("floats16", "16 floats"), ("dict50", "dict of 50 tensors of 16 floats")):
        latency = by_flavour("latency", function="echo", payload=payload)
        rate = by_flavour("throughput", function="echo", payload=payload, in_flight=64)
        for placement in PINNED:
            yield LatencyRow(
                f"{payload}/p50/{placement}",
                _SECTION,
                f"{title}, p50, {placement}",
                cells=three(latency, "async", "unix", placement),
            )
            yield RateRow(
                f"{payload}/rate/{placement}",
                _SECTION,
                f"{title}, calls/s, 64 in flight, {placement}",
                cells=three(rate, "async", "unix", placement),
                in_quick=payload == "floats16",
            )
    for count in (1, 10, 100, 1000):
        make = by_flavour("latency", function="echo", payload=f"list{count}")
        yield LatencyRow(
            f"tensors/{count}",
            _SECTION,
            f"list of {count:,} tensors of 16 floats, p50, split",
            cells=three(make, "async", "unix", "split"),
            max_rounds=5,
            in_quick=False,
            point=Point("tensors", count),
        )
