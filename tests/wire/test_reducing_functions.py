"""Functions and classes travel by name where they can be imported, and by value where not."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from arpc.wire.values.pickler import Pickler, loads
from arpc.wire.values.reducers import importable_name
from tests.wire.exchange import both_ways, exchange, travel


def module_function() -> str:
    return "module"


class Model:
    """Things that are called in different ways."""

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = bias

    def method(self, value: float) -> float:
        return value + self.bias

    @classmethod
    def class_method(cls) -> str:
        return cls.__name__

    @staticmethod
    def static_method() -> str:
        return "static"

    class Inner:
        pass


BY_NAME = [
    module_function,
    Model,
    Model.Inner,
    Model.method,
    Model.static_method,
    math.sqrt,
    len,
    int,
    operator.add,
    torch.add,
    torch.nn.functional.relu,
    torch.nn.functional.conv2d,
    Tensor.add,
    nn.Linear,
    asyncio.sleep,
]


@pytest.mark.parametrize("value", BY_NAME, ids=lambda value: getattr(value, "__qualname__", str(value)))
@pytest.mark.parametrize("main_by_value", [False, True])
def test_what_can_be_imported_travels_by_name(value, main_by_value):
    payload, slots = Pickler().dumps(value, main_by_value=main_by_value)

    assert slots == []
    assert len(payload) < 150
    assert loads(payload, slots) is value


def test_methods_travel_with_their_object():
    method, class_method = exchange([Model(2.0).method, Model.class_method])

    assert method(1.0) == 3.0
    assert class_method() == "Model"
    assert type(method.__self__) is Model


def test_partials_travel():
    arrived = exchange(functools.partial(torch.add, torch.ones(2), alpha=2))
    assert arrived(torch.ones(2)).tolist() == [3.0, 3.0]


def test_lambdas_and_closures_travel_by_value():
    scale = 3

    def recursive(depth: int) -> int:
        return scale if depth == 0 else recursive(depth - 1)

    async def coroutine() -> int:
        return scale

    def generator() -> Any:
        yield scale

    arrived = exchange([lambda value: value * scale, recursive, coroutine, generator])

    assert arrived[0](5) == 15
    assert arrived[1](3) == 3
    assert arrived[1] is not recursive
    assert inspect.iscoroutinefunction(arrived[2])
    assert list(arrived[3]()) == [3]


@both_ways
def test_tensors_of_a_closure_travel_as_tensors(limit):
    weight = torch.arange(10_000.0)
    bias = Parameter(torch.ones(1))

    def forward(value: Tensor, offset: Tensor = weight) -> Tensor:
        return value + weight + bias + offset

    payload, slots = Pickler().dumps(forward)
    assert len(payload) < 3000
    assert {id(slot) for slot in slots} == {id(weight), id(bias)}

    arrived = exchange(forward, limit)
    assert torch.equal(arrived(torch.ones(1)), forward(torch.ones(1)))


def test_local_classes_travel_by_value():
    class Local:
        shared = torch.ones(2)

        def __init__(self, value: int) -> None:
            self.value = value

    first, second, cls = exchange([Local(1), Local(2), Local])

    assert type(first) is type(second) is cls
    assert (first.value, second.value) == (1, 2)
    assert cls.shared.tolist() == [1.0, 1.0]


def test_functions_of_one_pickle_share_their_globals():
    namespace: dict[str, Any] = {"__name__": "nowhere", "count": 0}
    exec("def up():\n    global count\n    count += 1\n    return count\ndef look():\n    return count", namespace)

    up, look = exchange([namespace["up"], namespace["look"]])
    assert up() == 1
    assert look() == 1
    # and those of another pickle have others
    assert exchange(namespace["look"])() == 0


# -- names


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (module_function, (__name__, "module_function")),
        (Model, (__name__, "Model")),
        (Model.Inner, (__name__, "Model.Inner")),
        (Model.method, (__name__, "Model.method")),
        (torch.add, ("torch", "add")),
        (len, ("builtins", "len")),
        (math.sqrt, ("math", "sqrt")),
        (Model().method, None),
        (Model.class_method, None),
        (Model(), None),
        (lambda: None, None),
        (functools.partial(len), None),
        (5, None),
        (None, None),
    ],
)
def test_importable_name(value, name):
    assert importable_name(value) == name


def test_a_name_that_means_something_else_now_is_none():
    def impostor() -> None: ...

    impostor.__qualname__ = "module_function"
    impostor.__module__ = __name__
    assert importable_name(impostor) is None
    assert exchange(impostor)() is None

    stray = type("Stray", (), {"__module__": "no.such.module"})
    assert importable_name(stray) is None
    nameless = type("Nameless", (), {"__module__": None})
    assert importable_name(nameless) is None


def test_travelling_twice_is_travelling():
    weight = torch.ones(3)
    once = exchange(lambda: weight)
    assert exchange(once)().tolist() == [1.0, 1.0, 1.0]
    assert travel([exchange(Parameter(weight))])[0].requires_grad
