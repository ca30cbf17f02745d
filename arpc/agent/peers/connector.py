"""Connections of one worker: listening, connecting on first use, and one connection per pair of workers.

Who may come in is up to `admission`, how a connection is made to `attempts` and `dialling`. Further ones beside it are
`lanes`, for large tensors, and lines, for threads: `lines_here`. This module has the books, and tells of changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context
from typing import Any, Final, Protocol

import msgspec

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.peers.admission import Admission
from arpc.agent.peers.bulk_connections import BulkConnections, lanes_of
from arpc.agent.peers.connect_retry import ConnectRetry
from arpc.agent.peers.dialer import Dialer, host_of, only
from arpc.agent.peers.elastic_join import ElasticJoin
from arpc.agent.peers.link import LINE, ONLOOKER, Link, PeerWatcher
from arpc.agent.peers.log_limit import LogLimit
from arpc.agent.peers.peer import Peer, PeerState
from arpc.agent.peers.reconnect import Reconnect
from arpc.agent.peers.thread_connections import ThreadConnections
from arpc.agent.server.inbound import Inbound
from arpc.errors import ProtocolError, WireError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.connection import Connection, Listener, Transport
from arpc.transport.in_process import connect_pair
from arpc.wire import protocol as wire
from arpc.wire.handshake import Identity, Refused, Role
from arpc.wire.messages import Message
from arpc.wire.values.policy import Policy

__all__ = ["Connector"]

logger = get_logger("arpc.connections")

_ONLOOKER_HANDLERS: Final = 16
_CLOSE_S: Final = 2.0


class _Host(Protocol):
    """What the connector needs of the agent."""

    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    is_closing: bool
    is_serving: bool
    policy: Policy
    resolve: Callable[[str | int], Awaitable[WorkerRecord]]

    def peer(self, to: str | int | WorkerInfo) -> Peer | None: ...
    def add_peer(self, record: WorkerRecord) -> Peer: ...
    @property
    def info(self) -> WorkerInfo: ...
    @property
    def is_elastic(self) -> bool: ...
    def make_peer(self, info: WorkerInfo) -> Peer: ...
    def inspection_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def line_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def link_lost(self, link: Link) -> None: ...
    def messages_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def output_drained(self, connection: Connection) -> None: ...


class _Incoming:
    """Hears of a connection that others made."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self.messages_received = connector.agent.messages_received
        self.output_drained = connector.agent.output_drained

    def connection_opened(self, connection: Connection) -> None:
        self._connector.opened(connection, is_mine=False)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._connector.lost(connection, error, is_mine=False)


class _Outgoing(_Incoming):
    """Hears of a connection that this worker made."""

    def connection_opened(self, connection: Connection) -> None:
        self._connector.opened(connection, is_mine=True)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._connector.lost(connection, error, is_mine=True)


