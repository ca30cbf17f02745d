"""Types of other parts bring reducers, which see the parcel their object goes into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from arpc.errors import RRefError, SerializationError, WorkerLostError
from arpc.ids import WorkerInfo
from arpc.wire.values.pickler import Pickler, Pickling, loads
from tests.wire.exchange import exchange

BOB = WorkerInfo("bob", 1)


class Handle:
    def __init__(self, name: str, tensor: Tensor | None = None) -> None:
        self.name = name
        self.tensor = tensor


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def named(handle: Handle, _: Pickling) -> tuple[Any, ...]:
    return str.upper, (handle.name,)


def call(handle: Handle, other: Any) -> None:
    """Something to be called with them."""


def test_reducers_are_for_their_type_alone():
    class Special(Handle):
        pass

    assert exchange([Handle("a"), Handle("b")], reducers={Handle: named}) == ["A", "B"]
    assert type(exchange(Special("c"), reducers={Handle: named})).__name__ == "Special"
    assert type(exchange(Handle("d"))) is Handle


def test_a_reducer_may_have_tensors():
    def reduce(handle: Handle, _: Pickling) -> tuple[Any, ...]:
        return dict, ([(handle.name, handle.tensor)],)

    arrived = exchange([Handle("a", torch.ones(2)), torch.zeros(1)], reducers={Handle: reduce})

    assert arrived[0]["a"].tolist() == [1.0, 1.0]
    assert arrived[1].tolist() == [0.0]


def test_a_reducer_may_pickle():
    pickler: Pickler

    def reduce(handle: Handle, _: Pickling) -> tuple[Any, ...]:
        payload, slots = pickler.dumps({"inner": handle.tensor, "name": handle.name})
        assert len(slots) == 1
        return loads, (payload, [slots[0]])

    pickler = Pickler({Handle: reduce})
    outer = torch.ones(1)
    payload, slots = pickler.dumps([outer, Handle("a", torch.zeros(2)), Handle("b", torch.zeros(3)), outer])

    assert len(slots) == 3
    arrived = loads(payload, slots)
    assert arrived[0] is arrived[3] is outer
    assert [value["name"] for value in arrived[1:3]] == ["a", "b"]
    assert arrived[2]["inner"].shape == (3,)


class Sent:
    """What a reducer was told: where its objects go, and whether they went."""

    def __init__(self) -> None:
        self.to: list[WorkerInfo | None] = []
        self.packed: list[str] = []
        self.pickler = Pickler({Handle: self._reduce})

    def _reduce(self, handle: Handle, pickling: Pickling) -> tuple[Any, ...]:
        self.to.append(pickling.to)
        pickling.packed.append(lambda: self.packed.append(handle.name))
        return named(handle, pickling)


@pytest.fixture
def sent() -> Sent:
    return Sent()


def test_a_reducer_sees_where_its_object_goes(sent):
    handle = Handle("a")
    sent.pickler.dumps(handle, to=BOB)
    sent.pickler.dumps_call(call, (handle, 1), None, main_by_value=False, to=BOB)
    sent.pickler.dumps_call(call, (handle,), {"other": 1}, main_by_value=False, to=BOB)
    sent.pickler.dumps_result(handle, main_by_value=False, to=BOB)
    sent.pickler.dumps_result([handle], main_by_value=False, to=BOB)
    assert sent.to == [BOB] * 5

    sent.pickler.dumps(handle)
    assert sent.to[-1] is None


def test_it_is_told_once_the_pickle_is_complete(sent):
    payload, _ = sent.pickler.dumps([Handle("a"), Handle("b")], to=BOB)
    assert sent.packed == ["a", "b"]
    assert loads(payload, []) == ["A", "B"]

    sent.pickler.dumps([Handle("c"), b"x" * 5000])
    sent.pickler.dumps(1)
    assert sent.packed == ["a", "b", "c"]


def test_it_is_not_told_of_a_pickle_that_failed(sent):
    for fail in (
        lambda: sent.pickler.dumps([Handle("a"), Unpicklable()]),
        lambda: sent.pickler.dumps_call(call, (Handle("a"), Unpicklable()), None, main_by_value=False, to=BOB),
    ):
        with pytest.raises((ZeroDivisionError, SerializationError)):
            fail()
    sent.pickler.dumps(Handle("b"), is_rehearsal=True)
    assert sent.packed == []

    sent.pickler.dumps(Handle("c"))
    assert sent.packed == ["c"]


@pytest.mark.parametrize("error", [RRefError("it was deleted"), WorkerLostError("its owner is gone", "bob")])
def test_what_a_reference_says_of_itself_is_not_explained_away(error):
    def reduce(handle: Handle, pickling: Pickling) -> tuple[Any, ...]:
        raise error

    with pytest.raises(type(error), match=str(error)):
        Pickler({Handle: reduce}).dumps_call(call, (Handle("a"), 1), None, main_by_value=False, to=BOB)
