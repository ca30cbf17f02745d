"""Durations in fixed buckets: cheap to add to and easy to merge.

Each octave of microseconds has four buckets, so that a percentile is usually known to within 12%, and always to within
25%, from a microsecond to 36 minutes, in 124 numbers. The bounds are the same everywhere: the counts of two workers are
added bucket by bucket, and recent counts are the difference between two moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["BUCKETS", "Histogram", "SparseCounts", "difference", "merged", "quantile", "upper_bound_s"]

_UNIT_NS: Final = 250
"""A quarter of a microsecond: the first octave, from one to two microseconds, has four of these units."""
_UNITS_PER_S: Final = 1_000_000_000 // _UNIT_NS
_OCTAVES: Final = 31
BUCKETS: Final = 4 * _OCTAVES

SparseCounts = dict[int, int]
"""The count of each bucket, without the empty ones. Counts are sent in this form."""


def upper_bound_s(index: int) -> float:
    """Return the upper bound of a bucket, in seconds. The last bucket also has all longer durations."""
    octave, quarter = divmod(index, 4)
    return ((5 + quarter) << octave) / _UNITS_PER_S


def _lower_bound_s(index: int) -> float:
    return upper_bound_s(index - 1) if index else 0.0


class Histogram:
    """Counts durations.

    >>> durations = Histogram()
    >>> for milliseconds in range(1, 101):
    ...     durations.add(milliseconds * 1_000_000)
    >>> durations.count, durations.sum_s, round(quantile(durations.sparse(), 0.5), 2)
    (100, 5.05, 0.05)
    """

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.sum_ns = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def sum_s(self) -> float:
        return self.sum_ns / 1e9

    def add(self, duration_ns: int) -> None:
        """Count one duration, in nanoseconds."""
        self.sum_ns += duration_ns
        units = duration_ns // _UNIT_NS
        if units < 4:
            self.counts[0] += 1
            return
        octave = units.bit_length() - 3
        index = (octave << 2) + (units >> octave) - 4
        self.counts[index if index < BUCKETS else BUCKETS - 1] += 1

    def sparse(self) -> SparseCounts:
        return {index: count for index, count in enumerate(self.counts) if count}


def merged(parts: Iterable[Mapping[int, int]]) -> SparseCounts:
    """Return the sum of the counts of several histograms."""
    total: SparseCounts = {}
    for part in parts:
        for index, count in part.items():
            total[index] = total.get(index, 0) + count
    return total


def difference(now: Mapping[int, int], before: Mapping[int, int]) -> SparseCounts:
    """Return the counts added between two moments."""
    return {index: more for index, count in now.items() if (more := count - before.get(index, 0)) > 0}


def quantile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return the duration that this fraction of all durations did not exceed, in seconds; None if there are none.

    Durations are assumed to be spread evenly within a bucket.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank = fraction * total
    seen = 0
    last = 0
    for index, count in sorted(counts.items()):
        if not count:
            continue
        if seen + count >= rank:
            low, high = _lower_bound_s(index), upper_bound_s(index)
            return low + (high - low) * max(0.0, (rank - seen) / count)
        seen += count
        last = index
    return upper_bound_s(last)
