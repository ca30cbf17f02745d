from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import enum
import fractions
import functools
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arpc.errors import SerializationError
from arpc.wire.values.pickler import Pickler, loads
from tests.wire.exchange import both_ways, exchange, travel


@dataclasses.dataclass
class Point:
    x: float
    label: Any = None


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", "left right")):  # noqa: PYI024 - of any types
    __slots__ = ()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("it does not want to")


def train(model: Any, data: Any = None, /, rate: float = 0.1, *extra: Any, **options: Any) -> None:
    """A function with arguments of every kind."""


def dumps_call(*args: Any, **kwargs: Any) -> tuple[bytes, list[Any]]:
    return Pickler().dumps_call(train, args, kwargs or None, main_by_value=False)


# -- tensors are holes


@pytest.mark.parametrize("many", [1, 2, 50])
def test_a_pickle_has_holes_where_tensors_were(many):
    tensors = [torch.arange(1000.0) + index for index in range(many)]
    value = {"tensors": tensors, "text": "text", "point": Point(1.0, tensors[0] + 1)}

    payload, slots = Pickler().dumps(value)

    assert len(payload) < 300 + 10 * many
    assert len(slots) == many + 1
    assert all(slot is tensor for slot, tensor in zip(slots, tensors, strict=False))
    assert slots[-1] is value["point"].label


@both_ways
def test_an_object_arrives_with_its_tensors(limit):
    sent = {"a": torch.arange(3.0), "b": [torch.ones(2, 2), (torch.tensor(5), None)], "c": Point(1.5, torch.zeros(0))}

    arrived = exchange(sent, limit)

    assert arrived["a"].tolist() == [0.0, 1.0, 2.0]
    assert arrived["b"][0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert arrived["b"][1][0].item() == 5
    assert arrived["c"].x == 1.5
    assert arrived["c"].label.shape == (0,)


@both_ways
def test_one_tensor_in_two_places_stays_one(limit):
    tensor = torch.ones(3)
    _, slots = Pickler().dumps([tensor, {"again": tensor}, Point(0, tensor)])
    assert len(slots) == 1

    first, second, third = exchange([tensor, {"again": tensor}, Point(0, tensor)], limit)

    assert first is second["again"] is third.label


def test_equal_tensors_stay_two():
    first, second = exchange([torch.ones(3), torch.ones(3)])
    assert first is not second
    first.fill_(0)
    assert second.sum() == 3


def test_tensors_are_looked_at_when_they_are_packed():
    tensor = torch.zeros(3)
    payload, slots = Pickler().dumps((tensor,))
    tensor.fill_(7)

    (arrived,) = loads(payload, travel(slots))

    assert arrived.tolist() == [7.0] * 3


@both_ways
@pytest.mark.parametrize(
    "array",
    [
        np.arange(10, dtype=np.int16),
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24.0).reshape(4, 6)[::2, ::3],
        np.array(5.0),
        np.zeros((0, 3)),
        np.array(["text", None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["1d", "2d", "fortran", "strided", "0-dim", "empty", "objects", "records"],
)
def test_numpy_arrays_arrive(array, limit):
    arrived = exchange({"array": array}, limit)["array"]

    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array)
    assert arrived.flags.writeable


def test_memory_of_numpy_arrays_is_not_in_the_pickle():
    array = np.arange(10_000)
    payload, slots = Pickler().dumps([array, torch.ones(1), array])

    assert len(payload) < 500
    assert [type(slot) for slot in slots] == [pickle.PickleBuffer, Tensor]
    first, tensor, second = exchange([array, torch.ones(1), array])
    assert first is second
    assert tensor.tolist() == [1.0]


@pytest.mark.parametrize("size", [4, 10_000])
def test_a_read_only_array_stays_read_only(size):
    array = np.arange(size)
    array.flags.writeable = False

    arrived = exchange([array, torch.ones(1)])[0]

    assert np.array_equal(arrived, array)
    assert not arrived.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.array(5), np.empty((0, 3), np.float32), np.array([True, False])],
    ids=["matrix", "no dimensions", "empty", "booleans"],
)
def test_a_small_array_is_in_the_pickle(array):
    payload, slots = Pickler().dumps([array, array])
    assert slots == []

    first, second = loads(payload, slots)

    assert first is second
    assert (first.dtype, first.shape) == (array.dtype, array.shape)
    assert np.array_equal(first, array)
    assert first.flags.writeable


