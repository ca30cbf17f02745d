"""Sockets of the operating system; what they share with other transports is in test_conformance.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from arpc.errors import ConfigurationError, HandshakeError, ProtocolError, WireError
from arpc.testing.endpoints import NEAR, Endpoint, Endpoints, bulk_frame, small_frame, turns_until
from arpc.transport import connection as base
from arpc.transport import sockets as stream
from arpc.transport.sockets import TcpTransport, UnixTransport, socket_directory, split_tcp, split_unix
from arpc.wire.frames import frame
from arpc.wire.handshake import Handshake, Role
from arpc.wire.messages import MessageType

MIB = 1 << 20
TCP = "tcp://127.0.0.1:0"


@contextlib.asynccontextmanager
async def raw_peer(endpoints: Endpoints) -> AsyncIterator[socket.socket]:
    """A plain socket, connected to a listener; it does nothing by itself."""
    loop = asyncio.get_running_loop()
    address = endpoints.listener.address
    if address.startswith("unix://"):
        sock, where = socket.socket(socket.AF_UNIX), split_unix(address)
    else:
        sock, where = socket.socket(), split_tcp(address)
    sock.setblocking(False)
    with sock:
        await loop.sock_connect(sock, where)
        yield sock


async def shake_hands(sock: socket.socket) -> None:
    """The connector's part of a handshake without a secret, by hand."""
    loop = asyncio.get_running_loop()
    handshake = Handshake(Role.CONNECTOR, NEAR, None)
    await loop.sock_sendall(sock, handshake.start())
    assert len(await loop.sock_recv(sock, 4096)) > 32  # CHALLENGE; with no secret there is nothing in it to answer to
    await loop.sock_sendall(sock, frame(MessageType.PROOF, 0, 0, 0, 0, b""))
    assert len(await loop.sock_recv(sock, 4096)) == 32  # WELCOME


# -- busy polling


@pytest.mark.parametrize(("transport", "address"), [(TcpTransport, TCP), (UnixTransport, "unix://")])
async def test_where_the_other_end_is_is_found_out_once(
    transport: type[TcpTransport | UnixTransport], address: str, monkeypatch: pytest.MonkeyPatch
):
    async with Endpoints(transport(), address) as endpoints:
        near, far = await endpoints.pair()
        for end in (near, far):
            assert end.connection.is_local
        monkeypatch.setattr(stream, "split_tcp", None)  # a busy_poll asks all connections again and again
        for end in (near, far):
            assert end.connection.is_local


# -- what has arrived


@pytest.mark.parametrize(("transport", "address"), [(TcpTransport, TCP), (UnixTransport, "unix://")])
async def test_what_was_sent_is_delivered_in_the_end(transport: type[TcpTransport | UnixTransport], address: str):
    async with Endpoints(transport(), address) as endpoints:
        near, far = await endpoints.pair()
        for _ in range(10):
            near.connection.send(small_frame(1))
        near.connection.flush()  # so that they are counted
        await far.until(lambda: far.connection.bytes_received >= near.connection.count_sent())
        async with asyncio.timeout(30):
            await turns_until(lambda: near.connection.count_delivered() == near.connection.count_sent())
        assert near.connection.count_delivered() >= 320


async def test_what_the_other_process_does_not_read_is_not_delivered():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        near, far = await endpoints.pair()
        far.connection._transport.pause_reading()
        before = near.connection.count_delivered()
        for _ in range(10):
            near.connection.send(small_frame(1))
            near.connection.flush()
        assert near.connection.count_sent() >= before + 320
        assert near.connection.count_delivered() <= before


# -- addresses


@pytest.mark.parametrize(
    "address",
    ["tcp://host", "tcp://:1", "tcp://host:port", "tcp://host:99999", "tcp://", "unix:///path", "host:1", "tcp:host:1"],
)
def test_not_an_address_of_a_port(address):
    with pytest.raises(ConfigurationError, match="is not an address like tcp://host:port"):
        split_tcp(address)


