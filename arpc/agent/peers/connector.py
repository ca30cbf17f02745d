"""Connections of one worker: listening, connecting on first use, and one connection per pair of workers.

`admission` decides which connections are accepted, `dialer` and `connect_retry` make them. Besides the main connection
between two workers there may be further ones: `bulk_connections` for large tensors, and thread connections, on which
threads of a peer make calls, see `link.THREAD`. This module keeps them, and notifies watchers of changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

import msgspec

from arpc.agent.peers.admission import THREAD_HANDLERS, Admission
from arpc.agent.peers.bulk_connections import BulkConnections
from arpc.agent.peers.connect_retry import ConnectRetry
from arpc.agent.peers.dialer import Dialer, host_of
from arpc.agent.peers.link import ONLOOKER, THREAD, Link, PeerWatcher
from arpc.agent.peers.log_limit import LogLimit
from arpc.agent.peers.peer import Peer, PeerState
from arpc.errors import ProtocolError, WireError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.transport.connection import Connection
from arpc.transport.contract import Listener, Transport
from arpc.transport.in_process import connect_pair
from arpc.wire.handshake import Identity, Refused, Role
from arpc.wire.messages import Refusal

if TYPE_CHECKING:
    from arpc.agent.agent import Agent

__all__ = ["Connector"]

logger = get_logger("arpc.connections")

_ONLOOKER_HANDLERS: Final = 16
_CLOSE_S: Final = 2.0


class Connector:
    """Makes and keeps the connections of an agent: the `Receiver` of all of them."""

    def __init__(
        self,
        agent: Agent,
        identity: Identity,
        transports: Mapping[str, Transport],
        context: Context,
        watchers: Sequence[PeerWatcher] = (),
    ) -> None:
        self.agent = agent
        self.messages_received = agent.messages_received
        self.output_drained = agent.output_drained
        self._watchers = tuple(watchers)
        self._options = agent.options
        self._context = context
        self._listeners: list[Listener] = []
        self._links: dict[Connection, Link] = {}
        self.dialer = Dialer(identity, agent.options, transports, context, self, agent.policy.layout)
        self.bulk = BulkConnections(self)
        self.retry = ConnectRetry(self, context)
        self.admission = Admission(self, context)
        self._log_limit = LogLimit(logger)
        self.refused = 0

    @property
    def _id(self) -> int:
        """The id of this worker, once it has one."""
        return self.dialer.identity.id

    def identify(self, worker_id: int) -> None:
        self.dialer.identity = msgspec.structs.replace(self.dialer.identity, id=worker_id)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._links.values())

    def links_of_threads(self, main: Link) -> list[Link]:
        """Return the links of the thread connections that belong to a main connection."""
        return [link for link in self._links.values() if link.main is main]

    def main_link(self, identity: Identity) -> Link | None:
        """Return the link of the open main connection to exactly this worker, None if there is none."""
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        main = peer.connection if peer is not None else None
        if main is None or not main.is_open or main.peer.incarnation != identity.incarnation:
            return None
        return self._links.get(main)

    # -- making connections

    async def listen(self, addresses: Iterable[str], host: str) -> tuple[str, ...]:
        """Listen on all addresses; returns them as peers must connect to them. ``host`` names this machine."""
        self.dialer.host = host
        for address in addresses:
            listener = await self.dialer.transport(address).listen(address, lambda: (self.admission.protocol(), self))
            self._listeners.append(listener)
        return tuple(listener.address for listener in self._listeners)

    async def connect(self, peer: Peer) -> Connection:
        """Return a connection to a peer, made by either side."""
        if peer.info.id != self._id:
            return await self.retry.connect(peer)
        near, far = self.dialer.protocol(Role.CONNECTOR), self.dialer.protocol(Role.ACCEPTOR)
        connection, _ = self._context.run(connect_pair, (near, self), (far, self), f"{peer.info.name}-itself")
        await connection.wait_opened()
        return connection

    # -- called by connections

    def connection_opened(self, connection: Connection) -> None:
        if self.bulk.opened(connection):
            return
        features = connection.peer.features
        if self.agent.is_closing:
            _turn_away(connection, "this worker is shutting down")
        elif ONLOOKER in features:
            self._opened_by_onlooker(connection)
        elif THREAD in features:
            self._opened_by_thread(connection)
        else:
            self._opened_by_worker(connection)

    def _opened_by_worker(self, connection: Connection) -> None:
        identity = connection.peer
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            record = WorkerRecord(identity.name, identity.id, identity.incarnation, (), "", identity.main)
            peer = self.agent.add_peer(record)
        main_by_value = not self.same_main(identity.main)
        limit = self._options.max_handlers_per_peer
        self._links[connection] = Link(connection, peer, self.agent.deadlines, limit, main_by_value=main_by_value)
        # the connection to itself has both ends here, and calls go out on one only
        if connection.protocol.role is Role.CONNECTOR or identity.id != self._id:
            peer.opened(connection, main_by_value=main_by_value)
            peer.hosts.add(host_of(connection.address))
        self.retry.end_search(peer)
        if identity.id != self._id:
            for watcher in self._watchers:
                watcher.peer_connected(peer.info)

    def _opened_by_onlooker(self, connection: Connection) -> None:
        """Keep the connection of an onlooker: a peer that cannot be called, and that is not reported to features."""
        peer = self.agent.make_peer(WorkerInfo(connection.peer.name, connection.peer.id))
        self._links[connection] = Link(connection, peer, self.agent.deadlines, _ONLOOKER_HANDLERS, is_onlooker=True)
        connection.redirect(self.agent.inspection_received)

    def _opened_by_thread(self, connection: Connection) -> None:
        """Keep a thread connection. Its requests count among those that the peer may have running."""
        main = self.main_link(connection.peer)
        if main is None:
            _turn_away(connection, "the connection that it belongs to has ended")
            return
        main.set_limit(main.limit - THREAD_HANDLERS)
        main_by_value = main.main_by_value
        self._links[connection] = Link(
            connection, main.peer, self.agent.deadlines, THREAD_HANDLERS, main_by_value=main_by_value, main=main
        )
        main.peer.accepted_from_threads.add(connection)
        connection.redirect(self.agent.thread_calls_received)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self.bulk.lost(connection)
        link = self._links.pop(connection, None)
        if link is None:
            # if this worker made the attempt, the code that waits for it gets the error, or has given it up
            if connection.protocol.role is Role.ACCEPTOR:
                self.refused += 1
                level = logging.DEBUG if isinstance(error, Refused) else logging.WARNING
                if error is not None:
                    self._log_limit.log(level, "a connection from %s was refused: %s", connection.address, error)
            return
        peer = link.peer
        if isinstance(error, ProtocolError):
            name = peer.info.name
            logger.warning("the connection to worker %s was closed: %s", name, error, extra={"peer": name})
        self.agent.observers.dropped(link)  # its waiting requests will not run
        link.cancel_all()
        if link.main is not None:
            # the main connection to the peer is still there
            peer.accepted_from_threads.discard(connection)
            link.main.set_limit(link.main.limit + THREAD_HANDLERS)
            self.agent.dispatcher.readmit(link.main)
            return
        for of_thread in self.links_of_threads(link):
            of_thread.connection.abort(error)
        peer.lost(connection, error, reason=link.goodbye)
        # the end of a connection that was replaced, or of an earlier incarnation of the worker, changes nothing
        is_latest = peer.connection is None and connection.peer.incarnation == peer.incarnation
        if is_latest and not link.is_onlooker and peer.info.id != self._id:
            peer.is_verified = not self.agent.is_elastic
            for watcher in self._watchers:
                watcher.peer_disconnected(peer.info, has_left=link.goodbye is not None)
            if link.goodbye is None:
                self.seek(peer, str(error) if error is not None else "it closed the connection")

    def seek(self, peer: Peer, reason: str) -> None:
        """Try to reach a peer that is not connected, if any watcher needs it, to learn whether it is lost."""
        if not self.agent.is_closing and any(watcher.wants(peer.info) for watcher in self._watchers):
            grace_s = self._options.rref_grace
            # a peer that was never connected may still be starting, or connecting to many others
            self.retry.begin_search(peer, reason, grace_s if peer.connects else grace_s + self._options.connect_timeout)

    def replaced(self, peer: Peer) -> None:
        """End the connection of a peer whose name another worker has taken, and report the peer as lost."""
        self.retry.end_search(peer)
        reason = f"worker {peer.info.name!r} was started again"
        connection = peer.connection
        if connection is not None:
            error = WireError(reason)
            connection.abort(error)
            # now, and not when the connection has ended: calls made meanwhile are for the new one
            peer.lost(connection, error, reason=None)
        if peer.state is not PeerState.GONE:
            self.give_up(peer.info, reason)

    def forget(self, worker: WorkerInfo) -> None:
        """Notify watchers that a worker that is gone is no longer remembered."""
        for watcher in self._watchers:
            watcher.peer_forgotten(worker)

    def give_up(self, info: WorkerInfo, reason: str) -> None:
        """Notify watchers that a worker counts as lost."""
        logger.info("worker %s (id %d) is given up: %s", info.name, info.id, reason)
        for watcher in self._watchers:
            watcher.peer_lost(info, reason)

    def same_main(self, main: str) -> bool:
        """Return whether a worker runs the same script, so that functions of ``__main__`` mean the same there."""
        return bool(main) and main == self.dialer.identity.main

    # -- state

    def open_connections(self) -> list[Connection]:
        """Return the open connections that show if a peer is alive. Threads read theirs only while they make a call."""
        return [connection for connection, link in self._links.items() if connection.is_open and not link.is_of_thread]

    def busy_links(self) -> bool:
        """Return whether handlers run, or requests wait, for any peer. Onlookers do not count."""
        return any(link.is_busy for link in self._links.values() if not link.is_onlooker)

    def statistics(self) -> dict[str, Any]:
        return {
            "listening": [listener.address for listener in self._listeners],
            "connections": len(self._links),
            "refused": self.refused,
        }

    # -- the end

    async def aclose(self, reason: str) -> None:
        await self.admission.aclose()
        for listener in self._listeners:
            await listener.aclose()
        connections = list(self._links)
        lanes = [lane for main in connections if main.lanes is not None for lane in main.lanes.connections]
        for connection in connections:
            connection.close(reason)
        if connections:
            # lanes close when their main connection has ended
            connections += lanes
            closing = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            _, late = await asyncio.wait(closing, timeout=_CLOSE_S)
            for connection in connections:
                connection.abort()
            if late:
                await asyncio.wait(late, timeout=_CLOSE_S)
            for waiting in closing:
                waiting.cancel()


def _turn_away(connection: Connection, reason: str) -> None:
    """End a connection whose handshake is done. Messages that came with the end of the handshake are dropped."""
    connection.redirect(lambda _, __: None)
    connection.abort(Refused(Refusal.CLOSING, reason))
