"""The pytest plugin: the fixture ``arpc_cluster``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from arpc.testing.in_process_cluster import Cluster

__all__ = ["arpc_cluster"]


@pytest.fixture
def arpc_cluster() -> Iterator[Callable[..., AbstractAsyncContextManager[Cluster]]]:
    """Return `arpc.testing.cluster`, which makes groups of workers in this process, and clean up after the test."""
    from arpc.agent.scope import current_scope  # slow: it imports torch
    from arpc.testing.in_process_cluster import cluster  # slow, likewise

    before = current_scope.get()
    yield cluster
    # An async fixture that makes a group sets this variable for the test as well. If the end of that fixture fails,
    # pytest-asyncio does not reset it, and the next test would have a worker that is gone.
    current_scope.set(before)
