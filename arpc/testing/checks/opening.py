"""Checks of how connections open, or fail to."""

from __future__ import annotations

import asyncio

from arpc.errors import AuthenticationError, ConfigurationError, HandshakeError, ProtocolError, WireError
from arpc.testing.checks.support import Checks, raises, turns
from arpc.testing.endpoints import FAR, LIMITS, NEAR, Endpoint, small_frame
from arpc.wire.handshake import Handshake, Identity, Refused, Role
from arpc.wire.messages import Refusal
from arpc.wire.protocol import Protocol

__all__ = ["OpeningChecks"]


class _Stranger(Protocol):
    """A protocol that sends something else than HELLO."""

    def __init__(self, first_words: bytes) -> None:
        super().__init__(Handshake(Role.CONNECTOR, NEAR, None), LIMITS)
        self._first_words = first_words
        super().take_output()

    def take_output(self) -> bytes:
        first_words, self._first_words = self._first_words, b""
        return first_words + super().take_output()


class OpeningChecks(Checks):
    """Listening, connecting and the handshake."""

    async def check_handshake_tells_who_is_there(self) -> None:
        async with self.endpoints(b"secret") as endpoints:
            near, far = await endpoints.pair()
            assert (near.connection.peer, far.connection.peer) == (FAR, NEAR)
            assert near.connection.is_open, "the connection is not open after its handshake"
            assert near.opened == [near.connection], "connection_opened was not called exactly once"
            assert "://" in near.connection.address, "an address says which transport it is of"

    async def check_wrong_secret_is_refused(self) -> None:
        async with self.endpoints(b"secret") as endpoints:
            near = await endpoints.start(endpoints.connector(b"guess"))
            await raises(AuthenticationError, near.connection.wait_opened())
            far = await endpoints.next_accepted()
            assert isinstance(await near.ended(), AuthenticationError)
            assert isinstance(await far.ended(), AuthenticationError)
            assert not near.opened, "an end was told that a refused connection is open"
            assert not far.opened, "an end was told that a refused connection is open"

    async def check_refusal_says_why(self) -> None:
        def refuse(_: Identity) -> None:
            raise Refused(Refusal.STALE, "not today")

        async with self.endpoints() as endpoints:
            endpoints.admit = refuse
            near = await endpoints.start()
            await raises(HandshakeError, near.connection.wait_opened(), "not today")
            await near.ended()
            await (await endpoints.next_accepted()).ended()

    async def check_garbage_is_no_handshake(self) -> None:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 64, b"\xff" * 300_000, small_frame(1)):
            async with self.endpoints() as endpoints:
                near = await endpoints.start(_Stranger(garbage))
                far = await endpoints.next_accepted()
                assert isinstance(await far.ended(), ProtocolError), f"{garbage[:16]!r} was taken for a handshake"
                assert await near.ended() is not None, "a connection that never opened cannot have closed on purpose"
                await endpoints.pair()  # the listener still accepts

    async def check_silence_is_no_handshake(self) -> None:
        async with self.endpoints() as endpoints:
            near = await endpoints.start(_Stranger(b""))
            try:
                async with asyncio.timeout(0.05):
                    await near.connection.wait_opened()
            except TimeoutError:
                pass
            else:
                raise AssertionError("a connection opened with no handshake")
            far = await endpoints.next_accepted()
            near.connection.abort(WireError("given up"))
            assert str(await near.ended()) == "given up"
            assert await far.ended() is not None, "a connection that never opened cannot have closed on purpose"

    async def check_nobody_there(self) -> None:
        async with self.endpoints() as endpoints:
            await endpoints.listener.aclose()
            await raises(OSError, endpoints.start())

    async def check_address_that_cannot_be(self) -> None:
        async with self.endpoints() as endpoints:
            for address in ("", "nonsense", "other://somewhere"):
                await raises(ConfigurationError, endpoints.start(address=address or "://"))
                await raises(ConfigurationError, endpoints.transport.listen(address, endpoints.accept))

    async def check_address_that_is_taken(self) -> None:
        async with self.endpoints() as endpoints:
            address = endpoints.listener.address
            await raises(OSError, endpoints.transport.listen(address, endpoints.accept))
            await endpoints.pair()  # the first listener still has the address
            await endpoints.listener.aclose()
            endpoints.listener = await endpoints.transport.listen(address, endpoints.accept)
            assert endpoints.listener.address == address
            await endpoints.pair()

    async def check_listener_closes_alone(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            half_open = await endpoints.start(_Stranger(b""))
            await endpoints.next_accepted(1)
            await endpoints.listener.aclose()
            assert await half_open.ended() is not None, "a handshake outlived the listener"
            near.connection.send(small_frame(1))
            await far.received(1)

    async def check_cancelled_connect_leaves_nothing(self) -> None:
        for delay in range(12):
            async with self.endpoints() as endpoints:
                endpoint = Endpoint()
                attempt = asyncio.ensure_future(
                    endpoints.transport.connect(endpoints.listener.address, endpoints.connector(), endpoint)
                )
                await turns(delay)
                attempt.cancel()
                try:
                    connection = await attempt
                except asyncio.CancelledError:
                    pass
                else:
                    connection.abort()
                    await endpoint.ended()
                pair = await endpoints.pair()  # by now the listener has accepted the first one, if it connected
                for other in endpoints.accepted:
                    if other is not pair.far:
                        await other.ended()
