"""The plainest messages, taken straight from the read: the same ones, in the same order, wherever the reads end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from arpc.wire.frames import HEADER, TERMS, bare_lead, brief_kind, frame
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import SEVERAL_TAKEN, Protocol, State
from tests.wire.connections import feed, opened

_REQUEST = int(MessageType.REQUEST)
_REPLY = int(MessageType.REPLY)
_FUNCTION = int(MessageType.FUNCTION)
_DATA = int(MessageType.DATA)
_RECEIVE_BYTES = 2 * MAX_HANDSHAKE_BYTES

Seen = tuple[Any, ...]


def seen(message: Message) -> Seen:
    return (int(message.type), message.flags, message.id, message.arg, message.timeout_ms, bytes(message.body))


def take_directly(protocol: Protocol, log: list[Seen]) -> None:
    """Have requests and replies taken from the read."""

    def taker(type_: int) -> Any:
        return lambda id_, arg, timeout_ms, payload: log.append((type_, 0, id_, arg, timeout_ms, bytes(payload)))

    protocol.direct = {brief_kind(type_): taker(type_) for type_ in (_REQUEST, _REPLY)}


def take_bare(protocol: Protocol, log: list[Seen]) -> None:
    """Have those of them that have no body taken in another way."""

    def taker(type_: int) -> Any:
        return lambda id_, terms: log.append((type_, 0, id_, *TERMS.unpack(terms), b""))

    protocol.bare_of_many = {bare_lead(brief_kind(type_)): taker(type_) for type_ in (_REQUEST, _REPLY)}


def put(protocol: Protocol, take: Any, is_bare: bool) -> None:
    """Have all requests taken by one function, or by none."""
    takers = {} if take is None else {brief_kind(_REQUEST): take}
    if is_bare:
        protocol.bare_of_many = {bare_lead(kind): taker for kind, taker in takers.items()}
    else:
        protocol.direct = takers


def read(protocol: Protocol, data: bytes, log: list[Seen], random: Random, largest: int) -> None:
    """Read in pieces of any size."""
    rest = memoryview(data)
    while rest:
        target = protocol.get_buffer(-1)
        size = min(len(rest), target.nbytes, random.randint(1, largest))
        target[:size] = rest[:size]
        rest = rest[size:]
        log += map(seen, protocol.receive(size))


def traffic(random: Random, count: int) -> bytes:
    """Frames of all sorts, most of them plain."""
    frames: list[bytes] = []
    bulk = 0
    for id_ in range(count):
        payload = random.randbytes(random.choice((0, 0, 1, 7, 300)))
        kind = random.randrange(12)
        if kind < 4:
            frames.append(frame(_REQUEST, 0, id_, random.randrange(5), random.randrange(9), payload))
        elif kind < 7:
            frames.append(frame(_REPLY, 0, id_, 0, 0, payload))
        elif kind == 7:
            frames.append(frame(_FUNCTION, 0, 0, id_, 0, payload))
        elif kind == 8:
            frames.append(frame(_REQUEST, 1, id_, 1, 2, payload))  # with a flag
        elif kind == 9:
            frames.append(frame(_REPLY, 0, id_, 0, 0, payload, meta=b"\x80"))
        elif kind == 10:
            frames.append(frame(_REQUEST, 0, id_, 1, 2, random.randbytes(_RECEIVE_BYTES + 1)))  # larger than the buffer
        else:
            tensor = random.randbytes(random.choice((1, 50, 5000)))
            frames.append(frame(_REQUEST, 0, id_, 1, 2, payload, table=b"\x90", buffer_sizes=(len(tensor),)))
            frames.append(HEADER.pack(len(tensor), _DATA, 0, 0, bulk, 0, 0, 0, 0) + tensor)
            bulk += 1
    return b"".join(frames)


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_reads_that_end_anywhere_bring_the_same_messages_in_order(seed, is_bare):
    random = Random(seed)
    data = traffic(random, 150)
    expected = [seen(message) for message in feed(opened(), data)]
    for largest in (40, 400, 10 * _RECEIVE_BYTES):
        protocol = opened(receive_bytes=_RECEIVE_BYTES)
        log: list[Seen] = []
        take_directly(protocol, log)
        if is_bare:
            take_bare(protocol, log)
        read(protocol, data, log, random, largest)
        assert log == expected
        assert protocol.is_plain
        assert protocol.is_between_frames


def test_reads_of_whole_messages_leave_none_to_return():
    protocol = opened()
    log: list[Seen] = []
    take_directly(protocol, log)
    data = frame(_REQUEST, 0, 1, 2, 3, b"first") + frame(_REPLY, 0, 4, 0, 0, b"")
    protocol.get_buffer(-1)[: len(data)] = data
    assert protocol.receive(len(data)) is SEVERAL_TAKEN
    assert log == [(_REQUEST, 0, 1, 2, 3, b"first"), (_REPLY, 0, 4, 0, 0, b"")]


def test_those_without_a_body_are_taken_as_such_until_one_has_a_body():
    protocol = opened()
    log: list[Seen] = []
    bare: list[Seen] = []
    take_directly(protocol, log)
    take_bare(protocol, bare)
    data = b"".join(frame(_REQUEST, 0, id_, 2, 3, b"" if id_ != 3 else b"body") for id_ in range(5))
    protocol.get_buffer(-1)[: len(data)] = data
    assert protocol.receive(len(data)) is SEVERAL_TAKEN
    assert [entry[2] for entry in bare] == [0, 1, 2]
    assert [entry[2] for entry in log] == [3, 4]
    assert protocol.receive(3 * HEADER.size) is SEVERAL_TAKEN, "the first three are still in the buffer"
    assert [entry[2] for entry in bare] == [0, 1, 2] * 2


def test_what_is_behind_a_message_that_is_not_taken_is_returned():
    """A function must be known before the request behind it runs."""
    protocol = opened()
    log: list[Seen] = []
    take_directly(protocol, log)
    data = frame(_REPLY, 0, 1, 0, 0, b"") + frame(_FUNCTION, 0, 0, 2, 0, b"f") + frame(_REQUEST, 0, 3, 2, 0, b"")
    returned = feed(protocol, data)
    assert [message.type for message in returned] == [MessageType.FUNCTION, MessageType.REQUEST]
    assert [entry[2] for entry in log] == [1]


@pytest.mark.parametrize("is_bare", [False, True])
def test_whoever_takes_one_may_close_the_connection(is_bare):
    protocol = opened()
    taken: list[int] = []

    def close(id_: int, *_: object) -> None:
        taken.append(id_)
        protocol.close()

    put(protocol, close, is_bare)
    assert feed(protocol, b"".join(frame(_REQUEST, 0, id_, 0, 0, b"") for id_ in range(3))) == []
    assert taken == [0]
    assert protocol.state is State.CLOSED
    assert not protocol.is_plain


@pytest.mark.parametrize("is_bare", [False, True])
def test_whoever_takes_one_may_say_goodbye(is_bare):
    """What the peer has sent before it hears of that still arrives, for others to refuse."""
    protocol = opened()
    taken: list[int] = []

    def part(id_: int, *_: object) -> None:
        taken.append(id_)
        assert protocol.say_goodbye("enough")

    put(protocol, part, is_bare)
    requests = [frame(_REQUEST, 0, id_, 0, 0, b"") for id_ in range(4)]
    assert [message.id for message in feed(protocol, b"".join(requests[:3]))] == [1, 2]
    assert [message.id for message in feed(protocol, requests[3])] == [3]
    assert taken == [0]


@pytest.mark.parametrize("is_bare", [False, True])
def test_whoever_takes_one_may_stop_taking(is_bare):
    protocol = opened()
    taken: list[int] = []

    def stop(id_: int, *_: object) -> None:
        taken.append(id_)
        put(protocol, None, is_bare)

    put(protocol, stop, is_bare)
    requests = b"".join(frame(_REQUEST, 0, id_, 0, 0, b"") for id_ in range(3))
    assert [message.id for message in feed(protocol, requests)] == [1, 2]
    assert taken == [0]


def test_what_a_taker_raises_closes_the_connection():
    protocol = opened()

    def fail(*_: object) -> None:
        raise LookupError("of the taker")

    protocol.direct = {brief_kind(_REQUEST): fail}
    with pytest.raises(LookupError, match="of the taker"):
        feed(protocol, frame(_REQUEST, 0, 1, 0, 0, b""))
    assert protocol.state is State.CLOSED
