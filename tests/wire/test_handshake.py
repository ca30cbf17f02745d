from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import AuthenticationError, ConfigurationError, HandshakeError, ProtocolError
from arpc.wire import handshake as handshake_module
from arpc.wire.frames import HEADER_BYTES
from arpc.wire.handshake import OLDEST_VERSION, PROTOCOL_VERSION, Identity, Refused
from arpc.wire.messages import MessageType, Refusal
from tests.wire.connections import ALICE, BOB
from tests.wire.handshakes import (
    MALLORY,
    SECRET,
    STEPS,
    acceptor,
    challenge_of,
    changed,
    complete,
    connector,
    decoded,
    message,
    read,
)

# -- what goes well


@pytest.mark.parametrize("secret", [SECRET, None, b""])
def test_both_sides_learn_who_the_other_is(secret):
    near, far = connector(secret), acceptor(secret)
    assert not near.done
    assert near.peer is None

    complete(near, far)

    assert near.done
    assert far.done
    assert near.peer == BOB
    assert far.peer == ALICE
    assert near.version == far.version == PROTOCOL_VERSION


def test_the_secret_is_never_said():
    near, far = connector(b"a rather long secret"), acceptor(b"a rather long secret")
    hello = near.start()
    challenge = far.receive(read(hello))
    proof = near.receive(read(challenge))

    assert b"a rather long secret" not in hello + challenge + proof


def test_nobody_is_known_before_it_has_proven_itself():
    near, far = connector(), acceptor()
    challenge = challenge_of(near, far)
    assert far.peer is None

    proof = read(near.receive(challenge))
    assert near.peer is None
    assert not near.done

    welcome = read(far.receive(proof))
    assert far.peer == ALICE
    near.receive(welcome)
    assert near.peer == BOB


def test_admit_is_asked_on_both_sides_about_peers_that_have_proven_themselves():
    asked: list[Identity] = []
    near, far = connector(admit=asked.append), acceptor(admit=asked.append)

    complete(near, far)

    assert asked == [BOB, ALICE]


@given(
    st.text(max_size=60),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**63),
    st.text(max_size=80),
    st.lists(st.text(max_size=9)),
)
def test_any_identity_arrives(name, worker_id, incarnation, main, features):
    me = Identity(name, worker_id, incarnation, main, tuple(features[:20]))
    near, far = connector(me=me), acceptor()

    complete(near, far)

    assert far.peer == me


def test_an_identity_too_large_for_a_handshake_is_refused_at_home():
    with pytest.raises(ConfigurationError, match=r"'nnnn.* take 30.. bytes; 2048 are allowed"):
        connector(me=Identity("n" * 3000, 0, 0))


def test_a_handshake_starts_once():
    near = connector()
    near.start()
    with pytest.raises(ProtocolError, match="cannot start"):
        near.start()
    with pytest.raises(ProtocolError, match="cannot start"):
        acceptor().start()


# -- versions


def versions(monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int) -> None:
    monkeypatch.setattr(handshake_module, "OLDEST_VERSION", oldest)
    monkeypatch.setattr(handshake_module, "PROTOCOL_VERSION", newest)


@pytest.mark.parametrize(
    ("near_versions", "far_versions", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((3, 3), (1, 4), 3), ((1, 9), (9, 9), 9)],
)
def test_the_newest_version_both_speak_is_chosen(monkeypatch, near_versions, far_versions, agreed):
    versions(monkeypatch, *near_versions)
    near = connector()
    hello = read(near.start())
    versions(monkeypatch, *far_versions)
    far = acceptor()
    challenge = read(far.receive(hello))
    versions(monkeypatch, *near_versions)
    proof = read(near.receive(challenge))
    versions(monkeypatch, *far_versions)
    welcome = read(far.receive(proof))
    near.receive(welcome)

    assert near.version == far.version == agreed


