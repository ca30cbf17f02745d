"""Connections of one worker: listening, connecting on first use, and one connection per pair of workers.

`admission` decides which connections are accepted, `dialer` and `connect_retry` make them. Beside the connection
between two workers there may be further ones: `bulk_connections` for large tensors, `thread_connections` for calls of
threads. This module keeps them, and tells of changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final

import msgspec

from arpc.agent.peers.admission import Admission, ElasticJoin
from arpc.agent.peers.bulk_connections import BulkConnections, lanes_of
from arpc.agent.peers.connect_retry import ConnectRetry, Reconnect
from arpc.agent.peers.dialer import Dialer, host_of
from arpc.agent.peers.link import ONLOOKER, THREAD, Host, Link, PeerWatcher
from arpc.agent.peers.log_limit import LogLimit
from arpc.agent.peers.peer import Peer, PeerState
from arpc.agent.peers.thread_connections import ThreadConnections
from arpc.errors import ProtocolError, WireError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.connection import Connection, Listener, Transport
from arpc.transport.in_process import connect_pair
from arpc.wire import protocol as wire
from arpc.wire.handshake import Identity, Refused, Role

__all__ = ["Connector"]

logger = get_logger("arpc.connections")

_ONLOOKER_HANDLERS: Final = 16
_CLOSE_S: Final = 2.0


class _Receiver:
    """Hears of one connection, which this worker made (``is_mine``) or another process."""

    def __init__(self, connector: Connector, *, is_mine: bool) -> None:
        self._connector = connector
        self._is_mine = is_mine
        self.messages_received = connector.agent.messages_received
        self.output_drained = connector.agent.output_drained

    def connection_opened(self, connection: Connection) -> None:
        self._connector.opened(connection, is_mine=self._is_mine)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._connector.lost(connection, error, is_mine=self._is_mine)


class Connector:
    """Makes and keeps the connections of an agent."""

    def __init__(
        self,
        agent: Host,
        identity: Identity,
        options: RpcOptions,
        transports: Mapping[str, Transport],
        context: Context,
        watchers: Sequence[PeerWatcher] = (),
    ) -> None:
        self.agent = agent
        self._watchers = tuple(watchers)
        self._options = options
        self._context = context
        self._listeners: list[Listener] = []
        self._links: dict[Connection, Link] = {}
        self.dialer = Dialer(
            identity, options, transports, context, partial(_Receiver, self, is_mine=True), agent.policy.layout
        )
        self.bulk = BulkConnections(agent, self.dialer)
        self.threads = ThreadConnections(agent, self._links, options.max_handlers_per_peer)
        self.connect_retry = ConnectRetry(agent, self.dialer, self.bulk)
        self.joining = ElasticJoin(agent, context)
        self._admission = Admission(self)
        self.reconnect = Reconnect(agent.loop, context, self._given_up)
        self._log_limit = LogLimit(logger)
        self.refused = 0

    @property
    def _identity(self) -> Identity:
        return self.dialer.identity

    def identify(self, worker_id: int) -> None:
        self.dialer.identity = msgspec.structs.replace(self._identity, id=worker_id)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._links.values())

    def is_mine(self, connection: Connection) -> bool:
        """Whether this worker made a connection."""
        return self._links[connection].is_mine

    # -- making connections

    async def listen(self, addresses: Iterable[str], host: str) -> tuple[str, ...]:
        """Listen on all addresses; returns them as others must call them. ``host`` names this machine."""
        self.dialer.host = host
        for address in addresses:
            self._listeners.append(await self.dialer.transport(address).listen(address, self._accept))
        return tuple(listener.address for listener in self._listeners)

    def _accept(self) -> tuple[wire.Protocol, _Receiver]:
        return self._admission.protocol(), _Receiver(self, is_mine=False)

    async def connect(self, peer: Peer) -> Connection:
        """A connection to a peer, made by either side."""
        if peer.info.id != self._identity.id:
            return await self.connect_retry.connect(peer)
        near = self.dialer.protocol(Role.CONNECTOR), _Receiver(self, is_mine=True)
        far = self.dialer.protocol(Role.ACCEPTOR), _Receiver(self, is_mine=False)
        connection, _ = self._context.run(connect_pair, near, far, f"{peer.info.name}-itself")
        await connection.wait_opened()
        return connection

    async def is_alive(self, record: WorkerRecord) -> bool:
        """Whether the worker of a record, in that very incarnation, still answers at its addresses."""
        return await self.dialer.is_alive(record)

    # -- told by connections

    def opened(self, connection: Connection, *, is_mine: bool) -> None:
        if self.bulk.opened(connection):
            return
        identity = connection.peer
        if ONLOOKER in identity.features:
            self._opened_by_onlooker(connection)
            return
        if THREAD in identity.features:
            self.threads.opened(connection)
            return
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            record = WorkerRecord(identity.name, identity.id, identity.incarnation, (), "", identity.main)
            peer = self.agent.add_peer(record)
        main_by_value = not self.same_main(identity.main)
        self._links[connection] = Link(
            connection,
            peer,
            self.agent.deadlines,
            max_handlers=self._options.max_handlers_per_peer,
            main_by_value=main_by_value,
            is_mine=is_mine,
        )
        if self._refused_at_the_end(connection):
            return
        # of the two ends of the connection to oneself, calls go out on one only
        if is_mine or identity.id != self._identity.id:
            peer.opened(connection, main_by_value=main_by_value)
            peer.hosts.add(host_of(connection.address))
        self.connect_retry.came(identity.id)
        self.reconnect.end(peer)
        if identity.id != self._identity.id:
            for watcher in self._watchers:
                watcher.peer_connected(peer.info)

    def _opened_by_onlooker(self, connection: Connection) -> None:
        """Keep the connection of an onlooker: a peer that cannot be called, and that no feature hears of."""
        self._links[connection] = Link(
            connection,
            self.agent.make_peer(WorkerInfo(connection.peer.name, connection.peer.id)),
            self.agent.deadlines,
            max_handlers=_ONLOOKER_HANDLERS,
            main_by_value=True,
            is_onlooker=True,
        )
        connection.redirect(self.agent.inspection_received)
        self._refused_at_the_end(connection)

    def _refused_at_the_end(self, connection: Connection) -> bool:
        """Abort a connection if this worker is shutting down; True if it is."""
        if self.agent.is_closing:
            connection.abort(WireError("this worker is shutting down"))
        return self.agent.is_closing

    def lost(self, connection: Connection, error: Exception | None, *, is_mine: bool) -> None:
        self.bulk.lost(connection)
        link = self._links.pop(connection, None)
        if link is None:
            if not is_mine:  # the caller of this worker's own attempt hears of its end, or has given it up
                self.refused += 1
                level = logging.DEBUG if isinstance(error, Refused) else logging.WARNING
                if error is not None:
                    self._log_limit.log(level, "a connection from %s was refused: %s", connection.address, error)
            return
        if isinstance(error, ProtocolError):
            name = link.peer.info.name
            logger.warning("the connection to worker %s was closed: %s", name, error, extra={"peer": name})
        self.agent.link_lost(link)
        link.inbound.cancel_all()
        if link.main is not None:
            self.threads.lost(link, link.main)
            return
        for of_thread in self.threads.of(link):
            of_thread.connection.abort(error)
        link.peer.lost(connection, error, reason=link.goodbye)
        # one that a newer connection has replaced changes nothing, nor does that of an earlier start of the worker
        is_latest = link.peer.connection is None and connection.peer.incarnation == link.peer.incarnation
        if is_latest and not link.is_onlooker and link.peer.info.id != self._identity.id:
            link.peer.is_verified = not self.agent.is_elastic
            for watcher in self._watchers:
                watcher.peer_disconnected(link.peer.info, has_left=link.goodbye is not None)
            if link.goodbye is None:
                self.seek(link.peer, str(error) if error is not None else "it closed the connection")

    def seek(self, peer: Peer, reason: str) -> None:
        """Find out what became of a peer that is not connected, if it matters to anyone."""
        if not self.agent.is_closing and any(watcher.wants(peer.info) for watcher in self._watchers):
            grace_s = self._options.rref_grace
            # one that was never met may be about to start, or have many others to meet
            self.reconnect.begin(peer, reason, grace_s if peer.connects else grace_s + self._options.connect_timeout)

    def replaced(self, peer: Peer) -> None:
        """Another worker has come under the name of a peer, which is about to be told of as the new one."""
        self.reconnect.end(peer)
        reason = f"worker {peer.info.name!r} was started again"
        connection = peer.connection
        if connection is not None:
            error = WireError(reason)
            connection.abort(error)
            # now, and not when the connection has ended: calls made meanwhile are for the new one
            peer.lost(connection, error, reason=None)
        if peer.state is not PeerState.GONE:
            self._given_up(peer.info, reason)

    def forget(self, worker: WorkerInfo) -> None:
        """A worker is gone, and remembered no more."""
        for watcher in self._watchers:
            watcher.peer_forgotten(worker)

    def _given_up(self, info: WorkerInfo, reason: str) -> None:
        logger.info("worker %s (id %d) is given up: %s", info.name, info.id, reason)
        for watcher in self._watchers:
            watcher.peer_lost(info, reason)

    def same_main(self, main: str) -> bool:
        """Whether a worker runs the same script, so that functions of ``__main__`` mean the same there."""
        return bool(main) and main == self._identity.main

    # -- looking

    def open_connections(self) -> list[Connection]:
        """Those that show whether a peer is alive: a thread does not read its own while it makes no call."""
        return [connection for connection, link in self._links.items() if connection.is_open and not link.is_of_thread]

    def busy_links(self) -> bool:
        """Whether handlers run, or requests wait, for any peer. Onlookers are not waited for."""
        return any(
            link.inbound.running or link.inbound.waiting for link in self._links.values() if not link.is_onlooker
        )

    def statistics(self) -> dict[str, Any]:
        return {
            "listening": [listener.address for listener in self._listeners],
            "connections": len(self._links),
            "refused": self.refused,
        }

    # -- the end

    async def aclose(self, reason: str) -> None:
        await self.joining.aclose()
        for listener in self._listeners:
            await listener.aclose()
        connections = list(self._links)
        lanes = [lane for connection in connections for lane in lanes_of(connection)]
        for connection in connections:
            connection.close(reason)
        if connections:
            # lanes close when the connection has ended that they belong to
            connections += lanes
            closing = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            _, late = await asyncio.wait(closing, timeout=_CLOSE_S)
            for connection in connections:
                connection.abort()
            if late:
                await asyncio.wait(late, timeout=_CLOSE_S)
            for waiting in closing:
                waiting.cancel()
