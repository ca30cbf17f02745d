"""What all connections have in common, looked at through one that writes into a list."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
import torch

from arpc.errors import ConnectionClosedError, HandshakeError, ProtocolError, WireError
from arpc.testing.endpoints import FAR, LIMITS, NEAR, Endpoint, bulk_frame, small_frame, turns_until
from arpc.transport import announced_schemas
from arpc.transport import connection as base
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.wire.frames import CHUNK_BYTES, HEADER, HEADER_BYTES, ONE_OFF, Header, frame
from arpc.wire.handshake import Handshake, Role
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol, State
from arpc.wire.values.content import Content
from arpc.wire.values.schemas import Packer
from tests.wire.connections import Spoken, feed, heard
from tests.wire.connections import opened as wire_opened

MIB = 1 << 20
REQUEST = int(MessageType.REQUEST)
REPLY = int(MessageType.REPLY)


class Clock:
    """The time between frames: none, unless a test lets some pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(base, "_clock", clock)
    return clock


class ListConnection(Connection):
    """Writes into a list, and ends when told to."""

    def __init__(self, protocol: Protocol, endpoint: Endpoint) -> None:
        super().__init__(protocol, endpoint)
        self.written: list[bytes | memoryview] = []
        self.asked: list[str] = []
        self.room_bytes = 1 << 40
        self.unsent = 0
        self.is_elsewhere = False
        self.on_write: Callable[[bytes], object] | None = None

    address = "list://"

    @property
    def is_peer_elsewhere(self) -> bool:
        return self.is_elsewhere

    def _write(self, data):
        if self.on_write is not None:
            self.on_write(data)
        self.written.append(data)
        self.room_bytes -= len(data)
        if self.room_bytes <= 0:
            self.pause_writing()

    def _write_pieces(self, pieces):
        header, chunk = pieces
        self.written.append(header)
        self._write(chunk)

    def _unsent_bytes(self):
        return self.unsent

    def _shut(self):
        self.asked.append("shut")

    def _abort(self):
        self.asked.append("abort")

    # -- what happens to it

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            buffer = self.protocol.get_buffer(-1)
            size = min(len(buffer), len(view))
            buffer[:size] = view[:size]
            view = view[size:]
            self._received(size)

    def make_room(self, room_bytes: int = 1 << 40) -> None:
        self.room_bytes = room_bytes
        self.resume_writing()

    def end(self, error: Exception | None = None) -> None:
        self._ended(error)

    def headers(self) -> list[Header]:
        """Of every frame written since the last `take`."""
        data = b"".join(self.written)
        found = []
        start = 0
        while start < len(data):
            found.append(header_of(data[start:]))
            start += HEADER_BYTES + found[-1].length
        assert start == len(data)
        return found

    def take(self) -> list[tuple[MessageType, int]]:
        """Type and id of every frame written since the last time."""
        found = [(MessageType(header.type), header.id) for header in self.headers()]
        self.written.clear()
        return found


def header_of(data: bytes | None) -> Header:
    assert data is not None
    return Header._make(HEADER.unpack_from(data))


def connect(secret: bytes | None = None) -> tuple[ListConnection, Endpoint]:
    endpoint = Endpoint()
    protocol = Protocol(Handshake(Role.CONNECTOR, NEAR, secret), LIMITS)
    connection = ListConnection(protocol, endpoint)
    connection.start()
    return connection, endpoint


async def opened() -> tuple[ListConnection, Endpoint]:
    connection, endpoint = connect()
    far = Protocol(Handshake(Role.ACCEPTOR, FAR, None), LIMITS)
    while not endpoint.opened:
        spoken = b"".join(connection.written)
        connection.written.clear()
        far.get_buffer(-1)[: len(spoken)] = spoken
        far.receive(len(spoken))
        connection.feed(far.take_output())
    await asyncio.sleep(0)
    connection.written.clear()
    return connection, endpoint


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


# -- sending


async def test_frames_of_a_busy_turn_are_joined():
    connection, _ = await opened()
    for number in range(100):
        connection.send(small_frame(number))
    await asyncio.sleep(0)
    assert len(connection.written) <= 100 // 8  # a few may go at once, while little is going on
    assert connection.take() == [(MessageType.REQUEST, number) for number in range(100)]