@pytest.mark.parametrize(("near_versions", "far_versions"), [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((5, 9), (1, 4))])
def test_no_common_version_is_refused_with_both_ranges(monkeypatch, near_versions, far_versions):
    versions(monkeypatch, *near_versions)
    near = connector()
    hello = read(near.start())
    versions(monkeypatch, *far_versions)
    far = acceptor()

    with pytest.raises(Refused, match=r"no common protocol version: worker 'bob' speaks") as caught:
        far.receive(hello)

    assert caught.value.kind is Refusal.VERSION
    assert str(far_versions[1]) in str(caught.value)
    with pytest.raises(Refused, match="no common protocol version") as told:
        near.receive(read(far.farewell(caught.value)))
    assert told.value.kind is Refusal.VERSION


def test_the_wire_format_is_version_2():
    assert (OLDEST_VERSION, PROTOCOL_VERSION) == (2, 2)
    assert read(connector().start()).arg == 2


def test_a_worker_of_version_1_is_refused_and_told_why():
    # all that a worker of arpc 0.1.0 says first: magic, oldest version, identity and nonce
    body = msgspec.msgpack.encode(["arpc", 1, msgspec.to_builtins(Identity("old", 3, 9)), bytes(32)])
    hello = read(struct.pack("<IBBHQIIII", len(body), 1, 0, 0, 0, 1, 0, 0, 0) + body)
    far = acceptor()

    with pytest.raises(Refused, match=r"worker 'bob' speaks 2 to 2, .* 1 to 1") as caught:
        far.receive(hello)

    refusal = read(far.farewell(caught.value))
    assert refusal.type is MessageType.REFUSE
    assert refusal.arg == Refusal.VERSION
    assert b"no common protocol version" in refusal.body


def test_a_worker_of_version_1_that_was_connected_to_is_refused(monkeypatch):
    near = connector()
    hello = read(near.start())
    versions(monkeypatch, 1, 1)
    far = acceptor()
    with pytest.raises(Refused, match=r"worker 'bob' speaks 1 to 1") as caught:
        far.receive(hello)
    versions(monkeypatch, 2, 2)
    with pytest.raises(Refused, match="no common protocol version") as told:
        near.receive(read(far.farewell(caught.value)))
    assert told.value.kind is Refusal.VERSION


@pytest.mark.parametrize("chosen", [0, OLDEST_VERSION - 1, PROTOCOL_VERSION + 1, 2**32 - 1])
def test_a_version_that_was_not_offered_is_refused(chosen):
    near, far = connector(), acceptor()
    challenge = challenge_of(near, far)
    challenge.arg = chosen

    with pytest.raises(Refused, match="which was not offered"):
        near.receive(challenge)


def test_a_man_in_the_middle_cannot_talk_both_down_to_an_older_version(monkeypatch):
    versions(monkeypatch, 1, 2)
    near, far = connector(), acceptor()
    hello = read(near.start())
    hello.arg = 1  # "I speak version 1 only"
    challenge = read(far.receive(hello))
    assert challenge.arg == 1

    with pytest.raises(AuthenticationError):
        near.receive(challenge)


# -- proofs


def test_another_secret_is_found_out_by_the_connector_first():
    near, far = connector(b"one"), acceptor(b"two")

    with pytest.raises(AuthenticationError, match=r"worker 'bob' has another group secret than 'alice'.*ARPC_SECRET"):
        near.receive(challenge_of(near, far))


def test_a_connector_that_does_not_check_is_found_out_by_the_acceptor():
    near, far = connector(b"one"), acceptor(b"two")
    challenge_of(near, far)

    with pytest.raises(AuthenticationError, match="worker 'alice' has another group secret than 'bob'") as caught:
        far.receive(message(MessageType.PROOF, bytes(32)))

    assert not far.done
    assert far.peer is None
    refusal = read(far.farewell(caught.value))
    assert refusal.body == b"authentication failed"  # a stranger learns no names
    assert refusal.arg == Refusal.AUTHENTICATION


