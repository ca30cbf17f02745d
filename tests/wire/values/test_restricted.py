"""Pickles within the lists, and those that would like to be more."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime as dt
import decimal
import enum
import os
import pickle
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import arpc
from arpc.errors import NotAllowedError, SerializationError
from arpc.ids import WorkerInfo
from arpc.wire.values import restricted
from arpc.wire.values.allowlist import export, may_call_method, register_type
from arpc.wire.values.pickler import Pickler
from arpc.wire.values.reducers import NamesOnlyPickler
from arpc.wire.values.restricted import read_name, restricted_loads
from tests.wire.gadgets import GADGETS, call, named, text, whole

CANARY = Path(tempfile.gettempdir()) / f"arpc-canary-{os.getpid()}-{secrets.token_hex(4)}"
NAMES = sorted(GADGETS(str(CANARY)))


def permit(_):
    pass


def refuse(key):
    raise NotAllowedError(f"{key} may not be named")


def round_trip(value):
    payload, slots = Pickler().dumps(value)
    return restricted_loads(payload, slots, permit)


@register_type
@dataclass
class Order:
    number: int
    items: list[str]


@register_type
class Colour(enum.Enum):
    RED = 1


@register_type
class Pair(NamedTuple):
    left: int
    right: int


@register_type
class Stack(list):
    pass


@register_type
class OrderError(Exception):
    def __init__(self, order):
        super().__init__(order)
        self.order = order


@register_type
class Tagged(torch.Tensor):
    pass


class Stranger:
    pass


@export
def add(a, b):
    return a + b


@export
class Counter:
    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1

    def _secret(self):
        return self.count


class Special(Counter):
    def down(self):
        self.count -= 1

    @export
    def twice(self):
        self.count *= 2


PLAIN = [
    None,
    True,
    1,
    -(1 << 70),
    1.5,
    1j,
    "text with r and p and parameters in it",
    b"bytes",
    bytearray(b"mutable"),
    [1, [2, (3,)]],
    {"a": {"b": 1}, 2: None},
    {1, 2},
    frozenset({3}),
    range(3),
    slice(1, 2),
    torch.Size([1, 2]),
    torch.float32,
    torch.device("cpu"),
    torch.strided,
    collections.OrderedDict(a=1),
    collections.deque([1, 2], 5),
    collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}),
    dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
    dt.timedelta(1),
    decimal.Decimal("1.5"),
    np.float32(2.5),
    WorkerInfo("a", 1),
    arpc.UNSET,
    int,
    Order(1, ["a", "b"]),
    Colour.RED,
    Pair(1, 2),
    Stack([1, 2]),
    add,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_what_is_on_the_lists_travels(value):
    assert round_trip(value) == value
    assert type(round_trip(value)) is type(value)


@pytest.mark.parametrize(
    "value", [ValueError("x"), KeyError(1), OSError(2, "no"), ExceptionGroup("a", [ValueError(1)])]
)
def test_exceptions_travel(value):
    assert repr(round_trip(value)) == repr(value)


def test_exceptions_of_the_runtime_and_of_users_travel():
    lost = round_trip(arpc.WorkerLostError("gone", "a", may_have_run=False))
    # only the worker that made a call can say that it did not run
    assert (type(lost), str(lost), lost.worker, lost.may_have_run) == (arpc.WorkerLostError, "gone", "a", True)
    assert round_trip(OrderError(Order(1, []))).order == Order(1, [])


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.arange(6)[::2], np.array(["a", "bc"]), np.zeros((0, 2))]
)
def test_arrays_travel(array):
    np.testing.assert_array_equal(round_trip(array), array)
    assert round_trip(array).dtype == array.dtype


def test_tensors_travel():
    parameter = torch.nn.Parameter(torch.ones(2))
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.tag = "mine"
    plain, again, made, same = round_trip([torch.ones(2), parameter, tagged, parameter])
    assert torch.equal(plain, torch.ones(2))
    assert type(again) is torch.nn.Parameter
    assert again is same
    assert type(made) is Tagged
    assert made.tag == "mine"


def test_data_is_read_in_c(monkeypatch):
    monkeypatch.setattr(restricted, "_CarefulUnpickler", None)
    for value in ({"parameters": [1.0, "r" * 10]}, [torch.ones(1)], dt.timedelta(1), torch.Size([1])):
        assert repr(round_trip(value)) == repr(value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["quick", "careful"])
def test_gadgets_do_nothing(name, way, monkeypatch):
    payload = GADGETS(str(CANARY))[name]
    if way == "careful":
        monkeypatch.setattr(restricted, "needs_careful_reader", lambda *_, **__: True)
    before = {error: dict(vars(error)) for error in (arpc.RemoteError, ExceptionGroup, ValueError)}
    with pytest.raises((NotAllowedError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError)):
        restricted_loads(payload, [], permit)
    with pytest.raises((NotAllowedError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError)):
        callable_of_a_message(payload)
    assert not CANARY.exists()
    assert {error: dict(vars(error)) for error in before} == before


def callable_of_a_message(payload):
    from arpc.wire.values.allowlist import callable_named

    return callable_named(read_name(payload))


def test_the_canary_sings(tmp_path):
    """Without the restriction the same pickles do run: the test above would notice."""
    gadgets = GADGETS(str(tmp_path / "canary"))
    pickle.loads(gadgets["exec"])
    assert (tmp_path / "canary").exists()


def test_a_class_that_nobody_registered_is_refused():
    with pytest.raises(NotAllowedError, match=r"Stranger is not on the list.*register_type"):
        round_trip(Stranger())
    with pytest.raises(NotAllowedError, match="Stranger"):
        round_trip(Stranger)


def test_an_exported_function_can_be_named_but_not_called_by_a_pickle():
    module = __name__
    assert restricted_loads(whole(named(module, "add")), [], permit) is add
    with pytest.raises(NotAllowedError, match="calls"):
        restricted_loads(whole(call(named(module, "add"), b"K\x01", b"K\x02")), [], permit)
    with pytest.raises(NotAllowedError, match="makes an instance"):
        restricted_loads(whole(named(module, "Counter") + b")\x81"), [], permit)
    with pytest.raises(NotAllowedError, match="may not be named"):
        restricted_loads(whole(named(module, "add")), [], refuse)


def test_a_registered_class_cannot_be_changed():
    attack = whole(named(__name__, "Order") + b"N}" + text("number") + b"K\x07s\x86b")
    with pytest.raises(NotAllowedError, match="changes type"):
        restricted_loads(attack, [], permit)
    assert not hasattr(Order, "number")


def test_a_tensor_cannot_be_changed_with_a_function():
    attack = whole(b"\x97" + named(__name__, "add") + b"\x85b")
    with pytest.raises(NotAllowedError, match="changes Tensor"):
        restricted_loads(attack, [torch.ones(1)], permit)


def test_nor_with_data_alone():
    # what `Tensor.__setstate__` takes: another tensor, and how much of the memory there is to be
    attack = whole(b"\x97(\x97K\x00M\x00\x10\x85K\x01\x85tb")
    tensors = [torch.ones(1), torch.ones(1)]
    with pytest.raises(NotAllowedError, match="changes Tensor"):
        restricted_loads(attack, tensors, permit)
    assert [tensor.numel() for tensor in tensors] == [1, 1]


@pytest.mark.parametrize("nesting", [b"\x85", b"N\x86", b"NN\x87"], ids=["one", "two", "three"])
def test_tuples_nested_so_deep_that_hashing_one_would_crash(nesting):
    attack = b"\x80\x05\x8f(N" + nesting * 300_000 + b"\x90."
    with pytest.raises(NotAllowedError, match="tuples inside each other"):
        restricted_loads(attack, [], permit)


def test_many_tuples_beside_each_other_are_fine():
    pairs = [(number, (number,)) for number in range(20_000)]
    assert restricted_loads(pickle.dumps(pairs, protocol=5), [], permit) == pairs


def test_extension_codes_are_refused_even_where_they_are_in_use():
    copyreg.add_extension("posix", "system", 77)
    try:
        with pytest.raises((NotAllowedError, ValueError)):
            restricted_loads(whole(b"\x82\x4d"), [], permit)
    finally:
        copyreg.remove_extension("posix", "system", 77)


def _framed(size_bytes, opcodes):
    return b"\x80\x05\x95" + size_bytes.to_bytes(8, "little") + opcodes


def _read_or_refused(load):
    """What a pickle holds, or None: late releases of Python 3.13 and 3.14 refuse a value that goes beyond its frame."""
    try:
        return load()
    except pickle.UnpicklingError as error:
        assert str(error) == "pickle exhausted before end of frame"  # noqa: PT017 - reading it is right, too
        return None


@pytest.mark.parametrize("size_bytes", range(6))
def test_a_value_that_goes_beyond_its_frame_is_read_as_it_is_looked_over(size_bytes):
    attack = _framed(size_bytes, b"J\x01\x00\x00\x00.\x00\x00\x00\x00")
    found = _read_or_refused(lambda: restricted_loads(attack, [], permit))
    assert found == _read_or_refused(lambda: pickle.loads(attack))
    assert found == 1 or (found is None and 1 < size_bytes < 5)


def test_a_frame_hides_no_extension_code(monkeypatch):
    monkeypatch.setitem(copyreg._extension_cache, 77, os.system)
    copyreg.add_extension("posix", "system", 77)
    try:
        # what is left of the frame, one byte, was dropped: then the bytes begin with the code and not before it
        attack = _framed(2, b"J\x00\x00\x00\x00C\x82\x4d." + bytes(128) + b".")
        assert _read_or_refused(lambda: restricted_loads(attack, [], permit)) in {b"\x4d." + bytes(128), None}
    finally:
        copyreg.remove_extension("posix", "system", 77)


@pytest.mark.parametrize(
    "extent", [b"", b"\x00", b"\x8c", b"\x8c\x05abc", b"\x96" + bytes(6), b"I12", b"B\xff\x00\x00\x00ab"]
)
def test_a_pickle_that_ends_too_early_is_an_error(extent):
    with pytest.raises((EOFError, pickle.UnpicklingError, NotAllowedError)):
        restricted_loads(b"\x80\x05" + extent, [], permit)


def test_names_of_functions():
    payload, _ = Pickler().dumps(add)
    assert read_name(payload) == (__name__, "add")
    for wrong in (whole(text("add")), whole(named(__name__, "add") + b"\x85"), whole(call(named(__name__, "add")))):
        with pytest.raises(NotAllowedError, match="by their names"):
            read_name(wrong)


def test_methods_that_others_may_call():
    assert may_call_method(Counter, "up")
    assert may_call_method(Counter, "__call__")
    assert not may_call_method(Counter, "_secret")
    assert not may_call_method(Counter, "__init__")
    assert not may_call_method(Counter, "nothing")
    assert may_call_method(Special, "up"), "the class that defines it is exported"
    assert may_call_method(Special, "twice")
    assert not may_call_method(Special, "down")
    assert not may_call_method(Special, "__call__")
    assert not may_call_method(Special, "__class__")
    assert not may_call_method(dict, "pop")


@pytest.mark.parametrize("wrong", [lambda: None, Pickler().dumps, "add"])
def test_what_has_no_name_cannot_be_exported(wrong):
    with pytest.raises((arpc.ConfigurationError, TypeError)):
        export(wrong)


def test_a_sender_in_this_mode_sends_no_code():
    pickler = Pickler(kind=NamesOnlyPickler)
    assert pickler.dumps(add)[0]
    with pytest.raises(SerializationError, match="no name that others can import"):
        pickler.dumps(lambda: None)


DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(DATA)
@settings(max_examples=60, deadline=None)
def test_any_data_is_the_same_after_it(value):
    assert round_trip(value) == value
    payload = pickle.dumps(value, protocol=5)
    assert restricted._CarefulUnpickler(restricted.io.BytesIO(payload), [], permit).load() == value


@given(st.binary(max_size=60), st.sampled_from(NAMES), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_bent_gadgets_do_nothing(noise, name, place, byte):
    bent = bytearray(GADGETS(str(CANARY))[name])
    bent[place % len(bent)] = byte
    for payload in (bytes(bent), whole(noise)):
        with contextlib.suppress(Exception):
            restricted_loads(payload, [], permit)
    assert not CANARY.exists()


def test_a_name_that_a_peer_has_chosen_is_shown_on_one_line():
    with pytest.raises(NotAllowedError) as caught:
        restricted_loads(b"\x80\x05" + named("os\n\x1b[2J", "x" * 250) + b".", [], lambda _: None)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


# -- keys that take Python long


def _wide(value):
    """The pickle of an integer that is larger than its hash."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


