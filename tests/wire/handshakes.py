"""Handshakes for tests: both ends without a connection between them, at each of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from arpc.wire.frames import HEADER, HEADER_BYTES
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, Handshake, Identity, Role
from arpc.wire.messages import MESSAGE_CLASSES, Message, MessageType
from tests.wire.connections import ALICE, BOB

SECRET: Final = b"secret"
MALLORY: Final = msgspec.to_builtins(Identity("mallory", 2, 0))


def connector(secret: bytes | None = SECRET, me: Identity = ALICE, **options: object) -> Handshake:
    return Handshake(Role.CONNECTOR, me, secret, **options)


def acceptor(secret: bytes | None = SECRET, me: Identity = BOB, **options: object) -> Handshake:
    return Handshake(Role.ACCEPTOR, me, secret, **options)


def message(type_: int, body: bytes = b"", arg: int = 0, n_buffers: int = 0) -> Message:
    end = 8 * n_buffers
    return MESSAGE_CLASSES[type_](0, 0, arg, 0, bytearray(body), None, end, end)


def read(data: bytes) -> Message:
    header = HEADER.unpack_from(data)
    assert len(data) == HEADER_BYTES + header[0] <= HEADER_BYTES + MAX_HANDSHAKE_BYTES
    return message(header[1], data[HEADER_BYTES:], header[5])


def decoded(said: Message) -> list:
    return msgspec.msgpack.decode(said.body)


def changed(said: Message, index: int, value: object) -> Message:
    """The same message, with another value in one place of its body."""
    fields = decoded(said)
    fields[index] = value
    return message(said.type, msgspec.msgpack.encode(fields), said.arg)


def challenge_of(near: Handshake, far: Handshake) -> Message:
    return read(far.receive(read(near.start())))


def complete(near: Handshake, far: Handshake) -> None:
    proof = read(near.receive(challenge_of(near, far)))
    assert near.receive(read(far.receive(proof))) == b""


def at_each_step() -> list[tuple[str, Callable[[], Handshake]]]:
    def await_challenge() -> Handshake:
        near = connector()
        near.start()
        return near

    def await_welcome() -> Handshake:
        near = connector()
        near.receive(challenge_of(near, acceptor()))
        return near

    def await_proof() -> Handshake:
        far = acceptor()
        challenge_of(connector(), far)
        return far

    def done() -> Handshake:
        near, far = connector(), acceptor()
        complete(near, far)
        return near

    return [
        ("START", connector),
        ("AWAIT_HELLO", acceptor),
        ("AWAIT_CHALLENGE", await_challenge),
        ("AWAIT_PROOF", await_proof),
        ("AWAIT_WELCOME", await_welcome),
        ("DONE", done),
    ]


STEPS: Final = dict(at_each_step())
EXPECTED: Final = {
    "START": set(),
    "AWAIT_HELLO": {MessageType.HELLO},
    "AWAIT_CHALLENGE": {MessageType.CHALLENGE, MessageType.REFUSE},
    "AWAIT_PROOF": {MessageType.PROOF, MessageType.REFUSE},
    "AWAIT_WELCOME": {MessageType.WELCOME, MessageType.REFUSE},
    "DONE": set(),
}
