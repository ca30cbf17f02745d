"""Dask: an actor on the only process of a local cluster, called from an asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from arpc.bench.peers.caller import ActorSystem, PeerCaller

__all__ = ["system"]


class Callee:
    """The actor."""

    def noop(self) -> None:
        """Do nothing."""

    def drop(self, value: object) -> None:
        """Receive a value and drop it."""


@asynccontextmanager
async def open_caller(place: Path) -> AsyncIterator[PeerCaller]:
    """Start a local cluster with one worker."""
    cluster = LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        asynchronous=True,
        local_directory=str(place),
    )
    async with cluster, Client(cluster, asynchronous=True) as client:
        actor: Any = await client.submit(Callee, actor=True)
        yield PeerCaller(actor.noop, actor.drop)


def system() -> ActorSystem:
    """Make Dask with its defaults, without its dashboard."""
    return ActorSystem(open_caller)
