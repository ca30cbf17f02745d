from __future__ import annotations

import pickle
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT
from arpc.wire.handful import (
    HANDFUL_ARGUMENTS,
    HANDFUL_RESULT,
    LAST_HANDFUL,
    MAX_TENSORS,
    PARCEL_ARGUMENT,
    Handful,
    handful_payload,
    unpack_handful,
)
from arpc.wire.lone import LONE_RESULT
from arpc.wire.table import DTYPES
from tests.wire.exchange import assert_same
from tests.wire.test_tensors import filled

LIMIT: Final = 8192
COMPLEX: Final = [dtype for dtype in DTYPES.values() if dtype.is_complex]
OTHERS: Final = [dtype for dtype in DTYPES.values() if not dtype.is_complex]


def packed(*slots: Any, kind: int = HANDFUL_ARGUMENTS, meta: bytes = b"", content: bytes = b"") -> bytes | None:
    return handful_payload(kind, slots, LIMIT, meta, content)


def travel(*slots: Tensor, **more: Any) -> Handful:
    payload = packed(*slots, **more)
    assert payload is not None
    return unpack_handful(bytearray(payload))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_dtype_and_shape_of_up_to_three_dimensions_arrives(dtype, shape):
    sent = [filled(shape, dtype), torch.arange(3.0), filled(shape, dtype)]

    arrived = travel(*sent).slots

    for one, other in zip(arrived, sent, strict=True):
        assert_same(one, other)
        assert one._base is None
        assert one.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("count", range(MAX_TENSORS + 1))
def test_any_number_of_them_arrives_with_what_comes_with_them(count):
    sent = [torch.full((number + 1,), float(number)) for number in range(count)]

    kind, slots, meta, content = travel(*sent, kind=HANDFUL_RESULT, meta=b"meta", content=b"content")

    assert (kind, bytes(meta), bytes(content)) == (HANDFUL_RESULT, b"meta", b"content")
    assert [slot.tolist() for slot in slots] == [tensor.tolist() for tensor in sent]


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_they_require_grad_arrives(dtype, shape):
    sent = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype, requires_grad=True)

    arrived = travel(*sent).slots

    assert [tensor.requires_grad for tensor in arrived] == [False, True]
    assert all(tensor.is_leaf for tensor in arrived)


def test_a_parameter_is_sent_as_the_tensor_that_it_is():
    (arrived,) = travel(Parameter(torch.ones(2))).slots

    assert type(arrived) is Tensor
    assert arrived.requires_grad


def test_they_can_be_written_to_and_have_no_memory_in_common():
    first, second = travel(torch.zeros(3), torch.zeros(3)).slots
    first += 1

    assert second.tolist() == [0, 0, 0]


def test_no_pickle_begins_like_it():
    assert LONE_RESULT < HANDFUL_ARGUMENTS < LAST_HANDFUL
    assert min(pickle.dumps(None, protocol=protocol)[0] for protocol in range(6)) > LAST_HANDFUL


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(4, 4).t()[:, 1:], id="strided"),
        pytest.param(lambda: torch.ones(1, 1, 1, 2), id="four dimensions"),
        pytest.param(lambda: torch.ones(1 << 16, dtype=torch.int8), id="long"),
        pytest.param(lambda: torch.ones(0), id="empty"),
        pytest.param(lambda: torch.ones(LIMIT), id="large"),
        pytest.param(lambda: torch.ones(2, device="meta"), id="meta"),
        pytest.param(lambda: torch.ones(2).to_sparse(), id="coo"),
        pytest.param(lambda: torch.ones(2, 2).to_sparse_csr(), id="csr"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj().imag, id="negative"),
        pytest.param(lambda: torch._efficientzerotensor(2), id="zero tensor"),
        pytest.param(lambda: torch.ones(2).as_subclass(type("Odd", (Tensor,), {})), id="subclass"),
        pytest.param(lambda: memoryview(b"bytes"), id="not a tensor"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_more_than_plain_memory_takes_a_table(make, place):
    slots = [torch.ones(2)]
    slots.insert(place, make())

    assert packed(*slots) is None


def test_so_does_what_shares_memory_but_not_in_a_parcel():
    whole = torch.arange(4.0)
    halves = whole[:2], whole[2:]

    assert packed(*halves) is None
    assert [half.tolist() for half in travel(*halves, kind=PARCEL_ARGUMENT).slots] == [[0, 1], [2, 3]]


def test_so_do_too_many_and_too_much_that_rides_along():
    assert packed(*[torch.ones(1) for _ in range(MAX_TENSORS + 1)]) is None
    assert packed(torch.ones(1), meta=bytes(1 << 16)) is None


def test_more_kinds_of_tensors_than_are_remembered():
    for size in range(1, 1500):
        (arrived,) = travel(torch.ones(size, dtype=torch.int8)).slots
        assert arrived.shape == (size,)


# -- what a peer might send


def body_of(count: int, label: bytes, rest: bytes, meta_size: int = 0) -> bytes:
    header = bytes([HANDFUL_RESULT, count]) + meta_size.to_bytes(2, "little") + bytes(4)
    labels = label * count
    return header + labels + bytes(-(8 + len(labels)) % 16) + rest


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(bytes([HANDFUL_RESULT]), id="no header"),
        pytest.param(bytes([HANDFUL_RESULT, 3]) + bytes(6), id="no labels"),
        pytest.param(body_of(1, bytes([31, 1, 1, 0, 0, 0, 0, 0]), bytes(16)), id="no such dtype"),
        pytest.param(body_of(1, bytes([200, 1, 1, 0, 0, 0, 0, 0]), bytes(16)), id="no tensor"),
        pytest.param(body_of(1, bytes([0, 4, 1, 0, 1, 0, 1, 0]), bytes(16)), id="too many dimensions"),
        pytest.param(body_of(MAX_TENSORS + 1, bytes([3, 1, 16, 0, 0, 0, 0, 0]), bytes(16 * 9)), id="too many tensors"),
        pytest.param(body_of(1, bytes([0, 1, 5, 0, 0, 0, 0, 0]), bytes(16)), id="too few bytes"),
        pytest.param(body_of(1, bytes([0, 3]) + b"\xff" * 6, bytes(16)), id="too many elements"),
        pytest.param(body_of(1, bytes([0, 1, 4, 0, 0, 0, 0, 0]), bytes(32)), id="too many bytes"),
        pytest.param(body_of(1, bytes([0, 1, 4, 0, 0, 0, 0, 0]), bytes(16), meta_size=1), id="less than it says"),
        pytest.param(body_of(1, bytes([64 + 7, 1, 2, 0, 0, 0, 0, 0]), bytes(16)), id="integers that require grad"),
    ],
)
def test_what_does_not_fit_is_refused(body):
    with pytest.raises(ProtocolError):
        unpack_handful(bytearray(body))


@given(st.integers(1, MAX_TENSORS), st.binary(max_size=80))
def test_no_bytes_do_more_harm_than_being_refused(count, rest):
    data = bytearray(bytes([HANDFUL_ARGUMENTS, count]) + rest)
    try:
        handful = unpack_handful(data)
    except ProtocolError:
        return
    for tensor in handful.slots:
        assert tensor.nbytes <= len(rest)
        tensor.detach().clone()
