"""Subclasses of Tensor travel, however they keep what they are made of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.masked import MaskedTensor, masked_tensor
from torch.utils._pytree import tree_map

from arpc.errors import NotAllowedError
from arpc.testing import cluster
from arpc.wire.values.allowlist import register_type
from arpc.wire.values.pickler import Pickler, loads
from arpc.wire.values.restricted import restricted_loads


class Tagged(torch.Tensor):
    """Has attributes, and nothing else of its own."""


class Slotted(torch.Tensor):
    __slots__ = ("unit",)


class Watchful(torch.Tensor):
    """Sees every function of torch that is called with it, and returns plain tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Dispatching(torch.Tensor):
    """Has memory of its own, and refuses every operator of torch."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


class Wrapper(torch.Tensor):
    """Has no memory: answers operators with the tensor that it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = tree_map(lambda item: item.inner if isinstance(item, Wrapper) else item, (args, kwargs or {}))
        return function(*unwrapped[0], **unwrapped[1])


class Flattened(Wrapper):
    """Says itself what it is made of, as torch.compile wants to know it."""

    def __tensor_flatten__(self):
        return ["inner"], {"scale": 2}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        assert context == {"scale": 2}
        return Flattened(inner["inner"])


class Own(torch.Tensor):
    """Pickles itself."""

    def __reduce_ex__(self, protocol):
        return make_own, (self.as_subclass(torch.Tensor), "own")


def make_own(data, how):
    made = data.as_subclass(Own)
    made.how = how
    return made


class Restoring(torch.Tensor):
    def __setstate__(self, state):
        self.restored = state


def tagged():
    made = torch.arange(3.0).as_subclass(Tagged)
    made.tag = {"inner": torch.ones(2)}
    return made


def slotted():
    made = torch.arange(3.0).as_subclass(Slotted)
    made.unit = "kg"
    made.tag = 1
    return made


def masked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(torch.arange(4.0), torch.tensor([True, False, True, True]))


def round_trip(value):
    payload, slots = Pickler().dumps(value)
    return loads(payload, [slot.clone() if type(slot) is torch.Tensor else slot for slot in slots])


def test_a_masked_tensor():
    made, same = round_trip([masked(), 1, "x"])[:1] * 2
    assert type(made) is MaskedTensor
    assert made is same
    assert torch.equal(made.get_data(), torch.arange(4.0))
    assert made.get_mask().tolist() == [True, False, True, True]
    payload, slots = Pickler().dumps(masked())
    assert len(slots) == 2, "its data and its mask travel as tensors do, beside the pickle"
    assert len(payload) < 1000


async def test_a_masked_tensor_in_a_call():
    async with cluster(2) as group:
        made = await group[0].rpc_sync("worker1", give_back, args=(masked(),))
        assert type(made) is MaskedTensor
        assert torch.equal(made.to_tensor(0.0), torch.tensor([0.0, 0.0, 2.0, 3.0]))


def give_back(value):
    return value


def test_attributes_and_slots():
    made = round_trip(tagged())
    assert type(made) is Tagged
    assert torch.equal(made.tag["inner"], torch.ones(2))
    made = round_trip(slotted())
    assert (type(made), made.unit, made.tag) == (Slotted, "kg", 1)


def test_classes_that_see_functions_and_operators():
    made = round_trip(torch.arange(3.0).as_subclass(Watchful))
    assert type(made) is Watchful
    assert made.tolist() == [0, 1, 2]
    made = round_trip(Dispatching(torch.arange(3.0)))
    assert type(made) is Dispatching
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        assert made.as_subclass(torch.Tensor).tolist() == [0, 1, 2]


def test_wrappers():
    made = round_trip(Wrapper(torch.arange(3.0)))
    assert type(made) is Wrapper
    assert made.inner.tolist() == [0, 1, 2]
    assert (made + 1).tolist() == [1, 2, 3]
    made = round_trip(Flattened(torch.arange(3.0)))
    assert type(made) is Flattened
    assert made.inner.tolist() == [0, 1, 2]
    made = round_trip(Wrapper(Wrapper(torch.ones(2))))
    assert type(made.inner) is Wrapper


def test_one_that_pickles_itself():
    made = round_trip(torch.ones(2).as_subclass(Own))
    assert (type(made), made.how) == (Own, "own")


def test_one_that_sets_its_own_state():
    value = torch.ones(2).as_subclass(Restoring)
    value.tag = 1
    assert round_trip(value).restored == {"tag": 1}


# -- in allow-list mode


def permit(_):
    """All that is exported."""


def restricted_round_trip(value):
    payload, slots = Pickler().dumps(value)
    return restricted_loads(payload, slots, permit)


@pytest.fixture(scope="module", autouse=True)
def registered():
    for cls in (Tagged, Slotted, Flattened, Restoring):
        register_type(cls)


def test_registered_classes_travel_in_allow_list_mode():
    assert torch.equal(restricted_round_trip(tagged()).tag["inner"], torch.ones(2))
    made = restricted_round_trip(slotted())
    assert (type(made), made.unit, made.tag) == (Slotted, "kg", 1)
    assert restricted_round_trip(Flattened(torch.arange(3.0))).inner.tolist() == [0, 1, 2]
    value = torch.ones(2).as_subclass(Restoring)
    value.tag = 1
    assert restricted_round_trip(value).restored == {"tag": 1}
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = 1
    made = restricted_round_trip(parameter)
    assert (type(made), made.tag) == (torch.nn.Parameter, 1)


@pytest.mark.parametrize("make", [masked, lambda: Wrapper(torch.ones(1)), lambda: torch.ones(1).as_subclass(Own)])
def test_others_are_refused_there(make):
    with pytest.raises(NotAllowedError, match="not on the list"):
        restricted_round_trip(make())
