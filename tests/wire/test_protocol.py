from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arpc.errors import AuthenticationError
from arpc.wire import protocol as protocol_module
from arpc.wire.frames import CHUNK_BYTES, HEADER_BYTES, ONE_OFF, Limits, frame
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, Handshake, Identity, Refused, Role
from arpc.wire.messages import MessageType, Refusal
from arpc.wire.protocol import Protocol, State
from tests.wire.connections import (
    ALICE,
    BOB,
    LIMITS,
    Spoken,
    chunks_of,
    converse,
    data_frame,
    end,
    feed,
    heard,
    kept_by,
    noise,
    opened,
    opened_pair,
    schema_frame,
    table_of,
)
from tests.wire.streams import SMALL_BUFFER, pieces, spoken, streams


def request(id_: int = 0, pickle: bytes = b"", **parts: object) -> Spoken:
    return Spoken(MessageType.REQUEST, id=id_, pickle=pickle, **parts)


# -- the handshake, seen from here


def test_two_ends_open_by_talking_to_each_other():
    connector, acceptor = end(Role.CONNECTOR), end(Role.ACCEPTOR)
    assert connector.state is acceptor.state is State.HANDSHAKE
    assert connector.peer is acceptor.peer is None

    converse(connector, acceptor)

    assert connector.state is acceptor.state is State.OPEN
    assert connector.peer == BOB
    assert acceptor.peer == ALICE


def test_the_connector_speaks_first():
    assert end(Role.ACCEPTOR).take_output() == b""
    connector = end(Role.CONNECTOR)
    assert connector.take_output()
    assert connector.take_output() == b""


@pytest.mark.parametrize("piece", [1, 2, 31, 33])
def test_a_handshake_may_come_in_pieces(piece):
    connector, acceptor = end(Role.CONNECTOR), end(Role.ACCEPTOR)

    feed(acceptor, connector.take_output(), repeat(piece))
    feed(connector, acceptor.take_output(), repeat(piece))
    feed(acceptor, connector.take_output(), repeat(piece))
    assert acceptor.state is State.OPEN
    assert connector.state is State.HANDSHAKE
    feed(connector, acceptor.take_output(), repeat(piece))
    assert connector.state is State.OPEN


@pytest.mark.parametrize("size", [10, MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES + 1, 100_000, 300_000])
def test_messages_may_come_right_behind_the_handshake(size):
    connector, acceptor = end(Role.CONNECTOR), end(Role.ACCEPTOR)
    feed(acceptor, connector.take_output())
    feed(connector, acceptor.take_output())
    first, second = request(1, noise(size)), request(2, b"last")

    messages = feed(acceptor, connector.take_output() + first.frame() + second.frame())

    assert [heard(message) for message in messages] == [first, second]


def test_a_refusal_reaches_the_other_end_and_closes_both():
    def admit(_: Identity) -> None:
        raise Refused(Refusal.CLOSING, "not today")

    connector = end(Role.CONNECTOR)
    acceptor = Protocol(Handshake(Role.ACCEPTOR, BOB, b"secret", admit), LIMITS)
    feed(acceptor, connector.take_output())
    feed(connector, acceptor.take_output())

    with pytest.raises(Refused, match="not today"):
        feed(acceptor, connector.take_output())
    assert acceptor.state is State.CLOSED
    with pytest.raises(Refused, match="not today"):
        feed(connector, acceptor.take_output())
    assert connector.state is State.CLOSED
    assert connector.take_output() == b""  # a refusal is not answered
    assert connector.peer is acceptor.peer is None


def test_a_wrong_secret_is_told_to_the_other_end():
    connector, acceptor = end(Role.CONNECTOR, secret=b"one"), end(Role.ACCEPTOR, secret=b"two")
    feed(acceptor, connector.take_output())

    with pytest.raises(AuthenticationError, match="another group secret"):
        feed(connector, acceptor.take_output())
    with pytest.raises(AuthenticationError, match="the peer refused the connection: authentication failed"):
        feed(acceptor, connector.take_output())


# -- states


