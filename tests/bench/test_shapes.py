"""The lists of shapes hold together: what is called takes what it is given, plain and as a coroutine."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter

import pytest

from arpc.bench.floor import Server, floor_arguments
from arpc.bench.rows import shapes
from arpc.bench.shapes import BY_NAME, FAMILIES, GROWTH, SPREAD, Shape
from arpc.bench.targets import TARGETS


def test_no_two_shapes_have_the_same_name() -> None:
    assert len(BY_NAME) == sum(len(family.shapes) for family in FAMILIES)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_called_takes_its_arguments(name: str) -> None:
    shape: Shape = BY_NAME[name]
    for flavour in shape.flavours:
        called, arguments = shape.called(flavour), shape.arguments()
        if shape.use == "method":
            called = called().add
        result = called(*arguments, **shape.keywords)
        if asyncio.iscoroutine(result):
            asyncio.run(result)


def test_every_shape_has_a_goal_on_one_cpu_and_on_two() -> None:
    judged = Counter(target.row for target in TARGETS if target.against == "torch")
    for row, speedup in shapes.goals():
        assert judged[row.key] == 1
        assert speedup >= 3


def test_calls_are_compared_with_the_floor_of_the_same_payload() -> None:
    judged = {target.row: target.at_most for target in TARGETS if target.against == "floor"}
    rows = list(shapes.floors())
    assert rows
    for row, times in rows:
        assert judged[row.key] == times
        assert "floor" in row.cells


@pytest.mark.parametrize("name", [name for name, shape in BY_NAME.items() if shape.has_floor])
def test_the_floor_takes_every_payload(name: str) -> None:
    server, sent = Server(), []
    server.send = lambda call_id, content, array=None: sent.append(content)  # type: ignore[method-assign]
    server.message(1, pickle.loads(pickle.dumps((name, floor_arguments(BY_NAME[name])), 5)), None)
    assert len(sent) == 1


def test_calls_go_to_the_workers_in_turn() -> None:
    assert BY_NAME["autograd on three workers/5 in a row"].callees == (
        *("callee", "callee1", "callee2"),
        *("callee", "callee1"),
    )


def test_growth_compares_shapes_that_there_are() -> None:
    judged = {target.row: target.at_most for target in TARGETS if target.against == "itself"}
    for one, (row, limit_us) in zip(GROWTH, shapes.growth(), strict=True):
        assert {one.few, one.many} <= BY_NAME.keys()
        assert judged[row.key] == limit_us == one.at_most_us


def test_one_small_argument_is_compared_with_none() -> None:
    judged = {target.row: target.at_most for target in TARGETS}
    for row in shapes.spread():
        assert judged[row.key] == 2
        assert row.cells["floor"].system == row.cells["arpc"].system
    assert all(f"call/{name}" in BY_NAME for name in SPREAD)
