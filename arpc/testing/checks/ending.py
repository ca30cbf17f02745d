"""Checks of how connections end: on purpose, by accident, by an error of either side."""

from __future__ import annotations

from arpc.errors import ConnectionClosedError, ProtocolError, WireError
from arpc.testing.checks.support import MIB, Checks, pattern, raises
from arpc.testing.endpoints import bulk_frame, small_frame
from arpc.transport.connection import Connection
from arpc.wire.messages import Goodbye, MessageType

__all__ = ["EndingChecks"]


class EndingChecks(Checks):
    """Closing, aborting and errors."""

    async def check_close_delivers_what_was_sent_before(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [pattern(24 * MIB)]
            far.connection.send(small_frame(9))  # in flight to the side that closes: TCP must not lose data for that
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
        async with self.endpoints() as endpoints:
            ends = near, far = await endpoints.pair()
            for end in ends:
                buffers = [pattern(6 * MIB)]
                end.connection.send_bulk(bulk_frame(1, buffers), buffers)
                end.connection.close()
                end.connection.close()
            assert (await near.ended(), await far.ended()) == (None, None)
            assert (near.numbers, far.numbers) == ([1], [1]), "what was sent before close() is missing"

    async def check_close_in_the_handshake(self) -> None:
        async with self.endpoints() as endpoints:
            near = await endpoints.start()
            near.connection.close()
            assert await near.ended() is None, "closed on purpose"
            await raises(ConnectionClosedError, near.connection.wait_opened())
            far = await endpoints.next_accepted()
            assert await far.ended() is not None, "nobody said goodbye"

    async def check_nothing_goes_after_close(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            near.connection.send(small_frame(1))
            near.connection.close()
            for _ in range(2):
                for number in range(5):
                    await raises(ConnectionClosedError, _send(near.connection, number))
                await near.ended()
                await near.connection.wait_closed()
            near.connection.close()
            near.connection.abort()
            await far.ended()
            assert far.numbers == [1]
            assert near.connection.statistics()["unsent_bytes"] == 0

    async def check_abort_loses(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [memoryview(bytearray(32 * MIB))]
            bulk = near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            await far.until(lambda: far.connection.bytes_received > MIB)
            near.connection.send(small_frame(2))
            near.connection.abort(WireError("cut"))
            near.connection.send(small_frame(3))  # the receivers do not know yet that it has ended
            assert not near.connection.drop_bulk(bulk)
            assert near.connection.unsent_bytes == 0
            near.connection.abort(WireError("again"))
            assert str(await near.ended()) == "cut"
            assert await far.ended() is not None, "a connection that broke did not close on purpose"
            assert 1 not in far.numbers

    async def check_malformed_frame_ends_that_connection_only(self) -> None:
        unknown_type = small_frame(1)[:4] + b"\xee" + small_frame(1)[5:]
        data_for_nobody = small_frame(1)[:4] + bytes([MessageType.DATA]) + small_frame(1, b"x")[5:]
        for garbage in (unknown_type, data_for_nobody, b"\xff" * 64):
            async with self.endpoints() as endpoints:
                other = await endpoints.pair()
                near, far = await endpoints.pair()
                near.connection.send(garbage)
                assert isinstance(await far.ended(), ProtocolError)
                assert await near.ended() is not None
                other.near.connection.send(small_frame(1))
                await other.far.received(1)

    async def check_receiver_that_raises_ends_that_connection_only(self) -> None:
        for name in ("connection_opened", "messages_received", "connection_lost"):
            async with self.endpoints() as endpoints:
                other = await endpoints.pair()
                endpoints.accept_failing_in = name
                near = await endpoints.start()
                far = await endpoints.next_accepted(1)
                if name != "connection_opened":
                    await near.connection.wait_opened()
                    near.connection.send(small_frame(1))
                if name == "connection_lost":
                    near.connection.close()
                    await far.ended()
                else:
                    assert isinstance(await far.ended(), ZeroDivisionError), f"an error in {name} was swallowed"
                await near.ended()
                other.near.connection.send(small_frame(1))
                await other.far.received(1)

    async def check_receiver_that_raises_when_drained(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            near.fail_in = "output_drained"
            buffers = [memoryview(bytearray(16 * MIB))]
            near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            assert isinstance(await near.ended(), ZeroDivisionError), "an error in output_drained was swallowed"
            await far.ended()


async def _send(connection: Connection, number: int) -> None:
    connection.send(small_frame(number))
