"""Every function that a pickle may call while it is read, called with what it does not expect."""

from __future__ import annotations

import pickle
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

from arpc.errors import NotAllowedError, ProtocolError, SerializationError
from arpc.wire.values import policy  # which fills the lists
from arpc.wire.values.allowlist import (
    CLASSES,
    MAKERS,
    NAMES,
    QUICK,
    TENSOR_CLASSES,
    allow_function,
    export,
    register_type,
)
from arpc.wire.values.checked_functions import (
    ANYTHING,
    FLAG,
    NUMBER,
    SIZES,
    TENSOR,
    TEXT,
    Checked,
    all_of,
    exactly,
    integer,
)

assert policy
REFUSED = (NotAllowedError, SerializationError, ProtocolError)
ran: list[object] = []


@export
def side_effect(*args, **kwargs):
    ran.append((args, kwargs))


def of_this_test(text):
    return text


class Chameleon:
    """Answers to any name, with a function."""

    def __getattr__(self, name):
        return side_effect

    __index__ = __int__ = __len__ = __iter__ = __hash__ = side_effect


class Text(str):
    __slots__ = ()


class Subclass(torch.Tensor):
    pass


def zoo():
    """Values that no function of the runtime has a use for, in places where they were not meant to be."""
    return [
        None,
        -1,
        1 << 40,
        -(1 << 70),
        1e300,
        "x" * 1000,
        "os.system",
        b"\xff" * 10,
        range(1 << 40),
        [1] * 3,
        (1 << 62, 1 << 62),
        ("a",),
        {"a": 1},
        {1: side_effect},
        type,
        int,
        bytearray,
        torch.Tensor,
        torch.nn.Module,
        Subclass,
        side_effect,
        partial(side_effect, 1),
        Chameleon(),
        Text("x"),
        ValueError("x"),
        torch.ones(1),
        torch.ones(1).expand(1 << 30),
        torch.empty(1 << 40, device="meta"),
        torch.ones(1).as_subclass(Subclass),
        np.arange(3),
        np.dtype("O"),
        memoryview(b"abc"),
        pickle.PickleBuffer(b"abc"),
    ]


def all_trusted():
    functions = {".".join(key): found for key, found in (QUICK | NAMES).items() if type(found) is Checked}
    makers = {id(cls): key for key, cls in NAMES.items()}
    return functions | {".".join(makers[id_]): maker for id_, maker in MAKERS.items()}


def arguments_of_the_zoo(count):
    animals = zoo()
    for first in range(len(animals)):
        yield tuple(animals[(first + 5 * place) % len(animals)] for place in range(count))


def is_data(made):
    """What such a function may make of a value that happened to fit: nothing with effects, nothing large."""
    return not callable(made) and (not isinstance(made, torch.Tensor) or made.untyped_storage().nbytes() < 1 << 20)


# They make an object of anything: what it is made of is kept, and not looked at
TAKES_ANYTHING = {"arpc.wire.values.reducers._fill"}


@pytest.mark.parametrize("name", sorted(all_trusted()))
def test_whatever_it_is_handed_it_has_no_effect_and_takes_no_memory(name):
    function = all_trusted()[name]
    ran.clear()
    tracemalloc.start()
    try:
        for count in range(8):
            for args in arguments_of_the_zoo(count):
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                try:
                    made = function(*args)
                except REFUSED:
                    continue
                finally:
                    assert tracemalloc.get_traced_memory()[1] - before < 4 << 20, args
                if name in TAKES_ANYTHING:
                    assert made is args[0]
                else:
                    assert is_data(made), args
        assert not ran
    finally:
        tracemalloc.stop()


def test_all_that_a_pickle_can_call_is_trusted_registered_or_immutable():
    for name, found in QUICK.items():
        assert type(found) is Checked or found in (complex, range, slice) or isinstance(found, torch.dtype), name
    named = {found for found in NAMES.values() if type(found) is not Checked}
    assert named.isdisjoint((complex, range, slice))
    assert all(type(found) is Checked for found in MAKERS.values())
    assert all(isinstance(cls, type) and not issubclass(cls, torch.Tensor) for cls in CLASSES.by_key.values())
    assert all(issubclass(cls, torch.Tensor) for cls in TENSOR_CLASSES.by_key.values())


def test_a_trusted_function_cannot_be_changed_nor_looked_into():
    function = all_trusted()["collections.OrderedDict"]
    with pytest.raises(AttributeError):
        function._call = side_effect
    with pytest.raises(AttributeError):
        function.other = 1
    assert not hasattr(function, "__dict__")


def test_values_are_looked_at_before_anything_is_called():
    called: list[object] = []
    function = Checked("thing", lambda *args: called.append(args), TEXT, NUMBER, required=1, rest=FLAG)
    for wrong in ((), (1,), (Text("a"),), ("a", True), ("a", -1), ("a", 1, 1), ("a", 1, True, None)):
        with pytest.raises(NotAllowedError, match="a message that makes a thing"):
            function(*wrong)
    assert not called
    function("a")
    function("a", 1, True, False)
    assert called == [("a",), ("a", 1, True, False)]


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (ANYTHING, [None, 1, "a"], []),
        (exactly(int, str), [1, "a"], [True, Text("a"), None]),
        (integer(0, 5), [0, 5], [-1, 6, True, 1.0]),
        (all_of(list, TEXT, 2), [[], ["a", "b"]], [("a",), ["a"] * 3, [1]]),
        (SIZES, [(), (1, 2)], [[1], (-1,), (1 << 63,), (1,) * 65, range(2), torch.Size([1])]),
        (TENSOR, [torch.ones(1), torch.nn.Parameter(torch.ones(1))], [torch.ones(1).as_subclass(Subclass), 1]),
    ],
    ids=["anything", "exactly", "integer", "all_of", "sizes", "tensor"],
)
def test_checks(check, right, wrong):
    assert all(map(check.holds, right))
    assert not any(map(check.holds, wrong))


def test_a_function_is_trusted_with_its_checks_alone():
    key = __name__, "of_this_test"
    assert allow_function(TEXT)(of_this_test) is of_this_test
    try:
        assert NAMES[key]("a") == "a"
        with pytest.raises(NotAllowedError):
            NAMES[key](1)
    finally:
        del NAMES[key]


@pytest.mark.parametrize("cls", [type, np.ndarray, np.float32, memoryview, torch.Tensor, torch.UntypedStorage])
def test_classes_that_are_no_data_cannot_be_registered(cls):
    with pytest.raises(TypeError, match="plain data"):
        register_type(cls)


def test_lists_know_an_object_by_its_identity():
    class Equal:
        def __eq__(self, _):
            return True

        __hash__ = None

    assert Equal() not in CLASSES