async def test_what_is_sent_while_reading_goes_out_at_the_end_of_the_read():
    connection, _ = await opened()

    def answer(_, messages):
        for message in messages:
            connection.send(small_frame(100 + message.id))
        assert not connection.written

    connection._messages_received = answer
    connection.feed(small_frame(1) + small_frame(2) + small_frame(3))
    assert len(connection.written) == 1
    assert connection.take() == [(MessageType.REQUEST, number) for number in (101, 102, 103)]


async def test_a_read_lets_nothing_overtake_what_waits_to_be_written():
    """The peer counts the frames that have buffers: one that came before its turn would get the buffers of another."""
    connection, endpoint = await opened()
    connection.send = connection._send_later
    connection.send(small_frame(1))
    assert not connection.written
    connection.feed(small_frame(5))
    assert endpoint.numbers == [5]
    connection.send(small_frame(2))
    buffers = views(10)
    connection.send_bulk(bulk_frame(3, buffers), buffers)
    await asyncio.sleep(0)
    assert [id_ for type_, id_ in connection.take() if type_ is MessageType.REQUEST] == [1, 2, 3]


def portions(connection: ListConnection, messages: int, sent: int) -> list[int]:
    """How many frames each write has, if so many are sent on a read of so many messages."""

    def answer(_, __):
        for number in range(sent):
            connection.send(small_frame(number))

    connection._messages_received = answer
    connection.feed(b"".join(map(small_frame, range(messages))))
    sizes = [len(data) // HEADER_BYTES for data in connection.written]
    connection.written.clear()
    return sizes


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (2, [20]),
        (3, [20]),
        (4, [2] * 10),
        (16, [8, 8, 4]),
        (64, [20]),
        (500, [20]),
    ],
)
async def test_half_goes_ahead_if_the_peer_has_a_cpu_of_its_own(read, written):
    connection, _ = await opened()
    connection.is_elsewhere = True
    connection._reads_until_look = 0
    assert portions(connection, read, 20) == written
    assert portions(connection, 128, 100) == [32, 32, 32, 4]


async def test_on_one_cpu_there_are_few_writes():
    connection, _ = await opened()
    for read in (2, 4, 16, 64):
        assert portions(connection, read, 20) == [20]


