from __future__ import annotations

import pytest

from arpc.bench.targets import Target, judge
from tests.bench.results import make_results


def test_a_verdict_is_on_the_ratio_that_the_target_names() -> None:
    results = make_results("call/async/unix/same")
    verdicts = {(verdict.target.row, verdict.target.against): verdict for verdict in judge(results) if verdict.measured}
    floor = verdicts["call/async/unix/same", "floor"]
    assert floor.measured == pytest.approx(41 / 51)
    assert floor.outcome == "pass"
    torch = verdicts["call/async/unix/same", "torch"]
    assert torch.measured == pytest.approx(51 / 41)
    assert torch.outcome == "miss"
    assert not torch.disturbed


def test_what_was_not_measured_is_neither_passed_nor_missed() -> None:
    outcomes = {verdict.outcome for verdict in judge(make_results("no such row"))}
    assert outcomes == {"not measured"}


@pytest.mark.parametrize(
    ("target", "bar"),
    [
        (Target("a", "r", "floor", at_most=1.1), "<= 1.1x the floor"),
        (Target("a", "r", "torch", at_least=10), ">= 10x as fast as torch"),
        (Target("a", "r", "itself", at_most=0.02), "<= 0.02"),
        (Target("a", "r", "itself"), "stated"),
    ],
)
def test_a_bar_is_spelt_out(target: Target, bar: str) -> None:
    assert target.bar == bar
