"""A thread connection alone: a socket that blocks, and a peer at its other end that says what the test wants."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from arpc.compat.blocking_client.thread_connection import NotSentError, ThreadConnection, ThreadConnectionClosedError
from arpc.errors import ProtocolError
from arpc.testing.endpoints import FAR, NEAR
from arpc.wire.frames import HEADER_BYTES, Limits, frame
from arpc.wire.handshake import Handshake, Role
from arpc.wire.messages import Failure, MessageType, Reply
from arpc.wire.protocol import Protocol, State

MIB = 1 << 20
REQUEST = frame(MessageType.REQUEST, 0, 1, 1, 0, b"")


def reply(id_: int, payload: bytes = b"") -> bytes:
    return frame(MessageType.REPLY, 0, id_, 0, 0, payload)


class Peer:
    """The other end: answers a request with bytes, as they are."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.settimeout(20)
        self.heard: list[bytes] = []

    def says(self, *pieces: bytes, after_request: bool = True) -> threading.Thread:
        """Say these, each on its own, once something was heard; then nothing more."""

        def say() -> None:
            if after_request:
                self.heard.append(self.socket.recv(MIB))
            for piece in pieces:
                self.socket.sendall(piece)

        thread = threading.Thread(target=say)
        thread.start()
        return thread


def shaken_hands() -> Protocol:
    """A protocol after its handshake."""
    limits = Limits(MIB, MIB)
    near = Protocol(Handshake(Role.CONNECTOR, NEAR, None), limits)
    far = Protocol(Handshake(Role.ACCEPTOR, FAR, None), limits)
    while near.state is State.HANDSHAKE:
        for sender, receiver in ((near, far), (far, near)):
            data = sender.take_output()
            receiver.get_buffer(0)[: len(data)] = data
            receiver.receive(len(data))
    return near


@pytest.fixture
def ends() -> Iterator[tuple[ThreadConnection, Peer]]:
    near, far = socket.socketpair()
    connection = ThreadConnection(near, shaken_hands(), "unix:///there")
    with far:
        yield connection, Peer(far)
        connection.close()