def test_goodbye_lets_what_is_under_way_arrive():
    connector, acceptor = opened_pair()
    bulk = request(1, buffers=(noise(100),))
    feed(acceptor, bulk.frame())

    (goodbye,) = feed(acceptor, connector.say_goodbye("that's all"))
    assert goodbye.type is MessageType.GOODBYE
    assert goodbye.body == b"that's all"
    assert connector.state is acceptor.state is State.CLOSING

    late = request(2, b"late")
    messages = feed(acceptor, late.frame() + data_frame(0, noise(100)))
    assert [heard(message) for message in messages] == [late, bulk]


def test_goodbye_is_said_once_and_only_when_open():
    connector, acceptor = opened_pair()
    assert end(Role.CONNECTOR).say_goodbye("x") == b""
    assert connector.say_goodbye("x")
    assert connector.say_goodbye("x") == b""
    # both may say it at once
    feed(connector, acceptor.say_goodbye("y"))
    assert connector.state is State.CLOSING
    connector.close()
    assert connector.say_goodbye("x") == b""


def test_a_long_goodbye_is_cut():
    connector, acceptor = opened_pair()
    (goodbye,) = feed(acceptor, connector.say_goodbye("ü" * 5000))
    assert goodbye.body.decode() == "ü" * 512


@pytest.mark.parametrize("make", [lambda: end(Role.CONNECTOR), lambda: end(Role.ACCEPTOR), opened])
def test_a_closed_connection_ignores_what_comes_and_forgets_what_came(make):
    protocol = make()
    if protocol.state is State.OPEN:
        feed(protocol, request(1, buffers=(noise(9),)).frame() + data_frame(0, b"x") + b"half a header"[:10])
    protocol.close()
    protocol.close()

    assert protocol.state is State.CLOSED
    assert feed(protocol, request().frame() + bytes(1000)) == []
    assert protocol.get_buffer(-1).nbytes > 0
    assert kept_by(protocol) == {"messages_incomplete": 0, "bytes_incomplete": 0}


def test_pings_are_answered_and_pongs_are_not():
    protocol = opened()

    assert feed(protocol, frame(MessageType.PING, 0, 77, 0, 0, b"") + frame(MessageType.PONG, 0, 1, 0, 0, b"")) == []
    assert protocol.take_output() == frame(MessageType.PONG, 0, 77, 0, 0, b"")
    assert protocol.take_output() == b""


# -- large tensors


def test_bytes_of_a_large_tensor_are_read_where_they_belong():
    given_out: list[memoryview] = []

    def allocate(size_bytes: int) -> memoryview:
        given_out.append(memoryview(bytearray(size_bytes)))
        return given_out[-1]

    protocol = opened(allocate=allocate)
    content = noise(100_000)
    head = request(1, buffers=(content, b"second")).frame() + data_frame(0, content)[:HEADER_BYTES] + content[:10]
    assert feed(protocol, head) == []

    # one buffer at a time, and the rest of the chunk goes straight into it
    (memory,) = given_out
    assert memory.nbytes == 100_000
    target = protocol.get_buffer(-1)
    assert target.nbytes == 100_000 - 10
    assert target.obj is memory.obj
    assert kept_by(protocol) == {"messages_incomplete": 1, "bytes_incomplete": 100_000}

    (message,) = feed(protocol, content[10:] + data_frame(0, b"second"))
    assert [bytes(buffer) for buffer in message.buffers] == [content, b"second"]
    assert all(buffer.obj is memory.obj for buffer, memory in zip(message.buffers, given_out, strict=True))
    assert kept_by(protocol) == {"messages_incomplete": 0, "bytes_incomplete": 0}


def test_hardly_any_bytes_of_a_large_tensor_pass_through_the_buffer():
    given_out: list[memoryview] = []

    def allocate(size_bytes: int) -> memoryview:
        given_out.append(memoryview(bytearray(size_bytes)))
        return given_out[-1]

    protocol = opened(limits=Limits(1 << 20, 1 << 24), allocate=allocate)
    content = noise(8 * CHUNK_BYTES)
    assert feed(protocol, request(1, buffers=(content,)).frame()) == []
    rest = memoryview(b"".join(chunks_of(0, [content], CHUNK_BYTES)))
    in_place = 0
    while rest:
        target = protocol.get_buffer()
        size = min(target.nbytes, rest.nbytes)  # a peer that is always ahead
        target[:size] = rest[:size]
        in_place += size if given_out and target.obj is given_out[0].obj else 0
        rest = rest[size:]
        messages = protocol.receive(size)

    assert bytes(messages[0].buffers[0]) == content
    assert in_place >= 0.99 * len(content)