@pytest.mark.parametrize("number", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1 + 2j)], ids=repr)
def test_a_number_of_numpy_names_no_function_in_its_pickle(number):
    payload, slots = Pickler().dumps(number)
    arrived = loads(payload, slots)

    assert b"numpy" not in payload
    assert type(arrived) is type(number)
    assert arrived == number


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**100,
        1.5,
        1j,
        "text",
        b"bytes",
        bytearray(b"x"),
        (),
        [],
        {},
        {1, 2},
        frozenset({3}),
        range(5),
        slice(1, 2),
        ...,
        NotImplemented,
        type(None),
        int,
        Point(1.0),
        Color.RED,
        Pair(1, [2]),
        fractions.Fraction(1, 3),
        torch.Size((2, 3)),
        torch.float32,
        torch.device("cpu"),
        np.float32(1.5),
        collections.OrderedDict(a=1),
        collections.deque([1, 2], maxlen=3),
        logging.getLogger("some.logger"),
        b"x" * 100_000,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_ordinary_objects_arrive(value):
    for payload, slots in (
        Pickler().dumps(value),
        Pickler().dumps(value, main_by_value=True),
        Pickler().dumps_result(value, main_by_value=False),
    ):
        assert slots == []
        assert payload or value is None
        assert not payload or loads(payload, slots) == value
    assert loads(*dumps_call(value)) == (value,)


def test_none_is_the_empty_result_and_a_tensor_hardly_more():
    assert Pickler().dumps_result(None, main_by_value=False) == (b"", [])
    tensor = torch.ones(2)
    payload, slots = Pickler().dumps_result(tensor, main_by_value=False)
    assert len(payload) < 20
    assert slots == [tensor]
    assert loads(payload, slots) is tensor


def test_reducers_registered_with_copyreg_are_found():
    class Odd:
        pass

    try:
        copyreg.pickle(Odd, lambda _: (fractions.Fraction, (1, 2)))
        assert exchange([Odd()]) == [fractions.Fraction(1, 2)]
    finally:
        del copyreg.dispatch_table[Odd]


# -- what does not pickle


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((threading.Lock(),), {}, r"argument 'model' of train \(lock\) cannot be sent: cannot pickle"),
        ((1, threading.Lock()), {}, r"argument 'data' of train \(lock\)"),
        ((1, 2, Unpicklable()), {}, r"argument 'rate' of train \(Unpicklable\) cannot be sent: it does not want to"),
        ((1, 2, 3, Unpicklable()), {}, r"argument '3' of train"),
        ((1,), {"wd": Unpicklable()}, r"argument 'wd' of train \(Unpicklable\)"),
        ((torch.ones(1), [1, {"deep": Unpicklable()}]), {}, r"argument 'data' of train \(list\)"),
    ],
)
def test_an_error_names_the_argument(args, kwargs, complaint):
    with pytest.raises(SerializationError, match=complaint) as caught:
        dumps_call(*args, **kwargs)
    assert isinstance(caught.value.__cause__, TypeError | ZeroDivisionError)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "argument '1' of .*add"),
        (functools.partial(train, 1), "argument 'rate' of partial"),
        (Point, "'label'"),
    ],
)
def test_any_callable_has_arguments(function, name):
    args = (1, Unpicklable())
    with pytest.raises(SerializationError, match=name):
        Pickler().dumps_call(function, args, None, main_by_value=False)


def test_a_result_that_does_not_pickle_raises_what_it_raises():
    with pytest.raises(ZeroDivisionError):
        Pickler().dumps_result([Unpicklable()], main_by_value=False)


def test_what_is_nested_too_deep_is_an_error_of_that_argument():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(
            SerializationError,
            match=r"argument 'data' of train \(list\) cannot be sent: (maximum recursion|Stack overflow)",
        ):
            dumps_call(torch.ones(1), deep)
    finally:
        while deep:  # taken apart by hand: so is its end
            (deep,) = deep


def test_after_an_error_a_pickler_is_as_good_as_new():
    pickler = Pickler()
    value = [torch.ones(1), Point(1.0), "text"]
    expected, _ = pickler.dumps(value)
    for bad in ([torch.zeros(1), value, Unpicklable()], [b"x" * 100_000, Unpicklable()], Unpicklable()):
        with pytest.raises(ZeroDivisionError):
            pickler.dumps(bad)
        payload, slots = pickler.dumps(value)
        assert payload == expected
        assert slots == value[:1]


