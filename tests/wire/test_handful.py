from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError
from arpc.wire import handful
from arpc.wire.frames import ALIGNMENT
from arpc.wire.handful import (
    ARGUMENTS,
    ARGUMENTS_AND_META,
    LAST_KIND,
    MAX_TENSORS,
    PARCEL_ARGUMENT,
    PICKLED_RESULT,
    RESULT,
    RESULT_AND_META,
    Handful,
    handful_payload,
    unpack_arguments,
    unpack_handful,
    unpack_result,
)
from arpc.wire.likeness import fits_nothing
from arpc.wire.table import DTYPES
from tests.wire.exchange import assert_same
from tests.wire.test_tensors import filled

LIMIT: Final = 8192


@pytest.fixture(params=["at once", "one by one"], autouse=True)
def ways_to_look(request, monkeypatch):
    """Tensors are looked at one by one where torch does not compare them at once."""
    for memory in (handful._heads, handful._recent):
        memory.clear()
    if request.param == "one by one":
        monkeypatch.setattr(handful, "fits_like", lambda _: fits_nothing)
    yield
    for memory in (handful._heads, handful._recent):
        memory.clear()


def packed(*slots: Any, kind: int = ARGUMENTS, meta: bytes = b"", content: bytes = b"") -> bytes | None:
    return handful_payload(LIMIT, kind, slots, meta, content)


def travel(*slots: Tensor, **more: Any) -> Handful:
    payload = packed(*slots, **more)
    assert payload is not None
    assert packed(*slots, **more) == payload  # which is made of what is remembered of the first
    return unpack_handful(bytearray(payload))


def arrived(*slots: Tensor, **more: Any) -> list[Tensor]:
    return travel(*slots, **more)[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape_of_up_to_three_dimensions_arrives(dtype):
    shapes: list[tuple[int, ...]] = [(), (1,), (5,), (3, 4), (2, 1, 3)]
    sent = [filled(shape, dtype) for shape in shapes]

    for one, other in zip(arrived(*sent), sent, strict=True):
        assert_same(one, other)
        assert one._base is None
        assert one.untyped_storage().nbytes() == other.nbytes
        assert one.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("count", range(MAX_TENSORS + 1))
def test_any_number_of_them_arrives_with_what_comes_with_them(count):
    sent = [torch.full((number + 1,), float(number)) for number in range(count)]

    kind, slots, meta, content = travel(*sent, kind=PICKLED_RESULT, meta=b"meta", content=b"content")

    assert (kind, bytes(meta), bytes(content)) == (PICKLED_RESULT, b"meta", b"content")
    assert [slot.tolist() for slot in slots] == [tensor.tolist() for tensor in sent]


@pytest.mark.parametrize("count", range(1, MAX_TENSORS + 1))
def test_they_are_the_arguments_of_a_call(count):
    sent = [torch.full((number + 1,), float(number)) for number in range(count)]
    payload = packed(*sent)
    assert payload is not None

    assert [tensor.tolist() for tensor in unpack_arguments(payload)] == [tensor.tolist() for tensor in sent]


@pytest.mark.parametrize("sent", [torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16)], ids=str)
def test_one_of_them_is_a_result(sent):
    payload = packed(sent, kind=RESULT)
    assert payload is not None

    assert_same(unpack_result(payload), sent)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_they_require_grad_arrives(dtype, shape):
    plain, requiring = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype, requires_grad=True)

    assert [tensor.requires_grad for tensor in arrived(plain, requiring)] == [False, True]
    with torch.no_grad():
        assert [tensor.requires_grad for tensor in arrived(requiring, plain)] == [True, False]
    assert [tensor.requires_grad for tensor in arrived(plain, plain.clone())] == [False, False]
    assert all(tensor.is_leaf for tensor in arrived(plain, requiring))


def test_what_looks_a_bit_different_from_the_last_is_looked_at_again():
    base = torch.arange(64.0).reshape(8, 8)
    for sent in (base[:2, :2].clone(), base[2:4, :2].clone().double(), base[:2, :2].clone().requires_grad_()):
        (tensor,) = arrived(sent)
        assert_same(tensor, sent)
        assert packed(base[:2, :2]) is None
        assert packed(torch._neg_view(sent.detach())) is None


def test_tensors_of_inference_mode_arrive_between_others():
    with torch.inference_mode():
        unusual = torch.ones(3)
    for sent in (torch.zeros(3), unusual, unusual, torch.zeros(3)):
        (tensor,) = arrived(sent)
        assert tensor.tolist() == sent.tolist()
        with torch.inference_mode():
            (tensor,) = arrived(sent)
        assert tensor.tolist() == sent.tolist()


def test_a_parameter_is_sent_as_the_tensor_that_it_is():
    (tensor,) = arrived(Parameter(torch.ones(2)))

    assert type(tensor) is Tensor
    assert tensor.requires_grad


def test_parts_of_storages_arrive_as_tensors_of_their_own():
    sent = torch.arange(4.0)[1:3], torch.arange(8.0)[3:6]

    assert [tensor.tolist() for tensor in arrived(*sent)] == [[1, 2], [3, 4, 5]]


def test_they_can_be_written_to_and_have_no_memory_in_common():
    first, second = arrived(torch.zeros(3), torch.zeros(3))
    first += 1

    assert second.tolist() == [0, 0, 0]


def test_they_keep_the_memory_they_lie_in():
    body = bytearray(packed(torch.ones(3), torch.ones(3)) or b"")
    first, second = unpack_arguments(body)
    del body, first

    assert second.tolist() == [1, 1, 1]


