from __future__ import annotations

from pathlib import Path

import pytest

from arpc.bench.plots import CURVES, draw, series_of
from arpc.bench.report import Document, as_document
from tests.bench.results import SCHEDULE, make_results

PNG = b"\x89PNG\r\n"


def make_document(*patterns: str, systems: tuple[str, ...] = ("arpc", "floor", "torch")) -> Document:
    return as_document(make_results(*patterns, systems=systems), SCHEDULE, [], {})


def test_bars_and_curves_are_drawn(tmp_path: Path) -> None:
    document = make_document("", systems=("arpc", "floor", "torch", "ray", "grpc"))
    drawn = list(draw([document], tmp_path / "images"))
    assert [path.name for path in drawn] == ["bench-systems.png", "bench-growth.png"]
    for path in drawn:
        assert path.read_bytes().startswith(PNG)


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    assert [path.name for path in draw([make_document("peers/")], tmp_path)] == ["bench-systems.png"]
    assert [path.name for path in draw([make_document("tensors/")], tmp_path)] == ["bench-growth.png"]
    assert list(draw([make_document("call/")], tmp_path)) == []


def test_figures_of_several_runs_go_into_one_set_of_pictures(tmp_path: Path) -> None:
    assert len(list(draw([make_document("tensors/"), make_document("peers/")], tmp_path))) == 2


def test_a_line_has_the_points_of_its_column_from_left_to_right() -> None:
    (curve,) = [curve for curve in CURVES if curve.name == "workers"]
    series = series_of(curve, make_document("workers/p50_us")["rows"])
    assert series["arpc"] == [(workers, 41.0) for workers in (2, 4, 8, 16, 32, 64)]
    assert [x for x, _ in series["torch"]] == [2, 4, 8]


def test_small_and_large_payloads_are_on_one_scale() -> None:
    (curve,) = [curve for curve in CURVES if curve.name == "payload"]
    series = dict(series_of(curve, make_document("send/")["rows"])["arpc"])
    assert series[64] == pytest.approx(64 / 41)  # bytes in microseconds
    assert series[1e9] == pytest.approx(41 * 2**30 / 1e6)  # GiB/s
