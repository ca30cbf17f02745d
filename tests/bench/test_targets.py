from __future__ import annotations

import pytest

from arpc.bench.targets import TARGETS, Target, Verdict, judge
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


@pytest.mark.parametrize(("share", "outcome"), [(0.5, "miss"), (0.7, "pass")])
def test_a_step_that_torch_spends_on_arithmetic_need_not_be_faster(share: float, outcome: str) -> None:
    results = make_results("autograd/transformer/")
    for measurements in results.figures.values():
        for one in measurements:
            assert one is not None
            one["arithmetic"] = share
    verdicts = [verdict for verdict in judge(results) if verdict.target.bound is not None]
    assert [verdict.outcome for verdict in verdicts] == [outcome] * 2
    assert "or arithmetic is 67% of its time" in verdicts[0].target.bar


def test_a_verdict_says_how_much_of_the_bar_was_reached() -> None:
    assert Verdict(Target("a", "r", "torch", at_least=10), 5, "miss").reached == 0.5
    assert Verdict(Target("a", "r", "floor", at_most=1), 2, "miss").reached == 0.5
    assert Verdict(Target("a", "r", "itself"), 7, "stated").reached == 1
    assert Verdict(Target("a", "r", "torch", at_least=10), None, "not measured").reached == 1


def test_every_goal_is_a_target_with_a_bar() -> None:
    judged = [target for target in TARGETS if target.at_least is not None or target.at_most is not None]
    names = {target.what for target in judged}
    for count in (1, 2, 3, 5, 10, 100):
        for way in ("in a row", "side by side"):
            for family in ("autograd", "autograd on three workers"):
                for placement in ("same", "split"):
                    name = f"{family}: {count} {way}, async def, {placement}"
                    assert {name, f"{name}, 64 in flight"} <= names


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
