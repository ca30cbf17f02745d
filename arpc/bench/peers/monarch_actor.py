"""Monarch: an actor in a process that the caller's own has spawned."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import Actor, endpoint, this_host

from arpc.bench import payloads
from arpc.bench.peers.caller import ActorSystem, PeerCaller

__all__ = ["system"]


class Callee(Actor):
    """The actor."""

    @endpoint
    async def noop(self) -> None:
        """Do nothing."""

    @endpoint
    async def drop(self, value: object) -> None:
        """Receive a value and drop it."""


@asynccontextmanager
async def open_caller(_place: Path) -> AsyncIterator[PeerCaller]:
    """Spawn one process on this host."""
    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor: Any = processes.spawn("callee", Callee)
    await actor.noop.call_one()
    try:
        yield PeerCaller(actor.noop.call_one, actor.drop.call_one, payloads.bulk_tensor)
    finally:
        await processes.stop()


def system() -> ActorSystem:
    """Make Monarch with its defaults."""
    return ActorSystem(open_caller)
