"""The history of some values: the last minute by seconds, or a longer time in longer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["SECONDS", "History"]

SECONDS: Final = 60


class History:
    """A ring buffer of seconds, or of other steps, for each of a set of named values.

    Totals become rates: `sample` gets the total so far, and keeps the increase per second since the sample before.
    Levels, such as the number of calls in flight, are kept as they are.
    """

    def __init__(self, totals: tuple[str, ...], levels: tuple[str, ...], seconds: int = SECONDS) -> None:
        self._totals = totals
        self._seconds = seconds
        self._rings = {name: [0.0] * seconds for name in (*totals, *levels)}
        self._before: Mapping[str, float] | None = None
        self._next = 0
        self._filled = 0

    def sample(self, values: Mapping[str, float], elapsed_s: float = 1.0) -> None:
        """Add a sample, ``elapsed_s`` after the one before."""
        before = self._before
        for name, ring in self._rings.items():
            value = values[name]
            if name in self._totals:
                # a total that shrank was reset: all of it came since
                came = 0.0 if before is None else value - before[name] if value >= before[name] else value
                value = came / elapsed_s if elapsed_s > 0 else 0.0
            ring[self._next] = value
        self._before = dict(values)
        self._next = (self._next + 1) % self._seconds
        self._filled = min(self._filled + 1, self._seconds)

    def last(self, name: str) -> float:
        """Return the value of the last step; 0 before the first one."""
        return self._rings[name][self._next - 1]

    def rows(self) -> dict[str, list[float]]:
        """Return all steps so far of each value, the oldest first."""
        first = (self._next - self._filled) % self._seconds
        order = [(first + offset) % self._seconds for offset in range(self._filled)]
        return {name: [ring[place] for place in order] for name, ring in self._rings.items()}
