from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster

OPTIONS = RpcOptions(gc_freeze=False, shutdown_timeout=5, rref_grace=0.2, control_backoff=0.02)


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
