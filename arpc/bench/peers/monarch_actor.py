"""Monarch: an actor in a process that the caller's own has spawned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import Actor, endpoint, this_host

from arpc.bench import payloads
from arpc.bench.asyncio_caller import Call
from arpc.bench.peers.caller import PeerCaller

__all__ = ["Monarch", "system"]


class Callee(Actor):
    """The actor."""

    @endpoint
    async def noop(self) -> None:
        """Does nothing."""

    @endpoint
    async def drop(self, value: object) -> None:
        """Receives something and lets go of it."""


class MonarchCaller(PeerCaller):
    """The measurements, with Monarch's calls."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def prepare_noop(self) -> Call:
        method = self._actor.noop

        async def call() -> object:
            return await method.call_one()

        return call

    def prepare_send(self, size_bytes: int) -> Call:
        method, tensor = self._actor.drop, payloads.bulk_tensor(size_bytes)

        async def call() -> object:
            return await method.call_one(tensor)

        return call


class Monarch:
    """One process on this host."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[MonarchCaller]:
        processes = this_host().spawn_procs(per_host={"gpus": 1})
        actor: Any = processes.spawn("callee", Callee)
        await actor.noop.call_one()
        try:
            yield MonarchCaller(actor)
        finally:
            await processes.stop()


def system() -> Monarch:
    """Monarch as it comes."""
    return Monarch()
