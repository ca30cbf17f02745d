"""Workers of an elastic group that connect before this one has heard of them, or after it has lost them.

A worker that was taken for dead may still run while another has its name. Who has a name is known to the group's store
alone, and it takes a while to ask it: so whoever comes is asked to try again in a moment, and is let in, or not, then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final, Protocol

from arpc.agent.peers.peer import Peer
from arpc.errors import ArpcError, RendezvousError, UnknownWorkerError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.wire.handshake import Identity, Refused
from arpc.wire.messages import Refusal

__all__ = ["ElasticJoin"]

logger = get_logger("arpc.connections")

_REMEMBERED: Final = 256
"""How many of those who were turned away are remembered."""


class _Host(Protocol):
    """What is needed of the agent."""

    loop: asyncio.AbstractEventLoop
    resolve: Callable[[str | int], Awaitable[WorkerRecord]]

    @property
    def is_elastic(self) -> bool: ...
    def peer(self, to: str | int | WorkerInfo) -> Peer | None: ...
    def add_peer(self, record: WorkerRecord) -> Peer: ...


class ElasticJoin:
    """Finds out who comes. Everything belongs to the agent's loop."""

    def __init__(self, agent: _Host, context: Context) -> None:
        self._agent = agent
        self._context = context
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._turned_away: OrderedDict[int, str] = OrderedDict()
        """Incarnations that are not, or no more, of the group, and why."""

    def check(self, identity: Identity) -> None:
        """Return if a worker is of the group for all that is known. Raises `Refused`, passing or for good, if not."""
        reason = self._turned_away.get(identity.incarnation)
        if reason is not None:
            raise Refused(Refusal.STALE, reason)
        peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is not None and peer.is_verified and peer.incarnation == identity.incarnation:
            return
        if identity.name not in self._looking:
            looking = self._context.copy().run(self._agent.loop.create_task, self._look_up(identity))
            self._looking[identity.name] = looking
        raise Refused(Refusal.STARTING, f"the group is asked which worker has the name {identity.name!r} now")

    async def _look_up(self, identity: Identity) -> None:
        try:
            record = await self._agent.resolve(identity.name)
            if (record.id, record.incarnation) != (identity.id, identity.incarnation):
                self._turn_away(identity, "was taken for dead, and another has its name now")
            # after the await: others may have told of it meanwhile, which does no harm
            self._agent.add_peer(record).is_verified = True
        except UnknownWorkerError:
            self._turn_away(identity, "is not in the group: it has left, or was taken for dead")
        except RendezvousError as error:
            # Nobody can take a name any more: those who are known stay who they are
            peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
            if peer is not None:
                peer.is_verified = True
            logger.debug("the group cannot be asked about worker %s: %s", identity.name, error)
        except ArpcError as error:
            self._turn_away(identity, f"cannot be in the group: {error}")
        finally:
            self._looking.pop(identity.name, None)

    def _turn_away(self, identity: Identity, reason: str) -> None:
        self._turned_away[identity.incarnation] = f"worker {identity.name!r} (id {identity.id}) {reason}"
        if len(self._turned_away) > _REMEMBERED:
            self._turned_away.popitem(last=False)

    async def aclose(self) -> None:
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        if looking:
            await asyncio.wait(looking)
