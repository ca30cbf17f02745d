from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError
from arpc.wire.metadata import decode_metadata, encode_metadata, pack_window, unpack_window


@given(st.dictionaries(st.text(max_size=10), st.binary(max_size=30), max_size=5))
def test_metadata_arrive_as_they_were_sent(metadata):
    data = encode_metadata(metadata)
    assert decode_metadata(data) == metadata
    assert decode_metadata(memoryview(bytearray(data))) == metadata


@pytest.mark.parametrize(
    "value", [None, 1, "text", b"bytes", [], ["key", b"value"], {"key": "text"}, {"key": 1}, {1: b""}, {b"key": b""}]
)
def test_what_is_no_map_of_text_to_bytes_is_refused(value):
    with pytest.raises(ProtocolError, match="malformed metadata"):
        decode_metadata(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa3key",
        b"\x81\xa1\xff\xc4\x00",
        b"\x80\x00",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1k\xc6\xff\xff\xff\xff",
    ],
    ids=["empty", "unused", "short", "no-value", "bad-text", "trailing", "huge-map", "deep", "huge-value"],
)
def test_malformed_metadata_are_refused(data):
    with pytest.raises(ProtocolError, match="malformed metadata"):
        decode_metadata(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    try:
        metadata = decode_metadata(data)
    except ProtocolError:
        return
    assert all(type(key) is str and type(value) is bytes for key, value in metadata.items())


@given(st.integers(0, 2**32 - 1))
def test_a_window_arrives_as_it_was_sent(items):
    assert unpack_window(pack_window(items)) == items


@pytest.mark.parametrize("data", [None, b"", b"123", b"12345"])
def test_a_stream_without_a_window_is_refused(data):
    with pytest.raises(ProtocolError, match="how many items"):
        unpack_window(data)
