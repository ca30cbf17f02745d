"""The status line of the launcher, with rich and without."""

from __future__ import annotations

import re
import sys

import pytest

from arpc.launch.status import Status

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RESTARTED = Status(alive=1, workers=2, elapsed_s=3.2, restarts=1, max_restarts=4)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(2, 2, 0.0), "2/2 workers  0 s"),
        (RESTARTED, "1/2 workers  3 s  restart 1 of 4"),
        (Status(1, 2, 65.0, is_ending=True), "1/2 workers  65 s  ending"),
    ],
)
def test_both_ways_say_the_same(status: Status, text: str):
    assert status.plain(80) == text
    assert COLOUR.sub("", status.styled(80)) == f" arpc   {text}"


def test_a_missing_worker_stands_out():
    assert "\x1b[1;31m1/2 workers" in RESTARTED.styled(80)
    assert "\x1b[1m2/2 workers" in Status(2, 2, 0.0).styled(80)
    assert "\x1b[1m0/2 workers" in Status(0, 2, 0.0, is_ending=True).styled(80)


@pytest.mark.parametrize("columns", [1, 5, 7, 20])
def test_it_is_cut_to_the_width_of_the_terminal(columns: int):
    assert len(RESTARTED.plain(columns)) == columns
    assert len(COLOUR.sub("", RESTARTED.styled(columns))) == columns


def test_without_rich_it_is_a_plain_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert RESTARTED.styled(80) == "\x1b[2m1/2 workers  3 s  restart 1 of 4\x1b[0m"