class Connector:
    """Makes and keeps the connections of an agent."""

    def __init__(
        self,
        agent: _Host,
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
        self.dialler = Dialer(identity, options, transports, context, lambda: _Outgoing(self), agent.policy.layout)
        self._lanes = BulkConnections(self.dialler, agent.peer)
        self._lines = ThreadConnections(agent, self._links, options.max_handlers_per_peer)
        self.attempts = ConnectRetry(agent, self.dialler, self._lanes)
        self._newcomers = ElasticJoin(agent, context)
        self._admission = Admission(
            agent, self.dialler, self._links, self.attempts.ids, self._newcomers, self._lanes, self._lines
        )
        self.recovery = Reconnect(agent.loop, context, self._given_up)
        self._complaints = LogLimit(logger)
        self.refused = 0

    @property
    def _identity(self) -> Identity:
        return self.dialler.identity

    def identify(self, worker_id: int) -> None:
        self.dialler.identity = msgspec.structs.replace(self._identity, id=worker_id)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._links.values())

    # -- making connections

    async def listen(self, addresses: Iterable[str], host: str) -> tuple[str, ...]:
        """Listen on all addresses; returns them as others must call them. ``host`` names this machine."""
        self.dialler.host = host
        for address in addresses:
            self._listeners.append(await self.dialler.transport(address).listen(address, self._accept))
        return tuple(listener.address for listener in self._listeners)

    def _accept(self) -> tuple[wire.Protocol, _Incoming]:
        return self._admission.protocol(), _Incoming(self)

    async def connect(self, peer: Peer) -> Connection:
        """A connection to a peer, whoever makes it."""
        if peer.info.id != self._identity.id:
            return await self.attempts.connect(peer)
        connection = self._connect_to_self(peer)
        await connection.wait_opened()
        return connection

    def _connect_to_self(self, peer: Peer) -> Connection:
        near, far = self.dialler.protocol(Role.CONNECTOR), self.dialler.protocol(Role.ACCEPTOR)
        name = f"{peer.info.name}-itself"
        connection, _ = self._context.run(connect_pair, (near, _Outgoing(self)), (far, _Incoming(self)), name)
        return connection

    async def line_to(self, peer: Peer) -> tuple[str, wire.Protocol]:
        """Address and protocol of a further connection to a peer, for a thread to make calls on. Raises `WireError`."""
        record = await self.agent.resolve(peer.info.name)
        main = peer.connection
        if main is None or main.peer.incarnation != record.incarnation:
            raise WireError(f"there is no connection to worker {peer.info.name!r} that a line could belong to")
        usable = [a for a in self.dialler.usable(record) if a.startswith(self._line_schemes)]
        if not usable:
            raise WireError(f"worker {peer.info.name!r} has no address that a thread can connect to")
        return usable[0], self.dialler.protocol(Role.CONNECTOR, only(record), features=(LINE,))

    @property
    def _line_schemes(self) -> tuple[str, ...]:
        """How addresses begin that a plain socket can connect to."""
        return ("unix://", "tcp://") if self._options.tls is None else ("unix://",)

    async def is_alive(self, record: WorkerRecord) -> bool:
        """Whether the worker of a record, in that very incarnation, still answers at its addresses."""
        return await self.dialler.is_alive(record)

    # -- told by connections

    def opened(self, connection: Connection, *, is_mine: bool) -> None:
        if self._lanes.opened(connection):
            return
        identity = connection.peer
        if ONLOOKER in identity.features:
            self._opened_by_onlooker(connection)
            return
        if LINE in identity.features:
            self._lines.opened(connection)
            return
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            record = WorkerRecord(identity.name, identity.id, identity.incarnation, (), "", identity.main)
            peer = self.agent.add_peer(record)
        main_by_value = not self.same_main(identity.main)
        inbound = Inbound(
            connection,
            peer.info,
            self.agent.deadlines,
            max_handlers=self._options.max_handlers_per_peer,
            main_by_value=main_by_value,
        )
        link = Link(connection, peer, inbound, is_mine=is_mine)
        self._links[connection] = link
        connection.owner = link
        if self.agent.is_closing:
            connection.abort(WireError("this worker is shutting down"))
            return
        # of the two ends of the connection to oneself, calls go out on one only
        if is_mine or identity.id != self._identity.id:
            peer.opened(connection, main_by_value=main_by_value)
            peer.hosts.add(host_of(connection.address))
        self.attempts.came(identity.id)
        self.recovery.end(peer)
        if identity.id != self._identity.id:
            for watcher in self._watchers:
                watcher.peer_connected(peer.info)

    def _opened_by_onlooker(self, connection: Connection) -> None:
        """Somebody who only looks: a peer that nobody can call, and that no feature hears of."""
        info = WorkerInfo(connection.peer.name, connection.peer.id)
        inbound = Inbound(connection, info, self.agent.deadlines, max_handlers=_ONLOOKER_HANDLERS, main_by_value=True)
        link = Link(connection, self.agent.make_peer(info), inbound, is_mine=False)
        link.is_onlooker = True
        self._links[connection] = link
        connection.owner = link
        connection.redirect(self.agent.inspection_received)
        if self.agent.is_closing:
            connection.abort(WireError("this worker is shutting down"))

    def lost(self, connection: Connection, error: Exception | None, *, is_mine: bool) -> None:
        self._lanes.lost(connection)
        link = self._links.pop(connection, None)
        if link is None:
            if not is_mine:  # the caller of this worker's own attempt hears of its end, or has given it up
                self.refused += 1
                level = logging.DEBUG if isinstance(error, Refused) else logging.WARNING
                if error is not None:
                    self._complaints.log(level, "a connection from %s was refused: %s", connection.address, error)
            return
        if isinstance(error, ProtocolError):
            name = link.peer.info.name
            logger.warning("the connection to worker %s was closed: %s", name, error, extra={"peer": name})
        self.agent.link_lost(link)
        link.inbound.cancel_all()
        if link.main is not None:
            self._lines.lost(link, link.main)
            return
        for line in self._lines.of(link):
            line.connection.abort(error)
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
            self.recovery.begin(peer, reason, grace_s if peer.connects else grace_s + self._options.connect_timeout)

    def replaced(self, peer: Peer) -> None:
        """Another worker has come under the name of a peer, which is about to be told of as the new one."""
        self.recovery.end(peer)
        reason = f"worker {peer.info.name!r} was started again"
        connection = peer.connection
        if connection is not None:
            error = WireError(reason)
            connection.abort(error)
            # now, and not when the connection has ended: calls made meanwhile are for the new one
            peer.lost(connection, error, reason=None)
        if peer.state is not PeerState.GONE:
            self._given_up(peer, peer.info, reason)

    def forget(self, worker: WorkerInfo) -> None:
        """A worker is gone, and remembered no more."""
        for watcher in self._watchers:
            watcher.peer_forgotten(worker)

    def _given_up(self, _peer: Peer, info: WorkerInfo, reason: str) -> None:
        logger.info("worker %s (id %d) is given up: %s", info.name, info.id, reason)
        for watcher in self._watchers:
            watcher.peer_lost(info, reason)

    def same_main(self, main: str) -> bool:
        """Whether a worker runs the same script, so that functions of ``__main__`` mean the same there."""
        return bool(main) and main == self._identity.main

    # -- looking

    def open_connections(self) -> list[Connection]:
        """Those that show whether a peer is alive: on a line nobody listens while no call is made."""
        return [connection for connection, link in self._links.items() if connection.is_open and not link.is_line]

    def busy_links(self) -> bool:
        """Whether handlers run, or requests wait, for any peer. One who only looks is not waited for."""
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

    async def stop_seeking(self) -> None:
        """Make no connection any more but those that calls under way need."""
        await self.recovery.aclose()

    async def aclose(self, reason: str) -> None:
        await self._newcomers.aclose()
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