def test_a_secret_on_one_side_only_is_an_error_that_says_where():
    near, far = connector(None), acceptor(SECRET)
    with pytest.raises(AuthenticationError, match="worker 'bob' uses a group secret and 'alice' has none"):
        near.receive(challenge_of(near, far))

    near, far = connector(SECRET), acceptor(None)
    with pytest.raises(AuthenticationError, match="worker 'bob' has no group secret and 'alice' asks for it"):
        near.receive(challenge_of(near, far))


def test_the_acceptor_notices_a_missing_or_an_unexpected_proof():
    far = acceptor(SECRET)
    challenge_of(connector(None), far)
    with pytest.raises(AuthenticationError, match="worker 'alice' has no group secret and 'bob' asks for it"):
        far.receive(message(MessageType.PROOF))

    far = acceptor(None)
    challenge_of(connector(SECRET), far)
    with pytest.raises(AuthenticationError, match="worker 'alice' uses a group secret and 'bob' has none"):
        far.receive(message(MessageType.PROOF, bytes(32)))


def test_a_recorded_proof_is_worth_nothing_in_another_session():
    near, far = connector(), acceptor()
    hello = read(near.start())
    recorded = read(near.receive(read(far.receive(hello))))

    again = acceptor()
    again.receive(hello)
    with pytest.raises(AuthenticationError):
        again.receive(recorded)


def test_a_recorded_challenge_is_worth_nothing_in_another_session():
    recorded = challenge_of(connector(), acceptor())

    near = connector()
    near.start()
    with pytest.raises(AuthenticationError):
        near.receive(recorded)


def test_a_proof_cannot_be_reflected():
    near, far = connector(), acceptor()
    challenge = challenge_of(near, far)

    with pytest.raises(AuthenticationError):
        far.receive(message(MessageType.PROOF, decoded(challenge)[2]))


def test_whoever_is_connected_to_itself_can_see_that():
    asked: list[Identity] = []
    near, far = connector(me=BOB, admit=asked.append), acceptor()

    near.receive(challenge_of(near, far))

    assert asked == [BOB]  # it looked for somebody else, and can refuse


@pytest.mark.parametrize(("index", "value"), [(2, MALLORY), (2, {**MALLORY, "extra": 1}), (3, bytes(32))])
def test_a_hello_that_was_tampered_with_is_noticed(index, value):
    near, far = connector(), acceptor()
    challenge = read(far.receive(changed(read(near.start()), index, value)))

    with pytest.raises(AuthenticationError):
        near.receive(challenge)
    with pytest.raises(AuthenticationError):
        far.receive(message(MessageType.PROOF, bytes(32)))


@pytest.mark.parametrize(("index", "value"), [(0, MALLORY), (1, bytes(32)), (2, bytes(32)), (2, b"x")])
def test_a_challenge_that_was_tampered_with_is_noticed(index, value):
    near, far = connector(), acceptor()

    with pytest.raises(AuthenticationError):
        near.receive(changed(challenge_of(near, far), index, value))


def test_fields_of_a_newer_version_are_proven_too_and_do_no_harm():
    class NewIdentity(Identity, frozen=True):
        color: str = "red"

    near, far = connector(me=NewIdentity("alice", 0, 7)), acceptor()

    complete(near, far)

    assert far.peer == Identity("alice", 0, 7)


# -- refusals


def test_a_refusal_by_admit_ends_the_handshake_on_both_sides():
    def admit(identity: Identity) -> None:
        raise Refused(Refusal.DUPLICATE, f"{identity.name} is here already")

    near, far = connector(), acceptor(admit=admit)
    proof = read(near.receive(challenge_of(near, far)))

    with pytest.raises(Refused, match="alice is here already") as caught:
        far.receive(proof)
    assert not far.done
    assert far.peer is None
    with pytest.raises(Refused, match="alice is here already") as told:
        near.receive(read(far.farewell(caught.value)))
    assert told.value.kind is Refusal.DUPLICATE
    assert near.peer is None


