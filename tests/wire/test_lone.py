from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT
from arpc.wire.lone import LONE_ARGUMENT, LONE_RESULT, lone_payload, unpack_lone
from arpc.wire.table import DTYPE_CODES, DTYPES, Code
from tests.wire.exchange import assert_same
from tests.wire.test_tensors import filled

LIMIT: Final = 8192
LABEL_BYTES: Final = 16


def packed(tensor: Any, kind: int = LONE_RESULT) -> bytes | None:
    return lone_payload(kind, tensor, LIMIT)


def travel(tensor: Tensor, kind: int = LONE_RESULT) -> Any:
    payload = packed(tensor, kind)
    assert payload is not None
    return unpack_lone(bytearray(payload))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape_of_up_to_three_dimensions_arrives(dtype, shape):
    sent = filled(shape, dtype)

    arrived = travel(sent)

    assert_same(arrived, sent)
    assert arrived._base is None
    assert arrived.untyped_storage().nbytes() == sent.nbytes
    assert arrived.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_it_requires_grad_arrives(dtype, shape):
    sent = torch.ones(shape, dtype=dtype, requires_grad=True)

    assert_same(travel(sent), sent)


def test_it_comes_as_the_argument_of_a_call_or_as_a_result():
    sent = torch.arange(3.0)

    assert isinstance(travel(sent, LONE_RESULT), Tensor)
    (argument,) = travel(sent, LONE_ARGUMENT)
    assert_same(argument, sent)


def test_it_can_be_written_to_and_is_nobody_elses_memory():
    sent = torch.zeros(4)

    arrived = travel(sent)
    arrived += 1

    assert sent.tolist() == [0, 0, 0, 0]
    assert arrived.tolist() == [1, 1, 1, 1]


def _freed() -> Tensor:
    tensor = torch.ones(100)[50:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(4, 4).t()[:, 1:], id="strided"),
        pytest.param(lambda: torch.ones(1, 1, 1, 2), id="four dimensions"),
        pytest.param(lambda: torch.ones(0), id="empty"),
        pytest.param(lambda: torch.ones(LIMIT), id="large"),
        pytest.param(lambda: torch.ones(2, device="meta"), id="meta"),
        pytest.param(lambda: torch.ones(2).to_sparse(), id="coo"),
        pytest.param(lambda: torch.ones(2, 2).to_sparse_csr(), id="csr"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj().imag, id="negative"),
        pytest.param(lambda: torch._efficientzerotensor(2), id="zero tensor"),
        pytest.param(lambda: Parameter(torch.ones(2)), id="subclass"),
        pytest.param(_freed, id="freed"),
        pytest.param(lambda: memoryview(b"bytes"), id="not a tensor"),
    ],
)
def test_what_is_more_than_plain_memory_takes_a_table(make):
    assert packed(make()) is None


def test_a_tensor_of_vmap_takes_a_table():
    seen: list[bytes | None] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(packed(tensor))
        return tensor

    torch.vmap(look)(torch.ones(2, 2))

    assert seen == [None]


# -- what a peer might send


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(bytes([LONE_RESULT]), id="no label"),
        pytest.param(bytes([LONE_RESULT, 31, 1, 0]) + bytes(12), id="no such dtype"),
        pytest.param(bytes([LONE_RESULT, 0, 1, 0]) + b"\x05" + bytes(11) + bytes(16), id="too few bytes"),
        pytest.param(bytes([LONE_RESULT, 0, 3, 0]) + b"\xff" * 12 + bytes(16), id="too many elements"),
        pytest.param(bytes([LONE_RESULT, 0, 9, 0]) + b"\x01" * 12 + bytes(16), id="too many dimensions"),
        pytest.param(
            bytes([LONE_RESULT, DTYPE_CODES[torch.int64] | Code.REQUIRES_GRAD, 0, 0]) + bytes(12) + bytes(8),
            id="integers that require grad",
        ),
    ],
)
def test_what_does_not_fit_is_refused(body):
    with pytest.raises(ProtocolError):
        unpack_lone(bytearray(body))


@given(st.binary(min_size=1, max_size=80))
def test_no_bytes_do_more_harm_than_being_refused(body):
    data = bytearray(bytes([LONE_ARGUMENT]) + body)
    try:
        (tensor,) = unpack_lone(data)
    except ProtocolError:
        return
    assert tensor.nbytes <= len(data) - LABEL_BYTES
