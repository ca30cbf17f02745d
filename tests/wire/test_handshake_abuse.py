"""What is not a handshake, or not in its order, ends it, and costs next to nothing."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arpc.errors import HandshakeError, ProtocolError
from arpc.wire.frames import HEADER_BYTES
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, PROTOCOL_VERSION, Handshake
from arpc.wire.messages import Message, MessageType
from tests.wire.connections import ALICE, BOB
from tests.wire.handshakes import EXPECTED, MALLORY, STEPS, acceptor, changed, connector, message, read


@pytest.mark.parametrize("type_", list(MessageType))
@pytest.mark.parametrize("step", STEPS)
def test_a_message_out_of_order_ends_the_handshake(step, type_):
    if type_ in EXPECTED[step]:
        return
    handshake = STEPS[step]()

    with pytest.raises(ProtocolError, match=f"{type_.name} is out of place in a handshake that is at {step}"):
        handshake.receive(message(type_))

    assert not handshake.done
    assert handshake.peer is None
    with pytest.raises(ProtocolError, match="at FAILED"):
        handshake.receive(message(type_))


@pytest.mark.parametrize("step", ["AWAIT_HELLO", "AWAIT_CHALLENGE", "AWAIT_PROOF", "AWAIT_WELCOME"])
def test_a_handshake_message_has_no_tensors(step):
    handshake = STEPS[step]()
    with pytest.raises(ProtocolError, match="with parts it cannot have"):
        handshake.receive(message(min(EXPECTED[step]), bytes(8), n_buffers=1))


HELLO: Final = read(connector().start())
NESTED: Final = b"\x91" * (MAX_HANDSHAKE_BYTES - 60)
CLAIMS_MUCH: Final = b"\xdd\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(bytes(HELLO.body[:-1]), id="truncated"),
        pytest.param(bytes(HELLO.body) + b"\0", id="trailing bytes"),
        pytest.param(bytes(changed(HELLO, 0, "carp").body), id="another magic"),
        pytest.param(bytes(changed(HELLO, 1, "1").body), id="version of another type"),
        pytest.param(bytes(changed(HELLO, 1, None).body), id="no version"),
        pytest.param(bytes(changed(HELLO, 3, b"short").body), id="short nonce"),
        pytest.param(bytes(changed(HELLO, 3, bytes(33)).body), id="long nonce"),
        pytest.param(bytes(changed(HELLO, 2, {}).body), id="no identity"),
        pytest.param(bytes(changed(HELLO, 2, {**MALLORY, "id": 2**16}).body), id="id over 16 bits"),
        pytest.param(bytes(changed(HELLO, 2, {**MALLORY, "id": -1}).body), id="negative id"),
        pytest.param(bytes(HELLO.body).replace(b"alice", b"\xff\xfe\xfd\xfc\xfb"), id="name is no text"),
        pytest.param(bytes(HELLO.body).replace(b"arpc", b"\xff\xfe\xfd\xfc", 1), id="magic is no text"),
        pytest.param(b"\x95" + bytes(HELLO.body)[1:] + NESTED, id="nested too deep, in a field of the future"),
        pytest.param(b"\x94\xa4arpc\x01" + NESTED, id="nested too deep, for an identity"),
        pytest.param(b"\x94\xa4arpc\x01\x81\xa8features" + CLAIMS_MUCH, id="more features than there are bytes"),
        pytest.param(CLAIMS_MUCH, id="more fields than there are bytes"),
    ],
)
def test_a_malformed_hello_is_refused(body):
    far = acceptor()
    with pytest.raises(ProtocolError):
        far.receive(message(MessageType.HELLO, body, PROTOCOL_VERSION))
    assert far.peer is None


@given(
    st.sampled_from(sorted(STEPS)),
    st.sampled_from(list(MessageType)),
    st.binary(max_size=200),
    st.integers(0, 2**32 - 1),
)
def test_random_bodies_are_refused(step, type_, body, arg):
    handshake = STEPS[step]()
    if (step, type_) == ("AWAIT_WELCOME", MessageType.WELCOME):
        handshake.receive(message(type_, body, arg))
        assert handshake.done
        return
    with pytest.raises((ProtocolError, HandshakeError)):
        handshake.receive(message(type_, body, arg))
    assert not handshake.done


@given(st.integers(0, 2), st.data())
def test_a_single_wrong_bit_keeps_the_connection_from_opening(which, data):
    near, far = connector(), acceptor()

    def carry(step: int, words: bytes) -> Message:
        said = read(words)
        if step == which:
            bit = data.draw(st.integers(0, 8 * len(said.body) - 1))
            said.body[bit // 8] ^= 1 << bit % 8
        return said

    with pytest.raises((ProtocolError, HandshakeError)):
        far.receive(carry(2, near.receive(carry(1, far.receive(carry(0, near.start()))))))
    assert far.peer is None
    assert near.peer is None


def test_a_handshake_takes_little_memory():
    bodies = [
        b"\x94\xa4arpc\x01\x81\xa8features" + CLAIMS_MUCH + bytes(3000),
        b"\x94\xa4arpc\x01\x81\xa4name\xdb" + struct.pack(">I", 2**32 - 1) + bytes(3000),
        b"\x94\xa4arpc\x01\xdf\xff\xff\xff\xff" + bytes(3000),
        b"\xc6" + struct.pack(">I", 2**32 - 1) + bytes(4000),
    ]
    far = acceptor()
    for body in bodies:
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                acceptor().receive(message(MessageType.HELLO, body, 1))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 * 1024
    assert not far.done


# -- any order of events


class Handshakes(RuleBasedStateMachine):
    """Two ends, and a network that delivers, repeats, changes and remembers what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[bytes] = []
        self.begin()

    @rule()
    def begin(self) -> None:
        self.near, self.far = connector(), acceptor()
        self.to_near: list[bytes] = []
        self.to_far = [self.near.start()]
        self.recorded += self.to_far
        self.is_meddled_with = False
        self.has_failed = False

    def _deliver(self, words: bytes, to: Handshake) -> None:
        try:
            answer = to.receive(read(words))
        except HandshakeError as error:
            self.has_failed = True
            answer = to.farewell(error)
        except ProtocolError:
            self.has_failed = True
            answer = b""
        if answer:
            self.recorded.append(answer)
            (self.to_far if to is self.near else self.to_near).append(answer)

    @precondition(lambda self: self.to_far)
    @rule()
    def deliver_to_far(self) -> None:
        self._deliver(self.to_far.pop(0), self.far)

    @precondition(lambda self: self.to_near)
    @rule()
    def deliver_to_near(self) -> None:
        self._deliver(self.to_near.pop(0), self.near)

    @precondition(lambda self: self.to_near or self.to_far)
    @rule(bit=st.integers(0, 2**15))
    def change_a_bit(self, bit: int) -> None:
        queue = self.to_near or self.to_far
        words = bytearray(queue[0])
        if len(words) > HEADER_BYTES:
            words[HEADER_BYTES + bit // 8 % (len(words) - HEADER_BYTES)] ^= 1 << bit % 8
            queue[0] = bytes(words)
            self.is_meddled_with = True

    @rule(number=st.integers(0), to_near=st.booleans())
    def replay(self, number: int, to_near: bool) -> None:
        words = self.recorded[number % len(self.recorded)]
        self.is_meddled_with = True
        self._deliver(words, self.near if to_near else self.far)

    @invariant()
    def nobody_is_let_in_who_has_not_proven_itself(self) -> None:
        for handshake, peer in ((self.near, BOB), (self.far, ALICE)):
            assert handshake.peer == (peer if handshake.done else None)

    @invariant()
    def all_goes_well_unless_somebody_meddles(self) -> None:
        assert self.is_meddled_with or not self.has_failed


Handshakes.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestHandshakes = Handshakes.TestCase