@pytest.mark.parametrize(
    "address", ["unix://", "unix://relative/path", "unix:/path", "/path", "tcp://host:1", "unix:///a\0b"]
)
def test_not_an_address_of_a_path(address):
    with pytest.raises(ConfigurationError, match="is not an address like unix:///path"):
        split_unix(address)


def test_host_and_port():
    assert split_tcp("tcp://example.org:80") == ("example.org", 80)
    assert split_tcp("tcp://[::1]:0") == ("::1", 0)


@pytest.mark.parametrize("character", ["x", "é"])
async def test_a_path_that_is_too_long(tmp_path, character):
    address = f"unix://{tmp_path}/{character * 99}"
    with pytest.raises(ConfigurationError, match="may have 100 bytes"):
        await UnixTransport().listen(address, lambda: pytest.fail("nobody connects"))
    with pytest.raises(ConfigurationError, match="may have 100 bytes"):
        await UnixTransport().connect(address, None, None)


async def test_ports_and_paths_are_told_as_they_are():
    async with Endpoints(TcpTransport(), TCP) as tcp, Endpoints(UnixTransport(), "unix://") as unix:
        host, port = split_tcp(tcp.listener.address)
        assert host == "127.0.0.1"
        assert port > 0
        assert Path(split_unix(unix.listener.address)).is_socket()
        near, far = await tcp.pair()
        assert near.connection.address == tcp.listener.address
        assert far.connection.address.startswith("tcp://127.0.0.1:")
        near, far = await unix.pair()
        assert near.connection.address == far.connection.address == unix.listener.address


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
async def test_version_six_of_ip():
    async with Endpoints(TcpTransport(), "tcp://[::1]:0") as endpoints:
        assert endpoints.listener.address.startswith("tcp://[::1]:")
        near, _ = await endpoints.pair()
        assert near.connection.address == endpoints.listener.address


async def test_a_host_that_does_not_exist():
    async with Endpoints(TcpTransport(), TCP) as endpoints:
        with pytest.raises(OSError):  # noqa: PT011 - the text is the resolver's
            await endpoints.start(address="tcp://host.invalid:1")


# -- files


async def test_only_this_user_can_reach_the_socket():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        path = Path(split_unix(endpoints.listener.address))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.parent == socket_directory()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_file_goes_with_the_listener(tmp_path):
    path = tmp_path / "socket"
    async with Endpoints(UnixTransport(), f"unix://{path}") as endpoints:
        near, far = await endpoints.pair()
        await endpoints.listener.aclose()
        assert not path.exists()
        near.connection.send(small_frame(1))
        await far.received(1)
        await endpoints.listener.aclose()


async def test_the_file_goes_when_nobody_closes_the_listener(tmp_path):
    path = tmp_path / "socket"
    async with Endpoints(UnixTransport(), f"unix://{path}") as endpoints:
        endpoints.listener._remove()  # what happens at the end of the process
        assert not path.exists()


async def test_a_fork_does_not_take_the_file_away(tmp_path):
    path = tmp_path / "socket"
    path.touch()
    stream._remove_socket(str(path), os.getpid() + 1)
    assert path.exists()
    stream._remove_socket(str(path), os.getpid())
    assert not path.exists()