_MODULUS = (1 << 61) - 1
MANY = 20_000
INTEGERS = b"".join(_wide(_MODULUS * number) for number in range(1, MANY + 1))
VALUED = b"".join(_wide(_MODULUS * number) + b"N" for number in range(1, MANY + 1))
SLOW_KEYS = {
    "a dict": b"}(" + VALUED + b"u",
    "a dict, one by one": b"}" + b"".join(_wide(_MODULUS * number) + b"Ns" for number in range(1, MANY + 1)),
    "a set": b"\x8f(" + INTEGERS + b"\x90",
    "a frozenset": b"(" + INTEGERS + b"\x91",
    "a counter": named("collections", "Counter") + b"}(" + VALUED + b"u\x85R",
    "many dicts": (b"](" + (b"}(" + b"".join(_wide(_MODULUS * n) + b"N" for n in range(1, 1001)) + b"u") * 40 + b"e"),
    "tuples": b"\x8f(" + b"".join(_wide(_MODULUS * n) + b"\x85" for n in range(1, MANY + 1)) + b"\x90",
    "a memoized tuple": b"(" + b"K\x01" * MANY + b"t\x940}(" + b"h\x00N" * MANY + b"u",
    "a class of users": named(__name__, "Tags") + b"](" + INTEGERS + b"e\x85R",
}


