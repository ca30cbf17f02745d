"""Measures the cells of the chosen rows, round by round, and takes medians.

Within a round the systems of one row follow each other directly, in an order that rotates from round to round, so that
disturbances of the machine affect all of them. A ratio is taken within each round; its median is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from arpc.bench.machine import ForeignLoad, Steadiness
from arpc.bench.pairs import MeasurementFailedError, Pair
from arpc.bench.placement import can_split
from arpc.bench.row import SUBJECT, Cell, Row
from arpc.bench.systems import REGISTRY, Measurement

__all__ = ["ATTEMPTS", "FOREIGN_LIMIT", "UNDISTURBED_ROUNDS", "Comparison", "Results", "Schedule", "measure_rounds"]

FAILURES_UNTIL_GIVEN_UP = 2

FOREIGN = "foreign_share"
FOREIGN_LIMIT = 0.1
"""A measurement during which other programs took more than this share of the machine counts as disturbed. That must be
visible: a peer that spins, as torch does, loses most of its speed to other programs, and would look too slow."""
ATTEMPTS = 3
UNDISTURBED_ROUNDS = 3
"""If this many rounds are undisturbed, the others do not count."""


Together = TypeVar("Together", bound=tuple[Measurement, ...])


@dataclass(frozen=True, slots=True)
class Comparison:
    """arpc against one column, over the rounds in which both were measured."""

    quotients: tuple[float, ...]
    """arpc's figure divided by the other's, for each round."""
    speedups: tuple[float, ...]
    """The factor by which arpc is faster (or smaller): the quotient, inverted where less is better."""
    disturbed: bool
    """True if too few rounds were undisturbed, so that all count."""

    @property
    def quotient(self) -> float:
        return statistics.median(self.quotients)

    @property
    def speedup(self) -> float:
        return statistics.median(self.speedups)

    @property
    def spread(self) -> float:
        """Half the interquartile range of the quotients, as a fraction of their median."""
        if len(self.quotients) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.quotients, n=4, method="inclusive")
        return (high - low) / 2 / self.quotient


@dataclass(slots=True)
class Results:
    """The results: for each cell one measurement per round, or None where it failed."""

    rows: list[Row]
    rounds: int
    figures: dict[Cell, list[Measurement | None]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """The errors of each system."""
    repeated_s: float = 0.0
    elapsed_s: float = 0.0
    steadiness: Steadiness = field(default_factory=Steadiness)

    def values(self, row: Row, column: str) -> list[float | None]:
        """Return the figure of each round."""
        return [None if one is None else one.get(row.metric) for one in self._measurements(row, column)]

    def foreign_shares(self, row: Row, column: str) -> list[float | None]:
        """Return the share of the machine that other programs took in each round."""
        return [None if one is None else one[FOREIGN] for one in self._measurements(row, column)]

    def median(self, row: Row, column: str) -> float | None:
        rounds = [(one,) for one in self._measurements(row, column) if one is not None and row.metric in one]
        return statistics.median(one[row.metric] for (one,) in _undisturbed(rounds)) if rounds else None

    def disturbed(self) -> tuple[int, int]:
        """Return how many measurements other programs disturbed even at the last attempt, and how many there are."""
        shares = [one[FOREIGN] for measurements in self.figures.values() for one in measurements if one is not None]
        return sum(share > FOREIGN_LIMIT for share in shares), len(shares)

    def comparison(self, row: Row, column: str) -> Comparison | None:
        rounds = [
            (ours, theirs)
            for ours, theirs in zip(self._measurements(row, SUBJECT), self._measurements(row, column), strict=False)
            if ours is not None and theirs is not None and min(ours.get(row.metric, 0), theirs.get(row.metric, 0)) > 0
        ]
        if not rounds:
            return None
        counted = _undisturbed(rounds)
        quotients = tuple(ours[row.metric] / theirs[row.metric] for ours, theirs in counted)
        speedups = quotients if row.better == "higher" else tuple(1 / quotient for quotient in quotients)
        return Comparison(quotients, speedups, disturbed=any(map(_is_disturbed, counted)))

    def _measurements(self, row: Row, column: str) -> list[Measurement | None]:
        cell = row.cells.get(column)
        return self.figures.get(cell, []) if cell is not None else []


def _undisturbed(rounds: Sequence[Together]) -> Sequence[Together]:
    """Return the rounds whose measurements were all undisturbed, if there are enough of them; else all."""
    quiet = [together for together in rounds if not _is_disturbed(together)]
    return quiet if len(quiet) >= UNDISTURBED_ROUNDS else rounds


def _is_disturbed(together: tuple[Measurement, ...]) -> bool:
    return any(one[FOREIGN] > FOREIGN_LIMIT for one in together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The number of rounds, and the time for measurements."""

    rounds: int
    budget_s: float
    """Seconds of measurement for a cell that is measured by time."""
    repeat_s: float = 30.0
    """The most seconds that repeated measurements, because of disturbances, may add to the whole run."""


async def measure_rounds(
    rows: list[Row],
    pairs: Mapping[str, Pair],
    schedule: Schedule,
    results: Results,
    progress: Callable[[int, str], None],
) -> None:
    """Measure every cell whose system is in `pairs`. A system that has failed twice is left out from then on."""
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
        timeout_s = REGISTRY[cell.system].timeout_s
        best: Measurement | None = None
        for _ in range(1 if cell.workload.fresh else ATTEMPTS):
            started = time.perf_counter()
            if best is not None and results.repeated_s > schedule.repeat_s:
                break
            load = ForeignLoad(pair.pids)
            figures = await pair.measure(cell.workload.measure, settings, cell.placement, timeout_s)
            figures[FOREIGN] = load.share()
            if best is not None:
                results.repeated_s += time.perf_counter() - started
            if best is None or figures[FOREIGN] < best[FOREIGN]:
                best = figures
            if best[FOREIGN] <= FOREIGN_LIMIT:
                break
        return best
    except MeasurementFailedError as error:
        results.failures.setdefault(cell.system, []).append(str(error))
        return None
    finally:
        if REGISTRY[cell.system].transient:
            await pair.stop()
