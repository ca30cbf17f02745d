"""Whether memory is flat: a straight line through the resident bytes of a process, after it has warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import Final

__all__ = ["MIB", "MemoryTrend", "trend_of"]

MIB: Final = 1 << 20
_WARM_UP: Final = 1 / 3
"""The fraction of a life in which threads start and their allocators, caches and pools fill."""
_SHORTEST_S: Final = 30.0
_JUDGED_S: Final = 120.0
"""Seconds: a shorter process may still be warming up, so its memory fails no soak."""
_MAX_GROWTH_BYTES: Final = 24 * MIB
_MAX_GROWTH: Final = 0.1
"""The fraction by which resident memory varies with the load. A leak goes on growing: a longer soak finds it."""


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """The memory of one process over its life after the warm-up."""

    process: str
    seconds: float
    begin_bytes: int
    """The median of the first fifth."""
    end_bytes: int
    """The median of the last fifth."""
    slope: float
    """Bytes per second, by linear regression."""

    @property
    def grown_bytes(self) -> float:
        """The growth of the line."""
        return self.slope * self.seconds

    @property
    def is_flat(self) -> bool:
        """Whether the growth of the line, or of the medians at its ends, is within the tolerance."""
        if self.seconds < _JUDGED_S:
            return True
        allowed = max(_MAX_GROWTH_BYTES, _MAX_GROWTH * self.begin_bytes)
        return self.grown_bytes <= allowed or self.end_bytes - self.begin_bytes <= allowed

    def per_thousand(self, operations: int) -> float:
        """Return the bytes that were added for each 1,000 operations; `operations` were made in this time."""
        return 1000 * self.grown_bytes / max(1, operations)


def trend_of(process: str, samples: Sequence[tuple[float, int]]) -> MemoryTrend | None:
    """Return the trend of (time, resident bytes); None if the process did not live long enough."""
    if not samples:
        return None
    begin = samples[0][0] + _WARM_UP * (samples[-1][0] - samples[0][0])
    warm = [sample for sample in samples if sample[0] >= begin]
    times, sizes = [time for time, _ in warm], [size for _, size in warm]
    if times[-1] - times[0] < _SHORTEST_S:
        return None
    fifth = max(1, len(sizes) // 5)
    slope = linear_regression(times, sizes).slope
    return MemoryTrend(process, times[-1] - times[0], int(median(sizes[:fifth])), int(median(sizes[-fifth:])), slope)