def test_no_pickle_begins_like_it():
    assert ARGUMENTS > 0
    assert min(pickle.dumps(None, protocol=protocol)[0] for protocol in range(6)) > LAST_KIND


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
        pytest.param(lambda: torch.ones(1 << 16, dtype=torch.int8), id="long"),
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
        pytest.param(lambda: torch.ones(2).as_subclass(type("Odd", (Tensor,), {})), id="subclass"),
        pytest.param(_freed, id="freed"),
        pytest.param(lambda: memoryview(b"bytes"), id="not a tensor"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_more_than_plain_memory_takes_a_table(make, place):
    plain = torch.ones(2)
    slots = [plain]
    slots.insert(place, make())

    for _ in range(2):
        assert packed(*slots) is None
        assert packed(slots[place]) is None
        assert packed(torch.ones(2), plain) is not None


def test_a_tensor_of_vmap_takes_a_table():
    seen: list[bytes | None] = [packed(torch.ones(2))]

    def look(tensor: Tensor) -> Tensor:
        seen.append(packed(tensor))
        return tensor

    torch.vmap(look)(torch.ones(2, 2))

    assert seen[1:] == [None]


def test_so_does_what_shares_memory_but_not_in_a_parcel():
    whole = torch.arange(4.0)
    halves = whole[:2], whole[2:]

    assert packed(*halves) is None
    assert packed(whole, whole) is None
    assert [half.tolist() for half in arrived(*halves, kind=PARCEL_ARGUMENT)] == [[0, 1], [2, 3]]
    assert [one.tolist() for one in arrived(whole, whole, kind=PARCEL_ARGUMENT)] == [[0, 1, 2, 3]] * 2


def test_so_do_too_many_and_too_much_that_rides_along():
    assert packed(*[torch.ones(1) for _ in range(MAX_TENSORS + 1)]) is None
    assert packed(torch.ones(1), kind=ARGUMENTS_AND_META, meta=bytes(1 << 16)) is None


def test_more_kinds_of_tensors_than_are_remembered():
    for size in range(1, 1500):
        (tensor,) = arrived(torch.ones(size, dtype=torch.int8))
        assert tensor.shape == (size,)
    assert max(map(len, (handful._heads, handful._recent, handful._layouts))) <= handful._REMEMBERED


# -- what a peer might send


def body_of(count: int, label: bytes, rest: bytes, meta_size: int = 0, kind: int = RESULT_AND_META) -> bytes:
    head_size = 4 + 8 * count
    head = bytes([kind, head_size]) + meta_size.to_bytes(2, "little") + label * count
    return head + bytes(-head_size % 16) + rest


FOUR_FLOATS: Final = bytes([0, 1, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(bytes([RESULT_AND_META]), id="no header"),
        pytest.param(bytes([RESULT_AND_META, 28]) + bytes(6), id="no labels"),
        pytest.param(bytes([RESULT_AND_META, 13]) + bytes(30), id="a head of no such size"),
        pytest.param(body_of(1, bytes([31, 1, 1, 0, 0, 0, 0, 0]), bytes(4)), id="no such dtype"),
        pytest.param(body_of(1, bytes([200, 1, 1, 0, 0, 0, 0, 0]), bytes(4)), id="no tensor"),
        pytest.param(body_of(1, bytes([0, 4, 1, 0, 1, 0, 1, 0]), bytes(4)), id="too many dimensions"),
        pytest.param(
            body_of(MAX_TENSORS + 1, bytes([3, 1, 16, 0, 0, 0, 0, 0]), bytes(16 * 9), kind=ARGUMENTS),
            id="too many tensors",
        ),
        pytest.param(body_of(1, bytes([0, 1, 5, 0, 0, 0, 0, 0]), bytes(16)), id="too few bytes"),
        pytest.param(body_of(1, bytes([0, 3]) + b"\xff" * 6, bytes(16)), id="too many elements"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(32)), id="too many bytes"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16), meta_size=1), id="less than it says"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(17), meta_size=1, kind=RESULT), id="meta where there are none"),
        pytest.param(body_of(2, FOUR_FLOATS, bytes(32), kind=RESULT), id="a result of two tensors"),
        pytest.param(body_of(0, b"", b"", kind=RESULT), id="a result of none"),
        pytest.param(body_of(1, bytes([64 + 7, 1, 2, 0, 0, 0, 0, 0]), bytes(16)), id="integers that require grad"),
    ],
)
def test_what_does_not_fit_is_refused(body):
    for _ in range(2):  # what was refused is not taken because it was seen before
        with pytest.raises(ProtocolError):
            unpack_handful(bytearray(body))
        with pytest.raises(ProtocolError):
            unpack_result(bytearray([RESULT]) + body[1:])


def test_arguments_that_do_not_fit_are_refused():
    payload = packed(torch.ones(4), torch.ones(4)) or b""

    for body in (payload[:1], payload[:10], payload[:-1], payload + b"\0", bytes([ARGUMENTS, 20, 1, 0]) + payload[4:]):
        with pytest.raises(ProtocolError):
            unpack_arguments(bytearray(body))


@given(st.integers(0, MAX_TENSORS), st.integers(1, LAST_KIND), st.binary(max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_do_more_harm_than_being_refused(count, kind, rest):
    data = bytearray(bytes([kind, 4 + 8 * count]) + rest)
    found: list[Tensor] = []
    for unpack in (
        lambda body: unpack_handful(body)[1],
        unpack_arguments,
        lambda body: [unpack_result(body)],
    ):
        with suppress(ProtocolError):
            found += unpack(bytearray(data))
    for tensor in found:
        assert tensor.nbytes <= len(rest)
        tensor.detach().clone()
