"""Dask: an actor on the one process of a local cluster, called from an asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from arpc.bench import payloads
from arpc.bench.asyncio_caller import Call
from arpc.bench.peers.caller import PeerCaller

__all__ = ["Dask", "system"]


class Callee:
    """The actor."""

    def noop(self) -> None:
        """Does nothing."""

    def drop(self, value: object) -> None:
        """Receives something and lets go of it."""


class DaskCaller(PeerCaller):
    """The measurements, with Dask's calls."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def prepare_noop(self) -> Call:
        method = self._actor.noop

        async def call() -> object:
            return await method()

        return call

    def prepare_send(self, size_bytes: int) -> Call:
        method, array = self._actor.drop, payloads.bulk_array(size_bytes)

        async def call() -> object:
            return await method(array)

        return call


class Dask:
    """A local cluster of the caller's own, with one worker."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[DaskCaller]:
        cluster = LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            asynchronous=True,
            local_directory=str(place),
        )
        async with cluster, Client(cluster, asynchronous=True) as client:
            yield DaskCaller(await client.submit(Callee, actor=True))


def system() -> Dask:
    """Dask as it comes, without its dashboard."""
    return Dask()
