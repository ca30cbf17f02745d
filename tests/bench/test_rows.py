"""The table of rows holds together: a typo in it would only show minutes into a run."""

from __future__ import annotations

import importlib.util
import inspect
from collections import Counter

import pytest

from arpc.bench.arpc_peer import ArpcCaller
from arpc.bench.drop_in import DropInCaller
from arpc.bench.floor import FloorCaller
from arpc.bench.peers.caller import PeerCaller
from arpc.bench.plots import BARS, CURVES
from arpc.bench.raw_sockets import RawCaller
from arpc.bench.rows import ROWS, Row, select
from arpc.bench.systems import PEERS, REGISTRY
from arpc.bench.targets import TARGETS
from arpc.bench.torch_rpc import TorchCaller

CALLERS: dict[str, type] = {
    "arpc.bench.arpc_peer": ArpcCaller,
    "arpc.bench.floor": FloorCaller,
    "arpc.bench.drop_in": DropInCaller,
    "arpc.bench.raw_sockets": RawCaller,
    "arpc.bench.torch_rpc": TorchCaller,
}


def test_no_two_rows_have_the_same_key() -> None:
    assert [key for key, count in Counter(row.key for row in ROWS).items() if count > 1] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_every_cell_names_a_measurement_its_system_can_do(row: Row) -> None:
    for cell in row.cells.values():
        caller = CALLERS.get(REGISTRY[cell.system].module, PeerCaller)
        method = getattr(caller, cell.workload.measure)
        given = dict(cell.workload.settings) | {"budget_s": 0.0}
        inspect.signature(method).bind(caller, **given)


def test_the_cells_of_a_row_are_measured_in_one_session() -> None:
    assert [row.key for row in ROWS if len({cell.session for cell in row.cells.values()}) > 1] == []


def test_every_target_has_a_row_with_what_it_is_compared_with() -> None:
    rows = {row.key: row for row in ROWS}
    for target in TARGETS:
        assert target.against == "itself" or target.against in rows[target.row].cells, target


def test_every_point_is_on_a_curve_and_every_curve_has_points() -> None:
    points = Counter(row.point.curve for row in ROWS if row.point is not None)
    assert set(points) == {curve.name for curve in CURVES}
    assert min(points.values()) > 3


def test_every_bar_has_its_row() -> None:
    assert {bar.row for bar in BARS} <= {row.key for row in ROWS}


def test_curves_reach_as_far_as_they_promise() -> None:
    ends: dict[str, list[float]] = {}
    for row in ROWS:
        if row.point is not None:
            ends.setdefault(row.point.curve, []).append(row.point.x)
    assert {name: (min(xs), max(xs)) for name, xs in ends.items()} == {
        "in flight": (1, 100_000),
        "workers": (2, 64),
        "payload": (64, 1e9),
        "tensors": (1, 1000),
    }


def test_patterns_select_by_part_of_the_key_or_as_a_shell() -> None:
    assert [row.key for row in select(["call/async/unix/same"], quick=False, long=False)] == ["call/async/unix/same"]
    assert {row.key for row in select(["send/*/tcp"], quick=True, long=False)} > {"send/1MB/tcp", "send/256MB/tcp"}
    assert select(["no such row"], quick=False, long=True) == []


def test_a_quick_run_has_some_of_the_rows_and_a_long_one_more() -> None:
    quick, usual, long = (
        {row.key for row in select([], quick=quick, long=long)}
        for quick, long in ((True, False), (False, False), (False, True))
    )
    assert quick < usual < long


@pytest.mark.parametrize("name", REGISTRY)
def test_every_system_has_its_code_and_says_what_it_is(name: str) -> None:
    # Found, not imported: what a peer needs may not be installed.
    assert importlib.util.find_spec(REGISTRY[name].module) is not None
    assert REGISTRY[name].about


def test_peers_are_measured_beside_arpc_and_torch() -> None:
    row = next(row for row in ROWS if row.key == "peers/send")
    assert list(row.cells) == ["arpc", "torch", *PEERS]
