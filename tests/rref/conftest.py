from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable

import pytest

from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster

# Quick to try again, and patient enough for a slow machine
OPTIONS = RpcOptions(gc_freeze=False, shutdown_timeout=30, rref_grace=0.2, control_backoff=0.02, control_retries=16)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other workers bring about."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - nobody can set an event for it
            await asyncio.sleep(0.002)


async def nothing_is_held(group: Cluster) -> None:
    """Every RRef of the group is gone, once those that nobody refers to are collected."""

    def is_idle() -> bool:
        return all(worker.rref_context.forks.is_idle for worker in group if not worker.is_shut_down)

    for _ in range(20):
        gc.collect()
        try:
            async with asyncio.timeout(0.5):
                await until(is_idle)
        except TimeoutError:
            continue
        break
    assert is_idle(), [worker.rrefs() for worker in group]


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    """Three workers that hold no RRef any more when the test is over."""
    async with cluster(3, options=OPTIONS) as workers:
        yield workers
        await nothing_is_held(workers)
        assert all(not worker.leaked_rrefs for worker in workers)
