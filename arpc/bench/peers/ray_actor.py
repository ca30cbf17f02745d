"""Ray: an async actor with room for a window of calls.

A large array goes as numpy's: Ray puts it into its shared memory once and the actor reads it there, while a torch
tensor would be pickled whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from arpc.bench import payloads
from arpc.bench.asyncio_caller import Call
from arpc.bench.peers.caller import PeerCaller

__all__ = ["Ray", "system"]

IN_FLIGHT = 1000


class Callee:
    """The actor."""

    async def noop(self) -> None:
        """Does nothing."""

    async def drop(self, value: object) -> None:
        """Receives something and lets go of it."""


class RayCaller(PeerCaller):
    """The measurements, with Ray's calls."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def prepare_noop(self) -> Call:
        method = self._actor.noop

        async def call() -> object:
            return await method.remote()

        return call

    def prepare_send(self, size_bytes: int) -> Call:
        method, array = self._actor.drop, payloads.bulk_array(size_bytes)

        async def call() -> object:
            return await method.remote(array)

        return call


class Ray:
    """A local cluster of the caller's own; the actor runs in one of its processes."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[RayCaller]:
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
            yield RayCaller(actor)
        finally:
            ray.shutdown()


def system() -> Ray:
    """Ray as it comes, without its dashboard."""
    return Ray()
