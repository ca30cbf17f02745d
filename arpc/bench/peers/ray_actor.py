"""Ray: an async actor with room for a window of calls.

A large array is sent as a numpy array: Ray puts it into its shared memory once and the actor reads it there, while a
torch tensor would be pickled whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from arpc.bench.peers.caller import ActorSystem, PeerCaller

__all__ = ["system"]

IN_FLIGHT = 1000


class Callee:
    """The actor."""

    async def noop(self) -> None:
        """Do nothing."""

    async def drop(self, value: object) -> None:
        """Receive a value and drop it."""


@asynccontextmanager
async def open_caller(place: Path) -> AsyncIterator[PeerCaller]:
    """Start a local cluster; the actor runs in one of its processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=str(place / "ray"),
    )
    try:
        actor: Any = ray.remote(max_concurrency=IN_FLIGHT)(Callee).remote()
        await actor.noop.remote()
        yield PeerCaller(actor.noop.remote, actor.drop.remote)
    finally:
        ray.shutdown()


def system() -> ActorSystem:
    """Make Ray with its defaults, without its dashboard."""
    return ActorSystem(open_caller)
