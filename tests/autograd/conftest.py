from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster

OPTIONS = RpcOptions(gc_freeze=False, shutdown_timeout=30, rref_grace=0.2, control_backoff=0.02, control_retries=10)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other workers bring about."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - nobody can set an event for it
            await asyncio.sleep(0.002)


def assert_nothing_is_left(group: Cluster) -> None:
    for worker in group:
        if not worker.is_shut_down:
            found = worker.autograd.statistics()
            assert not found["contexts"], (worker, found)
            assert not worker.autograd.container.contexts


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    """Three workers that hold no context any more when the test is over."""
    async with cluster(3, options=OPTIONS) as workers:
        yield workers
        assert_nothing_is_left(workers)
