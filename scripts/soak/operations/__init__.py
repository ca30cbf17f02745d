"""The kinds of load, by family. A new kind is one entry in the ``OPERATIONS`` of a module here."""

from __future__ import annotations

from typing import Final

from scripts.soak.operations import (
    batches,
    bulk,
    calls,
    children,
    hostile,
    nested,
    rrefs,
    streams,
    torch_functions,
    training,
)
from scripts.soak.operations.base import Operation

__all__ = ["FAMILIES", "operations_of"]

FAMILIES: Final[dict[str, tuple[Operation, ...]]] = {
    "calls": calls.OPERATIONS,
    "nested": nested.OPERATIONS,
    "batches": batches.OPERATIONS,
    "streams": streams.OPERATIONS,
    "training": training.OPERATIONS,
    "rrefs": rrefs.OPERATIONS,
    "torch": torch_functions.OPERATIONS,
    "bulk": bulk.OPERATIONS,
    "hostile": hostile.OPERATIONS,
    "children": children.OPERATIONS,
}


def operations_of(families: tuple[str, ...]) -> list[Operation]:
    """Return the operations of some families."""
    return [operation for family in families for operation in FAMILIES[family]]
