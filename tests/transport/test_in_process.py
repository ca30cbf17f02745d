"""Workers of one process; what they share with other transports is in test_conformance.py."""

from __future__ import annotations

import asyncio

import pytest

from arpc.testing.endpoints import FAR, LIMITS, NEAR, Endpoint, Endpoints, bulk_frame, small_frame
from arpc.transport.in_process import MemoryNetwork, connect_pair
from arpc.wire.handshake import Handshake, Role
from arpc.wire.protocol import Protocol

MIB = 1 << 20


async def test_names_are_chosen_or_given():
    network = MemoryNetwork()
    async with Endpoints(network, "memory://") as one, Endpoints(network, "memory://here") as two:
        assert one.listener.address.startswith("memory://worker-")
        assert two.listener.address == "memory://here"
        assert (await two.pair()).near.connection.address == "memory://here"
        assert one.accepted == []


async def test_networks_are_apart():
    async with Endpoints(MemoryNetwork(), "memory://here") as endpoints:
        await endpoints.pair()
        async with Endpoints(MemoryNetwork(), "memory://there") as others:
            with pytest.raises(ConnectionRefusedError, match="no worker listens on memory://here"):
                await others.start(address="memory://here")


async def test_a_listener_that_was_closed_twice_does_not_close_its_successor():
    network = MemoryNetwork()
    async with Endpoints(network, "memory://here") as endpoints:
        await endpoints.listener.aclose()
        async with Endpoints(network, "memory://here") as successor:
            await endpoints.listener.aclose()
            await successor.pair()


async def test_nothing_arrives_in_the_turn_it_was_sent_in():
    async with Endpoints(MemoryNetwork(), "memory://") as endpoints:
        near, far = await endpoints.pair()
        near.connection.send(small_frame(1))
        near.connection.flush()
        assert far.messages == []
        await far.received(1)


async def test_memory_is_the_callers_again_once_a_message_has_arrived():
    async with Endpoints(MemoryNetwork(), "memory://") as endpoints:
        near, far = await endpoints.pair()
        source = bytearray(b"before" * 100_000)
        near.connection.send_bulk(bulk_frame(1, [memoryview(source)]), [memoryview(source)])
        (message,) = await far.received(1)
        source[:6] = b"after!"
        assert bytes(message.buffers[0][:6]) == b"before"


async def test_a_large_message_leaves_the_loop_time_for_others():
    async with Endpoints(MemoryNetwork(), "memory://") as endpoints:
        near, far = await endpoints.pair()
        buffers = [memoryview(bytearray(32 * MIB))]
        near.connection.send_bulk(bulk_frame(1, buffers), buffers)
        turns = 0
        while not far.messages:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 16  # about two MiB a turn, at most


async def test_a_pair_needs_no_network():
    near, far = Endpoint(), Endpoint()
    connector = Protocol(Handshake(Role.CONNECTOR, NEAR, None), LIMITS)
    acceptor = Protocol(Handshake(Role.ACCEPTOR, FAR, None), LIMITS)
    one, two = connect_pair((connector, near), (acceptor, far), "itself")
    await one.wait_opened()
    two.send(small_frame(1))
    await near.received(1)
    one.close("done")
    assert await far.ended() is None
    assert await near.ended() is None
    assert one.address == two.address == "memory://itself"


async def test_small_messages_to_a_full_peer_do_not_hide_that_it_has_room_again():
    async with Endpoints(MemoryNetwork(), "memory://") as endpoints:
        near, far = await endpoints.pair()
        connection = near.connection
        for number in range(7):
            connection.send(small_frame(number, bytes(MIB // 4)))
        connection.flush()
        assert connection.is_congested
        await asyncio.sleep(0)  # the peer has read a part, and not enough of it to say so
        connection.send(small_frame(7))
        connection.flush()
        await far.received(8)
        await asyncio.sleep(0)
        assert not connection.is_congested
