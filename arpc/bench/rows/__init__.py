"""The table of all comparisons. Each module here has a function ``rows()``; add yours to `ROWS`."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Final

from arpc.bench.row import SUBJECT, Cell, Row, Workload
from arpc.bench.rows import (
    bulk,
    calls,
    drop_in,
    floors,
    gradients,
    many,
    opponent,
    overload,
    peers,
    profiling,
    rref,
    shapes,
    tensors,
    workers,
)

__all__ = ["ROWS", "SUBJECT", "Cell", "Row", "Workload", "select"]

ROWS: Final[tuple[Row, ...]] = (
    *shapes.rows(),
    *calls.rows(),
    *tensors.rows(),
    *bulk.rows(),
    *floors.rows(),
    *rref.rows(),
    *gradients.rows(),
    *drop_in.rows(),
    *many.rows(),
    *overload.rows(),
    *workers.rows(),
    *profiling.rows(),
    *opponent.rows(),
    *peers.rows(),
)


def select(patterns: list[str], *, quick: bool, long: bool) -> list[Row]:
    """Return the rows whose key contains a pattern or matches it as a shell would; all if there is no pattern."""

    def wanted(row: Row) -> bool:
        if patterns:
            return any(pattern in row.key or fnmatch(row.key, pattern) for pattern in patterns)
        return (long or not row.long) and (row.in_quick or not quick)

    return [row for row in ROWS if wanted(row)]