@pytest.mark.parametrize(("is_elsewhere", "written"), [(True, [2, 1, 2]), (False, [5])])
async def test_frames_with_much_time_between_them_do_not_wait_for_each_other(clock, is_elsewhere, written):
    """The code that sends them computes, and a peer with a CPU of its own can begin."""
    connection, _ = await opened()
    connection.is_elsewhere = is_elsewhere
    connection.send = connection._send_later
    for number, pause_s in enumerate([0, 0.001, 0.001, 0, 0.001]):
        clock.now += pause_s
        connection.send(small_frame(number))
    await asyncio.sleep(0)
    assert [len(data) // HEADER_BYTES for data in connection.written] == written
    clock.now += 1
    connection.written.clear()
    connection.send(small_frame(9))
    assert not connection.written, "the first of a turn waits"
    await asyncio.sleep(0)
    assert len(connection.written) == 1


async def test_replies_with_much_time_between_them_do_not_wait_for_the_end_of_a_read(clock):
    connection, _ = await opened()
    connection.is_elsewhere = True

    def answer(_, messages):
        for message in messages:
            clock.now += 0.001
            connection.send(small_frame(100 + message.id))

    connection._messages_received = answer
    connection.feed(b"".join(map(small_frame, range(4))))
    assert [len(data) // HEADER_BYTES for data in connection.written] == [2, 1, 1]


async def test_what_is_sent_after_a_read_goes_out_in_its_portions():
    connection, _ = await opened()
    connection.is_elsewhere = True
    connection._reads_until_look = 0
    portions(connection, 8, 0)
    for number in range(10):
        connection.send(small_frame(number))
    await asyncio.sleep(0)
    assert [len(data) // HEADER_BYTES for data in connection.written] == [4, 4, 2]
    assert connection.take() == [(MessageType.REQUEST, number) for number in range(10)]


async def test_a_peer_that_is_moved_to_another_cpu_is_noticed():
    connection, _ = await opened()
    for is_elsewhere, written in [(True, [8, 8]), (False, [16])] * 2:
        connection.is_elsewhere = is_elsewhere
        for _ in range(base._READS_PER_CHECK + 1):
            sizes = portions(connection, 16, 16)
        assert sizes == written


@pytest.mark.parametrize("secret", [None, b"secret"])
async def test_nothing_that_is_sent_when_a_connection_opens_overtakes_the_welcome(secret):
    endpoint = Endpoint()
    connection = ListConnection(Protocol(Handshake(Role.ACCEPTOR, NEAR, secret), LIMITS), endpoint)
    connection.start()
    endpoint.connection_opened = lambda opened: opened.send(small_frame(7))
    far = Protocol(Handshake(Role.CONNECTOR, FAR, secret), LIMITS)
    came: list[Message] = []
    while not came:
        connection.feed(far.take_output())
        await asyncio.sleep(0)
        spoken = b"".join(connection.written)
        connection.written.clear()
        far.get_buffer(-1)[: len(spoken)] = spoken
        came = far.receive(len(spoken))
    assert [message.id for message in came] == [7]
    assert far.state is State.OPEN
    connection.abort()
    connection.end()


async def test_a_ping_is_answered_by_the_connection_itself():
    connection, endpoint = await opened()
    connection.feed(frame(MessageType.PING, 0, 77, 0, 0, b""))
    assert connection.take() == [(MessageType.PONG, 77)]
    assert endpoint.messages == []


async def test_a_chunk_is_written_from_where_it_lies():
    connection, _ = await opened()
    (source,) = views(2 * CHUNK_BYTES + 5)
    connection.send_bulk(bulk_frame(1, [source]), [source])
    await asyncio.sleep(0)
    chunks = [data for data in connection.written if isinstance(data, memoryview)]
    assert [chunk.nbytes for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert all(chunk.obj is source.obj for chunk in chunks)


async def test_large_messages_take_turns_by_chunk():
    connection, _ = await opened()
    for number, size in enumerate((3 * CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES)):
        buffers = views(size)
        connection.send_bulk(bulk_frame(number, buffers), buffers)
    await asyncio.sleep(0)
    order = [id_ for type_, id_ in connection.take() if type_ is MessageType.DATA]
    assert order == [0, 1, 2, 0, 2, 0]


async def test_a_small_frame_waits_for_one_chunk_at_most():
    connection, _ = await opened()
    connection.room_bytes = CHUNK_BYTES // 2
    buffers = views(8 * CHUNK_BYTES)
    connection.send_bulk(bulk_frame(1, buffers), buffers)
    await asyncio.sleep(0)
    connection.send(small_frame(2))
    await asyncio.sleep(0)
    types = [type_ for type_, _ in connection.take()]
    assert types == [MessageType.REQUEST, MessageType.DATA, MessageType.REQUEST]


async def test_a_full_peer_gets_no_chunk_until_it_has_room():
    connection, endpoint = await opened()
    connection.room_bytes = 1
    buffers = views(3 * CHUNK_BYTES)
    connection.send_bulk(bulk_frame(1, buffers), buffers)
    await asyncio.sleep(0)
    assert connection.is_congested
    left = connection.unsent_bytes
    assert left >= 2 * CHUNK_BYTES
    connection.make_room(1)
    assert connection.unsent_bytes == left - CHUNK_BYTES
    assert endpoint.drained == 0  # it was full again at once
    connection.make_room()
    assert connection.unsent_bytes == 0
    assert endpoint.drained == 1


async def test_unsent_bytes_are_those_nobody_has_taken():
    connection, _ = await opened()
    connection.send = connection._send_later
    connection.unsent = 7
    connection.send(small_frame(1, b"four"))
    buffers = views(10, 20)
    bulk = connection.send_bulk(bulk_frame(2, buffers), buffers)
    frames = HEADER_BYTES + 4 + len(bulk_frame(2, buffers))
    assert connection.unsent_bytes == 7 + frames + 30
    assert connection.drop_bulk(bulk)
    assert connection.unsent_bytes == 7 + frames + HEADER_BYTES
    connection.abort()
    assert connection.unsent_bytes == 0  # what it wrote is nobody's any more


@pytest.mark.parametrize("chunks_out", [0, 1, 2, 3])
async def test_a_dropped_message_is_taken_back_wherever_it_is(chunks_out):
    connection, _ = await opened()
    connection.room_bytes = 1
    buffers = views(CHUNK_BYTES, 2 * CHUNK_BYTES + 9)
    bulk = connection.send_bulk(bulk_frame(1, buffers), buffers)
    for _ in range(chunks_out):
        connection.make_room(1)
    assert connection.drop_bulk(bulk)
    assert not connection.drop_bulk(bulk)
    connection.make_room()
    await asyncio.sleep(0)
    expected = [(MessageType.REQUEST, 1), *[(MessageType.DATA, 0)] * chunks_out, (MessageType.DROP_DATA, 0)]
    assert connection.take() == expected
    assert connection.unsent_bytes == 0
    again = views(5)
    connection.send_bulk(bulk_frame(2, again), again)
    await asyncio.sleep(0)
    assert connection.take() == [(MessageType.REQUEST, 2), (MessageType.DATA, 1)]


# -- the end


async def test_close_waits_for_large_messages_that_were_sent_before():
    connection, endpoint = await opened()
    connection.room_bytes = 1
    buffers = views(3 * CHUNK_BYTES)
    connection.send_bulk(bulk_frame(1, buffers), buffers)
    connection.close("enough")
    assert connection.asked == []
    with pytest.raises(ConnectionClosedError):
        connection.send(small_frame(2))
    connection.make_room()
    assert connection.asked == ["shut"]
    types = [type_ for type_, _ in connection.take()]
    assert types == [MessageType.REQUEST, MessageType.GOODBYE, *[MessageType.DATA] * 3]
    connection.end()
    assert endpoint.lost == [None]


async def test_close_flushes_although_the_peer_has_said_goodbye():
    connection, endpoint = await opened()
    connection.feed(frame(MessageType.GOODBYE, 0, 0, 0, 0, b"so long"))
    assert not connection.is_open
    connection.send = connection._send_later
    connection.send(small_frame(1))
    connection.close()
    assert connection.take() == [(MessageType.REQUEST, 1)]
    connection.end(ConnectionResetError("it went faster than we did"))
    assert endpoint.lost == [None]


async def test_what_comes_after_close_is_still_received_but_not_answered():
    connection, endpoint = await opened()
    connection.close()
    connection.take()
    connection.feed(small_frame(5) + frame(MessageType.PING, 0, 6, 0, 0, b""))
    assert endpoint.numbers == [5]
    assert connection.take() == []
    connection.end()


async def test_closing_ends_when_nothing_moves_any_more(monkeypatch):
    monkeypatch.setattr(base, "_LINGER_S", 0.01)
    connection, endpoint = await opened()
    connection.close()
    await turns_until(lambda: connection.asked == ["shut", "abort"])
    connection.end()
    assert endpoint.lost == [None]


async def test_closing_goes_on_while_bytes_move(monkeypatch):
    monkeypatch.setattr(base, "_LINGER_S", 0.01)
    connection, _ = await opened()
    connection.close()
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.1
    while loop.time() < end:
        connection.feed(small_frame(1))
        await asyncio.sleep(0)
    assert connection.asked == ["shut"]
    connection.end()


async def test_a_handshake_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(base, "HANDSHAKE_S", 0.01)
    connection, endpoint = connect()
    await turns_until(lambda: connection.asked)
    connection.end()
    assert isinstance(endpoint.lost[0], HandshakeError)
    with pytest.raises(HandshakeError, match=r"did not end its handshake within 0\.01 s"):
        await connection.wait_opened()


async def test_a_loop_that_was_busy_does_not_blame_the_peer(monkeypatch):
    monkeypatch.setattr(base, "HANDSHAKE_S", 0.05)
    connection, _ = connect()
    time.sleep(0.12)
    for _ in range(3):  # the timer is overdue, and runs
        await asyncio.sleep(0)
    assert connection.asked == []
    await turns_until(lambda: connection.asked == ["abort"])
    connection.end()


async def test_an_open_connection_has_no_handshake_to_end(monkeypatch):
    monkeypatch.setattr(base, "HANDSHAKE_S", 0.01)
    connection, _ = await opened()
    await asyncio.sleep(0.03)
    assert connection.asked == []
    assert connection.is_open


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, ConnectionClosedError), (ConnectionResetError("reset"), ConnectionResetError)],
)
async def test_an_end_without_a_goodbye_is_an_error(error, expected):
    connection, endpoint = await opened()
    connection.end(error)
    connection.end(OSError("told twice"))
    (told,) = endpoint.lost
    assert isinstance(told, expected)
    assert connection.protocol.state is State.CLOSED
    await connection.wait_closed()


async def test_the_first_error_is_the_one_that_is_told():
    connection, endpoint = await opened()
    connection.abort(WireError("first"))
    connection.abort(WireError("second"))
    connection.end(OSError("third"))
    assert str(endpoint.lost[0]) == "first"


async def test_nothing_is_written_or_read_between_abort_and_the_end():
    connection, endpoint = await opened()
    buffers = views(3 * CHUNK_BYTES)
    connection.send = connection._send_later
    connection.send(small_frame(1))
    connection.abort()
    connection.send(small_frame(2))
    connection.send_bulk(bulk_frame(3, buffers), buffers)
    connection.feed(small_frame(4))
    await asyncio.sleep(0)
    connection.make_room()
    assert connection.written == []
    assert endpoint.messages == []
    assert not connection.is_open
    connection.end()
    with pytest.raises(ConnectionClosedError, match="the connection to list:// is closed"):
        connection.send(small_frame(5))


async def test_bytes_after_a_refusal_are_for_nobody():
    connection, endpoint = connect(secret=b"secret")
    far = Protocol(Handshake(Role.ACCEPTOR, FAR, b"another"), LIMITS)
    hello = b"".join(connection.written)
    far.get_buffer(-1)[: len(hello)] = hello
    far.receive(len(hello))
    connection.written.clear()
    connection.feed(far.take_output())
    assert connection.take() == [(MessageType.REFUSE, 0)]
    connection.feed(small_frame(1))
    assert endpoint.messages == []
    assert connection.asked == ["shut"]
    connection.end()
    assert isinstance(endpoint.lost[0], HandshakeError)


async def test_a_refusal_by_a_receiver_that_has_aborted_changes_nothing():
    connection, endpoint = await opened()

    def refuse(_, __):
        connection.abort(WireError("first"))
        raise HandshakeError("second")

    connection._messages_received = refuse
    connection.feed(small_frame(1))
    connection.end()
    connection.end()
    assert [str(error) for error in endpoint.lost] == ["first"]
    with pytest.raises(ConnectionClosedError):
        connection.send(small_frame(2))


async def test_an_interrupt_in_a_read_keeps_nothing_back():
    connection, _ = await opened()

    def interrupt(_, __):
        connection.send(small_frame(8))
        raise KeyboardInterrupt

    connection._messages_received = interrupt
    with pytest.raises(KeyboardInterrupt):
        connection.feed(small_frame(1) + small_frame(2))
    connection.send(small_frame(9))
    await asyncio.sleep(0)
    assert connection.take() == [(MessageType.REQUEST, 8), (MessageType.REQUEST, 9)]


async def test_a_waiter_that_is_cancelled_harms_nobody():
    connection, _ = connect()
    impatient = asyncio.ensure_future(connection.wait_opened())
    patient = asyncio.ensure_future(connection.wait_opened())
    await asyncio.sleep(0)
    impatient.cancel()
    connection.end()
    with pytest.raises(ConnectionClosedError, match="closed the connection in its handshake"):
        await patient
    assert impatient.cancelled()


async def test_there_is_no_peer_before_the_handshake():
    connection, _ = connect()
    with pytest.raises(ConnectionClosedError, match="handshake is not done"):
        _ = connection.peer
    connection.end()


async def test_errors_of_the_receiver_are_logged(caplog):
    connection, endpoint = await opened()
    endpoint.fail_in = "messages_received"
    with caplog.at_level(logging.ERROR, "arpc.transport"):
        connection.feed(small_frame(1))
    assert connection.asked == ["abort"]
    assert "messages_received was told to fail" in caplog.text
    endpoint.fail_in = "connection_lost"
    connection.end()
    assert "connection_lost was told to fail" in caplog.text
    await connection.wait_closed()


async def test_errors_of_the_peer_are_told_and_not_logged_as_ours(caplog):
    connection, endpoint = await opened()
    with caplog.at_level(logging.ERROR, "arpc.transport"):
        connection.feed(b"\xff" * 64)
    connection.end()
    assert isinstance(endpoint.lost[0], ProtocolError)
    assert caplog.text == ""


async def test_statistics_of_a_connection_that_is_over():
    connection, _ = await opened()
    connection.send(small_frame(1))
    connection.end()
    statistics = connection.statistics()
    assert statistics["unsent_bytes"] == 0
    assert statistics["frames_sent"] >= 1
    assert statistics["bytes_received"] > 0


async def test_every_frame_is_counted():
    connection, _ = await opened()
    before = connection.frames_sent, connection.bytes_sent
    connection.send(small_frame(1))
    connection.send = connection._send_later
    connection.send(small_frame(2, b"four"))
    await asyncio.sleep(0)
    assert connection.frames_sent == before[0] + 2
    assert connection.bytes_sent == before[1] + 2 * HEADER_BYTES + 4


# -- messages with tensors


def packed(packer: Packer, *tensors: torch.Tensor, pickle: bytes = b"pickle", meta: bytes = b"meta") -> Content:
    return packer.pack(list(tensors), pickle, meta)


def send_tensors(connection: ListConnection, content: Content, number: int = 1) -> BulkSend | None:
    return connection.send_message(REQUEST, 2, number, 3, 4, content)


async def received_by_a_peer(connection: ListConnection) -> list[Message]:
    """What the peer makes of everything that was written."""
    await asyncio.sleep(0)
    peer = wire_opened(limits=LIMITS)
    return feed(peer, b"".join(connection.written))


async def test_a_message_without_tensors_is_one_frame():
    connection, _ = await opened()
    assert connection.send_message(REQUEST, 1, 2, 3, 4, Content(b"pickle", b"meta")) is None
    (message,) = await received_by_a_peer(connection)
    assert heard(message) == Spoken(MessageType.REQUEST, 1, 2, 3, 4, b"meta", b"pickle")


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_schema_is_announced_when_it_is_used_again(is_busy):
    connection, _ = await opened()
    packer = Packer(1 << 20)
    values = [torch.full((3, 5), float(number)) for number in range(4)]
    for number, value in enumerate(values):
        if is_busy:
            connection.send = connection._send_later
        send_tensors(connection, packed(packer, value), number)
    messages = await received_by_a_peer(connection)
    assert [message.layout.build(message.memory, message.buffers)[0].tolist() for message in messages] == [
        value.tolist() for value in values
    ]
    assert [(bytes(message.meta), bytes(message.body), message.flags, message.arg) for message in messages] == [
        (b"meta", b"pickle", 2, 3)
    ] * 4
    headers = connection.headers()
    assert [(header.type, header.schema) for header in headers] == [
        (REQUEST, ONE_OFF),
        (MessageType.SCHEMA, 0),
        *[(REQUEST, 1)] * 3,
    ]
    assert headers[1].arg == 1


async def test_each_schema_has_a_number_of_its_own_on_each_connection():
    packer = Packer(1 << 20)
    connections = [(await opened())[0] for _ in range(2)]
    for size in (1, 2, 3):
        for _ in range(2):
            send_tensors(connections[0], packed(packer, torch.ones(size)))
    for size in (3, 1):
        send_tensors(connections[1], packed(packer, torch.ones(size)))
    assert [header.arg for header in connections[0].headers() if header.type == MessageType.SCHEMA] == [1, 2, 3]
    assert [header.arg for header in connections[1].headers() if header.type == MessageType.SCHEMA] == [1, 2]
    for connection in connections:
        await received_by_a_peer(connection)


async def test_large_tensors_follow_a_message_whose_schema_was_announced():
    connection, _ = await opened()
    packer = Packer(100)
    small, large = torch.arange(10), torch.arange(1000)
    for number in range(3):
        bulk = send_tensors(connection, packed(packer, small, large), number)
        assert bulk is not None
    messages = await received_by_a_peer(connection)
    for message in messages:
        first, second = message.layout.build(message.memory, message.buffers)
        assert torch.equal(first, small)
        assert torch.equal(second, large)
    types = [header.type for header in connection.headers() if header.type != MessageType.DATA]
    assert types == [REQUEST, MessageType.SCHEMA, REQUEST, REQUEST]


async def test_no_more_schemas_are_announced_than_a_peer_takes(monkeypatch):
    monkeypatch.setattr(announced_schemas, "MAX_SCHEMAS", 2)
    connection, _ = await opened()
    packer = Packer(1 << 20)
    for size in (1, 2, 3, 4):
        for _ in range(2):
            send_tensors(connection, packed(packer, torch.ones(size)))
    assert len(await received_by_a_peer(connection)) == 8
    assert [header.arg for header in connection.headers() if header.type == MessageType.SCHEMA] == [1, 2]
    # a thread must not wait for a number that never comes
    tensors = packed(packer, torch.ones(4))
    assert header_of(connection.frame_in_thread(REPLY, 7, tensors)).schema == ONE_OFF


async def test_no_more_is_announced_than_a_peer_takes(monkeypatch):
    packer = Packer(1 << 20)
    tensors = [packed(packer, torch.ones(size)) for _ in range(2) for size in (1, 2, 3)]
    monkeypatch.setattr(announced_schemas, "MAX_SCHEMA_BYTES", sum(len(each.schema.table) for each in tensors[:2]))
    connection, _ = await opened()
    for each in tensors * 2:
        send_tensors(connection, each)
    assert [header.arg for header in connection.headers() if header.type == MessageType.SCHEMA] == [1, 2]
    assert header_of(connection.frame_in_thread(REPLY, 7, tensors[-1])).schema == ONE_OFF


async def test_a_thread_uses_no_number_that_was_not_written():
    connection, _ = await opened()
    packer = Packer(1 << 20)
    tensors = packed(packer, torch.ones(3))
    assert header_of(connection.frame_in_thread(REPLY, 1, tensors)).schema == ONE_OFF
    tensors = packed(packer, torch.ones(3))
    assert connection.frame_in_thread(REPLY, 2, tensors) is None  # the loop announces it

    seen: list[bytes | None] = []
    connection.on_write = lambda data: seen.append(connection.frame_in_thread(REPLY, 3, tensors))
    connection.send = connection._send_later
    connection.send(small_frame(1))  # waits to be written, as does what is sent next
    send_tensors(connection, tensors)
    # at each write, the announcement's own included, the number was not known to threads
    assert seen == [None] * 2
    connection.on_write = None
    in_thread = connection.frame_in_thread(REPLY, 3, tensors)
    assert header_of(in_thread).schema == 1
    connection.written.append(in_thread)  # before the loop has written its own message
    messages = await received_by_a_peer(connection)
    assert [message.type for message in messages] == [MessageType.REQUEST, MessageType.REPLY, MessageType.REQUEST]


async def test_a_thread_sends_no_large_tensors():
    connection, _ = await opened()
    assert connection.frame_in_thread(REPLY, 1, packed(Packer(0), torch.ones(3))) is None
    assert connection.frame_in_thread(REPLY, 1, Content(b"x")) == frame(REPLY, 0, 1, 0, 0, b"x")


async def test_nothing_is_announced_once_a_connection_is_closing():
    connection, _ = await opened()
    packer = Packer(1 << 20)
    for _ in range(2):
        tensors = packed(packer, torch.ones(3))
    connection.feed(frame(MessageType.GOODBYE, 0, 0, 0, 0, b"so long"))
    send_tensors(connection, tensors)
    await asyncio.sleep(0)
    assert [(header.type, header.schema) for header in connection.headers()] == [(REQUEST, ONE_OFF)]
    connection.close()
    connection.take()
    with pytest.raises(ConnectionClosedError):
        send_tensors(connection, tensors)
    assert connection.take() == []


async def test_nothing_is_written_for_a_schema_after_abort():
    connection, _ = await opened()
    packer = Packer(1 << 20)
    for _ in range(2):
        tensors = packed(packer, torch.ones(3))
    connection.abort()
    send_tensors(connection, tensors)
    await asyncio.sleep(0)
    assert connection.written == []
    connection.end()
    with pytest.raises(ConnectionClosedError):
        send_tensors(connection, tensors)
