"""Bytecodes per call are counted on both sides and every thread, and are the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from arpc.bench.shapes import BY_NAME
from scripts import bytecodes

ROOT = Path(__file__).parents[2]


def test_two_counts_of_a_call_agree() -> None:
    runs = [bytecodes.run("call/no arguments", "async") for _ in range(2)]
    first, second = [{(each.name, each.place): each.bytecodes for each in counted} for counted in runs]
    assert first == pytest.approx(second, abs=1)  # a call that begins in a new tick of the clock does a little more


def test_caller_callee_and_the_function_are_counted() -> None:
    counted = {function.name: function for function in bytecodes.run("call/two ints", "async")}
    assert counted["rpc_sync"].place.startswith("arpc/api.py:")
    assert counted["add_async"].entered == 1
    assert not any(function.place.startswith("scripts/bytecodes.py") for function in counted.values())


def test_what_runs_on_another_thread_is_counted() -> None:
    names = [function.name for function in bytecodes.run("call/no arguments", "def")]
    assert "noop" in names


def test_every_counted_shape_is_one_of_the_list() -> None:
    for name, flavour in bytecodes.COUNTED:
        assert flavour in BY_NAME[name].flavours


def test_two_checkouts_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bytecodes, "COUNTED", (("call/an int", "async"),))
    assert bytecodes.main(["--against", str(ROOT)]) == 0
    _, line = capsys.readouterr().out.splitlines()
    name, *_, ratio = line.rsplit(maxsplit=3)
    assert (name, ratio) == ("call/an int, async", "1.00")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bytecodes.main(["--against", str(tmp_path)]) == 2
    assert "no checkout of arpc" in capsys.readouterr().err


def test_the_functions_of_a_shape_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bytecodes.main(["--by-function", "noop"]) == 0
    head, columns, *functions = capsys.readouterr().out.splitlines()
    assert head.startswith("call/no arguments, async: ")
    assert columns.split() == ["bytecodes", "entered", "function"]
    assert any("noop_async" in line for line in functions)


def test_a_shape_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bytecodes.main(["--by-function", "no such shape"]) == 2
    assert "no shape has" in capsys.readouterr().err
