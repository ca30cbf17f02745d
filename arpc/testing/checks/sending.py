"""Checks of how frames and large buffers are sent, and of backpressure when a peer does not keep up."""

from __future__ import annotations

import asyncio
import tracemalloc
import weakref
from typing import Final

from arpc.testing.checks.support import KIB, MIB, Checks, pattern
from arpc.testing.endpoints import bulk_frame, small_frame

# The most that a transport may buffer of what it was given to write: the chunk being written, and some more
HELD_BYTES: Final = 4 * MIB

__all__ = ["SendingChecks"]


class _Memory(bytearray):
    """Memory that can have weak references, which show when it is freed."""


class SendingChecks(Checks):
    """Order, batching, memory and backpressure."""

    async def check_frames_arrive_in_order(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            payloads = [pattern(size, size).tobytes() for size in (0, 1, 31, 4 * KIB, 256 * KIB - 32, 256 * KIB, MIB)]
            for number, payload in enumerate(payloads):
                near.connection.send(small_frame(number, payload))
            for number in range(len(payloads), 2000):
                near.connection.send(small_frame(number))
            messages = await far.received(2000)
            assert far.numbers == list(range(2000)), "frames came out of order"
            assert [bytes(message.body) for message in messages[: len(payloads)]] == payloads, "a frame came damaged"
            far.connection.send(small_frame(7, b"back"))
            assert bytes((await near.received(1))[0].body) == b"back"
            assert near.connection.statistics()["bytes_sent"] == far.connection.statistics()["bytes_received"]

    async def check_sends_of_one_turn_are_joined(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            before = near.connection.statistics()
            for number in range(1000):
                near.connection.send(small_frame(number))
            await far.received(1000)
            after = near.connection.statistics()
            assert after["frames_sent"] - before["frames_sent"] == 1000
            writes = after["writes"] - before["writes"]
            assert writes <= 1000 // 8, f"1000 frames of one loop turn took {writes} writes"

    async def check_large_buffers_arrive_in_memory_made_for_them(self) -> None:
        made: list[memoryview] = []

        def allocate(size_bytes: int) -> memoryview:
            made.append(memoryview(bytearray(size_bytes)))
            return made[-1]

        async with self.endpoints() as endpoints:
            endpoints.allocate = allocate
            near, far = await endpoints.pair()
            sizes = [[1], [MIB, 1, 3 * MIB + 17], [64 * KIB], [5 * MIB - 1, MIB + 1]]
            sent = [[pattern(size, number) for size in row] for number, row in enumerate(sizes)]
            for number, buffers in enumerate(sent):
                near.connection.send_bulk(bulk_frame(number, buffers), buffers)
            messages = await far.received(len(sent))
            for message in messages:
                assert all(any(buffer is one for one in made) for buffer in message.buffers), (
                    "not in the memory made for it"
                )
                assert message.buffers == sent[message.id], f"the buffers of message {message.id} came damaged"
            assert len(made) == sum(map(len, sizes)), "memory was made more than once"

    async def check_large_buffers_are_not_copied(self) -> None:
        size = 64 * MIB
        target = memoryview(bytearray(size))
        source = memoryview(bytearray(size))
        source[:: 4 * KIB] = b"x" * len(source[:: 4 * KIB])
        async with self.endpoints() as endpoints:
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
        async with self.endpoints() as endpoints:
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
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            for number, size in enumerate((64 * MIB, 2 * MIB)):
                buffers = [memoryview(bytearray(size))]
                near.connection.send_bulk(bulk_frame(number, buffers), buffers)
            await far.received(2)
            assert far.numbers == [1, 0], "a large message waited for a larger one"

    async def check_dropped_buffers_leave_both_sides_consistent(self) -> None:
        made: list[weakref.ref[_Memory]] = []

        def allocate(size_bytes: int) -> memoryview:
            memory = _Memory(size_bytes)
            made.append(weakref.ref(memory))
            return memoryview(memory)

        async with self.endpoints() as endpoints:
            endpoints.allocate = allocate
            near, far = await endpoints.pair()
            connection = near.connection
            large = [memoryview(bytearray(32 * MIB)), memoryview(bytearray(MIB))]
            at_once = connection.send_bulk(bulk_frame(1, large), large)
            assert connection.drop_bulk(at_once), "what has not gone out can be dropped"
            midway = connection.send_bulk(bulk_frame(2, large), large)
            kept = [pattern(3 * MIB)]
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
            held = [reference for reference in made if reference() is not None]
            assert len(held) == 2, "the receiver keeps memory for what was dropped"

    # -- backpressure

    async def check_large_buffers_wait_at_their_owner(self) -> None:
        async with self.endpoints() as endpoints:
            near, far = await endpoints.pair()
            buffers = [memoryview(bytearray(48 * MIB))]
            near.connection.send_bulk(bulk_frame(1, buffers), buffers)
            most = 0
            while not far.messages:
                assert near.connection.unsent_bytes <= 49 * MIB
                most = max(most, near.connection.bytes_sent - far.connection.bytes_received)
                await asyncio.sleep(0)
            # a transport cannot limit the system's own buffers
            assert most < 32 * MIB, f"{most >> 20} MiB were written ahead of the peer"
            assert near.connection.unsent_bytes == 0
            assert not near.connection.is_congested

    async def check_sender_hears_when_to_go_on(self) -> None:
        async with self.endpoints() as endpoints:
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
