"""What every transport promises, as checks that any transport can be put through.

::

    @pytest.mark.parametrize("check", TransportConformance.names())
    async def test_conformance(check):
        await TransportConformance(MyTransport, "my://").run(check)

A check says what it found in an `AssertionError`. The contract itself is in `arpc.transport.base`.
"""

from __future__ import annotations

import asyncio
import inspect
import tracemalloc
from collections.abc import Callable
from typing import Final

from arpc.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectionClosedError,
    HandshakeError,
    ProtocolError,
    WireError,
)
from arpc.testing.endpoints import FAR, NEAR, Endpoint, Endpoints, bulk_frame, small_frame
from arpc.transport.base import Connection, Transport
from arpc.wire.handshake import Identity, Refused
from arpc.wire.messages import Goodbye, MessageType, Refusal
from arpc.wire.protocol import Protocol

__all__ = ["TransportConformance"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
CHECK_LIMIT_S: Final = 30.0
# What a transport may hold back of what it was given to write: a chunk that is under way, and one more
HELD_BYTES: Final = 4 * MIB


def _pattern(size_bytes: int, seed: int = 1) -> memoryview:
    """Bytes that tell a shift by any number of them."""
    return memoryview(bytes((seed * 31 + index * index) % 251 for index in range(251)) * (size_bytes // 251 + 1))[
        :size_bytes
    ]


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TransportConformance:
    """The checks. ``make`` gives a new transport, ``address`` lets it choose where to listen (``tcp://127.0.0.1:0``)."""

    def __init__(self, make: Callable[[], Transport], address: str) -> None:
        self._make = make
        self._address = address

    @classmethod
    def names(cls) -> list[str]:
        """All checks."""
        return [name.removeprefix("check_") for name, _ in inspect.getmembers(cls) if name.startswith("check_")]

    async def run(self, name: str) -> None:
        """One check, which may take half a minute at most."""
        async with asyncio.timeout(CHECK_LIMIT_S):
            await getattr(self, f"check_{name}")()

    def _endpoints(self, secret: bytes | None = None) -> Endpoints:
        return Endpoints(self._make(), self._address, secret=secret)

    # -- the beginning

    async def check_handshake_tells_who_is_there(self) -> None:
        async with self._endpoints(b"secret") as endpoints:
            near, far = await endpoints.pair()
            assert (near.connection.peer, far.connection.peer) == (FAR, NEAR)
            assert near.connection.is_open, "the connection is not open after its handshake"
            assert near.opened == [near.connection], "connection_opened was not called exactly once"
            assert "://" in near.connection.address, "an address says which transport it is of"

    async def check_wrong_secret_is_refused(self) -> None:
        async with self._endpoints(b"secret") as endpoints:
            near = await endpoints.start(endpoints.connector(b"guess"))
            await _raises(AuthenticationError, near.connection.wait_opened())
            far = await endpoints.next_accepted()
            assert isinstance(await near.ended(), AuthenticationError)
            assert isinstance(await far.ended(), AuthenticationError)
            assert not near.opened, "an end was told that a refused connection is open"
            assert not far.opened, "an end was told that a refused connection is open"

    async def check_refusal_says_why(self) -> None:
        def refuse(_: Identity) -> None:
            raise Refused(Refusal.STALE, "not today")

        async with self._endpoints() as endpoints:
            endpoints.admit = refuse
            near = await endpoints.start()
            await _raises(HandshakeError, near.connection.wait_opened(), "not today")
            await near.ended()
            await (await endpoints.next_accepted()).ended()

    async def check_garbage_is_no_handshake(self) -> None:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 64, b"\xff" * 300_000, small_frame(1)):
            async with self._endpoints() as endpoints:
                near = await endpoints.start(_garbled(endpoints.connector(), garbage))
                far = await endpoints.next_accepted()
                assert isinstance(await far.ended(), ProtocolError), f"{garbage[:16]!r} was taken for a handshake"
                assert await near.ended() is not None, "a connection that never opened cannot have closed on purpose"
                await endpoints.pair()  # the listener lives on

    async def check_silence_is_no_handshake(self) -> None:
        async with self._endpoints() as endpoints:
            near = await endpoints.start(_garbled(endpoints.connector(), b""))
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
        async with self._endpoints() as endpoints:
            await endpoints.listener.aclose()
            await _raises(OSError, endpoints.start())

    async def check_address_that_cannot_be(self) -> None:
        async with self._endpoints() as endpoints:
            for address in ("", "nonsense", "other://somewhere"):
                await _raises(ConfigurationError, endpoints.start(address=address or "://"))
                await _raises(ConfigurationError, endpoints.transport.listen(address, endpoints._accept))

    async def check_address_that_is_taken(self) -> None:
        async with self._endpoints() as endpoints:
            address = endpoints.listener.address
            await _raises(OSError, endpoints.transport.listen(address, endpoints._accept))
            await endpoints.pair()  # who had it still has it
            await endpoints.listener.aclose()
            endpoints.listener = await endpoints.transport.listen(address, endpoints._accept)
            assert endpoints.listener.address == address
            await endpoints.pair()

    async def check_listener_closes_alone(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            half_open = await endpoints.start(_garbled(endpoints.connector(), b""))
            await endpoints.next_accepted(1)
            await endpoints.listener.aclose()
            assert await half_open.ended() is not None, "a handshake outlived the listener"
            near.connection.send(small_frame(1))
            await far.received(1)

    async def check_cancelled_connect_leaves_nothing(self) -> None:
        for turns in range(12):
            async with self._endpoints() as endpoints:
                endpoint = Endpoint()
                attempt = asyncio.ensure_future(
                    endpoints.transport.connect(endpoints.listener.address, endpoints.connector(), endpoint)
                )
                await _turns(turns)
                attempt.cancel()
                try:
                    connection = await attempt
                except asyncio.CancelledError:
                    pass
                else:
                    connection.abort()
                    await endpoint.ended()
                await endpoints.pair()  # by now the listener has seen the first one, if anything came of it
                for other in endpoints.accepted[:-1]:
                    await other.ended()

    # -- sending

    async def check_frames_arrive_in_order(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            payloads = [_pattern(size, size).tobytes() for size in (0, 1, 31, 4 * KIB, 256 * KIB - 32, 256 * KIB, MIB)]
            for number, payload in enumerate(payloads):
                near.connection.send(small_frame(number, payload))
            for number in range(len(payloads), 2000):
                near.connection.send(small_frame(number))
            messages = await far.received(2000)
            assert far.numbers == list(range(2000)), "frames came out of order"
            assert [bytes(message.body) for message in messages[: len(payloads)]] == payloads, "a frame came damaged"
            far.connection.send(small_frame(7, b"back"))
            assert (await near.received(1))[0].body == b"back"
            assert near.connection.statistics()["bytes_sent"] == far.connection.statistics()["bytes_received"]

    async def check_sends_of_one_turn_are_one_write(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            before = near.connection.statistics()
            for number in range(1000):
                near.connection.send(small_frame(number))
            await far.received(1000)
            after = near.connection.statistics()
            assert after["frames_sent"] - before["frames_sent"] == 1000
            # the first few may go out at once, while nothing else is going on
            assert after["writes"] - before["writes"] <= 5, "frames of one loop turn were written one by one"

    async def check_large_buffers_arrive_in_memory_made_for_them(self) -> None:
        made: list[memoryview] = []

        def allocate(size_bytes: int) -> memoryview:
            made.append(memoryview(bytearray(size_bytes)))
            return made[-1]

        async with self._endpoints() as endpoints:
            endpoints.allocate = allocate
            near, far = await endpoints.pair()
            sizes = [[1], [MIB, 1, 3 * MIB + 17], [64 * KIB], [5 * MIB - 1, MIB + 1]]
            sent = [[_pattern(size, number) for size in row] for number, row in enumerate(sizes)]
            for number, buffers in enumerate(sent):
                near.connection.send_bulk(bulk_frame(number, buffers), buffers)
            messages = await far.received(len(sent))
            for message in messages:
                assert all(any(buffer is one for one in made) for buffer in message.buffers), "not in the memory made for it"
                assert message.buffers == sent[message.id], f"the buffers of message {message.id} came damaged"
            assert len(made) == sum(map(len, sizes)), "memory was made more than once"

    async def check_large_buffers_are_not_copied(self) -> None:
        size = 64 * MIB
        target = memoryview(bytearray(size))
        source = memoryview(bytearray(size))
        source[:: 4 * KIB] = b"x" * len(source[:: 4 * KIB])
        async with self._endpoints() as endpoints:
            endpoints.allocate = lambda _: target
            near, far = await endpoints.pair()
            tracemalloc.start()
            try:
                near.connection.send_bulk(bulk_frame(1, [source]), [source])
                await far.received(1)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert target == source
            assert peak < 16 * MIB, f"sending {size >> 20} MiB took {peak >> 20} MiB of memory"

    async def check_small_frames_overtake_large_buffers(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [memoryview(bytearray(64 * MIB))]
            near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            await far.until(lambda: far.connection.bytes_received > MIB)
            near.connection.send(small_frame(2))
            already_sent = near.connection.bytes_sent
            await far.received(1)
            assert far.numbers == [2], "a small frame waited for a large buffer to end"
            overtaken_by = near.connection.bytes_sent - already_sent
            assert overtaken_by < 32 * MIB, f"{overtaken_by} bytes were sent while a small frame was on its way"
            await far.received(2)

    async def check_large_buffers_take_turns(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            for number, size in enumerate((64 * MIB, 2 * MIB)):
                buffers = [memoryview(bytearray(size))]
                near.connection.send_bulk(bulk_frame(number, buffers), buffers)
            await far.received(2)
            assert far.numbers == [1, 0], "a large message waited for a larger one"

    async def check_dropped_buffers_leave_both_sides_consistent(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            connection = near.connection
            large = [memoryview(bytearray(32 * MIB)), memoryview(bytearray(MIB))]
            at_once = connection.send_bulk(bulk_frame(1, large), large)
            assert connection.drop_bulk(at_once), "what has not gone out can be dropped"
            midway = connection.send_bulk(bulk_frame(2, large), large)
            kept = [_pattern(3 * MIB)]
            connection.send_bulk(bulk_frame(3, kept), kept)
            await far.until(lambda: far.connection.bytes_received > 4 * MIB)
            assert connection.drop_bulk(midway), "what is under way can be dropped"
            assert not connection.drop_bulk(midway), "what was dropped cannot be dropped again"
            last = connection.send_bulk(bulk_frame(4, kept), kept)
            await far.received(2)
            assert far.numbers == [3, 4]
            assert [message.buffers for message in far.messages] == [kept, kept], "what came after a drop is damaged"
            assert not connection.drop_bulk(last), "what has arrived cannot be dropped"
            assert connection.unsent_bytes == 0, f"{connection.unsent_bytes} bytes are counted that nobody holds"

    # -- a peer that does not keep up

    async def check_large_buffers_wait_at_their_owner(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [memoryview(bytearray(48 * MIB))]
            near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            most = 0
            while not far.messages:
                assert near.connection.unsent_bytes <= 49 * MIB
                most = max(most, near.connection.bytes_sent - far.connection.bytes_received)
                await asyncio.sleep(0)
            # what the system's own buffers take is not ours to bound
            assert most < 32 * MIB, f"{most >> 20} MiB were written ahead of the peer"
            assert near.connection.unsent_bytes == 0
            assert not near.connection.is_congested

    async def check_sender_hears_when_to_go_on(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            payload = bytes(16 * KIB)
            most = number = 0
            while number < 2000:
                while number < 2000 and not near.connection.is_congested:
                    near.connection.send(small_frame(number, payload))
                    number += 1
                    if number % 16 == 0:
                        await asyncio.sleep(0)
                    most = max(most, near.connection.unsent_bytes)
                drained = near.drained
                if near.connection.is_congested:
                    await near.until(lambda seen=drained: near.drained > seen)  # type: ignore[misc]
            await far.received(2000)
            assert far.numbers == list(range(2000))
            assert most < HELD_BYTES, f"{most} bytes were held although the sender waited when it was told to"

    # -- the end

    async def check_close_delivers_what_was_sent_before(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [_pattern(24 * MIB)]
            far.connection.send(small_frame(9))  # on its way to the side that closes: TCP must not lose the rest for it
            near.connection.send(small_frame(1))
            near.connection.send_bulk(bulk_frame(2, buffers), buffers)
            near.connection.send(small_frame(3))
            near.connection.close("enough")
            assert not near.connection.is_open
            assert await far.ended() is None, "a goodbye is no error"
            assert await near.ended() is None, "a goodbye is no error"
            assert sorted(far.numbers) == [1, 2, 3], "something that was sent before close() is missing"
            goodbyes = [bytes(message.body) for message in far.messages if isinstance(message, Goodbye)]
            assert goodbyes == [b"enough"]
            (large,) = [message for message in far.messages if message.id == 2]
            assert large.buffers == buffers

    async def check_both_close_at_once(self) -> None:
        async with self._endpoints() as endpoints:
            ends = near, far = await endpoints.pair()
            for end in ends:
                buffers = [_pattern(6 * MIB)]
                end.connection.send_bulk(bulk_frame(1, buffers), buffers)
                end.connection.close()
                end.connection.close()
            assert (await near.ended(), await far.ended()) == (None, None)
            assert (near.numbers, far.numbers) == ([1], [1]), "what was sent before close() is missing"

    async def check_close_in_the_handshake(self) -> None:
        async with self._endpoints() as endpoints:
            near = await endpoints.start()
            near.connection.close()
            assert await near.ended() is None, "closed on purpose"
            await _raises(ConnectionClosedError, near.connection.wait_opened())
            far = await endpoints.next_accepted()
            assert await far.ended() is not None, "nobody said goodbye"

    async def check_nothing_goes_after_close(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            near.connection.send(small_frame(1))
            near.connection.close()
            for _ in range(2):
                for number in range(5):
                    _raises_now(ConnectionClosedError, lambda number=number: near.connection.send(small_frame(number)))
                await near.ended()
                await near.connection.wait_closed()
            near.connection.close()
            near.connection.abort()
            await far.ended()
            assert far.numbers == [1]
            assert near.connection.statistics()["unsent_bytes"] == 0

    async def check_abort_loses(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [memoryview(bytearray(32 * MIB))]
            bulk = near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            await far.until(lambda: far.connection.bytes_received > MIB)
            near.connection.send(small_frame(2))
            near.connection.abort(WireError("cut"))
            near.connection.send(small_frame(3))  # nobody knows yet that it is over
            assert not near.connection.drop_bulk(bulk)
            assert near.connection.unsent_bytes == 0 or near.connection.statistics()["unsent_bytes"] >= 0
            near.connection.abort(WireError("again"))
            assert str(await near.ended()) == "cut"
            assert await far.ended() is not None, "a connection that broke did not close on purpose"
            assert not far.numbers

    async def check_malformed_frame_ends_that_connection_only(self) -> None:
        unknown_type = small_frame(1)[:4] + b"\xee" + small_frame(1)[5:]
        data_for_nobody = small_frame(1)[:4] + bytes([MessageType.DATA]) + small_frame(1, b"x")[5:]
        for garbage in (unknown_type, data_for_nobody, b"\xff" * 64):
            async with self._endpoints() as endpoints:
                other = await endpoints.pair()
                near, far = await endpoints.pair()
                near.connection.send(garbage)
                assert isinstance(await far.ended(), ProtocolError)
                assert await near.ended() is not None
                other.near.connection.send(small_frame(1))
                await other.far.received(1)

    async def check_receiver_that_raises_ends_that_connection_only(self) -> None:
        for name in ("connection_opened", "messages_received", "connection_lost"):
            async with self._endpoints() as endpoints:
                other = await endpoints.pair()
                endpoints.accept_failing_in = name
                near = await endpoints.start()
                await near.connection.wait_opened()
                near.connection.send(small_frame(1))
                far = await endpoints.next_accepted(1)
                if name == "connection_lost":
                    near.connection.close()
                    await far.ended()
                else:
                    assert isinstance(await far.ended(), ZeroDivisionError), f"an error in {name} was swallowed"
                await near.ended()
                other.near.connection.send(small_frame(1))
                await other.far.received(1)

    async def check_receiver_that_raises_when_drained(self) -> None:
        async with self._endpoints() as endpoints:
            near, far = await endpoints.pair()
            near.fail_in = "output_drained"
            buffers = [memoryview(bytearray(16 * MIB))]
            near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            assert isinstance(await near.ended(), ZeroDivisionError), "an error in output_drained was swallowed"
            await far.ended()


def _garbled(protocol: Protocol, first_words: bytes) -> Protocol:
    """A connector that says something else than HELLO."""
    protocol.take_output()
    protocol.output.append(first_words)
    return protocol


async def _raises(kind: type[BaseException], awaitable: object, text: str = "") -> None:
    try:
        await awaitable  # type: ignore[misc]
    except kind as error:
        assert text in str(error), f"{error!r} does not say {text!r}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def _raises_now(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


__all__ += ["Connection"]
