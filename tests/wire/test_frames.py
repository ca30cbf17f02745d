from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError, SerializationError
from arpc.wire import frames
from arpc.wire.frames import ALIGNMENT, HEADER, HEADER_BYTES, Header, Limits, buffer_sizes_of, check, frame

u8 = st.integers(0, 2**8 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
parts = st.binary(max_size=40)


def test_the_layout_is_what_the_documentation_says():
    data = frame(17, 1, 2, 3, 4, b"payload", b"meta", b"table", b"inline" * 3, (5, 6))

    assert data[:HEADER_BYTES] == (
        (16 + 4 + 5 + 7 + 18).to_bytes(4, "little")
        + bytes([17, 1])
        + (2).to_bytes(2, "little")
        + (2).to_bytes(8, "little")
        + b"".join(n.to_bytes(4, "little") for n in (3, 4, 4, 5))
    )
    assert data[HEADER_BYTES:] == struct.pack("<QQ", 5, 6) + b"meta" + b"table" + b"payload" + b"inline" * 3


@given(u8, u8, u64, u32, u32, parts, parts, parts, parts, st.lists(st.integers(1, 2**64 - 1), max_size=5))
def test_a_frame_can_be_taken_apart(type_, flags, id_, arg, timeout_ms, payload, meta, table, inline, sizes):
    if not table:  # tensors always come with a table
        inline, sizes = b"", []
    data = frame(type_, flags, id_, arg, timeout_ms, payload, meta, table, inline, sizes)
    header = Header._make(HEADER.unpack_from(data))
    body = bytearray(data[HEADER_BYTES:])

    assert header[1:7] == (type_, flags, len(sizes), id_, arg, timeout_ms)
    assert header.length == len(body)
    check(header, Limits(len(body), 0))
    assert list(buffer_sizes_of(body, header.n_buffers, Limits(0, 2**80))) == sizes
    meta_start = 8 * len(sizes)
    table_start = meta_start + header.meta_size
    payload_start = table_start + header.table_size
    assert body[meta_start:table_start] == meta
    assert body[table_start:payload_start] == table
    assert body[payload_start : payload_start + len(payload)] == payload
    assert body.endswith(inline)
    if inline:
        assert (len(body) - len(inline)) % ALIGNMENT == 0
        assert not any(body[payload_start + len(payload) : len(body) - len(inline)])
    else:
        assert len(body) == payload_start + len(payload)


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


@pytest.mark.parametrize("meta", [b"", b"meta"])
def test_a_message_over_four_gigabytes_says_what_to_do(meta):
    with pytest.raises(SerializationError, match=r"a message of 42949\d+ bytes.*send it in parts"):
        frame(17, 0, 0, 0, 0, Huge(), meta)


LIMITS = Limits(body_bytes=100, message_bytes=1000)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (Header(101, 17, 0, 0, 0, 0, 0, 0, 0), "101 bytes is over the limit of 100"),
        (Header(2**32 - 1, 17, 0, 0, 0, 0, 0, 0, 0), "over the limit"),
        (Header(100, 17, 0, 13, 0, 0, 0, 0, 0), "longer than the frame"),
        (Header(100, 17, 0, 0, 0, 0, 0, 101, 0), "longer than the frame"),
        (Header(100, 17, 0, 0, 0, 0, 0, 0, 101), "longer than the frame"),
        (Header(100, 17, 0, 10, 0, 0, 0, 10, 11), "longer than the frame"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(header, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        check(header, LIMITS)


@pytest.mark.parametrize("header", [Header(100, 17, 0, 10, 0, 0, 0, 10, 10), Header(0, 17, 0, 0, 0, 0, 0, 0, 0)])
def test_sizes_up_to_the_limit_are_accepted(header):
    check(header, LIMITS)


def test_large_tensors_are_limited_together():
    body = bytearray(struct.pack("<QQ", 500, 501))

    with pytest.raises(ProtocolError, match="1001 bytes is over the limit of 1000"):
        buffer_sizes_of(body, 2, LIMITS)
    assert buffer_sizes_of(body, 1, LIMITS) == (500,)


def test_an_empty_buffer_is_refused():
    with pytest.raises(ProtocolError, match="empty buffer"):
        buffer_sizes_of(bytearray(struct.pack("<QQ", 5, 0)), 2, LIMITS)
