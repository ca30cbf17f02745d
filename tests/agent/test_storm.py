"""Everything at once, by chance but always the same: calls, streams, cancellations, timeouts and cut connections."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch

import arpc
from arpc.errors import CallError, WireError
from arpc.testing import Cluster, cluster
from tests.agent.generators import count_up, count_up_in_thread
from tests.agent.leftovers import assert_both_alive, assert_nothing_left
from tests.agent.stage import call_on, call_on_in_thread, echo, echo_in_thread, echo_inline, echo_later

ROUNDS = 120


async def linger(turns: int) -> str:
    for _ in range(turns):
        await asyncio.sleep(0)
    return "lingered"


async def fail(text: str) -> None:
    await asyncio.sleep(0)
    raise LookupError(text)


class Storm:
    """Makes calls of all kinds, and trouble of all kinds, and counts how they end."""

    def __init__(self, group: Cluster, seed: int) -> None:
        self.group = group
        self.chance = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def call(self) -> tuple[Any, tuple[Any, ...]]:
        to = self.chance.choice(self.group).name
        return self.chance.choice(
            [
                (echo, (1,)),
                (echo_later, ("x" * self.chance.choice([1, 50_000]),)),
                (echo_in_thread, (torch.ones(self.chance.choice([4, 100_000])),)),
                (echo_inline, (torch.ones(100_000),)),
                (linger, (self.chance.randrange(50),)),
                (fail, ("on purpose",)),
                (call_on, (to, linger, self.chance.randrange(20))),
                (call_on, (to, fail, "on purpose, and deep")),
                (call_on_in_thread, (to, echo, 2)),
            ]
        )

    async def one_call(self) -> None:
        worker, to = self.chance.choice(self.group), self.chance.choice(self.group).name
        function, args = self.call()
        timeout = self.chance.choice([arpc.UNSET, 0, 30, 0.02])
        future = worker.rpc_async(to, function, args, timeout=timeout)
        ended: list[bool] = []
        future.add_done_callback(lambda _: ended.append(True))
        if self.chance.random() < 0.3:
            await linger(self.chance.randrange(8))
            future.cancel()
        await self.end_of(future)
        await asyncio.sleep(0)
        assert ended == [True]

    async def one_stream(self) -> None:
        worker, to = self.chance.choice(self.group), self.chance.choice(self.group).name
        generator = self.chance.choice([count_up, count_up_in_thread])
        stream = worker.stream(to, generator, (20,), window=self.chance.choice([1, 4, 16]))
        await self.end_of(self.consume(stream, self.chance.choice([0, 3, 100])))

    async def consume(self, stream: arpc.Stream[int], stop: int) -> None:
        expected = 0
        async with stream:
            async for number in stream:
                assert number == expected
                expected += 1
                if expected >= stop:
                    break

    async def cut(self) -> None:
        """Break a connection, at one end or the other."""
        worker = self.chance.choice(self.group)
        connections = worker.agent.connector.open_connections()
        if connections:
            self.chance.choice(connections).abort(WireError("cut by the storm"))
        self.ends["cut"] += 1

    async def end_of(self, awaitable: Any) -> None:
        try:
            await awaitable
        except asyncio.CancelledError:
            self.ends["cancelled"] += 1
        except (LookupError, CallError) as error:
            self.ends[type(error).__name__] += 1
        else:
            self.ends["well"] += 1

    async def rage(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ROUNDS):
                kinds = [self.one_call] * 12 + [self.one_stream] * 3 + [self.cut]
                tasks.create_task(self.chance.choice(kinds)())
                if self.chance.random() < 0.5:
                    await linger(self.chance.randrange(5))


@pytest.mark.parametrize("seed", range(3))
async def test_every_call_of_a_storm_ends_once_and_leaves_nothing(seed):
    options = arpc.RpcOptions(
        window_bytes=200_000, max_handlers_per_peer=8, num_worker_threads=4, heartbeat_interval=0, gc_freeze=False
    )
    async with cluster(3, options=options) as group:
        storm = Storm(group, seed)
        async with asyncio.timeout(30):
            await storm.rage()
        assert sum(storm.ends.values()) == ROUNDS
        assert storm.ends["well"] > ROUNDS // 4, storm.ends
        await assert_nothing_left(group)
        await assert_both_alive(group)
