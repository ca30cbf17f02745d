from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import pytest

from arpc.bench import report
from arpc.bench.targets import Target, Verdict, judge
from tests.bench.results import SCHEDULE, make_results


@pytest.fixture(params=["rich", "plain"])
def _with_and_without_rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "rich":
        return
    real: Callable[..., Any] = builtins.__import__

    def without_rich(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_rich)


@pytest.mark.usefixtures("_with_and_without_rich")
def test_the_table_has_figures_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    results = make_results("call/async/unix/same")
    report.print_results(results)
    printed = capsys.readouterr().out
    assert "async def, unix, same" in printed
    assert "41.0 us" in printed  # arpc: four letters, the second of three rounds
    assert "51.0 us" in printed  # floor, torch
    assert "0.80x" in printed  # of the floor
    assert "1.24x" in printed  # as fast as torch


@pytest.mark.usefixtures("_with_and_without_rich")
def test_systems_side_by_side_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    results = make_results("peers/", systems=("arpc", "torch", "ray", "grpc"))
    report.print_results(results)
    lines = capsys.readouterr().out.splitlines()
    for system in ("arpc", "torch", "ray", "grpc"):
        (line,) = [line for line in lines if line.strip("│ ").startswith(f"{system} ")]
        assert "GiB/s" in line
    assert not [line for line in lines if "dask" in line]


def test_missed_targets_come_first_and_the_worst_of_them_at_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    far = Target("far off", "far", "torch", at_least=10)
    near = Target("nearly there", "near", "floor", at_most=1.5)
    good = Target("good", "good", "torch", at_least=1)
    report.print_targets([Verdict(good, 2, "pass"), Verdict(near, 1.6, "miss"), Verdict(far, 2, "miss")])
    printed = capsys.readouterr().out
    assert printed.index("far off") < printed.index("nearly there") < printed.index("good")
    assert "Targets: 2 miss, 1 pass" in printed


def test_a_row_without_figures_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_results(make_results("call/async/unix/same", systems=()))
    assert capsys.readouterr().out == ""


def test_what_was_not_measured_is_said_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    results = make_results("peers/")
    results.failures = {"ray": ["it took longer than 60 s", "it did again"], "torch": ["it ended"]}
    report.print_warnings(results, {"dask": "distributed is not installed"})
    printed = capsys.readouterr().out
    assert "not measured: dask: distributed is not installed" in printed
    assert "not measured: ray: it took longer than 60 s\n  (2 times)" in printed
    assert "failed: torch: it ended" in printed
    assert "DISTURBED" not in printed


def test_a_disturbed_run_is_not_to_be_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    results = make_results("call/async/unix/same")
    for measurements in results.figures.values():
        for one in measurements:
            assert one is not None
            one["foreign_share"] = 0.5
    report.print_warnings(results, {})
    assert "Do not quote this run" in capsys.readouterr().out


def test_the_rules_name_placement_opponent_and_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_rules(make_results("call/"), SCHEDULE)
    printed = capsys.readouterr().out
    for subject in ("Placement", "Opponent", "Rounds: 3", "Warm", "Floor", "Disturbance", "Machine"):
        assert f"  - {subject}" in printed


def test_the_document_is_json_and_has_every_round() -> None:
    results = make_results("call/async/unix/same", "send/64MB/unix")
    document = report.as_document(results, SCHEDULE, list(judge(results)), {"ray": "ray is not installed"})
    again = json.loads(json.dumps(document))
    row = next(row for row in again["rows"] if row["key"] == "call/async/unix/same")
    assert row["columns"]["arpc"]["rounds"] == [40, 41, 42]
    assert row["columns"]["arpc"]["placement"] == "same"
    assert row["ratios"]["torch"]["speedup"] == pytest.approx(51 / 41)
    assert row["ratios"]["floor"]["quotient"] == pytest.approx(41 / 51)
    assert row["point"] is None
    assert next(row for row in again["rows"] if row["key"] == "send/64MB/unix")["point"]["x"] == 64e6
    assert again["absent"] == {"ray": "ray is not installed"}
    assert again["rules"]
