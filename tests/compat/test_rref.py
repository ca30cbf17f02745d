"""RRefs as torch has them."""

from __future__ import annotations

import pickle

import pytest
import torch

import arpc
from arpc.compat import rpc


class Counter:
    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, n: int) -> int:
        self.total += n
        return self.total


def local_total(rref: rpc.RRef[Counter]) -> int:
    return rref.local_value().total


def kind_of(rref: object) -> str:
    return f"{type(rref).__module__}.{type(rref).__name__}"


async def total_of(rref: rpc.RRef[Counter]) -> int:
    return (await rref.handle.local_value()).total


def test_ids_and_texts_are_those_of_torch(alone: str) -> None:
    assert str(rpc.RRef(1)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    made = rpc.remote(alone, Counter, args=(1,))
    assert str(made) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=1))"
    assert made.owner() == rpc.get_worker_info() == made.owner()
    assert made.owner_name() == alone
    assert made.is_owner()
    assert made.confirmed_by_owner()


def test_the_value_is_there_and_its_methods_can_be_called(alone: str) -> None:
    counter = rpc.remote(alone, Counter, args=(1,))
    assert counter.rpc_sync().add(1) == 2
    assert counter.rpc_async().add(1).wait() == 3
    assert counter.remote().add(1).to_here() == 4
    assert counter.to_here() is counter.local_value()
    assert rpc.rpc_sync(alone, local_total, args=(counter,)) == 4


def test_a_wrong_name_is_an_attribute_error(alone: str) -> None:
    counter = rpc.remote(alone, Counter, args=(1,))
    for call in (
        lambda: counter.rpc_sync().nothing(),
        lambda: counter.rpc_async().nothing().wait(),
        lambda: counter.remote().nothing(),
    ):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            call()


def test_handlers_get_rrefs_of_this_kind_and_can_reach_the_awaitable_one(alone: str) -> None:
    counter = rpc.remote(alone, Counter, args=(5,))
    assert rpc.rpc_sync(alone, kind_of, args=(counter,)) == "arpc.compat.rref.RRef"
    assert rpc.rpc_sync(alone, total_of, args=(counter,)) == 5
    assert isinstance(counter.handle, arpc.RRef)


def test_the_type_is_asked_once(alone: str) -> None:
    counter = rpc.remote(alone, Counter, args=(1,))
    assert counter._get_type() is Counter
    assert counter._get_type(blocking=False) is counter._get_type(blocking=False)


def test_an_error_of_the_creation_is_raised_by_every_use(alone: str) -> None:
    broken = rpc.remote(alone, Counter, args=("x", "y"))
    for _ in range(2):
        with pytest.raises(TypeError, match="positional argument"):
            broken.to_here()


def test_the_future_of_a_creation_is_one_of_torch(alone: str) -> None:
    made = rpc.remote(alone, torch.add, args=(1, 1))
    future = made._get_future()
    assert isinstance(future, torch._C.Future)
    assert future.wait() is None


def test_it_cannot_be_pickled_by_hand(alone: str) -> None:
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(rpc.RRef(1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_script_module_needs_its_interface(alone: str) -> None:
    module = torch.jit.script(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
        rpc.RRef(module)
