from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from arpc.optim.locks import ParameterLocks
from arpc.testing import Cluster, cluster
from tests.rref.conftest import OPTIONS, nothing_is_held


@pytest.fixture(scope="session")
def quick_collections() -> Iterator[None]:
    """The first optimizer makes torch import so much that every later garbage collection takes half a second."""
    import torch._dynamo  # noqa: F401 - slow, and for these tests alone

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
async def group(quick_collections: None) -> AsyncIterator[Cluster]:
    """Three workers that hold no RRef, no lock and no context any more when the test is over."""
    async with cluster(3, options=OPTIONS) as workers:
        yield workers
        await nothing_is_held(workers)
        for worker in workers:
            assert worker.keep(ParameterLocks).is_idle
            assert not worker.autograd.container.contexts
