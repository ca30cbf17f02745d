from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ProtocolError
from arpc.wire.frames import CHUNK_BYTES, HEADER, Limits, frame
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol
from tests.wire.connections import Spoken, data_frame, feed, noise, opened

LIMITS = Limits(1 << 20, 1 << 26)
LARGE = noise(2 * CHUNK_BYTES + 5)
SMALL = noise(100)


def main_and_lanes(count: int = 2) -> tuple[Protocol, list[Protocol]]:
    main = opened(limits=LIMITS)
    lanes = [opened(limits=LIMITS) for _ in range(count)]
    for lane in lanes:
        lane.join(main)
    return main, lanes


def request(*buffers: bytes) -> bytes:
    return Spoken(MessageType.REQUEST, id=5, buffers=buffers).frame()


def stripe(id_: int, index: int, number: int, data: bytes) -> bytes:
    return HEADER.pack(len(data), MessageType.DATA, 0, 0, id_, index, number, 0, 0) + data


def stripes(id_: int, *buffers: bytes) -> list[bytes]:
    return [
        stripe(id_, index, start // CHUNK_BYTES, buffer[start : start + CHUNK_BYTES])
        for index, buffer in enumerate(buffers)
        for start in range(0, len(buffer), CHUNK_BYTES)
    ]


def content(message: Message) -> list[bytes]:
    return [bytes(buffer) for buffer in message.buffers]


def is_empty(main: Protocol) -> bool:
    inbox = main._inbox
    return not (inbox.waiting or inbox._early or inbox._early_bytes)


@given(st.data())
def test_chunks_may_come_over_any_lane_in_any_order_and_before_their_frame(data):
    main, lanes = main_and_lanes()
    pieces = [("lane", each) for each in stripes(0, LARGE, SMALL)] + [("main", request(LARGE, SMALL))]
    messages: list[Message] = []

    for where, piece in data.draw(st.permutations(pieces)):
        protocol = main if where == "main" else lanes[data.draw(st.integers(0, 1))]
        messages += feed(protocol, piece)

    (message,) = messages
    assert content(message) == [LARGE, SMALL]
    assert is_empty(main)


def test_chunks_are_read_where_they_belong():
    main, (lane, _) = main_and_lanes()
    feed(main, request(LARGE))
    first, second, third = stripes(0, LARGE)
    feed(lane, second[: HEADER.size + 10])

    target = lane.get_buffer(-1)

    assert target.nbytes == CHUNK_BYTES - 10
    assert len(target.obj) == len(LARGE)
    assert feed(lane, second[HEADER.size + 10 :] + third) == []
    (message,) = feed(lane, first)
    assert content(message) == [LARGE]


def test_a_chunk_that_arrives_while_its_frame_does():
    main, (lane, other) = main_and_lanes()
    first, second, third = stripes(0, LARGE)
    feed(lane, first[:1000])  # it does not know its place yet
    feed(main, request(LARGE))
    feed(lane, first[1000:])
    feed(other, second)
    (message,) = feed(other, third)
    assert content(message) == [LARGE]


def test_messages_on_the_main_connection_are_as_ever():
    main, _ = main_and_lanes()
    (message,) = feed(main, request(SMALL) + data_frame(0, SMALL))
    assert content(message) == [SMALL]
    assert is_empty(main)


def test_what_was_dropped_may_still_come_over_a_lane():
    main, (lane, _) = main_and_lanes()
    first, second, third = stripes(0, LARGE)
    feed(main, request(LARGE))
    feed(lane, first)
    feed(main, frame(MessageType.DROP_DATA, 0, 0, 0, 0, b""))

    assert feed(lane, second + third) == []
    assert is_empty(main)
    feed(main, request(SMALL))
    (message,) = feed(lane, stripes(1, SMALL)[0])
    assert content(message) == [SMALL]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(stripe(0, 1, 0, SMALL), id="no such buffer"),
        pytest.param(stripe(0, 0, 1, SMALL), id="beyond its end"),
        pytest.param(stripe(0, 0, 0, SMALL[1:]), id="too short"),
        pytest.param(stripe(0, 0, 0, SMALL + b"x"), id="too long"),
        pytest.param(stripe(0, 0, 0, b""), id="empty"),
        pytest.param(stripe(9, 0, 0, noise(CHUNK_BYTES + 1)), id="larger than a chunk"),
    ],
)
def test_what_does_not_fit_closes_the_lane(bad):
    main, (lane, _) = main_and_lanes()
    feed(main, request(SMALL))
    with pytest.raises(ProtocolError):
        feed(lane, bad)


def test_no_chunk_counts_twice():
    main, (lane, other) = main_and_lanes()
    feed(main, request(LARGE))
    first = stripes(0, LARGE)[0]
    feed(lane, first)
    with pytest.raises(ProtocolError, match="twice"):
        feed(other, first)


@pytest.mark.parametrize("is_striped_first", [True, False])
def test_a_message_comes_one_way_or_the_other(is_striped_first):
    main, (lane, _) = main_and_lanes()
    feed(main, request(LARGE))
    ways = [(main, data_frame(0, LARGE[:CHUNK_BYTES])), (lane, stripes(0, LARGE)[1])]
    (first, begin), (second, go_on) = reversed(ways) if is_striped_first else ways
    feed(first, begin)
    with pytest.raises(ProtocolError, match="beside them"):
        feed(second, go_on)
