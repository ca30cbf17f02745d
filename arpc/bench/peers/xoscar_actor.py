"""xoscar: an actor in the second process of a pool, which is faster to reach than another pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import xoscar as xo

from arpc.bench.peers.caller import ActorSystem, PeerCaller

__all__ = ["system"]

UID = "callee"


class Callee(xo.Actor):
    """The actor."""

    async def noop(self) -> None:
        """Do nothing."""

    async def drop(self, value: object) -> None:
        """Receive a value and drop it."""


@asynccontextmanager
async def open_caller(_place: Path) -> AsyncIterator[PeerCaller]:
    """Start a pool with one more process."""
    pool = await xo.create_actor_pool("127.0.0.1", n_process=1)
    async with pool:
        there = xo.allocate_strategy.ProcessIndex(1)
        actor = await xo.create_actor(Callee, uid=UID, address=pool.external_address, allocate_strategy=there)
        yield PeerCaller(actor.noop, actor.drop)


def system() -> ActorSystem:
    """Make xoscar with its defaults."""
    return ActorSystem(open_caller)