def test_a_plain_reply_is_returned(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    thread = peer.says(reply(1, b"payload"))
    assert connection.request(REQUEST, 1, 0).body == b"payload"
    thread.join()
    assert peer.heard == [REQUEST]


def test_a_reply_may_come_in_pieces(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    whole = reply(1, b"0123456789" * 100)
    thread = peer.says(whole[:5], whole[5:40], whole[40:700], whole[700:])
    answer = connection.request(REQUEST, 1, 10.0)
    thread.join()
    # in one piece, if the reader was late
    assert (answer.body if isinstance(answer, Reply) else answer) == b"0123456789" * 100


def test_large_tensors_of_a_reply_are_gathered(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    head = frame(MessageType.REPLY, 0, 1, 0, 0, b"p", buffer_sizes=(6,))
    thread = peer.says(head, frame(MessageType.DATA, 0, 0, 0, 0, b"abc"), frame(MessageType.DATA, 0, 0, 0, 0, b"def"))
    answer = connection.request(REQUEST, 1, 10.0)
    thread.join()
    assert isinstance(answer, Reply)
    assert [bytes(buffer) for buffer in answer.buffers] == [b"abcdef"]


def test_a_failure_is_handed_over(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    thread = peer.says(frame(MessageType.FAILURE, 0, 1, 0, 0, b"why"))
    answer = connection.request(REQUEST, 1, 0)
    thread.join()
    assert isinstance(answer, Failure)
    assert answer.body == b"why"


def test_a_late_reply_is_not_taken_for_that_of_the_next_call(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    with pytest.raises(TimeoutError):
        connection.request(REQUEST, 1, 0.01)
    assert connection.owed == {1}
    thread = peer.says(reply(1, b"late"), reply(2, b"mine"))
    answer = connection.request(frame(MessageType.REQUEST, 0, 2, 1, 0, b""), 2, 10.0)
    thread.join()
    assert (answer.body if isinstance(answer, Reply) else answer) == b"mine"
    assert not connection.owed
    assert not connection.is_ended


def test_what_comes_meanwhile_does_not_prolong_the_wait(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    thread = peer.says(reply(7, b"of another"), reply(8), reply(9))
    with pytest.raises(TimeoutError):
        connection.request(REQUEST, 1, 0.05)
    thread.join()
    assert connection.owed == {1}


def test_an_idle_thread_connection_takes_what_is_owed_and_notices_its_end(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    with pytest.raises(TimeoutError):
        connection.request(REQUEST, 1, 0.01)
    assert connection.is_sound()
    peer.says(reply(1, b"late"), after_request=False).join()
    assert connection.is_sound()
    assert not connection.owed
    peer.socket.shutdown(socket.SHUT_RDWR)
    assert not connection.is_sound()


def test_one_that_was_closed_while_idle_sends_nothing(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    peer.says(frame(MessageType.GOODBYE, 0, 0, 0, 0, b"enough"), after_request=False).join()
    connection.used_at -= 10
    with pytest.raises(NotSentError, match="while it was not used"):
        connection.request(REQUEST, 1, 0)
    peer.socket.close()
    connection.used_at = time.monotonic()
    with pytest.raises(NotSentError):
        connection.request(REQUEST, 1, 0)


@pytest.mark.parametrize(("last_words", "farewell"), [(b"", None), (b"see you", "see you")])
def test_the_end_of_the_peer_ends_the_call(
    ends: tuple[ThreadConnection, Peer], last_words: bytes, farewell: str | None
):
    connection, peer = ends

    def end() -> None:
        peer.socket.recv(MIB)
        if last_words:
            peer.socket.sendall(frame(MessageType.GOODBYE, 0, 0, 0, 0, last_words))
        peer.socket.close()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(ThreadConnectionClosedError, match="closed the connection without a goodbye") as closed:
        connection.request(REQUEST, 1, 10.0)
    thread.join()
    assert closed.value.farewell == farewell


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * HEADER_BYTES,
        frame(MessageType.REQUEST, 0, 1, 1, 0, b""),
        frame(MessageType.WELCOME, 0, 0, 0, 0, b""),
        frame(MessageType.DATA, 0, 3, 0, 0, b"of nothing"),
        frame(MessageType.CREDIT, 0, 1, 1, 0, b""),
    ],
)
def test_bad_bytes_are_an_error_of_the_protocol(ends: tuple[ThreadConnection, Peer], words: bytes):
    connection, peer = ends
    thread = peer.says(words)
    with pytest.raises(ProtocolError):
        connection.request(REQUEST, 1, 10.0)
    thread.join()


def test_a_ping_is_answered(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    thread = peer.says(frame(MessageType.PING, 0, 5, 0, 0, b""), reply(1, b"x"))
    answer = connection.request(REQUEST, 1, 10.0)
    thread.join()
    assert (answer.body if isinstance(answer, Reply) else answer) == b"x"
    assert peer.socket.recv(MIB) == frame(MessageType.PONG, 0, 5, 0, 0, b"")


def test_a_thread_that_waits_can_be_woken(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            connection.request(REQUEST, 1, 0)
        except ThreadConnectionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert peer.socket.recv(MIB) == REQUEST
    connection.wake()
    thread.join(20)
    assert [type(error) for error in errors] == [ThreadConnectionClosedError]
    assert connection.is_ended


def test_a_request_that_does_not_fit_in_time_ends_the_thread_connection(ends: tuple[ThreadConnection, Peer]):
    connection, _ = ends
    with pytest.raises(TimeoutError):
        connection.request(bytes(16 * MIB), 1, 0.05)
    assert connection.is_ended


def test_close_says_goodbye_once(ends: tuple[ThreadConnection, Peer]):
    connection, peer = ends
    connection.close("done")
    connection.close("done")
    assert peer.socket.recv(MIB) == frame(MessageType.GOODBYE, 0, 0, 0, 0, b"done")
    assert peer.socket.recv(MIB) == b""


def test_a_host_that_does_not_answer_is_no_deadline_that_has_passed(
    ends: tuple[ThreadConnection, Peer], monkeypatch: pytest.MonkeyPatch
):
    connection, _ = ends

    def time_out(_: memoryview) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(connection, "_receive_into", time_out)
    with pytest.raises(ThreadConnectionClosedError, match="does not answer"):
        connection.request(REQUEST, 1, 0.0)
    assert not connection.owed