async def test_a_file_that_a_dead_process_left_makes_way(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    async with Endpoints(UnixTransport(), f"unix://{path}") as endpoints:
        await endpoints.pair()


async def test_a_file_that_is_no_socket_stays(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="cannot listen on unix://"):
        await UnixTransport().listen(f"unix://{path}", lambda: pytest.fail("nobody connects"))
    assert path.read_text() == "data"


async def test_no_such_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot listen on unix://"):
        await UnixTransport().listen(f"unix://{tmp_path}/none/socket", lambda: pytest.fail("nobody connects"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's; pytest's own are too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


async def test_a_directory_others_can_enter_is_not_used(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    mine = short_path / f"arpc-{os.getuid()}"
    mine.mkdir(mode=0o755)
    with pytest.raises(WireError, match="must be a directory that only its owner"):
        await UnixTransport().listen("unix://", lambda: pytest.fail("nobody connects"))
    mine.chmod(0o700)
    assert socket_directory() == mine
    mine.rmdir()
    mine.symlink_to(short_path)
    with pytest.raises(WireError, match="must be a directory"):
        socket_directory()


def test_a_long_temporary_directory_is_not_used(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert socket_directory() == Path("/tmp") / f"arpc-{os.getuid()}"


def test_a_runtime_directory_that_is_not_there_is_not_used(short_path, monkeypatch):
    """As in a container, or under sudo: the variable comes from where the user logged in."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    assert socket_directory() == short_path / f"arpc-{os.getuid()}"


# -- who is there


class SocketOf:
    """A socket whose other end belongs to a user."""

    family = socket.AF_UNIX

    def __init__(self, uid: int | None):
        self._uid = uid

    def getsockopt(self, *_):
        if self._uid is None:
            raise OSError("not connected")
        return struct.pack("iII", 1234, self._uid, 1000)


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="this system does not tell")
@pytest.mark.parametrize(
    ("uid", "stranger"),
    [(os.getuid(), None), (0, None), (os.getuid() + 1, os.getuid() + 1), (2**32 - 2, 2**32 - 2), (None, -1)],
)
def test_a_peer_of_another_user_is_refused(uid, stranger):
    if stranger is None:
        assert stream._process_at(SocketOf(uid), "here") == 1234
        return
    with pytest.raises(HandshakeError, match=rf"another user \({stranger}\) is at the other end of here"):
        stream._process_at(SocketOf(uid), "here")


def test_over_tcp_everybody_is_a_stranger_already():
    with socket.socket() as sock:
        assert stream._process_at(sock, "here") is None  # secrets and TLS are for that


async def test_the_process_at_the_other_end_is_known():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        near, far = await endpoints.pair()
        assert near.connection.peer_process == far.connection.peer_process == os.getpid()
        assert near.connection.is_local
    async with Endpoints(TcpTransport(), TCP) as endpoints:
        near, _ = await endpoints.pair()
        assert near.connection.peer_process is None
        assert near.connection.is_local


async def test_a_process_of_another_user_is_refused(monkeypatch):
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        monkeypatch.setattr(stream, "_credentials", lambda _: (1234, 4711))
        near = await endpoints.start()
        with pytest.raises(HandshakeError, match=r"a process of another user \(4711\)"):
            await near.connection.wait_opened()
        far = await endpoints.next_accepted()
        assert isinstance(await far.ended(), HandshakeError)
        monkeypatch.undo()
        await endpoints.pair()


# -- peers that are no peers


@pytest.mark.parametrize(("transport", "address"), [(TcpTransport, TCP), (UnixTransport, "unix://")])
async def test_a_peer_that_hangs_up_in_the_handshake(transport, address):
    async with Endpoints(transport(), address) as endpoints:
        for words in (b"", b"\x10", Handshake(Role.CONNECTOR, NEAR, None).start()):
            number = len(endpoints.accepted)
            async with raw_peer(endpoints) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, words)
                far = await endpoints.next_accepted(number)
            assert isinstance(await far.ended(), ConnectionError)
            assert not far.opened
        await endpoints.pair()


async def test_a_peer_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(base, "HANDSHAKE_S", 0.02)
    async with Endpoints(TcpTransport(), TCP) as endpoints, raw_peer(endpoints) as sock:
        far = await endpoints.next_accepted()
        assert isinstance(await far.ended(), HandshakeError)
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_bad_bytes_of_a_peer_that_shook_hands():
    async with Endpoints(TcpTransport(), TCP) as endpoints, raw_peer(endpoints) as sock:
        await shake_hands(sock)
        far = await endpoints.next_accepted()
        await asyncio.get_running_loop().sock_sendall(sock, b"\xff" * 1000)
        assert isinstance(await far.ended(), ProtocolError)
        assert far.opened


async def test_a_peer_that_hangs_up_in_the_middle_of_a_frame():
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        async with raw_peer(endpoints) as sock:
            await shake_hands(sock)
            far = await endpoints.next_accepted()
            await asyncio.get_running_loop().sock_sendall(sock, small_frame(1, bytes(100))[:50])
        assert isinstance(await far.ended(), ConnectionError)
        assert far.messages == []


@pytest.mark.parametrize(("transport", "address"), [(TcpTransport, TCP), (UnixTransport, "unix://")])
async def test_a_peer_that_does_not_read(transport, address):
    async with Endpoints(transport(), address) as endpoints, raw_peer(endpoints) as sock:
        loop = asyncio.get_running_loop()
        await shake_hands(sock)
        far = await endpoints.next_accepted()
        await turns_until(lambda: far.opened)
        connection = far.connection
        size = 64 * MIB
        buffers = [memoryview(bytearray(size))]
        connection.send_bulk(bulk_frame(1, buffers), buffers)
        await turns_until(lambda: connection.is_congested)
        for _ in range(100):
            await asyncio.sleep(0)
        # It holds a reference to the memory that was to be sent, and of what it wrote ahead little more than a chunk
        assert connection.is_congested
        assert connection._unsent_bytes() <= 3 * MIB
        assert connection.unsent_bytes > size // 2
        received = 0
        while received < size:
            received += len(await loop.sock_recv(sock, MIB))
        await turns_until(lambda: far.drained)
        assert not connection.is_congested


async def test_closing_does_not_wait_for_a_peer_that_does_not_read(monkeypatch):
    monkeypatch.setattr(base, "_LINGER_S", 0.02)
    async with Endpoints(TcpTransport(), TCP) as endpoints, raw_peer(endpoints) as sock:
        await shake_hands(sock)
        far = await endpoints.next_accepted()
        await turns_until(lambda: far.opened)
        buffers = [memoryview(bytearray(64 * MIB))]
        far.connection.send_bulk(bulk_frame(1, buffers), buffers)
        far.connection.close()
        assert await far.ended() is None


# -- what is left


async def test_256_mib_take_the_memory_of_the_receiver_and_no_more():
    size = 256 * MIB
    process = psutil.Process()
    target = memoryview(bytearray(b"\1") * size)  # all of it there before we look
    source = memoryview(bytearray(b"\2") * size)
    async with Endpoints(UnixTransport(), "unix://") as endpoints:
        endpoints.allocate = lambda _: target
        near, far = await endpoints.pair()
        before = most = process.memory_info().rss
        near.connection.send_bulk(bulk_frame(1, [source]), [source])
        while not far.messages:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0)
        assert target == source
        assert most - before < 32 * MIB, f"{(most - before) >> 20} MiB more than before"


@pytest.mark.parametrize(("transport", "address"), [(TcpTransport, TCP), (UnixTransport, "unix://")])
async def test_a_cancelled_connect_leaves_no_socket(transport, address):
    process = psutil.Process()
    async with Endpoints(transport(), address) as endpoints:
        await endpoints.pair()
        before = process.num_fds()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            for turns in range(20):
                endpoint = Endpoint()
                attempt = asyncio.ensure_future(
                    endpoints.transport.connect(endpoints.listener.address, endpoints.connector(), endpoint)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await attempt).abort()
            await turns_until(lambda: process.num_fds() <= before)


async def test_a_failed_listen_leaves_no_socket(tmp_path):
    process = psutil.Process()
    before = process.num_fds()
    (tmp_path / "file").touch()
    for address in (f"unix://{tmp_path}/file", f"unix://{tmp_path}/none/socket"):
        with pytest.raises(OSError, match="cannot listen"):
            await UnixTransport().listen(address, lambda: pytest.fail("nobody connects"))
    assert process.num_fds() <= before  # less if the collector finds what other tests left


async def test_tcp_does_not_wait_to_join_small_frames():
    async with Endpoints(TcpTransport(), TCP) as endpoints:
        near, far = await endpoints.pair()
        for end in (near, far):
            sock = end.connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