def test_a_small_message_passes_between_the_chunks_of_a_large_one():
    protocol = opened()
    large, small = request(1, buffers=(noise(50), noise(60))), request(2, b"small")
    first, *rest = chunks_of(0, large.buffers, 20)

    messages = feed(protocol, large.frame() + first + small.frame() + b"".join(rest))

    assert [heard(message) for message in messages] == [small, large]


def test_dropped_data_is_forgotten():
    protocol = opened()
    dropped, kept = request(1, buffers=(noise(50),)), request(2, buffers=(noise(60),))
    feed(protocol, dropped.frame() + data_frame(0, bytes(10)) + kept.frame())
    assert kept_by(protocol)["messages_incomplete"] == 2

    feed(protocol, frame(MessageType.DROP_DATA, 0, 0, 0, 0, b""))
    assert kept_by(protocol) == {"messages_incomplete": 1, "bytes_incomplete": 0}
    (message,) = feed(protocol, data_frame(1, noise(60)))
    assert heard(message) == kept


def test_a_body_larger_than_the_buffer_is_read_into_memory_of_its_own():
    protocol = opened()
    large = request(1, noise(protocol_module.RECEIVE_BYTES + 1))
    feed(protocol, large.frame()[: HEADER_BYTES + 5])

    assert protocol.get_buffer(-1).nbytes == len(large.pickle) - 5
    assert kept_by(protocol) == {"messages_incomplete": 1, "bytes_incomplete": len(large.pickle)}
    (message,) = feed(protocol, large.frame()[HEADER_BYTES + 5 :])
    assert heard(message) == large


def test_it_can_be_told_whether_something_has_arrived_in_part():
    protocol = opened()
    assert protocol.is_between_frames
    large = request(1, buffers=(noise(300_000),))
    for data in (request().frame()[:5], request().frame()[5:] + large.frame(), data_frame(0, noise(300_000))[:-1]):
        feed(protocol, data)
        assert not protocol.is_between_frames
    feed(protocol, noise(300_000)[-1:])
    assert protocol.is_between_frames

    body = request(1, noise(protocol_module.RECEIVE_BYTES + 1)).frame()
    feed(protocol, body[:-1])
    assert not protocol.is_between_frames
    feed(protocol, body[-1:])
    assert protocol.is_between_frames


def test_a_message_does_not_change_when_the_next_one_is_read():
    protocol = opened()
    (first,) = feed(protocol, request(1, b"first").frame())
    feed(protocol, request(2, b"other").frame())

    assert first.body == b"first"


# -- the same messages, wherever the stream is cut


@given(streams(), pieces)
@settings(max_examples=150)
def test_any_pieces_give_the_same_messages(stream, pieces):
    data, arrived = stream
    protocol = opened(receive_bytes=SMALL_BUFFER)

    assert [heard(message) for message in feed(protocol, data, pieces)] == arrived
    assert kept_by(protocol) == {"messages_incomplete": 0, "bytes_incomplete": 0}
    assert protocol.state is State.OPEN


def test_one_cut_at_every_place_gives_the_same_messages():
    large, small = (
        request(2, b"p", meta=b"meta", buffers=(noise(7), noise(70)), inline=noise(32)),
        request(1, noise(20)),
    )
    first, *rest = chunks_of(0, large.buffers, 50)
    data = small.frame() + large.frame() + first + small.frame() + b"".join(rest) + small.frame()
    protocol = opened(receive_bytes=SMALL_BUFFER)
    for cut in range(len(data) + 1):
        protocol._inbox._frames = 0  # each round is the first of a stream
        messages = feed(protocol, data[:cut]) + feed(protocol, data[cut:])
        assert [heard(message) for message in messages] == [small, small, large, small]


@given(st.integers(0, 2 * SMALL_BUFFER), pieces)
def test_many_small_messages_in_any_pieces(offset, pieces):
    protocol = opened(receive_bytes=SMALL_BUFFER)
    messages = [request(0, noise(offset)), *(request(number, noise(number)) for number in range(100))]

    received = feed(protocol, b"".join(message.frame() for message in messages), pieces)

    assert [heard(message) for message in received] == messages


