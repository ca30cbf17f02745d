"""Buffers that go through shared memory: what arrives, what comes back, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import threading

import msgspec
import pytest

from arpc.errors import ProtocolError
from arpc.testing.endpoints import bulk_frame, small_frame, turns_until
from arpc.transport.bulk import BulkSend
from arpc.transport.shm import channel as channel_module
from arpc.transport.shm.mapping import ArenaFile, MappedArena, UnmappableError, is_supported
from arpc.wire.frames import frame
from arpc.wire.messages import ArenaFlag, Freed, Lent, MessageType
from tests.transport.shm.sharing import KIB, MIB, sharing

pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has files in memory without a name")


async def test_the_first_message_goes_through_shared_memory():
    async with sharing() as both:
        source = os.urandom(MIB)
        (received,) = await both.send(source)
        assert received == source
        assert not received.readonly
        assert both.near.connection.bytes_sent < 1000
        statistics = both.near_arena.statistics()
        assert (statistics["sends"], statistics["sent_bytes"]) == (1, MIB)
        assert statistics["lent_bytes"] == {"far": MIB}
        assert both.far_arena.statistics()["borrowed_bytes"] == MIB
        del received
        await both.freed()
        assert both.near_arena.statistics()["lent_bytes"] == {}
        assert both.far_arena.statistics()["borrowed_bytes"] == 0


async def test_what_is_given_back_serves_the_next():
    async with sharing() as both:
        for _ in range(5):
            received = await both.send(os.urandom(MIB))
            del received
            await both.freed()
        assert both.near_arena.statistics()["resident_bytes"] == MIB


async def test_a_receiver_that_keeps_everything():
    async with sharing() as both:
        sources = [os.urandom(MIB) for _ in range(10)]
        kept = [(await both.send(source))[0] for source in sources]
        assert kept == sources
        assert both.near_arena.statistics()["used_blocks"] == 10
        kept.clear()
        await both.freed()


async def test_buffers_of_all_sizes_in_one_message():
    async with sharing() as both:
        sources = [os.urandom(size) for size in (1, 100, 64 * KIB, 17, 3 * MIB, 63 * KIB, *[40 * KIB] * 40)]
        received = await both.send(*sources)
        assert received == sources
        assert both.near_arena.statistics()["sends"] == 1
        assert both.near_arena.statistics()["used_blocks"] == 4, "two large ones, and two groups of small ones"
        del received[1:]
        await both.freed(used_blocks=1)
        assert received == sources[:1]


async def test_a_small_message_takes_the_socket():
    async with sharing() as both:
        assert await both.send(os.urandom(10 * KIB))
        assert both.near_arena.statistics()["sends"] == 0
        assert both.near.connection.bytes_sent > 10 * KIB


async def test_both_directions_at_once():
    async with sharing() as both:
        buffers = [memoryview(os.urandom(MIB))]
        for end in (both.near, both.far):
            end.connection.send_bulk(bulk_frame(1, buffers), buffers)
        assert (await both.far.received(1))[0].buffers[0] == buffers[0]
        assert (await both.near.received(1))[0].buffers[0] == buffers[0]
        assert both.near_arena.sends == both.far_arena.sends == 1


async def test_a_large_buffer_is_copied_by_a_thread(monkeypatch):
    async with sharing() as both:
        threads: list[str] = []
        copy = ArenaFile.copy

        def noting(*args, **options):
            threads.append(threading.current_thread().name)
            copy(*args, **options)

        monkeypatch.setattr(ArenaFile, "copy", noting)
        small, large = os.urandom(64 * KIB), os.urandom(32 * MIB)
        assert await both.send(small) == [small]
        assert await both.send(large) == [large]
        assert threads[0] == threading.main_thread().name
        assert threads[1].startswith("arpc-memory")


class Gate:
    """Copies wait for it to open."""

    def __init__(self, monkeypatch):
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.copy = ArenaFile.copy

        def gated(*args, **options):
            self.entered.set()
            assert self.opened.wait(30)
            self.copy(*args, **options)

        monkeypatch.setattr(ArenaFile, "copy", gated)

    async def wait_entered(self):
        await asyncio.to_thread(self.entered.wait, 30)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


async def test_small_messages_pass_one_that_is_being_copied(gate):
    async with sharing() as both:
        buffers = [memoryview(os.urandom(32 * MIB))]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        both.near.connection.send(small_frame(2))
        await both.far.received(1)
        assert both.near.connection.unsent_bytes >= 32 * MIB
        gate.opened.set()
        await both.far.received(2)
        assert both.far.numbers == [2, 1]
        assert both.near.connection.unsent_bytes == 0


async def test_whoever_sends_learns_that_much_waits_to_be_copied(gate):
    async with sharing() as both:
        connection = both.near.connection
        buffers = [memoryview(os.urandom(6 * MIB))]
        for number in range(3):
            assert not connection.is_behind
            connection.send_bulk(bulk_frame(number, buffers), buffers)
        assert not connection.is_behind, "a few keep the threads at work"
        connection.send_bulk(bulk_frame(3, buffers), buffers)
        await turns_until(lambda: connection.is_behind)
        assert both.near.drained == 0
        gate.opened.set()
        await both.far.received(4)
        assert not connection.is_behind
        assert both.near.drained == 1


async def test_a_few_large_messages_are_no_reason_to_wait(gate):
    async with sharing(capacity_bytes=256 * MIB) as both:
        buffers = [memoryview(bytes(21 * MIB))]
        for number in range(3):
            both.near.connection.send_bulk(bulk_frame(number, buffers), buffers)
        await gate.wait_entered()
        assert not both.near.connection.is_behind, "small ones would wait for them"
        gate.opened.set()
        await both.far.received(3)
        assert both.near.drained == 0


async def test_one_that_is_dropped_while_it_is_copied(gate):
    async with sharing() as both:
        buffers = [memoryview(os.urandom(32 * MIB))]
        bulk = both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        assert both.near.connection.drop_bulk(bulk)
        assert not both.near.connection.drop_bulk(bulk)
        assert both.near_arena.statistics()["used_blocks"] == 1, "a thread still writes there"
        gate.opened.set()
        await both.freed()
        assert both.far.messages == []
        assert await both.send(b"x" * MIB) == [b"x" * MIB], "and the next is counted right"


async def test_one_that_is_dropped_and_then_finds_no_memory(gate):
    async with sharing() as both:

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        gate.copy = fail
        buffers = [memoryview(os.urandom(32 * MIB))]
        bulk = both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        assert both.near.connection.drop_bulk(bulk)
        gate.opened.set()
        await both.freed()
        assert both.near_arena.statistics()["resident_bytes"] == 0, "what is not there counts as free memory"


async def test_a_connection_that_ends_while_something_is_copied(gate):
    async with sharing() as both:
        buffers = [memoryview(os.urandom(32 * MIB))]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        both.near.connection.abort()
        await both.near.ended()
        assert both.near_arena.statistics()["used_blocks"] == 1
        gate.opened.set()
        await both.freed()


async def test_what_was_sent_before_close_still_arrives(gate):
    async with sharing() as both:
        source = os.urandom(32 * MIB)
        buffers = [memoryview(source)]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        both.near.connection.close("done")
        gate.opened.set()
        messages = await both.far.received(2)
        assert {message.type for message in messages} == {MessageType.REQUEST, MessageType.GOODBYE}
        assert next(message for message in messages if message.buffers).buffers == [source]
        assert await both.near.ended() is None


async def test_an_arena_that_is_closed_waits_for_its_threads(gate):
    async with sharing() as both:
        buffers = [memoryview(os.urandom(32 * MIB))]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        both.near.connection.abort()
        closing = asyncio.ensure_future(both.near_arena.aclose())
        await both.near.ended()
        assert not closing.done()
        gate.opened.set()
        await closing


async def test_a_closing_that_is_cancelled_disturbs_no_thread(gate):
    async with sharing() as both:
        buffers = [memoryview(os.urandom(32 * MIB))]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        await gate.wait_entered()
        closing = asyncio.ensure_future(both.near_arena.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        gate.opened.set()
        assert (await both.far.received(1))[0].buffers == buffers


async def test_a_full_arena_lets_the_socket_do_it():
    async with sharing(capacity_bytes=2 * MIB) as both:
        sources = [os.urandom(MIB) for _ in range(4)]
        kept = [(await both.send(source))[0] for source in sources]
        assert kept == sources
        assert both.near_arena.statistics()["sends"] == 2
        assert both.near_arena.statistics()["fallbacks"] == 2
        kept.clear()
        await both.freed()
        assert await both.send(sources[0]) == sources[:1]
        assert both.near_arena.statistics()["sends"] == 3


async def test_a_message_larger_than_the_arena():
    async with sharing(capacity_bytes=2 * MIB) as both:
        source = os.urandom(5 * MIB)
        assert await both.send(source) == [source]
        assert both.near_arena.statistics()["used_blocks"] == 0


async def test_memory_in_blocks_of_other_sizes_is_freed_for_those_that_need_it():
    async with sharing(capacity_bytes=2 * MIB) as both:
        received = await both.send(os.urandom(2 * MIB))
        del received
        await both.freed()
        await both.send(os.urandom(MIB))  # takes the socket, and makes room
        await turns_until(lambda: both.near_arena.statistics()["resident_bytes"] == 0)
        await both.send(os.urandom(MIB))
        assert both.near_arena.statistics()["sends"] == 2


async def test_a_system_without_memory_lets_the_socket_do_it(monkeypatch, caplog):
    async with sharing() as both:

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ArenaFile, "copy", fail)
        for source in (os.urandom(64 * KIB), os.urandom(32 * MIB)):
            assert await both.send(source) == [source]
        statistics = both.near_arena.statistics()
        assert (statistics["sends"], statistics["used_blocks"], statistics["resident_bytes"]) == (0, 0, 0)
    assert "No space left" in caplog.text


async def test_a_peer_that_does_not_read_gets_no_more_than_the_window():
    async with sharing(window_bytes=2 * MIB) as both:
        channel, socket = both.near.connection.shared_memory, both.far.connection._transport
        await both.send(os.urandom(MIB))
        await turns_until(lambda: not channel._unread)
        socket.pause_reading()  # as one that is stopped
        buffers = [memoryview(os.urandom(MIB))]
        for number in range(10):
            both.near.connection.send_bulk(bulk_frame(number, buffers), buffers)
        await turns_until(lambda: both.near.connection.is_congested and both.near_arena.sends == 1 + 2)
        assert both.near.connection.unsent_bytes > 7 * MIB
        assert both.near.connection.held_bytes == both.near.connection.unsent_bytes + 2 * MIB
        socket.resume_reading()
        await both.far.received(10)
        assert sorted(both.far.numbers) == list(range(10))
        await turns_until(lambda: not channel._unread)
        assert both.near.connection.held_bytes == 0
        await both.send(os.urandom(MIB))
        assert both.near_arena.sends == 1 + 2 + 1, "it reads again, so it is lent to again"


async def test_a_mapping_that_is_refused(monkeypatch, caplog):
    def refuse(*_):
        raise UnmappableError("in another namespace")

    monkeypatch.setattr(MappedArena, "__init__", refuse)
    async with sharing() as both:
        source = os.urandom(MIB)
        with caplog.at_level("INFO", "arpc.transport"):
            for _ in range(3):
                assert await both.send(source) == [source]
        assert both.near_arena.statistics()["sends"] == 0
        assert caplog.text.count("does not share memory: in another namespace") == 1


async def test_a_peer_that_knows_nothing_of_it(monkeypatch):
    monkeypatch.setattr(channel_module, "FEATURE", "another")
    async with sharing() as both:
        source = os.urandom(MIB)
        assert await both.send(source) == [source]
        assert both.near_arena.statistics()["sends"] == 0


# -- a connection that is lost while both live


async def test_memory_that_is_lent_is_not_used_again_before_the_peer_is_heard():
    async with sharing() as both:
        source = os.urandom(MIB)
        (received,) = await both.send(source)
        await both.reconnect()
        assert both.near_arena.statistics()["used_blocks"] == 1
        (other,) = await both.send(b"x" * MIB)
        assert received == source, "nobody wrote there"
        assert both.near_arena.statistics()["lent_bytes"] == {"far": 2 * MIB}
        del received, other
        await both.freed()


async def test_what_was_given_back_while_there_was_no_connection():
    async with sharing() as both:
        kept, dropped = (await both.send(b"k" * MIB)), (await both.send(b"d" * MIB))
        both.near.connection.abort()
        await both.near.ended()
        await both.far.ended()
        del dropped
        gc.collect()
        await asyncio.sleep(0)
        assert both.near_arena.statistics()["used_blocks"] == 2
        both.near, both.far = await both.endpoints.pair()
        await both.freed(used_blocks=1)  # without another message
        assert kept == [b"k" * MIB]
        del kept
        await both.freed()


async def test_the_end_of_a_connection_that_is_noticed_after_the_next_has_begun():
    async with sharing() as both:
        received = await both.send(b"x" * MIB)
        old = [end.connection.shared_memory for end in (both.near, both.far)]
        ended = [channel.closed for channel in old]
        for channel in old:
            channel.closed = lambda: None
        await both.reconnect()
        (more,) = await both.send(b"y" * MIB)
        for close in ended:
            close()
        assert both.near_arena.statistics()["lent_bytes"] == {"far": 2 * MIB}
        del received, more
        await both.freed()


async def test_two_connections_at_once_agree_on_what_is_lent():
    async with sharing() as both:
        kept, dropped = (await both.send(b"k" * MIB)), (await both.send(b"d" * MIB))
        old_near, old_far = both.near, both.far
        both.near, both.far = await both.endpoints.pair()
        (more,) = await both.send(b"m" * MIB)  # the newer one has told what is held
        # what the older one says now is out of date
        assert not old_near.connection.shared_memory.carry(b"", BulkSend([memoryview(b"x" * MIB)]))
        del dropped
        gc.collect()
        old_near.connection.send(small_frame(1))  # a read, after which the far end tells what it has given back
        await old_far.received(1)
        await both.freed(used_blocks=2)
        assert old_near.connection.is_open
        assert old_far.connection.is_open
        assert (kept, more) == ([b"k" * MIB], b"m" * MIB)
        del kept, more
        await both.freed()


async def test_what_was_given_back_over_an_older_connection_is_not_taken_back_twice():
    async with sharing() as both:
        kept, dropped = (await both.send(b"k" * MIB)), (await both.send(b"d" * MIB))
        _, offset = both.near_arena._borrowers[both.near.connection.peer.incarnation].loans.held()
        old = both.near
        both.near, both.far = await both.endpoints.pair()
        (more,) = await both.send(b"m" * MIB)
        del dropped
        await both.freed(used_blocks=2)
        # it may have been told over the older one just before, and be read only now
        old.connection.shared_memory.message_received(Freed(0, 0, 0, 0, bytearray(struct.pack("<Q", offset))))
        assert (kept, more) == ([b"k" * MIB], b"m" * MIB)


async def test_memory_that_was_lent_over_an_older_connection_is_not_used():
    async with sharing() as both:
        await both.send(b"x" * MIB)
        old = both.far
        both.near, both.far = await both.endpoints.pair()
        (kept,) = await both.send(b"k" * MIB)
        with pytest.raises(ProtocolError, match="another one has replaced"):
            old.connection.shared_memory.borrow(Lent(0, 0, 0, 0, bytearray(struct.pack("<Q", 1 << 16))), [MIB])
        assert kept == b"k" * MIB


async def test_a_message_that_never_arrived_is_not_lent():
    async with sharing() as both:
        await both.send(b"x" * MIB)
        await both.freed()
        buffers = [memoryview(b"x" * MIB)]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        both.far.connection.abort()  # before it could read it
        await both.far.ended()
        await both.near.ended()
        assert both.far.messages == []
        assert both.near_arena.statistics()["used_blocks"] == 1
        both.near, both.far = await both.endpoints.pair()
        await both.freed()


async def test_a_message_that_waits_for_the_answer_can_be_dropped():
    async with sharing() as both:
        buffers = [memoryview(b"x" * MIB)]
        bulk = both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        assert both.near.connection.drop_bulk(bulk)
        assert both.near.connection.unsent_bytes < 1000
        assert await both.send(b"y" * MIB, number=2) == [b"y" * MIB]
        assert both.far.numbers == []


# -- a peer that lies


def lent(*offsets: int, number: int = 0) -> bytes:
    return frame(MessageType.LENT, 0, number, 0, 0, struct.pack(f"<{len(offsets)}Q", *offsets))


def freed(*offsets: int, count: int = 0) -> bytes:
    return frame(MessageType.FREED, 0, 0, count, 0, struct.pack(f"<{len(offsets)}Q", *offsets))


def arena(flag: int, body: bytes) -> bytes:
    return frame(MessageType.ARENA, flag, 0, 0, 0, body)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(lent(1 << 16, number=7), id="for-no-message"),
        pytest.param(bulk_frame(1, [memoryview(bytes(9))]) + lent(1 << 16, number=1), id="never-offered"),
        pytest.param(freed(1 << 16), id="never-lent"),
        pytest.param(freed(count=1), id="never-sent"),
        pytest.param(arena(ArenaFlag.MAPPED, msgspec.msgpack.encode((1, []))), id="answer-to-no-offer"),
        pytest.param(arena(ArenaFlag.REFUSED, b"no"), id="refusal-of-no-offer"),
        pytest.param(arena(ArenaFlag.OFFER, b"\xc1"), id="malformed-offer"),
        pytest.param(arena(ArenaFlag.OFFER, msgspec.msgpack.encode((1, 2, 3))), id="short-offer"),
    ],
)
async def test_nonsense_closes_the_connection_and_no_more(said):
    async with sharing() as both:
        both.near.connection.send(said)
        assert isinstance(await both.far.ended(), ProtocolError)
        await both.near.ended()
        both.near, both.far = await both.endpoints.pair()
        assert await both.send(b"x" * MIB) == [b"x" * MIB]


@pytest.mark.parametrize(
    ("offsets", "size"),
    [
        ((0,), 100),
        ((1 << 62,), 100),
        (((1 << 64) - 16,), 100),
        (((1 << 16) + 1,), 100),
        ((1 << 16, 1 << 16), 100),
        ((), 100),
        ((1 << 16,), 1 << 35),
    ],
)
async def test_a_forged_reference_closes_the_connection(offsets, size):
    async with sharing() as both:
        await both.send(b"x" * MIB)
        header = frame(MessageType.REQUEST, 0, 9, 0, 0, b"", buffer_sizes=(size,))
        both.near.connection.send(header + lent(*offsets, number=1))
        assert isinstance(await both.far.ended(), ProtocolError)
        assert both.far.messages == []


async def test_the_same_memory_cannot_be_given_back_twice():
    async with sharing() as both:
        received = await both.send(b"x" * MIB)
        both.far.connection.send(freed(1 << 20, 1 << 20))
        assert isinstance(await both.near.ended(), ProtocolError)
        assert received == [b"x" * MIB]


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode((1, [1 << 16])), msgspec.msgpack.encode((1,))])
async def test_an_answer_that_cannot_be_closes_the_connection(body, monkeypatch):
    monkeypatch.setattr(
        channel_module, "_encode", lambda value: body if len(value.__struct_fields__) == 2 else real(value)
    )
    real = msgspec.msgpack.encode
    async with sharing() as both:
        buffers = [memoryview(bytes(MIB))]
        both.near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        assert isinstance(await both.near.ended(), ProtocolError)
        assert both.near_arena.statistics()["used_blocks"] == 0


async def test_a_second_offer_closes_the_connection():
    async with sharing() as both:
        await both.send(b"x" * MIB)
        both.near.connection.send(arena(ArenaFlag.OFFER, msgspec.msgpack.encode(both.near_arena.file.offer)))
        assert isinstance(await both.far.ended(), ProtocolError)
