from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from arpc.errors import WorkerLostError
from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster
from arpc.transport.connection import Connection
from arpc.transport.sockets import TcpTransport
from arpc.transport.striping import Lanes
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import echo

MIB = 1 << 20


@asynccontextmanager
async def pair_over_tcp(lanes: int = 2, **options: Any) -> AsyncIterator[Cluster]:
    """Two workers with lanes, connected."""
    chosen = RpcOptions(
        gc_freeze=False, shared_memory_bytes=0, listen=("tcp://127.0.0.1:0",), bulk_connections=lanes, **options
    )
    async with cluster(2, options=chosen, transports={"tcp": TcpTransport()}) as group:
        await group[0].rpc_sync("worker1", echo)
        await have_lanes(group, lanes)
        yield group


async def have_lanes(group: Cluster, lanes: int) -> None:
    async with asyncio.timeout(30):
        while not all(len(lanes_of(worker, other)) == lanes for worker, other in both(group)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def both(group: Cluster) -> list[tuple[Any, str]]:
    return [(group[0], "worker1"), (group[1], "worker0")]


def connection_of(worker: Any, other: str) -> Connection | None:
    return worker.agent.known_peer(other).connection


def lanes_of(worker: Any, other: str) -> list[Connection]:
    connection = connection_of(worker, other)
    route = connection.lanes if connection is not None else None
    return route.connections if isinstance(route, Lanes) else []


async def double(tensor: Tensor) -> Tensor:
    return tensor * 2


async def test_large_tensors_take_the_lanes_in_both_directions():
    async with pair_over_tcp() as group:
        sent = torch.arange(2 * MIB)
        assert torch.equal(await group[0].rpc_sync("worker1", double, args=(sent,)), sent * 2)
        assert torch.equal(await group[1].rpc_sync("worker0", double, args=(sent,)), sent * 2)
        for worker, other in both(group):
            figures = worker.statistics()["peers"][other]
            assert figures["lanes"] == 2
            assert figures["lane_bytes_sent"] > 2 * sent.nbytes
            assert figures["bytes_sent"] < 10_000
            assert all(lane.bytes_sent > sent.nbytes / 4 for lane in lanes_of(worker, other))
            assert figures["unsent_bytes"] == 0
        await assert_nothing_left(group)


async def test_small_ones_and_calls_do_not():
    async with pair_over_tcp() as group:
        sent = torch.arange(10_000)
        for _ in range(3):
            assert torch.equal(await group[0].rpc_sync("worker1", double, args=(sent,)), sent * 2)
        assert group[0].statistics()["peers"]["worker1"]["lane_chunks_sent"] == 0


async def test_many_at_once_arrive_whole():
    async with pair_over_tcp(3) as group:
        sent = [torch.full((400_000 + number,), number) for number in range(12)]
        answers = await asyncio.gather(
            *(
                group[number % 2].rpc_sync(f"worker{1 - number % 2}", double, args=(each,))
                for number, each in enumerate(sent)
            )
        )
        assert all(torch.equal(answer, each * 2) for answer, each in zip(answers, sent, strict=True))
        await assert_nothing_left(group)


async def test_without_the_option_there_are_none():
    async with pair_over_tcp(0) as group:
        assert connection_of(group[0], "worker1").lanes is None
        assert "lanes" not in group[0].statistics()["peers"]["worker1"]


async def test_a_lane_that_is_lost_takes_the_connection_with_it_and_a_new_one_has_lanes_again():
    async with pair_over_tcp() as group:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        waiting = group[0].rpc_async("worker1", wait)
        before = connection_of(group[0], "worker1")
        lanes_of(group[1], "worker0")[0].abort(OSError("the cable was pulled"))
        with pytest.raises(WorkerLostError, match="one of its connections for large tensors was lost"):
            await waiting
        await before.wait_closed()
        for lane in lanes_of(group[0], "worker1"):
            await lane.wait_closed()

        sent = torch.arange(2 * MIB)
        await group[0].rpc_sync("worker1", echo)
        await have_lanes(group, 2)
        assert torch.equal(await group[0].rpc_sync("worker1", double, args=(sent,)), sent * 2)
        assert connection_of(group[0], "worker1") is not before


async def test_a_call_that_is_cancelled_on_its_way_leaves_nothing():
    async with pair_over_tcp(window_bytes=1 << 30) as group:
        sent = torch.zeros(8 * MIB)
        calls = [group[0].rpc_async("worker1", double, args=(sent,)) for _ in range(4)]
        await asyncio.sleep(0)
        for call in calls[1:]:
            call.cancel()
        assert (await calls[0]).numel() == sent.numel()
        assert torch.equal(await group[0].rpc_sync("worker1", double, args=(sent,)), sent)
        assert group[0].statistics()["peers"]["worker1"]["unsent_bytes"] == 0


async def test_a_lane_that_belongs_to_no_connection_is_refused(caplog: pytest.LogCaptureFixture):
    async with pair_over_tcp() as group:
        main = connection_of(group[0], "worker1")
        (address,) = (await group[0].rendezvous.resolve("worker1")).addresses
        with caplog.at_level(logging.WARNING, "arpc.connections"):
            await group[0].agent.connector.bulk.open(main, address, "a token that was made up")
        assert "there is no connection that this one could belong to" in caplog.text
        assert len(lanes_of(group[0], "worker1")) == 2
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1


async def test_a_peer_that_reads_nothing_counts_as_congested():
    async with pair_over_tcp(window_bytes=1 << 30) as group:
        for lane in lanes_of(group[1], "worker0"):
            lane._transport.pause_reading()  # type: ignore[attr-defined]
        sent = torch.zeros(MIB)
        calls = [group[0].rpc_async("worker1", double, args=(sent,)) for _ in range(32)]
        connection = connection_of(group[0], "worker1")
        async with asyncio.timeout(30):
            while not connection.is_congested:  # noqa: ASYNC110 - the kernel takes some before it is full
                await asyncio.sleep(0.001)
        assert connection.unsent_bytes > 0
        # what is small still passes
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1
        for lane in lanes_of(group[1], "worker0"):
            lane._transport.resume_reading()  # type: ignore[attr-defined]
        assert all(answer.numel() == sent.numel() for answer in await asyncio.gather(*calls))
        assert not connection.is_congested
        assert connection.unsent_bytes == 0
