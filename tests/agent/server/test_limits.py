"""What a member may ask for at once. Limits for strangers: tests/transport/test_connection_limits.py."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from arpc.agent.server import request_queue, request_reader
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from tests.agent.stage import echo

gate: list[asyncio.Event] = []


async def wait_at_the_gate(*_: object) -> int:
    await gate[0].wait()
    return 1


@pytest.fixture(autouse=True)
async def fresh_gate():
    gate[:] = [asyncio.Event()]


async def test_calls_that_there_is_no_room_for_are_refused():
    options = RpcOptions(gc_freeze=False, max_handlers_per_peer=2, max_requests_waiting=3)
    async with cluster(2, options=options) as group:
        calls = [group[0].rpc_async("worker1", wait_at_the_gate) for _ in range(8)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert len(waiting) == 5
        for call in done:
            with pytest.raises(arpc.OverloadedError, match=r"'worker1' refused .*3 of its requests wait already"):
                call.result()
        gate[0].set()
        assert await asyncio.gather(*waiting) == [1] * 5
        (link,) = (link for link in group[1].agent.connector.links if link.peer.info.name == "worker0")
        assert link.waiting_bytes == 0


async def test_requests_that_wait_take_a_bounded_amount_of_memory():
    options = RpcOptions(gc_freeze=False, max_handlers_per_peer=1, window_bytes=1 << 16)
    mine = options.replace(window_bytes=1 << 30)
    async with cluster(2, options=options) as group:
        # this one does not keep to what the other has room for
        for peer in group[0].agent.peers:
            peer._window_bytes = mine.window_bytes
        calls = [group[0].rpc_async("worker1", wait_at_the_gate, args=(bytes(1 << 17),)) for _ in range(40)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.pop().exception(), arpc.OverloadedError)
        (link,) = (link for link in group[1].agent.connector.links if link.peer.info.name == "worker0")
        assert link.waiting_bytes <= request_queue._WINDOWS * (1 << 16) + (1 << 18)
        gate[0].set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert 1 in results


@pytest.mark.parametrize("what", ["header", "functions", "a function without a number"])
async def test_too_much_costs_the_connection(what, monkeypatch):
    monkeypatch.setattr(request_reader, "_MAX_FUNCTIONS", 100)
    async with cluster(2, options=RpcOptions(gc_freeze=False, max_header_bytes=1 << 12)) as group:
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1
        pending = group[0].rpc_async("worker1", wait_at_the_gate, timeout=0)
        connection = group[0].agent.known_peer("worker1").connection
        if what == "header":
            connection.send(frame(MessageType.REQUEST, 0, 1, 1, 0, b"", meta=bytes(1 << 13)))
        elif what == "a function without a number":
            connection.send(frame(MessageType.FUNCTION, 0, 0, 0, 0, b"cbuiltins\nlen\n."))
        else:
            for number in range(200):
                connection.send(frame(MessageType.FUNCTION, 0, 0, 1000 + number, 0, b"cbuiltins\nlen\n."))
        with pytest.raises(arpc.WorkerLostError):
            await pending
        assert await group[0].rpc_sync("worker1", echo, args=(2,)) == 2


async def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize("value", [torch.zeros([1] * 65), torch.zeros([1] * 65).to_sparse()], ids=["dense", "sparse"])
async def test_a_tensor_of_too_many_dimensions_fails_its_own_call_only(value):
    async with cluster(2) as group:
        pending = group[0].rpc_async("worker1", wait_at_the_gate, timeout=0)
        for _ in range(2):
            with pytest.raises(arpc.SerializationError, match="65 dimensions cannot be sent"):
                await group[0].rpc_sync("worker1", echo, args=(value,))
        with pytest.raises(arpc.SerializationError, match="65 dimensions cannot be sent"):
            await group[0].rpc_sync("worker1", zeros, args=(1,) * 65)
        assert (await group[0].rpc_sync("worker1", zeros, args=(1,) * 64)).dim() == 64
        gate[0].set()
        assert await pending == 1


SMALL_BODY = RpcOptions(gc_freeze=False, max_body_bytes=1 << 15)


async def give(count: int, size: int) -> list[torch.Tensor]:
    return [torch.full((size,), float(number)) for number in range(count)]


async def raise_at_length(size: int) -> None:
    raise ValueError("!" * size)


async def give_bytes(size: int) -> bytes:
    return bytes(size)


@pytest.mark.parametrize(("count", "size"), [(100, 64), (3, 2048), (1, 2048)], ids=str)
async def test_more_small_tensors_than_a_body_takes_follow_it(count, size):
    async with cluster(2, options=SMALL_BODY.replace(inline_tensor_bytes=1 << 14)) as group:
        sent = [torch.full((size,), float(number)) for number in range(count)]
        given = await group[0].rpc_sync("worker1", echo, args=(sent,))
        torch.testing.assert_close(given, sent)
        torch.testing.assert_close(await group[0].rpc_sync("worker1", echo, args=(sent[0],)), sent[0])
        torch.testing.assert_close(await group[0].rpc_sync("worker1", give, args=(count, size)), sent)


async def test_who_sends_more_than_a_body_takes_is_told_and_nothing_else_suffers():
    async with cluster(2, options=SMALL_BODY) as group:
        waiting = group[0].rpc_async("worker1", wait_at_the_gate)
        with pytest.raises(arpc.SerializationError, match=r"make a pickle of .* raise RpcOptions\.max_body_bytes"):
            await group[0].rpc_sync("worker1", echo, args=(bytes(1 << 15),))
        with pytest.raises(arpc.SerializationError, match="send them in parts"):
            await group[0].rpc_sync("worker1", echo, args=([torch.ones(1) for _ in range(4000)],))
        with pytest.raises(arpc.SerializationError, match="the result of give_bytes makes a pickle of"):
            await group[0].rpc_sync("worker1", give_bytes, args=(1 << 15,))
        with pytest.raises(arpc.SerializationError, match="send them in parts"):
            await group[0].rpc_sync("worker1", give, args=(4000, 1))
        with pytest.raises(arpc.RemoteError, match="characters are left out"):
            await group[0].rpc_sync("worker1", raise_at_length, args=(1 << 15,))
        gate[0].set()
        assert await waiting == 1


async def test_the_largest_pickle_and_the_largest_tensors_beside_it_fit():
    async with cluster(2, options=SMALL_BODY) as group:
        codec = group[0].agent.codec
        sent = await give(8, SMALL_BODY.max_body_bytes // 256)
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1
        connection = group[0].agent.known_peer("worker1").connection

        async def send(size: int) -> None:
            _, given = await group[0].rpc_sync("worker1", echo, args=((bytes(size), sent),))
            torch.testing.assert_close(given, sent)

        around = len(codec.pickler.dumps(((bytes(1 << 14), sent),))[0]) - (1 << 14)
        for left in range(256, around - 1, -8):
            await send(codec.max_pickle_bytes - left)
        with pytest.raises(arpc.SerializationError, match="make a pickle of"):
            await send(codec.max_pickle_bytes)
        assert group[0].agent.known_peer("worker1").connection is connection
