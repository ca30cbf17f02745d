from __future__ import annotations

import json
from pathlib import Path

import pytest

from arpc import cli
from arpc.bench import command
from arpc.bench.report import as_document
from arpc.bench.rows import select
from arpc.bench.systems import REGISTRY, Configuration
from tests.bench.results import SCHEDULE, make_results


def test_the_rows_are_listed_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list", "--rows", "call/async"]) == 0
    assert capsys.readouterr().out.splitlines() == [row.key for row in select(["call/async"], quick=False, long=False)]


def test_a_row_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--rows", "no such row"]) == 2
    assert "no such row" in capsys.readouterr().err


def test_systems_are_chosen_by_name_or_by_what_it_begins_with() -> None:
    rows = select(["call/async/tcp/same"], quick=False, long=False)
    assert command.choose_systems(rows, []) == (["arpc-tcp", "floor-tcp", "torch", "torch-tcp"], {})
    assert command.choose_systems(rows, ["torch"]) == (["torch", "torch-tcp"], {})
    assert command.choose_systems(rows, ["arpc-tcp", "floor"]) == (["arpc-tcp", "floor-tcp"], {})


def test_a_system_that_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Configuration(module="nowhere", about="nothing", requires=("no_such_package_as_this",))
    monkeypatch.setitem(REGISTRY, "ray", absent)  # type: ignore[arg-type]
    wanted, missing = command.choose_systems(select(["peers/call"], quick=False, long=False), ["ray", "torch"])
    assert wanted == ["torch"]
    assert missing == {"ray": "no_such_package_as_this is not installed"}


def test_earlier_figures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps(as_document(make_results("tensors/"), SCHEDULE, [], {})))
    assert cli.main(["bench", "--replot", str(figures), "--plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"drawn: {tmp_path}/bench-growth.png\n"
    assert (tmp_path / "bench-growth.png").exists()


def test_drawing_again_needs_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--replot", str(tmp_path / "figures.json")]) == 2
    assert "--plot" in capsys.readouterr().err