def test_a_connector_that_finds_somebody_else_refuses_before_it_proves_anything():
    def admit(identity: Identity) -> None:
        raise Refused(Refusal.STALE, f"found {identity.name}")

    near, far = connector(admit=admit), acceptor()
    with pytest.raises(Refused, match="found bob") as caught:
        near.receive(challenge_of(near, far))

    with pytest.raises(Refused, match="found bob") as told:
        far.receive(read(near.farewell(caught.value)))
    assert told.value.kind is Refusal.STALE


def test_an_error_in_admit_gets_through_and_leaves_nobody_admitted():
    def admit(_: Identity) -> None:
        raise ZeroDivisionError

    near, far = connector(), acceptor(admit=admit)
    proof = read(near.receive(challenge_of(near, far)))

    with pytest.raises(ZeroDivisionError):
        far.receive(proof)
    with pytest.raises(ProtocolError, match="at FAILED"):
        far.receive(proof)
    assert far.peer is None


@pytest.mark.parametrize("step", ["AWAIT_CHALLENGE", "AWAIT_PROOF", "AWAIT_WELCOME"])
@pytest.mark.parametrize("kind", list(Refusal))
def test_a_refusal_is_understood_at_each_step_and_not_answered(step, kind):
    handshake = STEPS[step]()
    wanted = AuthenticationError if kind is Refusal.AUTHENTICATION else Refused

    with pytest.raises(wanted, match="go away") as caught:
        handshake.receive(message(MessageType.REFUSE, b"go away", kind))

    if isinstance(caught.value, Refused):
        assert caught.value.kind is kind
    assert handshake.farewell(caught.value) == b""
    assert not handshake.done


def test_an_unknown_reason_is_a_refusal_all_the_same():
    with pytest.raises(HandshakeError, match="for reason 77: because") as caught:
        STEPS["AWAIT_WELCOME"]().receive(message(MessageType.REFUSE, b"because", 77))
    assert type(caught.value) is HandshakeError


def test_what_a_stranger_says_cannot_forge_lines_of_a_log():
    with pytest.raises(Refused, match=r"no\?\?ERROR root: hacked\?\[31m\ufffd$"):
        STEPS["AWAIT_PROOF"]().receive(message(MessageType.REFUSE, b"no\r\nERROR root: hacked\x1b[31m\xff", 4))


def test_a_long_reason_is_cut():
    near, far = connector(), acceptor()
    challenge_of(near, far)
    farewell = far.farewell(Refused(Refusal.CLOSING, "ü" * 5000))
    assert len(farewell) == HEADER_BYTES + 1024

    with pytest.raises(Refused) as caught:
        near.receive(read(farewell))
    assert str(caught.value) == "ü" * 512


# -- the connection is authentic already


def test_a_name_that_is_in_the_certificate_is_believed():
    near, far = connector(None), acceptor(None)
    near.certify({BOB.name})
    far.certify({ALICE.name})
    complete(near, far)
    assert near.peer == BOB
    assert far.peer == ALICE


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_name_that_is_not_in_the_certificate_is_refused_on_either_side(secret):
    near, far = connector(secret), acceptor(secret)
    challenge = challenge_of(near, far)
    near.certify({"mallory"})
    with pytest.raises(AuthenticationError, match=rf"{BOB.name!r}, with a certificate for .*mallory"):
        near.receive(challenge)

    near, far = connector(secret), acceptor(secret)
    proof = read(near.receive(challenge_of(near, far)))
    far.certify({"mallory"})
    with pytest.raises(AuthenticationError, match=rf"{ALICE.name!r}, with a certificate for .*mallory"):
        far.receive(proof)
    assert far.peer is None


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(mine, theirs):
        compared.append((bytes(mine), bytes(theirs)))
        return True

    monkeypatch.setattr(handshake_module.hmac, "compare_digest", compare)
    complete(connector(), acceptor())
    assert len(compared) == 2
    assert all(len(mine) == len(theirs) == 32 for mine, theirs in compared)
