"""Who may come in. Asked when a peer has proven itself, before the last word of the handshake.

Two workers that connect to each other at the same moment end up with the connection made by the one with the lower id:
it refuses the other's as a duplicate, while the higher one gives up its own attempt for the one that comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from arpc.agent.peers.bulk_connections import BulkConnections
from arpc.agent.peers.dialer import Dialer
from arpc.agent.peers.elastic_join import ElasticJoin
from arpc.agent.peers.link import LINE, ONLOOKER, Link
from arpc.agent.peers.peer import Peer
from arpc.agent.peers.thread_connections import ThreadConnections
from arpc.errors import WireError
from arpc.ids import WorkerInfo
from arpc.transport.connection import Connection
from arpc.wire import protocol as wire
from arpc.wire.handshake import Identity, Refused, Role
from arpc.wire.messages import Refusal

__all__ = ["Admission"]


class _Host(Protocol):
    """What is needed of the agent."""

    is_closing: bool
    is_serving: bool

    @property
    def is_elastic(self) -> bool: ...
    def peer(self, to: str | int | WorkerInfo) -> Peer | None: ...


class Admission:
    """Lets in workers of the group, their lanes and lines, and onlookers; raises `Refused` for all others."""

    def __init__(
        self,
        agent: _Host,
        dialler: Dialer,
        links: Mapping[Connection, Link],
        attempts: Collection[int],
        newcomers: ElasticJoin,
        lanes: BulkConnections,
        lines: ThreadConnections,
    ) -> None:
        self._agent = agent
        self._dialler = dialler
        self._links = links
        self._attempts = attempts
        """Ids of workers this one is connecting to."""
        self._newcomers = newcomers
        self._lanes = lanes
        self._lines = lines

    def protocol(self) -> wire.Protocol:
        """Our end of a connection that somebody has made."""

        def admit(identity: Identity) -> None:
            if self._lanes.admit(identity, protocol):
                return
            self._check_the_time()
            if LINE in identity.features:
                self._lines.admit(identity)
            elif ONLOOKER not in identity.features:
                self._check(identity)
            elif self._agent.peer(identity.name) is not None:
                # roles go by names, and what workers may do is not for others
                raise Refused(Refusal.STALE, f"an onlooker has the name of worker {identity.name!r}")

        protocol = self._dialler.protocol(Role.ACCEPTOR, admit)
        return protocol

    def _check_the_time(self) -> None:
        """Whether anybody may come in now."""
        me = self._dialler.identity
        if self._agent.is_closing:
            raise Refused(Refusal.CLOSING, f"worker {me.name!r} is shutting down")
        if not self._agent.is_serving:
            # One that has joined already may call before we know who is in the group, and who we are in it
            raise Refused(Refusal.STARTING, f"worker {me.name!r} is still joining its group")

    def _check(self, identity: Identity) -> None:
        """Whether a worker may come in."""
        me = self._dialler.identity
        if identity.id == me.id or identity.name == me.name:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has the name or id of worker {me.name!r}")
        if self._agent.is_elastic:
            self._newcomers.check(identity)
        peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            raise Refused(Refusal.UNKNOWN_WORKER, f"worker {identity.name!r} (id {identity.id}) is not of this group")
        if peer.incarnation != identity.incarnation:
            raise Refused(
                Refusal.STALE, f"worker {identity.name!r} (id {identity.id}) was started again, or belongs elsewhere"
            )
        existing = peer.connection
        if existing is not None:
            if me.id < identity.id and self._links[existing].is_mine:
                raise Refused(Refusal.DUPLICATE, "a connection exists")
            # the peer has lost its end of the connection, and we did not notice
            existing.abort(WireError("the peer connected anew"))
        elif identity.id in self._attempts and me.id < identity.id:
            raise Refused(Refusal.DUPLICATE, "a connection is being made")
