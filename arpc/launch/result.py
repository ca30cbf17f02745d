"""The result of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Launched"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """The result of a group in which every worker ended with exit code 0."""

    values: dict[str, T]
    """The function's result on each worker, by the worker's name in the order of ranks; None for scripts."""
    restarts: int
    """The number of restarts of the group, or of its workers if it is elastic."""
    duration_s: float
