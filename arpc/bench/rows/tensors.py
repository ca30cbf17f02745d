"""Small tensors, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import PINNED, Point, Row, by_flavour, three

__all__ = ["rows"]

_SECTION: Final = "Small tensors, echo"


def rows() -> Iterator[Row]:
    """Few tensors, then more and more of them."""
    for payload, title in (("floats16", "16 floats"), ("dict50", "dict of 50 tensors of 16 floats")):
        make = by_flavour("latency", function="echo", payload=payload)
        for placement in PINNED:
            yield Row(
                key=f"{payload}/p50/{placement}",
                section=_SECTION,
                title=f"{title}, p50, {placement}",
                metric="p50_us",
                unit="us",
                better="lower",
                cells=three(make, "async", "unix", placement),
            )
        make = by_flavour("throughput", function="echo", payload=payload, in_flight=64)
        for placement in PINNED:
            yield Row(
                key=f"{payload}/rate/{placement}",
                section=_SECTION,
                title=f"{title}, calls/s, 64 in flight, {placement}",
                metric="calls_per_s",
                unit="/s",
                better="higher",
                cells=three(make, "async", "unix", placement),
                in_quick=payload == "floats16",
            )
    for count in (1, 10, 100, 1000):
        make = by_flavour("latency", function="echo", payload=f"list{count}")
        yield Row(
            key=f"tensors/{count}",
            section=_SECTION,
            title=f"list of {count:,} tensors of 16 floats, p50, split",
            metric="p50_us",
            unit="us",
            better="lower",
            cells=three(make, "async", "unix", "split"),
            max_rounds=5,
            in_quick=False,
            point=Point("tensors", count),
        )
