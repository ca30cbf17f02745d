"""What the tests of the wire share: two ends of a connection, bytes in pieces, and messages easy to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random
from typing import Final, NamedTuple
from unittest import mock

from arpc.errors import WireError
from arpc.wire import protocol as protocol_module
from arpc.wire.frames import HEADER, ONE_OFF, Limits, frame
from arpc.wire.handshake import Handshake, Identity, Role
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol, State
from arpc.wire.values.layouts import Layout, read_layout
from arpc.wire.values.raw_memory import allocate as allocate_memory
from arpc.wire.values.table import encode_table

LIMITS: Final = Limits(body_bytes=1 << 20, message_bytes=1 << 20)
ALICE: Final = Identity("alice", 0, incarnation=7, main="abc", features=("x",))
BOB: Final = Identity("bob", 1, incarnation=8)
CALL_TYPES: Final = tuple(
    type_ for type_ in MessageType if type_ >= MessageType.FUNCTION and type_ is not MessageType.SCHEMA
)
"""The messages that a connection hands over without a look at them."""


def end(role: Role, *, secret: bytes | None = b"secret", limits: Limits = LIMITS) -> Protocol:
    """One end of a connection before its handshake: alice connects, bob accepts."""
    return Protocol(Handshake(role, ALICE if role is Role.CONNECTOR else BOB, secret), limits)


def feed(protocol: Protocol, data: bytes, pieces: Iterator[int] | None = None) -> list[Message]:
    """Let a protocol read bytes, in pieces no larger than asked for and than the protocol takes at once."""
    messages: list[Message] = []
    rest = memoryview(data)
    while rest:
        target = protocol.get_buffer(-1)
        assert target.nbytes > 0
        assert not target.readonly
        size = min(len(rest), target.nbytes, next(pieces, len(rest)) if pieces is not None else len(rest))
        target[:size] = rest[:size]
        rest = rest[size:]
        messages += protocol.receive(size)
    return messages


def converse(left: Protocol, right: Protocol) -> None:
    """Carry what both sides say by themselves until neither has more to say."""
    while True:
        said = left.take_output(), right.take_output()
        if not any(said):
            return
        feed(right, said[0])
        feed(left, said[1])


def opened_pair(limits: Limits = LIMITS) -> tuple[Protocol, Protocol]:
    connector, acceptor = end(Role.CONNECTOR, limits=limits), end(Role.ACCEPTOR, limits=limits)
    converse(connector, acceptor)
    assert connector.state is acceptor.state is State.OPEN
    return connector, acceptor


def opened(
    *,
    limits: Limits = LIMITS,
    receive_bytes: int = protocol_module.RECEIVE_BYTES,
    allocate: Callable[[int], memoryview] = allocate_memory,
    read_layout: Callable[[bytes], Layout] = read_layout,
) -> Protocol:
    """The accepting end of an open connection; with a receive buffer of any size from that of the handshake up."""
    connector = end(Role.CONNECTOR)
    acceptor = Protocol(Handshake(Role.ACCEPTOR, BOB, b"secret"), limits, allocate, read_layout)
    with mock.patch.object(protocol_module, "RECEIVE_BYTES", receive_bytes):
        converse(connector, acceptor)
    assert acceptor.state is State.OPEN
    return acceptor


def endings(protocol: Protocol, data: bytes, pieces: Iterator[int] | None = None) -> Exception | None:
    """Feed whatever bytes; the error that ended the connection, if one did. Anything but a WireError gets through."""
    try:
        feed(protocol, data, pieces)
    except WireError as error:
        assert protocol.state is State.CLOSED
        assert protocol.receive(1) == []
        assert feed(protocol, data) == []
        assert kept_by(protocol) == {"messages_incomplete": 0, "bytes_incomplete": 0}
        return error
    assert protocol.state is not State.CLOSED
    return None


def kept_by(protocol: Protocol) -> dict[str, int]:
    """What a protocol keeps for messages that have not arrived in full."""
    assemblies = protocol._inbox.waiting.values()
    filled = protocol._target_filled
    is_body = isinstance(filled, partial) and filled.func == protocol._receive_frame
    body = filled.args[1] if isinstance(filled, partial) and is_body else b""
    return {
        "messages_incomplete": len(assemblies) + bool(body),
        "bytes_incomplete": sum(buffer.nbytes for assembly in assemblies for buffer in assembly.buffers.values())
        + len(body),
    }


class Spoken(NamedTuple):
    """A message as a sender means it, and as a receiver should find it."""

    type: MessageType
    flags: int = 0
    id: int = 0
    arg: int = 0
    timeout_ms: int = 0
    meta: bytes = b""
    pickle: bytes = b""
    buffers: tuple[bytes, ...] = ()
    inline: bytes | None = None
    """The memory of small tensors; None for a message without a layout of tensors."""

    def frame(self, schema: int = ONE_OFF) -> bytes:
        """The bytes of it, without its buffers. ``schema``: the number under which its layout was announced."""
        layout: int | bytes = 0
        if self.inline is not None:
            layout = table_of(len(self.inline)) if schema == ONE_OFF else schema
        return frame(
            self.type,
            self.flags,
            self.id,
            self.arg,
            self.timeout_ms,
            self.pickle,
            self.meta,
            layout,
            (self.inline,) if self.inline is not None else (),
            tuple(map(len, self.buffers)),
        )


def table_of(inline_bytes: int) -> bytes:
    """The layout of a message that begins with so many bytes of tensors. What they are does not matter here."""
    return encode_table((inline_bytes, b"", (), (), ()))


def schema_frame(number: int, table: bytes) -> bytes:
    """The announcement of a layout."""
    return frame(MessageType.SCHEMA, 0, 0, number, 0, table)


def heard(message: Message) -> Spoken:
    layout = message.layout
    return Spoken(
        message.type,
        message.flags,
        message.id,
        message.arg,
        message.timeout_ms,
        bytes(message.meta),
        bytes(message.body),
        tuple(map(bytes, message.buffers)),
        None if layout is None else bytes(message.memory[: layout.inline_bytes]),
    )


def data_frame(number: int, data: bytes) -> bytes:
    return HEADER.pack(len(data), MessageType.DATA, 0, 0, number, 0, 0, 0, 0) + data


def chunks_of(number: int, buffers: Iterable[bytes], size: int) -> list[bytes]:
    """The DATA frames of one message."""
    return [
        data_frame(number, buffer[start : start + size]) for buffer in buffers for start in range(0, len(buffer), size)
    ]


def noise(size: int) -> bytes:
    """Bytes that are easy to tell apart, cheap to make and the same every time."""
    return Random(size).randbytes(size)
