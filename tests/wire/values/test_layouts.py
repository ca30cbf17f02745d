"""What a message says of its tensors may be wrong in any way: then it is refused, and only its own memory is read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.packing import Slot
from arpc.wire.values.table import DTYPES, Code, Entry, Flag, Kind, decode_table, encode_table
from tests.wire.exchange import BUFFERS, INLINE, body_of, pack, received, unpack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about layouts it still works on

BODY_BYTES: Final = 256
INLINE_BYTES: Final = 128
FLOAT32: Final = 0


class Carried(NamedTuple):
    """What a peer receives."""

    table: bytes
    body: bytearray
    buffers: list[memoryview]


def carried(slots: Sequence[Slot], inline_limit: int) -> Carried:
    packed = pack(slots, inline_limit)
    return Carried(packed.schema.table, body_of(packed), [*map(received, packed.buffers)])


def rebuild(
    codes: Sequence[int],
    sources: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    entries: Sequence[Entry] = (),
    *,
    inline_bytes: int = INLINE_BYTES,
    buffers: Sequence[int] = (64,),
) -> list[Any]:
    table = encode_table((inline_bytes, bytes(codes), sources, shapes, entries))
    return unpack(table, bytearray(BODY_BYTES), [memoryview(bytearray(size)) for size in buffers])


def rebuild_entry(entry: Entry) -> Tensor:
    (tensor,) = rebuild([Code.ENTRY], [0], [()], [entry])
    return tensor


def entry(kind: int = Kind.STRIDED, **fields: Any) -> Entry:
    given = {
        "dtype": FLOAT32,
        "flags": 0,
        "source": 0,
        "shape": (4,),
        "strides": (1,),
        "offset": 0,
        "span_bytes": 64,
        **fields,
    }
    return Entry(kind, **given)


@pytest.mark.parametrize(
    ("code", "source", "shape"),
    [
        pytest.param(FLOAT32, 0, (33,), id="beyond-the-body"),
        pytest.param(FLOAT32, 112, (5,), id="beyond-the-body-with-offset"),
        pytest.param(FLOAT32, 4, (1,), id="not-aligned"),
        pytest.param(Code.BYTES, 4, (1,), id="bytes-not-aligned"),
        pytest.param(FLOAT32, 2**40, (0,), id="far-outside"),
        pytest.param(FLOAT32, 0, (-1,), id="negative-size"),
        pytest.param(FLOAT32, 0, (2**62,), id="huge"),
        pytest.param(FLOAT32, 0, (2**33, 2**33), id="product-overflows"),
        pytest.param(FLOAT32, 0, (1,) * 100, id="too-many-dimensions"),
        pytest.param(FLOAT32, -1, (17,), id="beyond-the-buffer"),
        pytest.param(FLOAT32, -2, (1,), id="no-such-buffer"),
        pytest.param(FLOAT32, -(2**63), (1,), id="no-such-buffer-by-far"),
        pytest.param(31, 0, (1,), id="unknown-dtype"),
        pytest.param(63, 0, (1,), id="unknown-stand-in"),
        pytest.param(31 | Code.REQUIRES_GRAD, 0, (1,), id="unknown-dtype-with-grad"),
        pytest.param(7 | Code.REQUIRES_GRAD, 0, (1,), id="integers-with-grad"),
        pytest.param(130, 0, (1,), id="unknown-kind"),
        pytest.param(255, 0, (1,), id="last-kind"),
        pytest.param(Code.BYTES, 0, (129,), id="bytes-beyond-the-body"),
        pytest.param(Code.BYTES, 0, (-1,), id="bytes-negative"),
        pytest.param(Code.BYTES, 0, (), id="bytes-of-no-size"),
        pytest.param(Code.BYTES, 0, (1, 1), id="bytes-of-two-sizes"),
        pytest.param(Code.BYTES, -1, (65,), id="bytes-beyond-the-buffer"),
        pytest.param(Code.BYTES, -1, (63,), id="bytes-of-another-size-than-the-buffer"),
        pytest.param(Code.BYTES, -9, (1,), id="bytes-of-no-such-buffer"),
        pytest.param(Code.ENTRY, 0, (), id="no-such-entry"),
    ],
)
def test_a_wrong_description_of_a_dense_tensor_is_refused(code, source, shape):
    with pytest.raises(ProtocolError):
        rebuild([code], [source], [shape])


@pytest.mark.parametrize("kind", [Kind.STRIDED, Kind.SHARED])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"shape": (17,)}, id="too-long"),
        pytest.param({"strides": (8,)}, id="strides-too-long"),
        pytest.param({"strides": (2**62,)}, id="stride-overflows"),
        pytest.param({"strides": (2**61 + 1,), "shape": (9,)}, id="stride-wraps-around"),
        pytest.param({"strides": (-1,)}, id="negative-stride"),
        pytest.param({"strides": ()}, id="no-strides"),
        pytest.param({"strides": (1, 1)}, id="too-many-strides"),
        pytest.param({"shape": (-4,)}, id="negative-size"),
        pytest.param({"shape": (2**63,)}, id="more-than-64-bits"),
        pytest.param({"span_bytes": 129}, id="span-beyond-the-body"),
        pytest.param({"span_bytes": -1}, id="negative-span"),
        pytest.param({"span_bytes": 0}, id="no-span"),
        pytest.param({"source": 1024}, id="outside-of-the-body"),
        pytest.param({"source": 4}, id="not-aligned"),
        pytest.param({"source": -1, "span_bytes": 63}, id="another-size-than-the-buffer"),
        pytest.param({"source": -2}, id="no-such-buffer"),
        pytest.param({"dtype": 31}, id="unknown-dtype"),
        pytest.param({"dtype": -1}, id="negative-dtype"),
    ],
)
def test_a_wrong_description_of_a_strided_tensor_is_refused(kind, fields):
    assert rebuild_entry(entry(kind)).shape == (4,)
    with pytest.raises(ProtocolError):
        rebuild_entry(entry(kind, **fields))


@pytest.mark.parametrize(
    "wrong",
    [
        entry(Kind.SHARED, offset=2),
        entry(Kind.SHARED, offset=52),
        entry(Kind.SHARED, offset=-4),
        entry(Kind.SHARED, offset=2**62),
        entry(Kind.META, shape=(2,), strides=()),
        entry(Kind.META, shape=(-2,)),
        entry(Kind.META, shape=(2**40, 2**40), strides=(1, 1)),
        entry(Kind.COO),
        entry(Kind.COO, parts=(entry(), entry())),
        entry(Kind.COO, parts=(entry(dtype=7, shape=(1, 1), strides=(1, 1)), entry(shape=(2,)))),
        entry(Kind.COMPRESSED, parts=(entry(), entry(), entry())),
        entry(Kind.COMPRESSED, parts=(entry(dtype=7), entry(dtype=7), entry()), layout="torch.strided"),
        entry(Kind.COMPRESSED, parts=(entry(dtype=7), entry(dtype=7), entry()), layout="torch.sparse_csr"),
        entry(Kind.SAVED),
        entry(99),
        entry(-1),
    ],
)
def test_a_wrong_entry_is_refused(wrong):
    with pytest.raises(ProtocolError):
        rebuild_entry(wrong)


def test_indices_outside_of_a_sparse_tensor_are_refused():
    message = carried([torch.eye(3).to_sparse_coo()], BUFFERS)
    message.buffers[0][0] = 7
    with pytest.raises(ProtocolError):
        unpack(message.table, message.body, message.buffers)


def test_what_was_saved_is_not_run():
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was unpickled",)

    message = carried([torch.nested.nested_tensor([torch.ones(2)])], BUFFERS)
    bomb = pickle.dumps(Bomb())
    table = decode_table(message.table)
    table.entries[0].span_bytes = len(bomb)
    with pytest.raises(ProtocolError):
        unpack(encode_table(table), message.body, [memoryview(bomb)])


def test_what_was_saved_must_be_a_tensor():
    file = io.BytesIO()
    torch.save({"not": "a tensor"}, file)
    saved = entry(Kind.SAVED, source=-1, span_bytes=file.tell())
    table = encode_table((0, bytes([Code.ENTRY]), [0], [()], [saved]))
    with pytest.raises(ProtocolError, match="it is of type dict"):
        unpack(table, bytearray(), [file.getbuffer()])


@pytest.mark.parametrize("flag", [Flag.CONJUGATE, Flag.NEGATIVE])
def test_what_was_saved_has_no_bits_of_its_own(flag):
    message = carried([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)], BUFFERS)
    table = decode_table(message.table)
    table.entries[0].flags |= flag
    with pytest.raises(ProtocolError, match="conjugate or negative"):
        unpack(encode_table(table), message.body, message.buffers)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ProtocolError, match="different lengths"):
        rebuild([FLOAT32, FLOAT32], [0], [(1,)])
    with pytest.raises(ProtocolError, match="different lengths"):
        rebuild([FLOAT32], [0], [(1,), (1,)])


@pytest.mark.parametrize("inline_bytes", [-1, BODY_BYTES + 1, 2**40])
def test_more_inline_bytes_than_there_are_bytes_are_refused(inline_bytes):
    with pytest.raises(ProtocolError, match=r"larger than the message|Expected `int` >= 0"):
        rebuild([], [], [], inline_bytes=inline_bytes)


@pytest.mark.parametrize(
    "table", [b"", b"\xc1", b"\x95", b"\x90", b"\x91" * 5000, b"\x95\0\xc4\x01\0\xdd\xff\xff\xff\xff"]
)
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ProtocolError, match="tensors that cannot be built"):
        unpack(table, bytearray(10), [])


def test_inline_tensors_that_are_not_aligned_are_refused():
    with pytest.raises(ProtocolError, match="not aligned"):
        rebuild([FLOAT32], [4], [(1,)])
    with pytest.raises(ProtocolError, match="not aligned"):
        rebuild([Code.BYTES], [4], [(1,)])


def test_an_empty_message_has_no_tensors():
    assert rebuild([], [], []) == []


# -- any table

small = st.integers(-2, 70)
number = st.one_of(small, small.map(ALIGNMENT.__mul__), st.integers(-(2**63), 2**63 - 1))
shapes = st.lists(st.one_of(st.integers(0, 6), number), max_size=3).map(tuple)
dtypes = st.one_of(st.sampled_from(sorted(DTYPES)), st.integers(0, 127))


def entries(parts: st.SearchStrategy[tuple[Entry, ...]]) -> st.SearchStrategy[Entry]:
    return st.builds(
        Entry,
        st.sampled_from([*Kind, 0, 7]),
        dtypes,
        st.integers(0, 15),
        number,
        shapes,
        shapes,
        number,
        number,
        st.sampled_from(["", "torch.sparse_csr", "torch.sparse_bsc", "torch.strided"]),
        parts,
    )


any_entry = entries(st.lists(entries(st.just(())), max_size=3).map(tuple))
rows = st.lists(st.tuples(st.one_of(dtypes, st.integers(128, 131)), number, shapes), max_size=4)


def look_at(slots: list[Any]) -> None:
    """Read whatever memory the tensors refer to, as far as that is not a matter of hours."""
    for slot in slots:
        if isinstance(slot, memoryview):
            bytes(slot)
        elif slot.layout is torch.strided and not slot.is_meta and slot.numel() < 10_000:
            start = slot.storage_offset() * slot.element_size()
            assert start <= slot.untyped_storage().nbytes() or not slot.numel()
            slot.detach().clone()


@given(
    rows,
    st.lists(any_entry, max_size=3),
    st.lists(st.integers(1, 100), max_size=3),
    st.one_of(st.integers(-1, BODY_BYTES + 1), st.integers(0, BODY_BYTES // ALIGNMENT).map(ALIGNMENT.__mul__)),
)
@settings(max_examples=500)
def test_any_table_is_built_or_refused(rows, entries, buffers, inline_bytes):
    codes, sources, sizes = [list(column) for column in zip(*rows, strict=True)] or ([], [], [])
    try:
        slots = rebuild(codes, sources, sizes, entries, inline_bytes=inline_bytes, buffers=buffers)
    except ProtocolError:
        return
    assert len(slots) == len(rows)
    look_at(slots)


@cache
def messages() -> list[Carried]:
    base = torch.arange(24.0).view(4, 6)
    slots = [
        torch.arange(6.0),
        torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True),
        base[1:3],
        base[:, 2:4],
        base[0].expand(3, 6),
        torch.arange(12).view(3, 4).t(),
        torch.eye(3).to_sparse_coo(),
        torch.eye(3).to_sparse_csr(),
        torch.empty(2, 2, device="meta"),
        pickle.PickleBuffer(np.arange(5)),
        torch.tensor(1j).conj(),
    ]
    return [carried(slots, limit) for limit in (INLINE, BUFFERS, 20)]


@given(
    st.deferred(lambda: st.sampled_from(messages())),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), max_size=1),
)
@settings(max_examples=500)
def test_a_damaged_table_is_built_or_refused(message, changes, lost):
    table = bytearray(message.table)
    for position, value in changes:
        table[position % len(table)] = value
    buffers = [buffer for index, buffer in enumerate(message.buffers) if index not in lost]
    try:
        slots = unpack(memoryview(table), bytearray(message.body), buffers)
    except ProtocolError:
        return
    look_at(slots)
