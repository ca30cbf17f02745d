from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arpc.errors import ProtocolError
from arpc.wire import handful, noted
from arpc.wire.handful import (
    ARGUMENTS,
    ARGUMENTS_AND_META,
    ARGUMENTS_AND_NOTE,
    LAST_KIND,
    MAX_TENSORS,
    NOTE_BYTES,
    NOTED,
    RESULT_AND_NOTE,
    handful_payload,
    unpack_arguments,
    unpack_handful,
)
from arpc.wire.noted import unpack_noted, without_note
from arpc.wire.table import DTYPES
from tests.wire.exchange import assert_same
from tests.wire.test_tensors import filled

NOTE: Final = bytes(range(NOTE_BYTES))


def packed(*slots: Any, kind: int = ARGUMENTS_AND_NOTE) -> bytes:
    payload = handful_payload(8192, kind, slots)
    assert payload is not None
    return payload


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape_arrives_with_the_note(dtype):
    shapes: list[tuple[int, ...]] = [(), (1,), (5,), (3, 4), (2, 1, 3)]
    sent = [filled(shape, dtype) for shape in shapes]

    for _ in range(2):
        tensors, requiring, note = unpack_noted(packed(*sent) + NOTE)

        assert not requiring
        assert bytes(note) == NOTE
        for one, other in zip(tensors, sent, strict=True):
            assert_same(one, other)
            assert one._base is None


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_which_of_them_shall_require_grad_is_told(dtype, shape):
    plain, requiring = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype, requires_grad=True)
    sent = plain, requiring, plain.clone(), (requiring * 1)

    tensors, places, _ = unpack_noted(packed(*sent) + NOTE)

    assert places == (1, 3)
    assert not any(tensor.requires_grad for tensor in tensors)
    # whoever does not care for notes finds the same tensors
    slots: list[Tensor]
    kind, slots, note, content = unpack_handful(packed(*sent) + NOTE)
    assert (kind, bytes(note), bytes(content)) == (ARGUMENTS_AND_NOTE, NOTE, b"")
    assert [slot.requires_grad for slot in slots] == [False, True, False, True]


def test_each_counts_its_own_versions():
    (first, second), _, _ = unpack_noted(packed(torch.zeros(3), torch.zeros(3)) + NOTE)
    first += 1

    assert (first._version, second._version) == (1, 0)
    assert second.tolist() == [0, 0, 0]


def test_the_note_is_no_part_of_what_lies_in_the_payload():
    payload = bytearray(packed(torch.ones(3)) + NOTE)
    (tensor,), _, note = unpack_noted(payload)
    note[:] = bytes(NOTE_BYTES)
    tensor.zero_()

    assert payload.endswith(NOTE)


@pytest.mark.parametrize("count", range(1, MAX_TENSORS + 1))
def test_a_note_that_is_not_written_leaves_arguments(count):
    sent = [torch.full((number + 1,), float(number), requires_grad=True) for number in range(count)]
    payload = packed(*sent)

    assert without_note(payload) == packed(*sent, kind=ARGUMENTS)
    assert [tensor.tolist() for tensor in unpack_arguments(without_note(payload))] == [one.tolist() for one in sent]


def test_more_kinds_of_tensors_than_are_remembered():
    for size in range(1, 1500):
        (tensor,), _, _ = unpack_noted(packed(torch.ones(size, dtype=torch.int8)) + NOTE)
        assert tensor.shape == (size,)
    assert len(noted._layouts) <= handful._REMEMBERED


# -- what a peer might send


def body_of(count: int, label: bytes, rest: bytes, note_size: int = NOTE_BYTES, kind: int = RESULT_AND_NOTE) -> bytes:
    head_size = 4 + 8 * count
    head = bytes([kind, head_size]) + note_size.to_bytes(2, "little") + label * count
    return head + bytes(-head_size % 16) + rest


FOUR_FLOATS: Final = bytes([0, 1, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("unpack", [unpack_noted, unpack_handful])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(bytes([RESULT_AND_NOTE]), id="no header"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16)), id="no note"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16 + 15)), id="less of a note than it says"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16 + 17)), id="more than the note"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16), note_size=0), id="an empty note"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16 + 15), note_size=15), id="a shorter note"),
        pytest.param(body_of(1, FOUR_FLOATS, bytes(16 + 17), note_size=17), id="a longer note"),
        pytest.param(body_of(2, FOUR_FLOATS, bytes(32 + 16)), id="a result of two tensors"),
        pytest.param(body_of(0, b"", bytes(16)), id="a result of none"),
        pytest.param(body_of(1, bytes([31, 1, 1, 0, 0, 0, 0, 0]), bytes(4 + 16)), id="no such dtype"),
        pytest.param(body_of(1, bytes([0, 4, 1, 0, 1, 0, 1, 0]), bytes(4 + 16)), id="too many dimensions"),
        pytest.param(body_of(1, bytes([0, 3]) + b"\xff" * 6, bytes(32)), id="too many elements"),
    ],
)
def test_what_does_not_fit_is_refused(body, unpack):
    for _ in range(2):  # what was refused is not taken because it was seen before
        with pytest.raises(ProtocolError):
            unpack(bytearray(body))


def test_integers_do_not_require_grad():
    label = next(bytes([64 + code, 1, 2, 0, 0, 0, 0, 0]) for code, dtype in DTYPES.items() if dtype is torch.int64)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="requires grad"):
            unpack_noted(body_of(1, label, bytes(16 + NOTE_BYTES)))


def test_what_has_no_note_is_refused():
    meta = handful_payload(8192, ARGUMENTS_AND_META, [torch.ones(2)], NOTE)
    assert meta is not None
    for _ in range(2):
        with pytest.raises(ProtocolError):
            unpack_noted(meta)
    with pytest.raises(ProtocolError):
        unpack_noted(packed(torch.ones(2), kind=ARGUMENTS))


@given(st.integers(0, MAX_TENSORS), st.integers(1, LAST_KIND), st.binary(max_size=80))
def test_no_bytes_do_more_harm_than_being_refused(count, kind, rest):
    with suppress(ProtocolError):
        tensors, requiring, note = unpack_noted(bytearray(bytes([kind, 4 + 8 * count]) + rest))
        assert kind in NOTED
        assert len(note) == NOTE_BYTES
        assert all(0 <= place < len(tensors) for place in requiring)
        for tensor in tensors:
            assert tensor.nbytes <= len(rest)
            tensor.clone()
