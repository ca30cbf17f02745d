"""What becomes of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Launched"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """A group that ended well: every worker with exit code 0."""

    values: dict[str, T]
    """What the function returned on each worker, by the worker's name in the order of ranks; None for scripts."""
    restarts: int
    """How often the group was started again."""
    duration_s: float
