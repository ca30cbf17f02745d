"""Memory for what is received: used again, for a while, and never by two."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from arpc.testing.endpoints import Endpoints, bulk_frame, turns_until
from arpc.transport import buffer_pool as warm
from arpc.transport.buffer_pool import BufferPool
from arpc.transport.sockets import Resources, TcpTransport
from arpc.wire.values.raw_memory import address_of

MIB = 1 << 20


@pytest.fixture
async def memory():
    made = BufferPool(16 * MIB)
    yield made
    made.close()


async def test_memory_is_used_again(memory):
    view = memory.allocate(3 * MIB)
    assert view.nbytes == 3 * MIB
    address = address_of(view)
    del view
    again = memory.allocate(4 * MIB)
    assert address_of(again) == address
    assert memory.statistics() == {"idle_bytes": 0, "reuses": 1}
    assert address_of(memory.allocate(4 * MIB)) != address, "somebody has it"


async def test_a_part_that_is_used_keeps_the_whole(memory):
    view = memory.allocate(3 * MIB)
    address = address_of(view)
    part = view[5:10]
    del view
    assert address_of(memory.allocate(3 * MIB)) != address
    del part
    assert memory.statistics()["idle_bytes"] == 0, "it is noticed when something is asked for, or in the next turn"
    await turns_until(lambda: memory.statistics()["idle_bytes"] == 8 * MIB)


async def test_no_more_is_kept_than_may_be(memory):
    views = [memory.allocate(4 * MIB) for _ in range(6)]
    views.clear()
    await turns_until(lambda: memory.statistics()["idle_bytes"])
    assert memory.statistics()["idle_bytes"] == 16 * MIB
    large = memory.allocate(17 * MIB)
    del large
    await asyncio.sleep(0)
    assert memory.statistics()["idle_bytes"] == 16 * MIB


async def test_small_memory_is_left_to_others(memory):
    view = memory.allocate(1000)
    assert view.nbytes == 1000
    del view
    await asyncio.sleep(0)
    assert memory.statistics()["idle_bytes"] == 0


async def test_idle_memory_is_freed(memory, monkeypatch):
    monkeypatch.setattr(warm, "_IDLE_S", 0.01)
    kept = memory.allocate(MIB)
    assert memory.allocate(2 * MIB)
    await turns_until(lambda: memory.statistics()["idle_bytes"])
    await turns_until(lambda: not memory.statistics()["idle_bytes"])
    assert memory._timer is None
    del kept
    await turns_until(lambda: memory.statistics()["idle_bytes"])
    await turns_until(lambda: not memory.statistics()["idle_bytes"])


async def test_memory_comes_back_from_other_threads(memory):
    views = [memory.allocate(MIB) for _ in range(8)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    await turns_until(lambda: memory.statistics()["idle_bytes"] == 8 * MIB)


async def test_the_end():
    memory = BufferPool(16 * MIB)
    view = memory.allocate(MIB)
    assert memory.allocate(2 * MIB)
    memory.close()
    assert memory.statistics()["idle_bytes"] == 0
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"
    del view
    gc.collect()
    await asyncio.sleep(0)
    assert memory.statistics()["idle_bytes"] == 0
    assert memory.allocate(MIB).nbytes == MIB


async def test_what_comes_through_a_socket_lands_in_it(memory):
    async with Endpoints(TcpTransport(Resources(memory)), "tcp://127.0.0.1:0") as endpoints:
        near, far = await endpoints.pair()
        for number in range(3):
            buffers = [memoryview(bytes([number]) * 2 * MIB)]
            near.connection.send_bulk(bulk_frame(number, buffers), buffers)
            (message,) = await far.received(1)
            assert message.buffers == buffers
            far.messages.clear()
            del message
        assert memory.statistics()["reuses"] == 2
