"""Tensors of every class: parameters, modules, subclasses, wrappers."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from arpc.wire.values.pickler import Pickler, loads
from tests.wire.exchange import both_ways, exchange

# -- parameters and modules


@both_ways
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_stays_a_parameter(requires_grad, limit):
    sent = Parameter(torch.arange(3.0), requires_grad)

    arrived = exchange([sent], limit)[0]

    assert type(arrived) is Parameter
    assert arrived.requires_grad == requires_grad
    assert arrived.is_leaf
    assert arrived.tolist() == [0.0, 1.0, 2.0]
    assert arrived._base is None
    with torch.no_grad():
        arrived.add_(1)


def test_the_slot_of_a_parameter_is_the_parameter():
    parameter = Parameter(torch.ones(2))
    _, slots = Pickler().dumps([parameter])
    assert slots[0] is parameter


def test_attributes_of_a_parameter_are_kept():
    sent = Parameter(torch.ones(2))
    sent.shard = 3

    arrived = exchange(sent)

    assert type(arrived) is Parameter
    assert arrived.shard == 3


class Scaled(Parameter):
    """A parameter with something to it."""


@both_ways
def test_a_subclass_of_parameter_stays_what_it_is(limit):
    sent = Scaled(torch.ones(2), requires_grad=False)
    sent.scale = torch.tensor(2.0)

    arrived = exchange(sent, limit)

    assert type(arrived) is Scaled
    assert not arrived.requires_grad
    assert arrived.scale.item() == 2.0


@both_ways
def test_a_module_arrives(limit):
    torch.manual_seed(0)
    sent = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    payload, slots = Pickler().dumps(sent)
    assert len(slots) == len(sent.state_dict())

    arrived = exchange(sent, limit)

    sample = torch.randn(3, 4)
    assert torch.equal(arrived(sample), sent(sample))
    assert {name for name, _ in arrived.named_parameters()} == {name for name, _ in sent.named_parameters()}
    assert all(type(parameter) is Parameter for parameter in arrived.parameters())
    assert sum(slot.nbytes for slot in slots) > 100
    assert all(slot.numpy(force=True).tobytes() not in payload for slot in slots if slot.nbytes > 8)


def test_tied_weights_stay_tied():
    sent = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sent[1].weight = sent[0].weight

    arrived = exchange(sent)

    assert arrived[1].weight is arrived[0].weight


def test_a_lazy_module_arrives_before_it_knows_its_size():
    arrived = exchange(nn.LazyLinear(5))

    assert type(arrived.weight) is UninitializedParameter
    assert arrived(torch.ones(2, 3)).shape == (2, 5)


def test_a_tensor_that_was_recorded_for_autograd_keeps_its_history():
    """What fills a hole may have a history there: then it is no leaf, and so no parameter."""
    source = torch.ones(2, requires_grad=True)
    payload, slots = Pickler().dumps([Parameter(torch.ones(2)), Tagged(torch.ones(2).requires_grad_(), "x")])
    recorded = [source * 2, source * 3]
    assert len(slots) == 2

    first, second = loads(payload, recorded)

    assert first is recorded[0]
    assert type(second) is Tagged
    assert second.tag == "x"
    (first + second.as_subclass(Tensor)).sum().backward()
    assert source.grad.tolist() == [5.0, 5.0]


# -- subclasses


class Tagged(Tensor):
    """A tensor with an attribute."""

    tag: str

    def __new__(cls, data: Tensor, tag: str) -> Self:
        made = data.as_subclass(cls)
        made.tag = tag
        return made


class Untouchable(Tensor):
    """A tensor that lets no operator look at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pytest.fail(f"{func} was called")


class Slotted(Tensor):
    __slots__ = ("note",)


class Stateful(Tensor):
    """A tensor that says itself what its state is."""

    def __getstate__(self) -> str:
        return "state"

    def __setstate__(self, state: str) -> None:
        self.restored = state


