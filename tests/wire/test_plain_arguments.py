"""Arguments made of containers, scalars and tensors alone."""

from __future__ import annotations

import collections
import enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arpc.wire.values.pickler import Pickler, loads
from arpc.wire.values.reducers import HolePickler


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", "left right")):  # noqa: PYI024 - of any types
    __slots__ = ()


def train(model: Any, data: Any = None, /, rate: float = 0.1, *extra: Any, **options: Any) -> None:
    """A function with arguments of every kind."""


def dumps_call(*args: Any, **kwargs: Any) -> tuple[bytes, list[Any]]:
    return Pickler().dumps_call(train, args, kwargs or None, main_by_value=False)


def test_ordinary_arguments_need_no_pickler_in_python(monkeypatch):
    monkeypatch.setattr(HolePickler, "reducer_override", None)  # would fail if it were called
    tensor = torch.ones(1)

    for args in ((tensor,), (1, "x"), (tensor, 1), ({"a": tensor, "b": [tensor + 1, None]}, 2.5), ([],), ()):
        payload, slots = dumps_call(*args)
        assert repr(loads(payload, slots)) == repr(args)
    payload, slots = dumps_call(1, option={"a": tensor})
    assert loads(payload, slots) == ((1,), {"option": {"a": tensor}})


def test_many_tensors_are_pickled_like_a_few():
    tensors = [torch.full((1,), float(index)) for index in range(1000)]
    for count in (1, 2, 10, 255, 256, 257, 1000):
        payload, slots = dumps_call(*tensors[:count])
        assert slots == tensors[:count]
        assert loads(payload, slots) == tuple(tensors[:count])


@pytest.mark.parametrize(
    "special",
    [Pair(1, 2), collections.OrderedDict(a=torch.ones(1)), torch.Size((1,)), {(1, 2): 3}, {1, 2}, True, {Color.RED: 1}],
    ids=repr,
)
def test_types_are_exact_on_the_short_way(special):
    arrived = loads(*dumps_call(torch.ones(1), special))[1]

    assert type(arrived) is type(special)
    assert arrived == special


def test_a_container_may_contain_itself():
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)

    arrived = loads(*dumps_call(loop))[0]

    assert arrived[1] is arrived


def test_arguments_in_a_named_tuple_are_still_arguments():
    assert loads(*Pickler().dumps_call(train, Pair(torch.ones(1), 2), None, main_by_value=False))[1] == 2


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=3))


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    """Containers, scalars and tensors, some of them in several places."""
    pool: list[Any] = [torch.full((2,), float(index)) for index in range(3)]
    for _ in range(draw(st.integers(1, 6))):
        chosen = st.one_of(scalars, st.integers(0, len(pool) - 1).map(pool.__getitem__))
        pool.append(
            draw(
                st.one_of(
                    st.lists(chosen, max_size=4),
                    st.lists(chosen, max_size=4).map(tuple),
                    st.dictionaries(st.text(max_size=2), chosen, max_size=4),
                )
            )
        )
    return pool[-1]


def outline(value: Any, known: dict[int, int] | None = None) -> Any:
    """The structure of an object, with a number for each tensor, list and dict: equal ones have the same in common."""
    known = {} if known is None else known
    if isinstance(value, Tensor | list | dict):
        number = known.get(id(value))
        if number is not None:
            return number
        known[id(value)] = len(known)
    if isinstance(value, Tensor):
        return "tensor", value.tolist()
    if isinstance(value, list | tuple):
        return type(value).__name__, [outline(item, known) for item in value]
    if isinstance(value, dict):
        return "dict", [(key, outline(item, known)) for key, item in value.items()]
    return type(value).__name__, value


@given(graphs())
@settings(max_examples=300)
def test_both_ways_lead_to_the_same_object(value):
    expected = outline(value)

    assert outline(loads(*Pickler().dumps(value))) == expected
    payload, slots = dumps_call(value)
    assert outline(loads(payload, slots)[0]) == expected
    assert len({id(slot) for slot in slots}) == len(slots)  # one tensor travels once
    assert outline(loads(*dumps_call(value, option=value))) == outline(((value,), {"option": value}))
    if value is not None:
        assert outline(loads(*Pickler().dumps_result(value, main_by_value=False))) == expected
