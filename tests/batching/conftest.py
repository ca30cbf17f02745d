from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import arpc
from arpc.agent.hooks import context_propagation as variables
from arpc.batching.decorator import Queues
from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster
from tests.batching import functions


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    """Three workers with no call that waits when the test is over."""
    async with cluster(3, options=RpcOptions(gc_freeze=False, shutdown_timeout=30)) as workers:
        yield workers
        for worker in workers:
            assert not worker.keep(Queues).queues


@pytest.fixture(autouse=True)
def sizes() -> Iterator[list[int]]:
    functions.sizes.clear()
    yield functions.sizes
    functions.gate.clear()


@pytest.fixture
def bar() -> Iterator[functions.Bar]:
    made = functions.Bar()
    functions.bar[:] = [made]
    functions.reached.clear()
    yield made
    made.lifted.set()


@pytest.fixture
async def gate() -> functions.Gate:
    made = functions.Gate()
    functions.gate[:] = [made]
    return made


@pytest.fixture(autouse=True)
def _variable_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared in these tests only: what rides on calls makes others slower."""
    monkeypatch.setattr(variables, "_declared", {})
    arpc.propagate(functions.request)
