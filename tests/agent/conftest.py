"""Groups of workers for the tests of the agent, each with proof that no call has left anything behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from arpc import torchstate
from arpc.testing import Cluster, cluster
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import Stage, call_on, echo, setting_stages


@pytest.fixture
def make_stage() -> Iterator[Callable[[], Stage]]:
    """Sets the stage on the running loop, for tests that run a loop of their own."""
    with setting_stages() as set_stage:
        yield set_stage


@pytest.fixture
async def stage(make_stage: Callable[[], Stage]) -> Stage:
    """Where this test and its handlers meet."""
    return make_stage()


@pytest.fixture
async def pair() -> AsyncIterator[Cluster]:
    """Two workers, connected; none of their tables holds anything when the test is over."""
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        yield group
        await assert_nothing_left(group)


@pytest.fixture
async def trio() -> AsyncIterator[Cluster]:
    """The same with three, each connected to the next."""
    async with cluster(3) as group:
        await group[0].rpc_sync("worker1", call_on, args=("worker2", echo))
        yield group
        await assert_nothing_left(group)


@pytest.fixture(params=["first step", "later step"])
def wait_first(request: pytest.FixtureRequest) -> bool:
    """Whether a handler has waited before: it then runs in a task that is its own."""
    return bool(request.param == "later step")


@pytest.fixture
def nothing_switched() -> Iterator[None]:
    """A mode of torch left on this thread is the failure of the test that left it, and not of the next."""
    yield
    was_pristine = torchstate.is_pristine()
    torchstate.save_and_reset()
    assert was_pristine, "the test left torch's state changed"
