from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from arpc.optim.locks import ParameterLocks
from arpc.testing import Cluster, cluster
from tests.rref.conftest import OPTIONS, nothing_is_held


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    """Three workers that hold no RRef and no lock any more when the test is over."""
    async with cluster(3, options=OPTIONS) as workers:
        yield workers
        await nothing_is_held(workers)
        assert all(worker.keep(ParameterLocks).is_idle for worker in workers)
