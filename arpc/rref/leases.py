"""Time for lost workers to come back: what they hold, and what is held of theirs, is theirs until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final

from arpc.agent.agent import Agent
from arpc.errors import ArpcError
from arpc.ids import WorkerInfo, creator_of
from arpc.rref.events import WorkerName
from arpc.rref.forks import Forks
from arpc.rref.states import OwnerState
from arpc.rref.uses import Use
from arpc.wire.messages import RRefForkQuery

__all__ = ["Leases"]

_RECONNECT_S: Final = 0.05


class Leases:
    """The workers whose connection broke. ``expired`` hears of those who are not back after ``grace_s`` seconds."""

    def __init__(
        self,
        agent: Agent,
        forks: Forks[Use],
        context: Context,
        incarnation: int,
        grace_s: float,
        expired: Callable[[WorkerName], None],
    ) -> None:
        self._agent = agent
        self._forks = forks
        self._context = context
        self._incarnation = incarnation
        self._grace_s = grace_s
        self._expired = expired
        self._tasks: dict[WorkerName, asyncio.Task[None]] = {}

    def begin(self, peer: WorkerInfo) -> None:
        """A connection broke. Nothing happens if there is nothing between this worker and the peer."""
        if peer.name not in self._tasks and self._concerns(peer):
            self._tasks[peer.name] = self._context.copy().run(self._agent.loop.create_task, self._keep(peer))

    def _concerns(self, peer: WorkerInfo) -> bool:
        """Whether there is anything between this worker and a peer."""
        forks = self._forks
        return (
            any(user.owner == peer.name for user in forks.users.values())
            or any(offer.to == peer.name for offer in forks.offers.values())
            or any(
                peer.name in owned.forks.values()
                or (owned.state is OwnerState.EXPECTED and creator_of(owned.rref) == peer.id)
                for owned in forks.owned.values()
            )
        )

    def end(self, name: WorkerName) -> None:
        """A worker is known to be lost."""
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _keep(self, peer: WorkerInfo) -> None:
        """Both sides try to connect: neither may have another reason to."""
        try:
            async with asyncio.timeout(self._grace_s):
                while True:
                    try:
                        await self._agent.request(RRefForkQuery, peer.name, (self._incarnation, 0, 0, []))
                        return
                    except (ArpcError, OSError):
                        await asyncio.sleep(_RECONNECT_S)
        except TimeoutError:
            self._expired(peer.name)
        finally:
            if self._tasks.get(peer.name) is asyncio.current_task():
                del self._tasks[peer.name]

    def __len__(self) -> int:
        """How many workers are given time at the moment."""
        return len(self._tasks)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
