"""The last minute, second by second, or a longer time in longer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["SECONDS", "History"]

SECONDS: Final = 60


class History:
    """A ring of seconds, or of other steps, for each of a set of named values.

    Totals become rates: `sample` is told how much there has been so far, and keeps how much came since. Levels, such as
    what is in flight, are kept as they are.
    """

    def __init__(self, totals: tuple[str, ...], levels: tuple[str, ...], seconds: int = SECONDS) -> None:
        self._totals = totals
        self._seconds = seconds
        self._rings = {name: [0.0] * seconds for name in (*totals, *levels)}
        self._before: Mapping[str, float] | None = None
        self._next = 0
        self._filled = 0

    def sample(self, values: Mapping[str, float], elapsed_s: float = 1.0) -> None:
        """A second, or rather ``elapsed_s``, has passed."""
        before = self._before
        for name, ring in self._rings.items():
            value = values[name]
            if name in self._totals:
                # a total that shrank was begun anew: what it has now came since
                came = 0.0 if before is None else value - before[name] if value >= before[name] else value
                value = came / elapsed_s if elapsed_s > 0 else 0.0
            ring[self._next] = value
        self._before = dict(values)
        self._next = (self._next + 1) % self._seconds
        self._filled = min(self._filled + 1, self._seconds)

    def last(self, name: str) -> float:
        """The value of the last second; 0 before there was one."""
        return self._rings[name][self._next - 1]

    def rows(self) -> dict[str, list[float]]:
        """Oldest first, as many as there have been."""
        first = (self._next - self._filled) % self._seconds
        order = [(first + offset) % self._seconds for offset in range(self._filled)]
        return {name: [ring[place] for place in order] for name, ring in self._rings.items()}
