"""Decides which connections are accepted, once a peer is authenticated, before the last message of the handshake.

Two workers that connect to each other at the same moment end up with the connection made by the one with the lower id:
it refuses the other's as a duplicate, while the higher one gives up its own attempt for the one that comes in.

In an elastic group, a worker may connect before this one knows it, and a worker that was taken for dead may still run
while another has its name. Only the group's store knows which worker has a name, and asking it takes a while: so an
unknown worker is asked to retry in a moment, and is accepted or refused for good then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextvars import Context
from typing import TYPE_CHECKING, Final

from arpc.agent.peers.link import ONLOOKER, THREAD
from arpc.agent.peers.peer import PeerState
from arpc.errors import ArpcError, RendezvousError, UnknownWorkerError, WireError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.wire import protocol as wire
from arpc.wire.handshake import Identity, Refused, Role
from arpc.wire.messages import Refusal

if TYPE_CHECKING:
    from arpc.agent.peers.connector import Connector

__all__ = ["MAX_THREADS", "THREAD_HANDLERS", "Admission"]

logger = get_logger("arpc.connections")

MAX_THREADS: Final = 64
"""The number of thread connections that a peer may have."""
THREAD_HANDLERS: Final = 64
"""The number of requests that may run at once on a thread connection. Each such connection lowers the limit of the main
connection by this number. A thread makes one call at a time, but calls that it has given up may run on."""
_REMEMBERED: Final = 256
"""The number of workers refused for good that are remembered."""


class Admission:
    """Accepts workers of the group, their bulk and thread connections, and onlookers; raises `Refused` for others."""

    def __init__(self, connector: Connector, context: Context) -> None:
        self._connector = connector
        self._agent = connector.agent
        self._context = context
        self._looking: dict[str, asyncio.Task[None]] = {}
        """The tasks that ask the group which workers have these names."""
        self._refused: OrderedDict[int, str] = OrderedDict()
        """The incarnations that are not, or no longer, in an elastic group, and the reasons."""

    def protocol(self) -> wire.Protocol:
        """Return this worker's end of a connection that another process has made."""

        def admit(identity: Identity) -> None:
            if not self._connector.bulk.admit(identity, protocol):
                self._check(identity)

        protocol = self._connector.dialer.protocol(Role.ACCEPTOR, admit)
        return protocol

    def _check(self, identity: Identity) -> None:
        me = self._connector.dialer.identity
        if self._agent.is_closing:
            raise Refused(Refusal.CLOSING, f"worker {me.name!r} is shutting down")
        if not self._agent.is_serving:
            # A worker that has joined already may connect before this one knows the group, and its own id in it
            raise Refused(Refusal.STARTING, f"worker {me.name!r} is still joining its group")
        if THREAD in identity.features:
            self._check_thread(identity)
        elif ONLOOKER not in identity.features:
            self._check_worker(identity, me)
        elif self._agent.peer(identity.name) is not None:
            # roles go by names, and an onlooker must not get the role of a worker
            raise Refused(Refusal.STALE, f"an onlooker has the name of worker {identity.name!r}")

    def _check_thread(self, identity: Identity) -> None:
        """Check that a peer may have one more thread connection, which needs a main connection. Raises `Refused`."""
        main = self._connector.main_link(identity)
        if main is None:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has no connection that this one could belong to")
        if len(self._connector.links_of_threads(main)) >= MAX_THREADS:
            raise Refused(
                Refusal.DUPLICATE, f"worker {identity.name!r} has {MAX_THREADS} connections of threads already"
            )
        left = main.limit - THREAD_HANDLERS
        if left < max(self._agent.options.max_handlers_per_peer // 2, len(main.running)):
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} may not have so many requests running")

    def _check_worker(self, identity: Identity, me: Identity) -> None:
        if identity.id == me.id or identity.name == me.name:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has the name or id of worker {me.name!r}")
        if self._agent.is_elastic:
            self.check_membership(identity)
        peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            raise Refused(Refusal.UNKNOWN_WORKER, f"worker {identity.name!r} (id {identity.id}) is not of this group")
        if peer.incarnation != identity.incarnation:
            raise Refused(
                Refusal.STALE, f"worker {identity.name!r} (id {identity.id}) was started again, or belongs elsewhere"
            )
        existing = peer.connection
        if existing is not None:
            if me.id < identity.id and existing.protocol.role is Role.CONNECTOR:
                raise Refused(Refusal.DUPLICATE, "a connection exists")
            # the peer has lost its end of the connection, and this worker has not noticed
            existing.abort(WireError("the peer connected anew"))
        elif peer.state is PeerState.CONNECTING and me.id < identity.id:
            raise Refused(Refusal.DUPLICATE, "a connection is being made")

    # -- elastic groups

    def check_membership(self, identity: Identity) -> None:
        """Return if a worker is known to be in the group. Raises `Refused` if not, for now or for good."""
        reason = self._refused.get(identity.incarnation)
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
                self._refuse(identity, "was taken for dead, and another has its name now")
            # the worker may have been added during the await, which does no harm
            self._agent.add_peer(record).is_verified = True
        except UnknownWorkerError:
            self._refuse(identity, "is not in the group: it has left, or was taken for dead")
        except RendezvousError as error:
            # No worker can take a name without the store, so known workers keep theirs
            peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
            if peer is not None:
                peer.is_verified = True
            logger.debug("the group cannot be asked about worker %s: %s", identity.name, error)
        except ArpcError as error:
            self._refuse(identity, f"cannot be in the group: {error}")
        finally:
            self._looking.pop(identity.name, None)

    def _refuse(self, identity: Identity, reason: str) -> None:
        self._refused[identity.incarnation] = f"worker {identity.name!r} (id {identity.id}) {reason}"
        if len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)

    async def aclose(self) -> None:
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        if looking:
            await asyncio.wait(looking)
