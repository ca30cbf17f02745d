from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from arpc import torchjit
from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster

collect_ignore = [] if torchjit.IS_AVAILABLE else ["test_calls.py", "test_modules.py", "test_types.py"]
"""The modules whose functions are compiled while they are imported."""


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    async with cluster(2, options=RpcOptions(gc_freeze=False, shutdown_timeout=30)) as workers:
        yield workers
