"""xoscar: an actor in the second process of a pool, which it reaches faster than another pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import xoscar as xo

from arpc.bench import payloads
from arpc.bench.asyncio_caller import Call
from arpc.bench.peers.caller import PeerCaller

__all__ = ["Xoscar", "system"]

UID = "callee"


class Callee(xo.Actor):
    """The actor."""

    async def noop(self) -> None:
        """Does nothing."""

    async def drop(self, value: object) -> None:
        """Receives something and lets go of it."""


class XoscarCaller(PeerCaller):
    """The measurements, with xoscar's calls."""

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


class Xoscar:
    """A pool of the caller's own, with one more process."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[XoscarCaller]:
        pool = await xo.create_actor_pool("127.0.0.1", n_process=1)
        async with pool:
            there = xo.allocate_strategy.ProcessIndex(1)
            yield XoscarCaller(
                await xo.create_actor(Callee, uid=UID, address=pool.external_address, allocate_strategy=there)
            )


def system() -> Xoscar:
    """Xoscar as it comes."""
    return Xoscar()