class Wrapper(Tensor):
    """A tensor made of two."""

    left: Tensor
    right: Tensor
    label: str

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor, label: str) -> Self:
        made = Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, requires_grad=left.requires_grad)
        made.left, made.right, made.label = left, right, label
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["left", "right"], {"label": self.label}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: torch.Size, stride: Any) -> Wrapper:
        assert inner["left"].shape == size
        assert stride == (1,)
        return Wrapper(inner["left"], inner["right"], context["label"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].left.detach(), args[0].right.detach(), args[0].label)
        pytest.fail(f"{func} was called")


class OwnWay(Tensor):
    """A tensor that knows how to pickle itself."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return OwnWay.of, (self.as_subclass(Tensor) + 1,)

    @staticmethod
    def of(tensor: Tensor) -> OwnWay:
        return tensor.as_subclass(OwnWay)


@both_ways
def test_a_subclass_keeps_its_class_and_attributes(limit):
    sent = Tagged(torch.arange(6.0).view(2, 3).t(), "tag").requires_grad_()

    arrived = exchange([sent, sent], limit)

    assert arrived[0] is arrived[1]
    assert type(arrived[0]) is Tagged
    assert arrived[0].tag == "tag"
    assert arrived[0].requires_grad
    assert arrived[0].is_leaf
    assert arrived[0].stride() == (1, 3)
    assert arrived[0].as_subclass(Tensor).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_attributes_may_be_tensors_of_the_same_message():
    inner = torch.ones(2)
    sent = Tagged(torch.zeros(1), inner)

    arrived, other = exchange([sent, inner])

    assert arrived.tag is other


def test_no_operator_of_a_subclass_is_called():
    sent = torch.arange(3.0).as_subclass(Untouchable)

    arrived = exchange([sent])[0]

    assert type(arrived) is Untouchable
    with torch._C.DisableTorchFunctionSubclass():
        assert arrived.as_subclass(Tensor).tolist() == [0.0, 1.0, 2.0]


def test_slots_of_a_subclass_are_kept():
    sent = torch.ones(1).as_subclass(Slotted)
    sent.note, sent.other = "note", "other"

    arrived = exchange(sent)

    assert (arrived.note, arrived.other) == ("note", "other")


def test_a_subclass_may_say_what_its_state_is():
    arrived = exchange(torch.ones(1).as_subclass(Stateful))
    assert arrived.restored == "state"


@both_ways
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_wrapper_travels_as_what_it_wraps(requires_grad, limit):
    sent = Wrapper(torch.arange(3.0).requires_grad_(requires_grad), torch.ones(2), "label")
    _, slots = Pickler().dumps(sent)
    assert [slot.shape for slot in slots] == [(3,), (2,)]

    arrived = exchange(sent, limit)

    assert type(arrived) is Wrapper
    assert arrived.label == "label"
    assert arrived.requires_grad == requires_grad
    assert arrived.left.tolist() == [0.0, 1.0, 2.0]
    assert arrived.right.tolist() == [1.0, 1.0]


def test_a_subclass_that_pickles_itself_does():
    arrived = exchange(torch.ones(2).as_subclass(OwnWay))

    assert type(arrived) is OwnWay
    assert arrived.as_subclass(Tensor).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jagged_tensors_arrive():
    sent = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)

    arrived = exchange([sent])[0]

    assert arrived.layout is torch.jagged
    assert [part.tolist() for part in arrived.unbind()] == [[0.0, 1.0], [0.0, 1.0, 2.0]]


def test_views_in_parameters_and_subclasses_keep_sharing():
    base = torch.arange(6.0)
    parameter, tagged, plain = exchange([Parameter(base[:4], requires_grad=False), Tagged(base[2:], "x"), base])

    plain.fill_(9)
    assert parameter.tolist() == [9.0] * 4
    assert tagged.as_subclass(Tensor).tolist() == [9.0] * 4
