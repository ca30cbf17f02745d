"""What `make clients` takes for the same, and what for a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import clients
from scripts.clients import Outcome, Row, is_close


@pytest.mark.parametrize("value", [1, 0.5, "a", None, [1.0, [True]], {"a": [0.1], "b": {}}])
def test_a_value_is_the_same_as_itself(value) -> None:
    assert is_close(value, json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 2), (1, 1.0), (0.5, 0.501), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ([0.5], [0.6]), (None, []), (True, 1)],
)
def test_other_values_are_not(one, other) -> None:
    assert not is_close(one, other)


def test_rounding_is_no_difference() -> None:
    assert is_close({"losses": [0.04848501458764076, 3e-12]}, {"losses": [0.04848502203822136, 1e-12]})


@pytest.mark.parametrize(
    ("on_torch", "on_arpc", "verdict"),
    [
        (Outcome({0: 1}), Outcome({0: 1}), "same"),
        (Outcome({0: 1}), Outcome({0: 2}), "differs"),
        (Outcome({0: 1, 1: None}), Outcome({0: 1}), "differs"),
        (Outcome({0: 1}), Outcome(failure="exit code 1"), "fails on arpc"),
        (Outcome(failure="exit code 1"), Outcome(failure="exit code 1"), "fails on torch and arpc"),
    ],
)
def test_the_verdict(on_torch, on_arpc, verdict) -> None:
    assert Row("rnn", "torch", on_torch, on_arpc).verdict == verdict


def test_the_exit_code_says_whether_all_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"rnn": 1, "pipeline": 2}

    def run(backend, programs, limit_s):
        is_other = backend == "arpc" and programs == ["pipeline"]
        return {name: Outcome({0: -1 if is_other else outcomes[name]}, cpu_s=0.25) for name in programs}

    monkeypatch.setattr(clients, "run", run)
    out = ["--repeat", "2", "--out", str(tmp_path / "clients.json")]
    assert clients.main(["-k", "^rnn", *out]) == 0
    assert "1 of 1 the same" in capsys.readouterr().out
    assert clients.main(["-k", "^(rnn|pipeline) ", *out]) == 1
    assert "1 of 2 the same" in capsys.readouterr().out
    found = json.loads((tmp_path / "clients.json").read_text())
    assert [row["verdict"] for row in found] == ["same", "differs"]
    assert clients.main(["-k", "nothing", *out]) == 1


def test_runs_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([1, 2])
    monkeypatch.setattr(clients, "run", lambda *_: {"rnn": Outcome({0: next(results)}, cpu_s=1.0)})
    assert "another result" in clients.repeated("torch", "rnn", 2, 1).failure


def test_every_program_is_there() -> None:
    folder = clients.ROOT / "tests" / "compat" / "scripts"
    assert {path.stem for path in folder.glob("*.py")} == {*clients.PROGRAMS, "launch", "seeding"}
