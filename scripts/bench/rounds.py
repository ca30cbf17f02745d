"""Measures the cells of the chosen rows, round by round, and takes medians.

Within a round the systems of one row follow each other directly, in an order that turns from round to round, so that
whatever the machine does meanwhile meets them all. A ratio is taken within each round; its median is what is reported.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scripts.bench.machine import ForeignLoad, Steadiness
from scripts.bench.pairs import MeasurementFailedError, Pair
from scripts.bench.placement import can_split
from scripts.bench.rows import SUBJECT, Cell, Row
from scripts.bench.systems import Measurement

__all__ = ["ATTEMPTS", "FOREIGN_LIMIT", "Comparison", "Results", "Schedule", "measure_rounds"]

FAILURES_UNTIL_GIVEN_UP = 2

FOREIGN = "foreign_share"
FOREIGN_LIMIT = 0.15
"""If other programs took more than this part of the machine, a cell is measured again. It matters most to a peer that
spins: what is taken from it is taken from its answers."""
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """arpc against one column, over the rounds in which both were measured."""

    quotients: tuple[float, ...]
    """arpc's figure divided by the other's."""
    speedups: tuple[float, ...]
    """How many times as fast (or as small) as the other: the quotient, turned round where less is better."""

    @property
    def quotient(self) -> float:
        return statistics.median(self.quotients)

    @property
    def speedup(self) -> float:
        return statistics.median(self.speedups)

    @property
    def spread(self) -> float:
        """How far the middle half of the rounds lies from the median, as a part of it."""
        if len(self.quotients) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.quotients, n=4, method="inclusive")
        return (high - low) / 2 / self.quotient


@dataclass(slots=True)
class Results:
    """What was measured: for each cell one measurement a round, or None where it failed."""

    rows: list[Row]
    rounds: int
    figures: dict[Cell, list[Measurement | None]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """By system, what went wrong."""
    steadiness: Steadiness = field(default_factory=Steadiness)

    def values(self, row: Row, column: str) -> list[float | None]:
        """The figure of each round."""
        cell = row.cells.get(column)
        measurements = self.figures.get(cell, []) if cell is not None else []
        return [None if one is None else one.get(row.metric) for one in measurements]

    def median(self, row: Row, column: str) -> float | None:
        known = [value for value in self.values(row, column) if value is not None]
        return statistics.median(known) if known else None

    def disturbed(self) -> tuple[int, int]:
        """How many measurements other programs disturbed even at the last attempt, and how many there are."""
        shares = [one[FOREIGN] for measurements in self.figures.values() for one in measurements if one is not None]
        return sum(share > FOREIGN_LIMIT for share in shares), len(shares)

    def comparison(self, row: Row, column: str) -> Comparison | None:
        pairs = [
            (ours, theirs)
            for ours, theirs in zip(self.values(row, SUBJECT), self.values(row, column), strict=False)
            if ours is not None and theirs is not None and ours > 0 and theirs > 0
        ]
        if not pairs:
            return None
        quotients = tuple(ours / theirs for ours, theirs in pairs)
        speedups = quotients if row.better == "higher" else tuple(1 / quotient for quotient in quotients)
        return Comparison(quotients, speedups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How much is measured."""

    rounds: int
    budget_s: float
    """The measured time of a cell that is measured by time."""
    timeout_s: float = 600.0
    """After which a measurement counts as hung."""


async def measure_rounds(
    rows: list[Row], pairs: Mapping[str, Pair], schedule: Schedule, progress: Callable[[int, str], None]
) -> Results:
    """Measures every cell whose system is in `pairs`. A system that has failed twice is left out from then on."""
    results = Results(rows, schedule.rounds)
    for number in range(schedule.rounds):
        measured: set[Cell] = set()
        for row in rows:
            if row.max_rounds is not None and number >= row.max_rounds:
                continue
            results.steadiness.probe()
            cells = list(row.cells.values())
            turn = number % len(cells)
            for cell in cells[turn:] + cells[:turn]:
                if cell in measured or not _possible(cell, pairs, results):
                    continue
                measured.add(cell)
                progress(number, f"{row.title}: {cell.system}")
                figures = results.figures.setdefault(cell, [])
                figures.append(await _measure(cell, pairs[cell.system], schedule, results))
    return results


def _possible(cell: Cell, pairs: Mapping[str, Pair], results: Results) -> bool:
    if cell.placement == "split" and not can_split():
        return False
    return cell.system in pairs and len(results.failures.get(cell.system, ())) < FAILURES_UNTIL_GIVEN_UP


async def _measure(cell: Cell, pair: Pair, schedule: Schedule, results: Results) -> Measurement | None:
    settings = dict(cell.workload.settings) | {"budget_s": schedule.budget_s}
    try:
        if cell.workload.fresh and pair.running:
            await pair.stop()
        if not pair.running:
            await pair.kill()
            await pair.start()
        attempts: list[Measurement] = []
        while True:
            load = ForeignLoad(pair.pids)
            figures = await pair.measure(cell.workload.measure, settings, cell.placement, schedule.timeout_s)
            attempts.append(figures | {FOREIGN: load.share()})
            best = min(attempts, key=operator.itemgetter(FOREIGN))
            if best[FOREIGN] <= FOREIGN_LIMIT or cell.workload.fresh or len(attempts) == ATTEMPTS:
                return best
    except MeasurementFailedError as error:
        results.failures.setdefault(cell.system, []).append(str(error))
        return None
