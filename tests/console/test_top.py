"""``arpc top``: tables and keys."""

from __future__ import annotations

import doctest

import pytest
from rich.console import Console

import arpc
from arpc.console import numbers, top
from arpc.console.tables import VIEWS, sorted_rows
from arpc.console.top import Screen
from arpc.testing import cluster


async def double(value):
    return 2 * value


async def fails():
    raise KeyError("nothing")


@pytest.fixture
async def summary():
    async with cluster(["ps", "trainer"], options=arpc.RpcOptions(gc_freeze=False, metrics=True)) as group:
        held = arpc.remote("trainer", list)
        assert await held == []
        for number in range(3):
            await arpc.rpc_sync("trainer", double, args=(number,))
        with pytest.raises(KeyError):
            await arpc.rpc_sync("trainer", fails)
        summary = await group[0].metrics.summary(30)
        del held
        return summary


def printed(renderable, width=160):
    console = Console(width=width, height=50, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@pytest.mark.parametrize("module", [numbers, top])
def test_the_examples_of_the_modules_hold(module):
    assert doctest.testmod(module).failed == 0


async def test_everything_at_once_has_all_tables(summary):
    text = printed(Screen().everything(summary))
    for word in (*VIEWS, "2 workers", "double", "fails", "trainer", "list", "ready"):
        assert word in text


async def test_a_page_has_one_table_and_says_which_keys_there_are(summary):
    text = printed(Screen("functions").page(summary, 30, 160))
    assert "double" in text
    assert "connection" not in text
    assert "q: quit" in text


async def test_rows_beyond_the_screen_are_counted(summary):
    assert "and 1 more" in printed(Screen("workers").page(summary, 10, 160))


async def test_a_narrow_terminal_has_fewer_columns(summary):
    assert "memory" in printed(Screen("workers").page(summary, 30, 160))
    narrow = printed(Screen("workers").page(summary, 30, 100), width=100)
    assert "memory" not in narrow
    assert "lag" in narrow


@pytest.mark.parametrize("view", list(VIEWS))
async def test_every_table_can_be_sorted_by_every_column(summary, view):
    for column in VIEWS[view].columns:
        rows = sorted_rows(VIEWS[view], summary, column.key)
        values = [column.value(row) for row in rows]
        assert values == sorted(values, reverse=not column.is_text)
        backwards = [column.value(row) for row in sorted_rows(VIEWS[view], summary, column.title, is_reversed=True)]
        assert backwards == values[::-1]


async def test_an_unknown_column_sorts_by_the_first(summary):
    rows = sorted_rows(VIEWS["workers"], summary, "nonsense")
    assert [row.name for row in rows] == ["ps", "trainer"]


def test_keys_change_table_and_order():
    screen = Screen()
    screen.press("2")
    assert screen.view.name == "functions"
    screen.press("\t")
    assert screen.view.name == "peers"
    before = screen.sort
    screen.press(">")
    assert screen.sort != before
    screen.press("<")
    assert screen.sort == before
    screen.press("r")
    assert screen.is_reversed
    screen.press("x")
    assert not screen.is_over
    for _ in VIEWS:
        screen.press("\t")
    assert screen.view.name == "peers"
    screen.press("q")
    assert screen.is_over
