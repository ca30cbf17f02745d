"""Layouts of tensors on a connection: announced once and used by number, or part of the message that needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError, SerializationError
from arpc.wire import protocol as protocol_module
from arpc.wire.frames import HEADER, ONE_OFF, Limits, frame
from arpc.wire.messages import MessageType
from arpc.wire.protocol import MAX_SCHEMAS, Protocol
from arpc.wire.values.content import Content
from arpc.wire.values.layouts import read_layout
from arpc.wire.values.policy import AllowList
from arpc.wire.values.schemas import Packer
from tests.wire.connections import Spoken, data_frame, endings, feed, heard, noise, opened, schema_frame, table_of

LARGE = protocol_module.RECEIVE_BYTES


def packed(*tensors: torch.Tensor, inline_limit: int = 1 << 20) -> Content:
    return Packer(inline_limit).pack(list(tensors))


def request(tensors: Content, schema: int, pickle: bytes = b"pickle", **changed: bytes) -> bytes:
    """A request with tensors, its layout announced under a number or its own."""
    layout = changed.get("table", tensors.schema.table) if schema == ONE_OFF else schema
    parts = [changed["inline"]] if "inline" in changed else tensors.inline
    sizes = [buffer.nbytes for buffer in tensors.buffers]
    return frame(MessageType.REQUEST, 0, 1, 2, 3, pickle, b"meta", layout, parts, sizes)


def complaint_of(data: bytes, protocol: Protocol | None = None) -> str:
    """Why a connection has ended that was fed something."""
    error = endings(protocol or opened(), data)
    assert isinstance(error, ProtocolError)
    return str(error)


# -- as they should be


@pytest.mark.parametrize("pickle", [b"", b"pickle", noise(LARGE + 1)], ids=["empty", "small", "large"])
@pytest.mark.parametrize("schema", [1, MAX_SCHEMAS, ONE_OFF])
def test_tensors_arrive_with_every_kind_of_layout(schema, pickle):
    tensors = packed(torch.arange(5), torch.ones(2, 3, requires_grad=True))
    announcement = b"" if schema == ONE_OFF else schema_frame(schema, tensors.schema.table)

    messages = feed(opened(), announcement + request(tensors, schema, pickle) * 2)

    assert len(messages) == 2  # the announcement is for the connection itself
    for message in messages:
        numbers, ones = message.layout.build(message.memory, message.buffers)
        assert numbers.tolist() == [0, 1, 2, 3, 4]
        assert ones.requires_grad
        assert bytes(message.meta) == b"meta"
        assert bytes(message.body) == pickle


@pytest.mark.parametrize("schema", [1, ONE_OFF])
def test_large_tensors_arrive_with_every_kind_of_layout(schema):
    large = torch.arange(100)
    tensors = packed(torch.ones(2), large, inline_limit=64)
    announcement = b"" if schema == ONE_OFF else schema_frame(schema, tensors.schema.table)
    chunk = data_frame(0, bytes(tensors.buffers[0]))

    (message,) = feed(opened(), announcement + request(tensors, schema) + chunk)

    _, arrived = message.layout.build(message.memory, message.buffers)
    assert torch.equal(arrived, large)
    assert bytes(message.body) == b"pickle"


def test_a_layout_is_read_once_for_all_messages_that_refer_to_it():
    read = []

    def count(table: bytes):
        read.append(table)
        return read_layout(table)

    tensors = packed(torch.ones(3))
    protocol = opened(read_layout=count)
    feed(protocol, schema_frame(1, tensors.schema.table) + request(tensors, 1) * 5)
    assert read == [tensors.schema.table]
    feed(protocol, request(tensors, ONE_OFF) * 2)
    assert len(read) == 3


def test_each_direction_and_each_connection_has_numbers_of_its_own():
    first, second = opened(), opened()
    feed(first, schema_frame(1, table_of(16)))
    feed(second, schema_frame(1, table_of(32)))
    (short,) = feed(first, Spoken(MessageType.REPLY, inline=bytes(16)).frame(1))
    (long,) = feed(second, Spoken(MessageType.REPLY, inline=bytes(32)).frame(1))
    assert (short.layout.inline_bytes, long.layout.inline_bytes) == (16, 32)


def test_tensors_of_one_message_do_not_change_with_the_next():
    tensors = packed(torch.ones(3))
    protocol = opened()
    (first,) = feed(protocol, schema_frame(1, tensors.schema.table) + request(tensors, 1))
    (ones,) = first.layout.build(first.memory, first.buffers)
    (second,) = feed(protocol, request(packed(torch.zeros(3)), 1))
    (zeros,) = second.layout.build(second.memory, second.buffers)
    assert ones.tolist() == [1.0] * 3
    assert zeros.tolist() == [0.0] * 3


def test_as_many_may_be_announced_as_the_limit_says():
    protocol = opened()
    feed(protocol, b"".join(schema_frame(number, table_of(number)) for number in range(1, MAX_SCHEMAS + 1)))
    message = Spoken(MessageType.REQUEST, inline=noise(MAX_SCHEMAS))
    assert [heard(each) for each in feed(protocol, message.frame(MAX_SCHEMAS))] == [message]


# -- as they must not be


@pytest.mark.parametrize("schema", [1, 2, MAX_SCHEMAS, MAX_SCHEMAS + 1, ONE_OFF - 1])
def test_a_number_that_was_not_announced_is_refused(schema):
    tensors = packed(torch.ones(3))
    protocol = opened()
    feed(protocol, schema_frame(3, tensors.schema.table))
    assert f"schema {schema}, which was not announced" in complaint_of(request(tensors, schema), protocol)


def test_a_number_in_a_large_message_that_was_not_announced_is_refused():
    tensors = packed(torch.ones(3))
    assert "which was not announced" in complaint_of(request(tensors, 1, noise(LARGE + 1)))


@pytest.mark.parametrize("number", [0, MAX_SCHEMAS + 1, ONE_OFF])
def test_a_number_out_of_range_cannot_be_announced(number):
    assert f"schema {number} cannot be announced" in complaint_of(schema_frame(number, table_of(0)))


def test_a_number_cannot_be_announced_twice():
    assert "schema 1 cannot be announced" in complaint_of(schema_frame(1, table_of(0)) + schema_frame(1, table_of(0)))


def test_no_more_is_kept_of_announcements_than_the_limit_says(monkeypatch):
    monkeypatch.setattr(protocol_module, "MAX_SCHEMA_BYTES", 2 * len(table_of(0)))
    announced = b"".join(schema_frame(number, table_of(0)) for number in (1, 2))
    protocol = opened()
    feed(protocol, announced)
    assert "schema 3 cannot be announced" in complaint_of(schema_frame(3, table_of(0)), protocol)


@pytest.mark.parametrize(
    "table",
    [b"", b"\xc1", b"\x95", b"\x95\x00\xc4\x01\x00\x90\x90\x90", table_of(0)[:-1], table_of(0) + b"\0", b"x" * 99],
)
def test_a_malformed_table_is_refused(table):
    complaint_of(schema_frame(1, table))
    complaint_of(frame(MessageType.REQUEST, 0, 1, 2, 3, b"", b"", table, ()))


@pytest.mark.parametrize(
    "data",
    [
        frame(MessageType.SCHEMA, 0, 0, 1, 0, table_of(0), b"meta"),
        frame(MessageType.SCHEMA, 0, 0, 1, 0, table_of(0), buffer_sizes=(8,)),
        frame(MessageType.SCHEMA, 0, 0, 1, 0, table_of(0), b"", table_of(0)),
    ],
    ids=["metadata", "buffers", "layout"],
)
def test_an_announcement_has_a_table_and_nothing_else(data):
    assert "tensors or metadata" in complaint_of(data)


@pytest.mark.parametrize("size", [1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("content", [b"", noise(LARGE + 1)], ids=["small", "large"])
def test_a_table_longer_than_its_message_is_refused(size, content):
    body = content + (len(content) + size if size == 1 else size).to_bytes(4, "little")
    data = HEADER.pack(len(body), MessageType.REQUEST, 0, 0, 1, 2, 3, 0, ONE_OFF) + body
    assert "longer than the message" in complaint_of(data)


@pytest.mark.parametrize("schema", [1, ONE_OFF])
@pytest.mark.parametrize("inline_bytes", [17, 1 << 20, 2**63 - 1])
def test_inline_tensors_longer_than_their_message_are_refused(schema, inline_bytes):
    table = table_of(inline_bytes)
    announcement = b"" if schema == ONE_OFF else schema_frame(schema, table)
    data = frame(MessageType.REQUEST, 0, 1, 2, 3, bytes(8), b"", table if schema == ONE_OFF else schema, [bytes(8)])
    assert "longer than the frame" in complaint_of(announcement + data)


@pytest.mark.parametrize("pickle", [b"p", noise(LARGE + 1)], ids=["small", "large"])
def test_metadata_over_the_limit_is_refused_in_every_message(pickle):
    protocol = opened(limits=Limits(1 << 20, 1 << 20, 100))
    assert "longer than the frame, or than the limit" in complaint_of(
        frame(MessageType.REQUEST, 0, 1, 2, 3, pickle, bytes(101)), protocol
    )


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(0, 70))
def test_any_table_and_size_do_no_more_than_end_the_connection(content, table, size):
    body = content + table + size.to_bytes(4, "little")
    data = HEADER.pack(len(body), MessageType.REQUEST, 0, 0, 1, 2, 3, 0, ONE_OFF) + body
    endings(opened(), data)
    endings(opened(), schema_frame(1, table) + Spoken(MessageType.REQUEST, inline=content).frame(1))


# -- allow-list mode


def quantizes(test: Callable[..., None]) -> Callable[..., None]:
    """Torch warns of quantized tensors wherever they are made or loaded."""
    for message in ("ignore:TypedStorage is deprecated", "ignore:.*quantize"):
        test = pytest.mark.filterwarnings(message)(test)
    return test


def restricted() -> Protocol:
    return opened(read_layout=partial(read_layout, is_restricted=True))


@quantizes
@pytest.mark.parametrize("schema", [1, ONE_OFF])
def test_a_restricted_connection_builds_nothing_that_torch_would_load(schema):
    tensors = packed(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
    announcement = b"" if schema == ONE_OFF else schema_frame(schema, tensors.schema.table)

    (message,) = feed(opened(), announcement + request(tensors, schema))
    assert message.layout.build(message.memory, message.buffers)[0].is_quantized

    (message,) = feed(restricted(), announcement + request(tensors, schema))
    with pytest.raises(SerializationError, match="allow-list mode"):
        message.layout.build(message.memory, message.buffers)


@quantizes
def test_the_policy_of_allow_list_mode_reads_layouts_restricted():
    tensors = packed(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
    layout = AllowList("me").layout(tensors.schema.table)
    with pytest.raises(SerializationError, match="allow-list mode"):
        layout.build(bytearray(b"".join(tensors.inline)), [*tensors.buffers])
