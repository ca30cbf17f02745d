"""The pytest plugin: the fixture ``arpc_cluster``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from arpc.testing.cluster import Cluster

__all__ = ["arpc_cluster"]


@pytest.fixture
def arpc_cluster() -> Callable[..., AbstractAsyncContextManager[Cluster]]:
    """What makes groups of workers in this process, as in ``async with make(3) as group``."""
    from arpc.testing.cluster import cluster  # slow: it imports torch

    return cluster
