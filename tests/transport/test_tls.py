"""TLS between two ends; that it is a transport like any other is in test_conformance.py."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from arpc.errors import AuthenticationError, HandshakeError, WireError
from arpc.testing.endpoints import Endpoints, small_frame, turns_until
from arpc.tls import TLS
from arpc.transport.contract import Transport
from arpc.transport.sockets import TcpTransport, split_tcp
from arpc.transport.tls import SecureConnection, TlsTransport
from tests.certificates import authority, tls_for

TCP = "tcp://127.0.0.1:0"


class Different(Transport):
    """Two ends that are not of one mind."""

    def __init__(self, near: Transport, far: Transport) -> None:
        self._near = near
        self._far = far

    async def connect(self, address, protocol, receiver):
        return await self._near.connect(address, protocol, receiver)

    async def listen(self, address, accept):
        return await self._far.listen(address, accept)


@contextlib.asynccontextmanager
async def two(near: TLS | None, far: TLS | None) -> AsyncIterator[Endpoints]:
    ways = [TcpTransport() if tls is None else TlsTransport(tls) for tls in (near, far)]
    async with Endpoints(Different(*ways), TCP) as endpoints:
        yield endpoints


async def refusal(near: TLS | None, far: TLS | None) -> tuple[Exception | None, Exception | None]:
    """How each end was told that there will be no connection."""
    async with two(near, far) as endpoints:
        end = await endpoints.start()
        with contextlib.suppress(WireError, OSError):
            await end.connection.wait_opened()
            await end.ended()
        accepted = await endpoints.next_accepted()
        await turns_until(lambda: accepted.lost and end.lost)
        assert not accepted.opened
        assert not accepted.messages
        return end.lost[0], accepted.lost[0]


async def test_names_are_checked_on_both_sides():
    async with two(tls_for("near"), tls_for("far")) as endpoints:
        near, far = await endpoints.pair()
        near.connection.send(small_frame(1, b"hello"))
        await turns_until(lambda: far.messages)
        assert bytes(far.messages[0].body) == b"hello"
        assert (near.connection.peer.name, far.connection.peer.name) == ("far", "near")


async def test_a_connector_with_another_name_is_refused():
    near, far = await refusal(tls_for("somebody"), tls_for("far"))
    assert isinstance(far, AuthenticationError)
    assert "'near', with a certificate for somebody" in str(far)
    assert isinstance(near, AuthenticationError)


async def test_an_acceptor_with_another_name_is_refused():
    near, _ = await refusal(tls_for("near"), tls_for("somebody"))
    assert isinstance(near, AuthenticationError)
    assert "'far', with a certificate for somebody" in str(near)


async def test_certificates_of_another_authority_are_refused():
    near, far = await refusal(tls_for("near", "theirs"), tls_for("far"))
    assert isinstance(near, AuthenticationError)
    assert "is not accepted" in str(near)
    near, far = await refusal(mixed(tls_for("near", "theirs")), tls_for("far"))
    assert isinstance(far, AuthenticationError)
    assert "is not accepted" in str(far)
    assert near is not None


def mixed(tls: TLS) -> TLS:
    """It trusts ours, and shows its own."""
    return TLS(cert=tls.cert, key=tls.key, ca=authority().path)


async def test_no_certificate_is_refused():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority().path)
    near, far = await refusal(TLS(server=tls_for("near").server_context, client=context), tls_for("far"))
    assert isinstance(far, AuthenticationError)
    assert near is not None


async def test_one_side_without_tls():
    near, far = await refusal(None, tls_for("far"))
    assert isinstance(far, HandshakeError)
    assert "does not speak TLS" in str(far)
    assert near is not None
    near, far = await refusal(tls_for("near"), None)
    assert isinstance(near, WireError)
    assert isinstance(far, WireError)


async def test_an_old_version_of_tls_is_refused():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    files = tls_for("near")
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    _, far = await refusal(TLS(server=files.server_context, client=context), tls_for("far"))
    assert isinstance(far, AuthenticationError)


async def test_renewed_certificates_serve_new_connections_and_old_ones_stay():
    near = authority().issue("near")
    async with two(near, tls_for("far")) as endpoints:
        before = await endpoints.pair()
        serial = peer_serial(before[1])
        authority().issue("near")
        after = await endpoints.pair()
        assert peer_serial(after[1]) != serial
        for number, (end, other) in enumerate((before, after)):
            end.connection.send(small_frame(number))
            await turns_until(lambda other=other: other.messages)


def peer_serial(end) -> str:
    return end.connection._tls.getpeercert()["serialNumber"]


async def test_what_a_stranger_says_in_place_of_tls():
    async with two(tls_for("near"), tls_for("far")) as endpoints:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000):
            reader, writer = await asyncio.open_connection(*split_tcp(endpoints.listener.address))
            writer.write(words)
            with contextlib.suppress(ConnectionError):
                assert b"arpc" not in await reader.read()
            writer.close()
        await turns_until(lambda: sum(len(far.lost) for far in endpoints.accepted) == 3)
        near, far = await endpoints.pair()
        assert near.connection.is_open
        assert far.connection.is_open


async def test_bytes_that_were_changed_on_their_way_end_the_connection():
    async with two(tls_for("near"), tls_for("far")) as endpoints:
        near, far = await endpoints.pair()
        near.connection._transport.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        await far.ended()
        assert isinstance(far.lost[0], ssl.SSLError)
        assert not far.messages


async def test_nothing_readable_is_on_the_wire():
    async with two(tls_for("near"), tls_for("far")) as endpoints:
        near, far = await endpoints.pair()
        written: list[bytes] = []
        write = near.connection._transport.write

        class Tap:
            def __getattr__(self, name):
                return getattr(transport, name)

            def write(self, data):
                written.append(data)
                write(data)

        transport = near.connection._transport
        near.connection._transport = Tap()
        near.connection.send(small_frame(1, b"a secret message"))
        await turns_until(lambda: far.messages)
        assert written
        assert b"secret" not in b"".join(written)
        near.connection._transport = transport


async def test_a_network_that_was_full_during_the_handshake_of_tls_does_no_harm(monkeypatch):
    begin = SecureConnection._begin

    def begin_slowly(self: SecureConnection, transport: asyncio.BaseTransport) -> None:
        begin(self, transport)
        self.pause_writing()
        self.resume_writing()

    monkeypatch.setattr(SecureConnection, "_begin", begin_slowly)
    async with two(tls_for("near"), tls_for("far")) as endpoints:
        near, far = await endpoints.pair()
        near.connection.send(small_frame(1, b"hello"))
        await turns_until(lambda: far.messages)
