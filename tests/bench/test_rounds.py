"""The statistics of the bench, on figures made up for the purpose."""

from __future__ import annotations

from typing import Any

import pytest

from arpc.bench import rounds
from arpc.bench.pairs import MeasurementFailedError
from arpc.bench.rounds import FOREIGN, FOREIGN_LIMIT, Results, Schedule, measure_rounds
from arpc.bench.row import FLOOR, SUBJECT, Cell, Row, fresh_workload, workload

WORK = workload("latency")
OURS, THEIRS, BARE = Cell("arpc-unix", WORK), Cell("torch", WORK), Cell("floor-unix", WORK)
SCHEDULE = Schedule(rounds=4, budget_s=0.0)


def make_row(**changes: Any) -> Row:
    settings: dict[str, Any] = {
        "key": "call",
        "section": "Calls",
        "title": "a call",
        "metric": "p50_us",
        "unit": "us",
        "better": "lower",
        "cells": {SUBJECT: OURS, FLOOR: BARE, "torch": THEIRS},
    }
    return Row(**settings | changes)


def make_results(row: Row, **figures: list[float | None]) -> Results:
    """Results whose cells have these figures, a round each, nobody else being busy."""
    results = Results([row], rounds=max(map(len, figures.values())))
    for column, values in figures.items():
        results.figures[row.cells[column]] = [
            None if value is None else {row.metric: value, FOREIGN: 0.0} for value in values
        ]
    return results


def disturb(results: Results, cell: Cell, *numbers: int) -> None:
    for number in numbers:
        measurement = results.figures[cell][number]
        assert measurement is not None
        measurement[FOREIGN] = FOREIGN_LIMIT * 2


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    row = make_row()
    # The machine slows down threefold for one round and both with it; a ratio of medians would be 40 / 10.
    results = make_results(row, arpc=[10, 30, 10], torch=[20, 60, 40])
    comparison = results.comparison(row, "torch")
    assert comparison is not None
    assert comparison.quotients == (0.5, 0.5, 0.25)
    assert comparison.quotient == 0.5
    assert comparison.speedup == 2.0


def test_where_more_is_better_the_speedup_is_the_quotient() -> None:
    row = make_row(better="higher")
    comparison = make_results(row, arpc=[30, 60], torch=[10, 20]).comparison(row, "torch")
    assert comparison is not None
    assert comparison.speedup == comparison.quotient == 3.0


def test_the_spread_is_how_far_the_middle_half_lies_from_the_median() -> None:
    row = make_row()
    comparison = make_results(row, arpc=[8, 9, 10, 11, 100], torch=[10] * 5).comparison(row, "torch")
    assert comparison is not None
    assert comparison.quotient == 1.0
    assert comparison.spread == pytest.approx(0.1)  # and not what the fifth, an outlier, makes of it


def test_a_round_in_which_one_of_the_two_failed_is_not_compared() -> None:
    row = make_row()
    results = make_results(row, arpc=[10, None, 10], torch=[20, 20, None])
    comparison = results.comparison(row, "torch")
    assert comparison is not None
    assert comparison.quotients == (0.5,)
    assert results.median(row, "torch") == 20
    assert results.comparison(row, FLOOR) is None


def test_disturbed_rounds_do_not_count_where_enough_others_are_left() -> None:
    row = make_row()
    results = make_results(row, arpc=[10, 10, 10, 90], torch=[20, 20, 20, 20])
    disturb(results, OURS, 3)
    comparison = results.comparison(row, "torch")
    assert comparison is not None
    assert comparison.quotients == (0.5, 0.5, 0.5)
    assert not comparison.disturbed
    assert results.median(row, SUBJECT) == 10
    assert results.disturbed() == (1, 8)


def test_with_too_few_quiet_rounds_all_count_and_the_comparison_says_so() -> None:
    row = make_row()
    results = make_results(row, arpc=[10, 10, 90], torch=[20, 20, 20])
    disturb(results, THEIRS, 2)  # one of the two is enough
    comparison = results.comparison(row, "torch")
    assert comparison is not None
    assert len(comparison.quotients) == 3
    assert comparison.disturbed


class FakePair:
    """A pair that has no processes: its measurement is the number of its call."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.name, self.running, self.pids = name, True, ()
        self._log, self._fails = log, fails
        self.started = self.stopped = self.measured = 0

    async def start(self) -> None:
        self.started += 1
        self.running = True

    async def stop(self) -> None:
        self.stopped += 1
        self.running = False

    async def kill(self) -> None:
        self.running = False

    async def measure(self, name: str, settings: object, placement: str, timeout_s: float) -> dict[str, float]:
        self._log.append(self.name)
        self.measured += 1
        if self._fails:
            raise MeasurementFailedError(f"{self.name} has failed")
        return {"p50_us": float(self.measured)}


@pytest.fixture
def foreign_shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next measurements find other programs to have taken; nothing once it is empty."""
    shares: list[float] = []

    class FakeLoad:
        def __init__(self, leaders: object) -> None: ...

        def share(self) -> float:
            return shares.pop(0) if shares else 0.0

    monkeypatch.setattr(rounds, "ForeignLoad", FakeLoad)
    return shares


async def run_rounds(rows: list[Row], pairs: dict[str, FakePair], schedule: Schedule = SCHEDULE) -> Results:
    results = Results(rows, schedule.rounds)
    await measure_rounds(rows, pairs, schedule, results, lambda number, text: None)  # type: ignore[arg-type]
    return results


async def test_the_systems_of_a_row_take_turns_in_being_first(foreign_shares: list[float]) -> None:
    log: list[str] = []
    pairs = {name: FakePair(name, log) for name in ("arpc-unix", "floor-unix", "torch")}
    await run_rounds([make_row()], pairs, Schedule(rounds=3, budget_s=0.0))
    assert log == [
        *("arpc-unix", "floor-unix", "torch"),
        *("floor-unix", "torch", "arpc-unix"),
        *("torch", "arpc-unix", "floor-unix"),
    ]


async def test_rows_that_share_a_cell_share_its_figures(foreign_shares: list[float]) -> None:
    log: list[str] = []
    rows = [make_row(cells={SUBJECT: OURS}), make_row(key="again", cells={SUBJECT: OURS})]
    results = await run_rounds(rows, {"arpc-unix": FakePair("arpc-unix", log)})
    assert len(log) == SCHEDULE.rounds
    assert results.values(rows[0], SUBJECT) == results.values(rows[1], SUBJECT) == [1, 2, 3, 4]


async def test_a_row_can_ask_for_fewer_rounds(foreign_shares: list[float]) -> None:
    row = make_row(cells={SUBJECT: OURS}, max_rounds=2)
    results = await run_rounds([row], {"arpc-unix": FakePair("arpc-unix", [])})
    assert results.values(row, SUBJECT) == [1, 2]


async def test_a_system_that_failed_twice_is_left_out_and_the_others_go_on(foreign_shares: list[float]) -> None:
    log: list[str] = []
    pairs = {"arpc-unix": FakePair("arpc-unix", log), "torch": FakePair("torch", log, fails=True)}
    row = make_row()
    results = await run_rounds([row], pairs)
    assert pairs["torch"].measured == 2
    assert results.failures == {"torch": ["torch has failed"] * 2}
    assert results.values(row, SUBJECT) == [1, 2, 3, 4]
    assert results.comparison(row, "torch") is None


async def test_a_disturbed_measurement_is_repeated_and_the_quietest_kept(foreign_shares: list[float]) -> None:
    row = make_row(cells={SUBJECT: OURS})
    pair = FakePair("arpc-unix", [])
    foreign_shares += [0.5, 0.3, 0.4]
    results = await run_rounds([row], {"arpc-unix": pair}, Schedule(rounds=1, budget_s=0.0))
    assert pair.measured == rounds.ATTEMPTS
    assert results.values(row, SUBJECT) == [2]
    assert results.foreign_shares(row, SUBJECT) == [0.3]
    assert results.disturbed() == (1, 1)


async def test_repeating_ends_with_the_first_quiet_measurement(foreign_shares: list[float]) -> None:
    row = make_row(cells={SUBJECT: OURS})
    pair = FakePair("arpc-unix", [])
    foreign_shares += [0.5, 0.0]
    results = await run_rounds([row], {"arpc-unix": pair}, Schedule(rounds=1, budget_s=0.0))
    assert pair.measured == 2
    assert results.values(row, SUBJECT) == [2]


async def test_a_workload_that_wants_fresh_processes_gets_them(foreign_shares: list[float]) -> None:
    fresh = Cell("arpc-unix", fresh_workload("flood"))
    pair = FakePair("arpc-unix", [])
    await run_rounds([make_row(cells={SUBJECT: fresh})], {"arpc-unix": pair}, Schedule(rounds=2, budget_s=0.0))
    assert (pair.stopped, pair.started) == (2, 2)


async def test_a_large_system_is_stopped_after_each_measurement(foreign_shares: list[float]) -> None:
    group = Cell("arpc-group-64", WORK)
    pair = FakePair("arpc-group-64", [])
    pair.running = False
    await run_rounds([make_row(cells={SUBJECT: group})], {"arpc-group-64": pair}, Schedule(rounds=2, budget_s=0.0))
    assert (pair.started, pair.stopped, pair.running) == (2, 2, False)
