"""Everything a worker runs for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

import arpc
from arpc.errors import ProfilerError
from arpc.profiler import server_profile
from arpc.testing import Cluster, cluster


@pytest.fixture
async def trio() -> AsyncIterator[Cluster]:
    async with cluster(3) as group:
        yield group
        assert group[1].agent.observers.installed == []


async def sine_in_turns(times: int) -> None:
    for _ in range(times):
        torch.sin(torch.ones(2))
        await asyncio.sleep(0)


async def test_whoever_called(trio: Cluster) -> None:
    held = arpc.remote("worker1", server_profile)
    await held.rpc_sync().start()
    await asyncio.gather(
        trio[0].rpc_sync("worker1", sine_in_turns, args=(2,)),
        trio[2].rpc_sync("worker1", torch.cos, args=(torch.ones(2),)),
    )
    await held.rpc_sync().stop()
    await trio[0].rpc_sync("worker1", torch.exp, args=(torch.ones(2),))
    prof = await arpc.rpc_sync("worker1", held_names, args=(held,))
    requests, counts = prof
    assert sorted(names for names in requests if "aten::sin" in names or "aten::cos" in names) == [
        ["aten::cos"],
        ["aten::ones", "aten::empty", "aten::fill_", "aten::sin"] * 2,
    ]
    assert counts["aten::sin"] == 2
    assert "aten::exp" not in counts


async def held_names(held: arpc.RRef[server_profile]) -> tuple[list[list[str]], dict[str, int]]:
    prof = await held.local_value()
    names = [[event.name for event in events] for events in prof.by_request]
    return names, {event.key: event.count for event in prof.key_averages()}


async def test_a_copy_has_the_results(trio: Cluster) -> None:
    held = arpc.remote("worker1", server_profile)
    await held.rpc_sync().__enter__()
    await trio[2].rpc_sync("worker1", torch.cos, args=(torch.ones(2),))
    await held.rpc_sync().stop()
    copy = await held.to_here()
    assert "aten::cos" in [event.name for event in copy.function_events]


async def see_from_within() -> tuple[list[str], list[str]]:
    """Two that overlap, on the worker itself."""
    with server_profile(record_shapes=True) as outer:
        await arpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        async with server_profile() as inner:
            await arpc.rpc_sync("worker1", torch.mul, args=(torch.ones(2), 2))
    return [event.name for event in outer.function_events], [event.name for event in inner.function_events]


async def test_blocks_overlap(trio: Cluster) -> None:
    outer, inner = await trio[0].rpc_sync("worker1", see_from_within)
    assert {"aten::add", "aten::mul"} <= set(outer)
    assert "aten::mul" in inner
    assert "aten::add" not in inner


async def test_used_out_of_turn(trio: Cluster) -> None:
    prof = server_profile()
    with pytest.raises(ProfilerError, match="not begun"):
        prof.stop()
    with prof, pytest.raises(ProfilerError, match="not finished"):
        prof.key_averages()
    with pytest.raises(ProfilerError, match="used already"):
        prof.start()
