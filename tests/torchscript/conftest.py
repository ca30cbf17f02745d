from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    async with cluster(2, options=RpcOptions(gc_freeze=False, shutdown_timeout=30)) as workers:
        yield workers
