"""The lists of shapes hold together: what is called takes what it is given, plain and as a coroutine."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from arpc.bench.rows import shapes
from arpc.bench.shapes import BY_NAME, FAMILIES, Shape
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
    judged = Counter(target.row for target in TARGETS)
    for row, speedup in shapes.goals():
        assert judged[row.key] == 1
        assert speedup >= 3
