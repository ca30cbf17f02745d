from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError, SerializationError
from arpc.wire import frames
from arpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    ONE_OFF,
    Header,
    Limits,
    buffer_sizes_of,
    frame,
    split_table,
)

u8 = st.integers(0, 2**8 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
parts = st.binary(max_size=40)


def test_the_layout_is_what_the_documentation_says():
    data = frame(17, 1, 2, 3, 4, b"pickle", b"meta", 9, [b"small", b"tensors"], (5, 6))

    assert data[:HEADER_BYTES] == (
        (12 + 16 + 4 + 6).to_bytes(4, "little")
        + bytes([17, 1])
        + (2).to_bytes(2, "little")
        + (2).to_bytes(8, "little")
        + b"".join(n.to_bytes(4, "little") for n in (3, 4, 4, 9))
    )
    assert data[HEADER_BYTES:] == b"smalltensors" + struct.pack("<QQ", 5, 6) + b"meta" + b"pickle"


def test_a_layout_of_tensors_that_was_not_announced_ends_the_body():
    data = frame(17, 0, 2, 3, 4, b"pickle", b"meta", b"table", [b"tensor"])

    assert Header._make(HEADER.unpack_from(data)).schema == ONE_OFF
    assert data[HEADER_BYTES:] == b"tensormetapickletable" + (5).to_bytes(4, "little")


@given(
    st.tuples(u8, u8, u64, u32, u32),
    parts,
    parts,
    st.one_of(st.integers(0, ONE_OFF - 1), st.binary(max_size=64)),
    st.lists(parts, max_size=4),
    st.lists(st.integers(1, 2**64 - 1), max_size=5),
)
def test_a_frame_can_be_taken_apart(numbers, pickle, meta, schema, inline, sizes):
    if schema == 0:  # small tensors always come with a layout
        inline = []
    data = frame(*numbers, pickle, meta, schema, inline, sizes)
    type_, flags, id_, arg, timeout_ms = numbers
    header = Header._make(HEADER.unpack_from(data))
    body = bytearray(data[HEADER_BYTES:])

    is_one_off = isinstance(schema, bytes)
    number = ONE_OFF if is_one_off else schema
    assert header == (len(body), type_, flags, len(sizes), id_, arg, timeout_ms, len(meta), number)
    if is_one_off:
        found, table_start = split_table(body)
        assert found == schema
        del body[table_start:]
    sizes_start = sum(map(len, inline))
    meta_start = sizes_start + 8 * len(sizes)
    assert body[:sizes_start] == b"".join(inline)
    assert list(buffer_sizes_of(body, sizes_start, header.n_buffers, Limits(0, 2**80))) == sizes
    assert body[meta_start:] == meta + pickle


@given(st.binary(max_size=40))
def test_a_table_is_found_in_any_body_or_refused(data):
    body = bytearray(data)
    try:
        table, start = split_table(body)
    except ProtocolError:
        return
    assert body[:start] + table + len(table).to_bytes(4, "little") == data


@pytest.mark.parametrize("size", [1, 7, 2**31, 2**32 - 1])
def test_a_table_that_is_longer_than_its_body_is_refused(size):
    with pytest.raises(ProtocolError, match="longer than the message"):
        split_table(bytearray(b"" if size == 1 else b"sixsix") + size.to_bytes(4, "little"))


@pytest.mark.parametrize("size", range(4))
def test_a_body_without_room_for_the_size_of_its_table_is_refused(size):
    with pytest.raises(ProtocolError, match="longer than the message"):
        split_table(bytearray(size))


def test_a_small_frame_is_header_and_payload_alone():
    assert frame(17, 0, 1, 2, 3, b"xyz") == HEADER.pack(3, 17, 0, 0, 1, 2, 3, 0, 0) + b"xyz"


def test_numbers_that_do_not_fit_are_a_bug_of_the_caller():
    with pytest.raises(struct.error):
        frame(256, 0, 0, 0, 0, b"")
    with pytest.raises(struct.error):
        frame(17, 0, 2**64, 0, 0, b"", b"meta")


class Huge(bytes):
    """Says it is larger than it is: four gigabytes are no test."""

    def __len__(self) -> int:
        return frames.MAX_BODY_BYTES + 1


@pytest.mark.parametrize(("meta", "schema"), [(b"", 0), (b"meta", 0), (b"meta", 1), (b"", b"table")])
def test_a_message_over_four_gigabytes_says_what_to_do(meta, schema):
    with pytest.raises(SerializationError, match=r"a message of 42949\d+ bytes.*send it in parts"):
        frame(17, 0, 0, 0, 0, Huge(), meta, schema)


LIMITS = Limits(body_bytes=100, message_bytes=1000)


def test_large_tensors_are_limited_together():
    body = bytearray(struct.pack("<QQ", 500, 501))

    with pytest.raises(ProtocolError, match="1001 bytes is over the limit of 1000"):
        buffer_sizes_of(body, 0, 2, LIMITS)
    assert buffer_sizes_of(body, 0, 1, LIMITS) == (500,)
    assert buffer_sizes_of(body, 8, 1, LIMITS) == (501,)


def test_an_empty_buffer_is_refused():
    with pytest.raises(ProtocolError, match="empty buffer"):
        buffer_sizes_of(bytearray(struct.pack("<QQ", 5, 0)), 0, 2, LIMITS)