# -- any order of events


class Receiving(RuleBasedStateMachine):
    """A sender that does all a sender may do, a network that delivers what it likes, and a model of what arrives."""

    @initialize(receive_bytes=st.sampled_from([SMALL_BUFFER, protocol_module.RECEIVE_BYTES]))
    def open(self, receive_bytes: int) -> None:
        self.protocol = opened(receive_bytes=receive_bytes, limits=Limits(1 << 20, 1 << 20))
        self.sent = b""
        self.delivered = 0
        # what arrives once so many bytes were delivered
        self.expected: list[tuple[int, Spoken]] = []
        self.pongs: list[tuple[int, bytes]] = []
        self.received: list[Spoken] = []
        self.answered = b""
        self.bulk: dict[int, tuple[Spoken, list[bytes]]] = {}
        self.bulk_count = 0
        self.schemas: dict[int, int] = {}

    def _send(self, data: bytes) -> None:
        self.sent += data

    @rule(size=st.integers(0, 3))
    def announce(self, size: int) -> None:
        if size not in self.schemas:
            self.schemas[size] = len(self.schemas) + 1
            self._send(schema_frame(self.schemas[size], table_of(size)))

    @rule(message=spoken, size=st.integers(-1, 3))
    def send(self, message: Spoken, size: int) -> None:
        if size >= 0:
            message = message._replace(inline=noise(size))
        self._send(message.frame(self.schemas.get(len(message.inline or b""), ONE_OFF)))
        if message.buffers:
            self.bulk[self.bulk_count] = message, chunks_of(self.bulk_count, message.buffers, 3000)
            self.bulk_count += 1
        else:
            self.expected.append((len(self.sent), message))

    @precondition(lambda self: self.bulk)
    @rule(which=st.integers(0), chunks=st.integers(1, 5))
    def send_chunks(self, which: int, chunks: int) -> None:
        number = sorted(self.bulk)[which % len(self.bulk)]
        message, waiting = self.bulk[number]
        for _ in range(min(chunks, len(waiting))):
            self._send(waiting.pop(0))
        if not waiting:
            del self.bulk[number]
            self.expected.append((len(self.sent), message))

    @precondition(lambda self: self.bulk)
    @rule(which=st.integers(0))
    def drop(self, which: int) -> None:
        number = sorted(self.bulk)[which % len(self.bulk)]
        del self.bulk[number]
        self._send(frame(MessageType.DROP_DATA, 0, number, 0, 0, b""))

    @rule(id_=st.integers(0, 2**64 - 1))
    def ping(self, id_: int) -> None:
        self._send(frame(MessageType.PING, 0, id_, 0, 0, b""))
        self.pongs.append((len(self.sent), frame(MessageType.PONG, 0, id_, 0, 0, b"")))

    @rule()
    def pong(self) -> None:
        self._send(frame(MessageType.PONG, 0, 1, 0, 0, b""))

    @rule()
    def say_goodbye(self) -> None:
        goodbye = Spoken(MessageType.GOODBYE, pickle=b"bye")
        self._send(goodbye.frame())
        self.expected.append((len(self.sent), goodbye))

    @precondition(lambda self: self.delivered < len(self.sent))
    @rule(size=st.one_of(st.integers(1, 50), st.integers(1, 20_000)), pieces=pieces)
    def deliver(self, size: int, pieces: Iterator[int]) -> None:
        data = self.sent[self.delivered : self.delivered + size]
        self.delivered += len(data)
        self.received += [heard(message) for message in feed(self.protocol, data, pieces)]
        self.answered += self.protocol.take_output()

    @invariant()
    def what_was_delivered_has_arrived(self) -> None:
        assert self.received == [message for at, message in self.expected if at <= self.delivered]
        assert self.answered == b"".join(pong for at, pong in self.pongs if at <= self.delivered)

    @invariant()
    def the_state_follows_the_goodbye(self) -> None:
        heard_goodbye = any(message.type is MessageType.GOODBYE for message in self.received)
        assert self.protocol.state is (State.CLOSING if heard_goodbye else State.OPEN)


Receiving.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestReceiving = Receiving.TestCase
