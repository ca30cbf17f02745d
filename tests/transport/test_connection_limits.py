"""How many strangers come in, and what they cost, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator

import psutil
import pytest

from arpc.errors import HandshakeError
from arpc.testing.endpoints import Endpoints, small_frame, turns_until
from arpc.transport.connection_limits import ConnectionLimits
from arpc.transport.sockets import Resources, TcpTransport, UnixTransport, split_tcp, split_unix
from arpc.transport.tls import TlsTransport
from tests.certificates import tls_for

KINDS = {
    "tcp": (lambda door: TcpTransport(Resources(limits=door)), "tcp://127.0.0.1:0"),
    "unix": (lambda door: UnixTransport(Resources(limits=door)), "unix://"),
    "tls": (lambda door: TlsTransport(tls_for("*"), Resources(limits=door)), "tcp://127.0.0.1:0"),
}


class Visitor:
    def __init__(self) -> None:
        self.handshake_s = 0.0
        self.ended: Exception | None = None

    def abort(self, error: Exception | None = None) -> None:
        self.ended = error


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@contextlib.asynccontextmanager
async def strangers(endpoints: Endpoints, count: int) -> AsyncIterator[list[socket.socket]]:
    """Sockets that connect and say nothing."""
    address = endpoints.listener.address
    is_unix = address.startswith("unix://")
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET))
            sock.setblocking(False)
            await loop.sock_connect(sock, split_unix(address) if is_unix else split_tcp(address))
            made.append(sock)
        yield made


def test_the_one_that_takes_longest_makes_room():
    door = ConnectionLimits(max_strangers=2, handshake_s=3)
    first, second, third = visitors = [Visitor() for _ in range(3)]
    for visitor in visitors:
        door.accepted(visitor)
    assert isinstance(first.ended, HandshakeError)
    assert second.ended is third.ended is None
    assert {visitor.handshake_s for visitor in visitors} == {3}
    assert door.statistics() == {"members": 0, "strangers": 2, "sent_away": 1}


def test_members_are_never_sent_away():
    door = ConnectionLimits(max_connections=2, max_strangers=5)
    members = [Visitor(), Visitor()]
    for member in members:
        door.accepted(member)
        door.opened(member)
    late = Visitor()
    door.accepted(late)
    assert "max_connections" in str(late.ended)
    assert not any(member.ended for member in members)
    door.left(members[0])
    another = Visitor()
    door.accepted(another)
    assert another.ended is None
    third = Visitor()
    door.accepted(third)
    assert another.ended is not None, "a stranger makes room for a newcomer"


def test_who_has_left_is_forgotten():
    door = ConnectionLimits()
    visitor = Visitor()
    door.accepted(visitor)
    door.left(visitor)
    door.opened(visitor)  # the two may cross
    door.left(visitor)
    assert door.statistics() == {"members": 0, "strangers": 0, "sent_away": 0}


async def test_a_flood_of_silent_strangers_keeps_no_member_out(kind):
    make, address = KINDS[kind]
    door = ConnectionLimits(max_strangers=20)
    async with Endpoints(make(door), address) as endpoints:
        near, far = await endpoints.pair()
        async with strangers(endpoints, 100):
            await turns_until(lambda: len(endpoints.accepted) == 101)
            assert door.statistics() == {"members": 1, "strangers": 20, "sent_away": 80}
            again = await endpoints.pair()
            for end, other in ((near, far), again):
                end.connection.send(small_frame(1))
                await turns_until(lambda other=other: other.messages)
        await turns_until(lambda: door.statistics()["strangers"] == 0)
        assert door.statistics()["members"] == 2
    assert door.statistics()["members"] == 0


async def test_strangers_run_out_of_time(kind):
    make, address = KINDS[kind]
    door = ConnectionLimits()
    async with Endpoints(make(door), address) as endpoints:
        near, _ = await endpoints.pair()
        door._handshake_s = 0.05
        async with strangers(endpoints, 3) as sockets:
            loop = asyncio.get_running_loop()
            # dripping bytes buys no time
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sockets[0], b"\x16")
            await turns_until(lambda: len(endpoints.accepted) == 4)
            await turns_until(lambda: all(end.lost for end in endpoints.accepted[1:]))
            assert all("did not end its handshake within 0.05 s" in str(end.lost[0]) for end in endpoints.accepted[1:])
        assert near.connection.is_open


async def test_what_strangers_send_is_not_kept(kind):
    make, address = KINDS[kind]
    door = ConnectionLimits(max_strangers=50)
    async with Endpoints(make(door), address) as endpoints:
        loop = asyncio.get_running_loop()
        async with strangers(endpoints, 20) as sockets:
            await turns_until(lambda: len(endpoints.accepted) == 20)
            before = rss_bytes()

            async def talk(sock: socket.socket, words: bytes) -> None:
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        await loop.sock_sendall(sock, words)

            # a frame that is announced and never ends; noise; a handshake of TLS that never ends
            words = [bytes(1 << 16), os.urandom(1 << 16), b"\x16\x03\x01\x40\x00" + bytes(1 << 14)]
            async with asyncio.timeout(30):
                await asyncio.gather(*(talk(sock, words[n % 3]) for n, sock in enumerate(sockets)))
                await turns_until(lambda: all(end.lost for end in endpoints.accepted))
            # 80 MB were offered
            gc.collect()
            assert rss_bytes() - before < 32 << 20
        assert door.statistics()["strangers"] == 0


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss
