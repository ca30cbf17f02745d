"""The turn to write: whoever writes, the bytes of a frame stay together and none is lost."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from arpc.testing.endpoints import Endpoints, bulk_frame, small_frame, turns_until
from arpc.transport.sockets import TcpTransport, UnixTransport
from arpc.transport.write_lock import WriteLock
from arpc.wire.messages import MessageType

# -- with a system that takes as many bytes as it is told to


class Pipe:
    """A connection whose peer takes bytes when the test says so: its transport, its socket and its loop in one."""

    def __init__(self, room_bytes: int) -> None:
        self.taken = b""
        self.is_full = False
        self.is_shut = False
        self.callbacks: list[Callable[[], None]] = []
        self._room_bytes = room_bytes
        self._buffer = b""
        self.loop = self
        self.call_soon_threadsafe = self.callbacks.append
        self.left = 0
        """How often it was notified that fewer bytes may be held."""
        self.turn = WriteLock(self, self, self)  # type: ignore[arg-type]

    def notify_bulk_left(self) -> None:
        self.left += 1

    def make_room(self, size_bytes: int) -> None:
        """The peer takes so many bytes: those that the transport holds go first."""
        self._room_bytes += size_bytes
        self._buffer = self._buffer[self._take(self._buffer) :]
        self.is_full = bool(self._buffer)

    def run_callbacks(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()

    def _take(self, data: bytes) -> int:
        size = min(len(data), self._room_bytes)
        self._room_bytes -= size
        self.taken += data[:size]
        return size

    # a socket

    def send(self, data: bytes) -> int:
        assert not self._buffer, "a thread has overtaken the transport"
        if not self._room_bytes:
            raise BlockingIOError
        return self._take(data)

    # a transport

    def write(self, data: bytes) -> None:
        if not self._buffer:
            data = data[self._take(data) :]
        self._buffer += data
        self.is_full = bool(self._buffer)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        # as that of asyncio, which did not tell for some time
        was_full = self.is_full
        self.write(b"".join(pieces))
        self.is_full = was_full

    def set_write_buffer_limits(self, high: int) -> None:
        self.is_full = len(self._buffer) > high

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def close(self) -> None:
        self.is_shut = True


def test_a_thread_sends_what_the_system_takes():
    pipe = Pipe(100)
    assert pipe.turn.send([b"one", b"two"])
    pipe.turn.write(b"three")
    assert pipe.taken == b"onetwothree"
    assert not pipe.callbacks, "the loop has nothing to do with it"
    assert (pipe.turn.frames_sent, pipe.turn.bytes_sent, pipe.turn.writes) == (2, 6, 1)


@pytest.mark.parametrize("room_bytes", [0, 2])
def test_the_rest_is_written_by_the_loop_before_anything_else(room_bytes):
    pipe = Pipe(room_bytes)
    assert pipe.turn.send([b"first"])
    assert pipe.turn.get_write_buffer_size() == 5 - room_bytes
    assert not pipe.turn.send([b"not yet"])
    pipe.turn.write(b"second")
    pipe.make_room(100)
    pipe.run_callbacks()
    assert pipe.taken == b"firstsecond"
    assert pipe.turn.send([b"third"])
    assert pipe.taken == b"firstsecondthird"


def test_the_rest_needs_no_other_write():
    pipe = Pipe(1)
    assert pipe.turn.send([b"first"])
    pipe.run_callbacks()
    pipe.make_room(100)
    assert pipe.taken == b"first"


def test_requests_that_wait_for_room_hear_that_the_rest_was_taken():
    """The transport notifies nobody if the system takes all at once."""
    pipe = Pipe(1)
    assert pipe.turn.send([b"first"])
    pipe.make_room(100)
    pipe.run_callbacks()
    assert pipe.turn.get_write_buffer_size() == 0
    assert pipe.left == 1


def test_what_has_to_wait_is_not_sent():
    pipe = Pipe(0)
    pipe.turn.write(b"held back")
    assert not pipe.turn.send([b"too early"])
    pipe.make_room(100)
    pipe.turn.shut()
    assert not pipe.turn.send([b"too late"])
    pipe.run_callbacks()
    assert pipe.taken == b"held back"


def test_the_end_closes_the_socket_and_forgets_the_rest():
    pipe = Pipe(1)
    assert pipe.turn.send([b"first"])
    pipe.turn.end()
    assert pipe.is_shut
    pipe.run_callbacks()
    pipe.make_room(100)
    assert pipe.taken == b"f"


def test_a_connection_that_is_lost_is_the_loops_to_notice():
    pipe = Pipe(0)

    def lost(_: bytes) -> int:
        raise BrokenPipeError

    pipe.turn._send = lost
    assert pipe.turn.send([b"first"])
    assert not pipe.callbacks
    assert pipe.turn.get_write_buffer_size() == 0


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_a_system_without_memory_loses_no_frame(code):
    pipe = Pipe(100)

    def refuse(_: bytes) -> int:
        raise OSError(code, "not now")

    pipe.turn._send = refuse
    assert pipe.turn.send([b"first"])
    assert pipe.turn.get_write_buffer_size() == 5
    pipe.run_callbacks()
    assert pipe.taken == b"first"


_steps = st.one_of(
    st.tuples(st.just("thread"), st.lists(st.integers(1, 40), max_size=3)),
    st.tuples(st.sampled_from(["write", "chunk", "room"]), st.integers(1, 60)),
    st.tuples(st.just("loop"), st.none()),
)


@given(st.integers(0, 50), st.lists(_steps, max_size=40))
def test_frames_leave_whole_and_in_the_order_in_which_they_were_accepted(room_bytes, steps):
    pipe = Pipe(room_bytes)
    expected = b""
    number = 0

    def make(size: int) -> bytes:
        nonlocal number
        number += 1
        return bytes([number % 256]) * size

    for kind, value in steps:
        if kind == "thread":
            frames = [make(size) for size in value]
            if pipe.turn.send(frames):
                expected += b"".join(frames)
        elif kind == "write":
            expected += (data := make(value))
            pipe.turn.write(data)
        elif kind == "chunk":
            expected += (data := make(value))
            pipe.turn.writelines([data[:1], memoryview(data)[1:]])
        elif kind == "room":
            pipe.make_room(value)
        else:
            pipe.run_callbacks()
        assert expected.startswith(pipe.taken)
        assert pipe.turn.get_write_buffer_size() == len(expected) - len(pipe.taken)
    pipe.run_callbacks()
    pipe.make_room(10_000)
    assert pipe.taken == expected


# -- with sockets


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_threads_and_the_loop_write_to_one_socket(new_loop, scheme):
    """Small frames of threads between small and large ones of the loop, to a peer that is slow to take them."""

    async def main() -> None:
        transport, address = (UnixTransport(), "unix://") if scheme == "unix" else (TcpTransport(), "tcp://127.0.0.1:0")
        async with Endpoints(transport, address) as endpoints:
            pair = await endpoints.pair()
            connection = pair.near.connection
            turn = connection.share_writing()
            assert turn is not None
            assert connection.share_writing() is turn
            pause = threading.Event()

            def work(thread: int) -> None:
                for number in range(200):
                    data = small_frame(1000 * (thread + 1) + number, bytes([number % 256]) * (37 * number))
                    while not turn.send([data]):
                        pause.wait(0.001)  # an agent would leave it to its loop

            threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
            for thread in threads:
                thread.start()
            for number in range(200):
                connection.send(small_frame(number, b"\x01" * 100))
                if number % 50 == 0:
                    large = memoryview(bytes(1 << 20))
                    connection.send_bulk(bulk_frame(number + 500, [large]), [large])
                await asyncio.sleep(0)
            await turns_until(lambda: len(pair.far.messages) >= 804)
            for thread in threads:
                thread.join(10)
            numbers = pair.far.numbers
            assert sorted(numbers) == sorted(
                [
                    *range(200),
                    500,
                    550,
                    600,
                    650,
                    *(1000 * thread + number for thread in (1, 2, 3) for number in range(200)),
                ]
            )
            for thread in (1, 2, 3):
                own = [number for number in numbers if number // 1000 == thread]
                assert own == sorted(own), "those of one thread keep their order"
            assert all(message.type is MessageType.REQUEST for message in pair.far.messages)
            sent = connection.statistics()
            assert sent["bytes_sent"] == pair.far.connection.statistics()["bytes_received"]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


async def test_the_peer_sees_the_end_of_a_connection_that_threads_may_write():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        pair = await endpoints.pair()
        turn = pair.near.connection.share_writing()
        assert turn is not None
        assert turn.send([small_frame(7)])
        pair.near.connection.close("done")
        assert not turn.send([small_frame(8)]), "nothing comes after a goodbye"
        await turns_until(lambda: pair.far.lost and pair.near.lost)
        assert pair.far.numbers == [7]
        assert pair.far.lost == pair.near.lost == [None]
        assert turn._socket.fileno() == -1


async def test_the_peer_sees_that_it_was_aborted():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        pair = await endpoints.pair()
        turn = pair.near.connection.share_writing()
        assert turn is not None
        pair.near.connection.abort()
        assert not turn.send([small_frame(8)])
        await turns_until(lambda: pair.far.lost and pair.near.lost)
        assert pair.near.connection.share_writing() is turn
        assert not turn.send([small_frame(9)])


async def test_a_closed_connection_is_not_shared(monkeypatch: Any):
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        pair = await endpoints.pair()

        def no_more(_: int) -> int:
            raise OSError("too many open files")

        with monkeypatch.context() as patched:
            patched.setattr("os.dup", no_more)
            assert pair.near.connection.share_writing() is None
        pair.near.connection.close()
        assert pair.near.connection.share_writing() is None
        await turns_until(lambda: pair.far.lost and pair.near.lost)


async def test_no_timeout_of_new_sockets_makes_a_thread_wait():
    socket.setdefaulttimeout(30)
    try:
        async with Endpoints(UnixTransport(), "unix://") as endpoints:
            pair = await endpoints.pair()
            turn = pair.near.connection.share_writing()
            assert turn is not None
            assert turn._socket.gettimeout() == 0.0
    finally:
        socket.setdefaulttimeout(None)
