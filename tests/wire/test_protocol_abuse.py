"""Nothing that a peer sends can do more than end its own connection, and cost more memory than it may use."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpc.errors import HandshakeError, ProtocolError
from arpc.wire.frames import CHUNK_BYTES, HEADER, HEADER_BYTES, ONE_OFF, Limits, frame
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, Role
from arpc.wire.messages import MessageType
from arpc.wire.protocol import Protocol, State
from tests.wire.connections import (
    LIMITS,
    Spoken,
    chunks_of,
    data_frame,
    end,
    endings,
    feed,
    kept_by,
    noise,
    opened,
    schema_frame,
    table_of,
)

# -- every state that bytes can come in


def awaiting_challenge() -> Protocol:
    return end(Role.CONNECTOR)


def awaiting_welcome() -> Protocol:
    connector, acceptor = end(Role.CONNECTOR), end(Role.ACCEPTOR)
    feed(acceptor, connector.take_output())
    feed(connector, acceptor.take_output())
    return connector


def awaiting_hello() -> Protocol:
    return end(Role.ACCEPTOR)


def awaiting_proof() -> Protocol:
    acceptor = end(Role.ACCEPTOR)
    feed(acceptor, end(Role.CONNECTOR).take_output())
    return acceptor


def awaiting_data() -> Protocol:
    protocol = opened()
    feed(protocol, Spoken(MessageType.REQUEST, buffers=(noise(50), noise(60))).frame() + data_frame(0, noise(50)))
    return protocol


def within_a_chunk() -> Protocol:
    protocol = opened()
    feed(protocol, Spoken(MessageType.REQUEST, buffers=(noise(50),)).frame() + data_frame(0, noise(50))[:-9])
    return protocol


def within_a_large_body() -> Protocol:
    protocol = opened()
    feed(protocol, Spoken(MessageType.REQUEST, pickle=noise(300_000)).frame()[:-9])
    return protocol


def closing() -> Protocol:
    protocol = opened()
    protocol.say_goodbye("")
    return protocol


STRANGERS: Final = (awaiting_challenge, awaiting_welcome, awaiting_hello, awaiting_proof)
FRIENDS: Final = (opened, awaiting_data, within_a_chunk, within_a_large_body, closing)
STATES: Final = (*STRANGERS, *FRIENDS)
states = st.sampled_from(STATES)
in_every_state = pytest.mark.parametrize("make", STATES)


@pytest.fixture(autouse=True)
def _nothing_is_unpickled() -> Iterator[None]:
    """The wire finds messages; what is in them is for others to open."""
    with (
        mock.patch.object(pickle, "loads", side_effect=AssertionError),
        mock.patch.object(pickle, "Unpickler", side_effect=AssertionError),
        mock.patch.object(torch, "load", side_effect=AssertionError),
    ):
        yield


# -- bytes that are no arpc

pieces = st.lists(st.integers(1, 200), min_size=1, max_size=20).map(cycle)
header_fields = st.tuples(
    st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1)),
    st.one_of(st.sampled_from(list(MessageType)), st.integers(0, 255)),
    st.integers(0, 255),
    st.one_of(st.integers(0, 3), st.integers(0, 2**16 - 1)),
    st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.one_of(st.integers(0, 30), st.integers(0, 2**32 - 1)),
    st.one_of(st.sampled_from([0, 1, ONE_OFF]), st.integers(0, 2**32 - 1)),
)
frames_of_sorts = st.lists(
    st.tuples(header_fields.map(lambda fields: HEADER.pack(*fields)), st.binary(max_size=120)).map(b"".join), max_size=6
).map(b"".join)


@given(states, st.binary(max_size=400), pieces)
def test_random_bytes_do_no_more_than_end_the_connection(make, data, pieces):
    endings(make(), data, pieces)


@given(states, frames_of_sorts, pieces)
@settings(max_examples=400)
def test_random_frames_do_no_more_than_end_the_connection(make, data, pieces):
    endings(make(), data, pieces)


def valid_stream() -> bytes:
    bulk = Spoken(MessageType.REPLY, id=3, meta=b"meta", pickle=b"pickle", buffers=(noise(40), noise(30)))
    small = Spoken(MessageType.REPLY, id=4, meta=b"meta", pickle=b"pickle", inline=noise(32))
    return b"".join(
        [
            schema_frame(1, table_of(32)),
            small.frame(1),
            small.frame(),
            Spoken(MessageType.REQUEST, id=1, pickle=b"first").frame(),
            bulk.frame(),
            frame(MessageType.PING, 0, 5, 0, 0, b""),
            *chunks_of(0, bulk.buffers, 25),
            bulk.frame(),
            frame(MessageType.DROP_DATA, 0, 1, 0, 0, b""),
            Spoken(MessageType.GOODBYE, pickle=b"bye").frame(),
        ]
    )


VALID: Final = valid_stream()


def conversation() -> tuple[bytes, bytes]:
    """All that each side of a handshake hears. Played again it fails in the end: proofs are for one session only."""
    connector, acceptor = end(Role.CONNECTOR), end(Role.ACCEPTOR)
    to_acceptor = connector.take_output()
    feed(acceptor, to_acceptor)
    to_connector = acceptor.take_output()
    feed(connector, to_connector)
    to_acceptor += (proof := connector.take_output())
    feed(acceptor, proof)
    return to_acceptor, to_connector + acceptor.take_output()


TO_ACCEPTOR, TO_CONNECTOR = conversation()
mutations = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "repeat"]), st.integers(0, 2**16), st.integers(0, 255)),
    min_size=1,
    max_size=5,
)


def mutated(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    result = bytearray(data)
    for how, where, value in changes:
        position = where % max(len(result), 1)
        if how == "set":
            result[position : position + 1] = bytes([value])
        elif how == "insert":
            result[position:position] = bytes([value])
        elif how == "delete":
            del result[position : position + value % 40]
        else:
            result[position:position] = result[position : position + value]
    return bytes(result)


@given(mutations, pieces)
@settings(max_examples=400)
def test_a_damaged_stream_does_no_more_than_end_the_connection(changes, pieces):
    endings(opened(), mutated(VALID, changes), pieces)


@given(st.sampled_from([(awaiting_hello, TO_ACCEPTOR), (awaiting_challenge, TO_CONNECTOR)]), mutations, pieces)
@settings(max_examples=200)
def test_a_damaged_handshake_does_no_more_than_end_the_connection(start, changes, pieces):
    make, data = start
    protocol = make()
    endings(protocol, mutated(data, changes), pieces)
    assert protocol.state in {State.HANDSHAKE, State.CLOSED}
    assert protocol.peer is None


@given(st.integers(0, len(VALID) - 1))
def test_a_truncated_stream_waits_for_more(cut):
    protocol = opened()
    assert endings(protocol, VALID[:cut]) is None


@in_every_state
def test_an_http_request_ends_the_connection(make):
    protocol = make()
    error = endings(protocol, b"GET /metrics HTTP/1.1\r\nHost: localhost:27720\r\nAccept: */*\r\n\r\n" * 6000)

    assert isinstance(error, ProtocolError)


# -- frames that are wrong in one way


def header(length: int = 0, type_: int = MessageType.REQUEST, n_buffers: int = 0, id_: int = 0, **sizes: int) -> bytes:
    return HEADER.pack(length, type_, 0, n_buffers, id_, 0, 0, sizes.get("meta", 0), sizes.get("schema", 0))


def to_the_next_frame(make: Callable[[], Protocol]) -> Protocol:
    """A protocol in the state, at the beginning of a frame."""
    protocol = make()
    if make in {within_a_chunk, within_a_large_body}:
        feed(protocol, bytes(9))
    return protocol


@in_every_state
def test_an_unknown_type_is_refused(make):
    for type_ in sorted(set(range(256)) - set(MessageType)):
        error = endings(to_the_next_frame(make), header(type_=type_))
        assert isinstance(error, ProtocolError)
        assert f"unknown type {type_}" in str(error)


@in_every_state
def test_a_frame_over_the_limit_is_refused_by_its_header(make):
    limit = MAX_HANDSHAKE_BYTES if make in STRANGERS else LIMITS.body_bytes
    for length in (limit + 1, 2**32 - 1):
        error = endings(to_the_next_frame(make), header(length))
        assert isinstance(error, ProtocolError)
        assert f"a frame of {length} bytes is over the limit of {limit}" in str(error)


@in_every_state
@pytest.mark.parametrize(
    "parts", [{"n_buffers": 2}, {"meta": 16}, {"n_buffers": 1, "meta": 8}, {"n_buffers": 65_535, "meta": 2**32 - 1}]
)
def test_parts_longer_than_their_frame_are_refused(make, parts):
    error = endings(to_the_next_frame(make), header(15, **parts) + bytes(15))
    assert isinstance(error, ProtocolError)
    assert "longer than the frame" in str(error)


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("type_", [type_ for type_ in MessageType if type_ >= MessageType.DATA])
def test_a_stranger_may_say_nothing_but_the_handshake(make, type_):
    error = endings(make(), header(4, type_) + b"1234")
    assert isinstance(error, ProtocolError)
    assert f"{type_.name} is out of place in a handshake" in str(error)


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("schema", [1, ONE_OFF])
def test_no_layout_of_a_stranger_is_read(make, schema):
    protocol = make()
    protocol._read_layout = mock.Mock(side_effect=AssertionError)
    error = endings(protocol, Spoken(MessageType.HELLO, inline=bytes(16)).frame(schema))
    assert isinstance(error, ProtocolError)
    assert "with tensors is out of place in a handshake" in str(error)


@pytest.mark.parametrize("make", FRIENDS)
@pytest.mark.parametrize("type_", [type_ for type_ in MessageType if type_ < MessageType.DATA])
def test_there_is_one_handshake_only(make, type_):
    error = endings(to_the_next_frame(make), header(0, type_))
    assert isinstance(error, ProtocolError)
    assert f"{type_.name} is out of place in an open connection" in str(error)


ANNOUNCED: Final = Spoken(MessageType.REQUEST, buffers=(bytes(50), bytes(60))).frame()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        pytest.param(data_frame(0, b"x"), "DATA for frame 0, which waits for none", id="nothing-announced"),
        pytest.param(ANNOUNCED + data_frame(1, b"x"), "DATA for frame 1, which waits for none", id="another-number"),
        pytest.param(ANNOUNCED + header(0, MessageType.DATA), "empty DATA", id="empty"),
        pytest.param(ANNOUNCED + data_frame(0, bytes(51)), "more DATA than was announced", id="over-the-end"),
        pytest.param(ANNOUNCED + header(51, MessageType.DATA), "more DATA than was announced", id="by-its-header"),
        pytest.param(
            ANNOUNCED + data_frame(0, bytes(50)) + data_frame(0, bytes(60)) + data_frame(0, b"x"),
            "DATA for frame 0, which waits for none",
            id="complete",
        ),
        pytest.param(
            ANNOUNCED + header(0, MessageType.DROP_DATA) + data_frame(0, b"x"),
            "DATA for frame 0, which waits for none",
            id="dropped",
        ),
        pytest.param(header(0, MessageType.DROP_DATA, id_=7), "DROP_DATA for frame 7, which waits", id="drop-unknown"),
        pytest.param(
            Spoken(MessageType.REQUEST, buffers=(bytes(8), b"")).frame(), "an empty buffer was announced", id="no-bytes"
        ),
        pytest.param(
            header(16, n_buffers=2) + (2**19).to_bytes(8, "little") + (2**19 + 1).to_bytes(8, "little"),
            f"a message of {2**20 + 1} bytes is over the limit",
            id="too-large",
        ),
        pytest.param(header(8, n_buffers=1) + b"\xff" * 8, "is over the limit", id="much-too-large"),
    ],
)
def test_data_that_does_not_fit_what_was_announced_is_refused(data, complaint):
    error = endings(opened(), data)
    assert isinstance(error, ProtocolError)
    assert complaint in str(error)


def test_what_was_complete_before_an_error_in_the_same_read_is_lost_with_the_connection():
    protocol = opened()
    with pytest.raises(ProtocolError):
        feed(protocol, Spoken(MessageType.REQUEST).frame() + header(type_=0))
    assert protocol.state is State.CLOSED


# -- memory


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", STRANGERS)
def test_a_stranger_is_given_a_few_kilobytes(make):
    full = header(MAX_HANDSHAKE_BYTES, MessageType.HELLO) + bytes(MAX_HANDSHAKE_BYTES)
    attempts = [full, header(2**32 - 1, MessageType.HELLO), header(8, n_buffers=1) + b"\xff" * 8, bytes(100_000)]
    make()  # what is made once, the first time, does not count
    for data in attempts:

        def attempt(data: bytes = data) -> None:
            protocol = make()
            assert protocol.get_buffer(-1).nbytes <= HEADER_BYTES + MAX_HANDSHAKE_BYTES
            assert isinstance(endings(protocol, data), ProtocolError | HandshakeError)

        assert peak_bytes(attempt) < 48 * 1024


@given(frames_of_sorts, pieces)
def test_a_friend_is_given_no_more_than_the_limits(data, pieces):
    limits = Limits(body_bytes=10_000, message_bytes=20_000)
    allocated: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        allocated.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    protocol = opened(limits=limits, allocate=allocate)
    endings(protocol, data, pieces)

    assert all(size <= limits.message_bytes for size in allocated)
    assert kept_by(protocol)["bytes_incomplete"] <= limits.message_bytes + limits.body_bytes


def test_memory_is_taken_when_bytes_come_and_not_when_they_are_announced():
    allocated: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        allocated.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    protocol = opened(allocate=allocate)
    for _ in range(100):
        feed(protocol, Spoken(MessageType.REQUEST, buffers=(bytes(1000), bytes(2000))).frame())
    assert allocated == []
    assert kept_by(protocol) == {"messages_incomplete": 100, "bytes_incomplete": 0}

    feed(protocol, data_frame(50, bytes(1)))
    assert allocated == [1000]


def test_no_memory_for_a_tensor_ends_the_connection():
    def allocate(size_bytes: int) -> memoryview:
        raise MemoryError

    error = endings(
        opened(allocate=allocate), Spoken(MessageType.REQUEST, buffers=(bytes(9),)).frame() + data_frame(0, b"x")
    )
    assert isinstance(error, ProtocolError)
    assert "no memory for a tensor of 9 bytes" in str(error)


def test_no_memory_for_a_body_ends_the_connection():
    protocol = opened(limits=Limits(2**32 - 1, 0))
    with mock.patch("arpc.wire.protocol.bytearray", side_effect=MemoryError, create=True):
        error = endings(protocol, header(2**32 - 1))
    assert isinstance(error, ProtocolError)
    assert "no memory for a frame of 4294967295 bytes" in str(error)


def test_chunks_are_small_enough_for_a_small_message_to_pass_soon():
    assert CHUNK_BYTES <= 1 << 20