@register_type
class Tags(set):
    pass


@pytest.mark.parametrize("keys", SLOW_KEYS.values(), ids=SLOW_KEYS)
def test_keys_that_would_take_python_seconds_are_refused(keys):
    begin = time.process_time()
    with pytest.raises(NotAllowedError, match="takes seconds"):
        restricted_loads(b"\x80\x05" + keys + b".", [], permit)
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    "value",
    [
        {(number, number % 7): number for number in range(20_000)},
        {number << 40: None for number in range(20_000)},
        {number**9 for number in range(1, 20_000)},
        [frozenset([(0, 0), (number, 1)]) for number in range(5000)],
        [collections.Counter([(0, 0)]) for _ in range(5000)],
        [{_MODULUS + 1: 0, (1, 2): number} for number in range(5000)],
        dict.fromkeys([float(number) * 2.0**61 for number in range(20_000)]),
        [(1, 2)] * 20_000,
    ],
    ids=["tuples", "integers", "large integers", "frozensets", "counters", "many dicts", "floats", "one tuple"],
)
def test_many_ordinary_keys_are_fine(value):
    assert restricted_loads(pickle.dumps(value, protocol=5), [], permit) == value


def test_a_class_of_users_that_is_a_set_travels():
    tags = Tags(["a", (1, 2)])
    assert restricted_loads(pickle.dumps(tags, protocol=5), [], permit) == tags