# -- a pickler is used again and again


def test_pickles_do_not_depend_on_those_before():
    pickler = Pickler()
    values = [[Point(1.0), "text", "text"], (1, 2), torch.ones(1), [torch.ones(2)] * 2, lambda: 5, np.arange(3)]
    first = [pickler.dumps(value)[0] for value in values]

    assert [pickler.dumps(value)[0] for value in values] == first
    assert [Pickler().dumps(value)[0] for value in values] == first


def test_a_pickler_keeps_nothing_alive():
    pickler = Pickler()
    point = Point(1.0, torch.ones(3))
    seen = weakref.ref(point), weakref.ref(point.label)

    result = pickler.dumps([point, np.arange(4), lambda kept=point: kept])

    del point, result
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_a_large_pickle_does_not_make_those_after_it_slow():
    pickler = Pickler()
    pickler.dumps((1, Point(2.0)))
    (small,) = pickler._free
    pickler.dumps((1, Point(2.0)))
    assert pickler._free == [small]

    pickler.dumps([[index] for index in range(10_000)])

    assert small not in pickler._free
    pickler.dumps((1, Point(2.0)))
    assert len(pickler._free) == 1


def test_threads_may_pickle_at_once():
    pickler = Pickler()
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        tensor = torch.full((3,), float(number))
        for round_ in range(200):
            value = [number, Point(round_, tensor), np.full(5, number), None if round_ % 2 else lambda: tensor]
            payload, slots = pickler.dumps(value)
            back = loads(payload, slots)
            assert back[0] == number
            assert back[1].x == round_
            assert back[1].label is tensor
            assert back[2].tolist() == [number] * 5
            assert back[3] is None if round_ % 2 else back[3]() is tensor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert 1 <= len(pickler._free) <= 8


def fails(pickler: Pickler, *args: Any, call: bool) -> weakref.ref[Any]:
    """Pickle a point, and then what cannot be pickled. The point is gone if nothing but the failed pickle kept it."""
    point = Point(1.0)
    arguments = ({"points": [point, torch.ones(2)]}, *args)
    with contextlib.suppress(ZeroDivisionError, SerializationError):
        if call:
            pickler.dumps_call(train, arguments, None, main_by_value=False)
        else:
            pickler.dumps(arguments)
    return weakref.ref(point)


@pytest.mark.parametrize("call", [False, True], ids=["result", "call"])
def test_a_pickle_that_failed_keeps_nothing(call):
    gc.disable()  # a worker's first pickler may be frozen: then no collection would ever find it
    try:
        assert fails(Pickler(), Unpicklable(), call=call)() is None
    finally:
        gc.enable()


def test_a_pickle_keeps_nothing_if_its_end_cannot_be_told():
    class Told:
        """Its reducer wants to hear of the end of the pickle."""

    def reduce(_: Any, pickling: Any) -> tuple[Any, ...]:
        pickling.packed.append(Unpicklable().__reduce__)
        return str, ()

    gc.disable()
    try:
        assert fails(Pickler({Told: reduce}), Told(), call=False)() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [list, tuple], ids=["list", "tuple"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "in a container"])
def test_tensors_and_numbers_side_by_side_arrive(make, is_alone):
    first, second = torch.ones(2), torch.zeros(3)
    for parts in ([first, second], [b"head", first, None, second, 7], [first, 1, first], [1, "a"], []):
        value = make(parts)
        sent = value if is_alone else [value]
        for found in (
            loads(*Pickler().dumps_result(sent, main_by_value=False)),
            loads(*dumps_call(sent))[0],
        ):
            inner = found if is_alone else found[0]
            assert type(inner) is make
            assert list(map(repr, inner)) == list(map(repr, parts))
            assert len({id(one) for one in inner if one is not None}) == len(
                {id(one) for one in parts if one is not None}
            )


def test_functions_that_a_reducer_declines_travel_by_value():
    def decline(function: Any, pickling: Any) -> Any:
        return NotImplemented

    pickler = Pickler({FunctionType: decline})
    assert loads(*pickler.dumps([lambda: 7]))[0]() == 7
    assert loads(*pickler.dumps(loads)) is loads
