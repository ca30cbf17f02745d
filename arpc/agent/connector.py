"""Connections of one worker: listening, connecting on first use, and one connection per pair of workers.

Two workers that connect to each other at the same moment end up with the connection made by the one with the lower id:
it refuses the other's as a duplicate, while the higher one gives up its own attempt for the one that comes in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context
from typing import Any, Final, Protocol

import msgspec

from arpc.agent.complaints import Complaints
from arpc.agent.deadlines import Deadlines
from arpc.agent.membership import WorkerRecord
from arpc.agent.newcomers import Newcomers
from arpc.agent.peers import Peer, PeerState
from arpc.agent.recovery import Recovery, backoff_delays
from arpc.agent.requests import Inbound
from arpc.errors import ArpcError, HandshakeError, ProtocolError, WireError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.base import Connection, Listener, Transport
from arpc.transport.lanes import Lanes
from arpc.transport.line import Line, open_line
from arpc.transport.memory import connect_pair
from arpc.transport.stream import is_loopback, split_tcp
from arpc.wire import protocol as wire
from arpc.wire.frames import Limits
from arpc.wire.handshake import Handshake, Identity, Refused, Role
from arpc.wire.messages import Message, Refusal

__all__ = ["Connector", "Link", "PeerWatcher"]

logger = get_logger("arpc.connections")

_RETRY_S: Final = 0.02
ONLOOKER: Final = "onlooker"
"""The feature of a caller that is no worker and only looks: it may send `Inspect` messages, and is in no books."""
LINE: Final = "line"
"""The feature of a further connection on which a thread of a worker makes its calls: it carries nothing else."""
MAX_LINES: Final = 64
"""How many of them a peer may have."""
LINE_HANDLERS: Final = 64
"""Requests of one line that may run at once, of the number that a peer may have. One is made at a time, but those that
their caller has given up may run on."""
_PASSING: Final = frozenset((Refusal.DUPLICATE, Refusal.STARTING))
"""Refusals after which to try again."""
_ONLOOKER_HANDLERS: Final = 16


class Link:
    """What the agent keeps about one connection."""

    __slots__ = ("connection", "goodbye", "inbound", "is_mine", "is_onlooker", "main", "peer")

    def __init__(self, connection: Connection, peer: Peer, inbound: Inbound, *, is_mine: bool) -> None:
        self.connection = connection
        self.peer = peer
        self.inbound = inbound
        self.is_mine = is_mine
        """This worker made the connection."""
        self.is_onlooker = False
        """The peer is no worker, see `ONLOOKER`."""
        self.main: Link | None = None
        """That of the connection which this one is beside, if it is a line, see `LINE`."""
        self.goodbye: str | None = None

    @property
    def is_line(self) -> bool:
        return self.main is not None


class PeerWatcher(Protocol):
    """A feature that wants to know which workers can be reached. Not told about this worker itself."""

    def peer_connected(self, peer: WorkerInfo) -> None: ...

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """The connection is gone. ``has_left``: the peer said goodbye, so it will not come back as the same worker."""

    def wants(self, peer: WorkerInfo) -> bool:
        """Whether a peer whose connection broke matters here.

        If it does to anyone it is sought until it is found, and `peer_connected` is told, or given up, and `peer_lost`.
        """

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        """A peer is dead, has been replaced by another of its name, or was not heard of for `RpcOptions.rref_grace`.

        Told of none that said goodbye. One that was only cut off may connect again, later.
        """


class _Host(Protocol):
    """What the connector needs of the agent."""

    info: WorkerInfo
    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    is_closing: bool
    is_elastic: bool
    is_serving: bool
    resolve: Callable[[str | int], Awaitable[WorkerRecord]]

    def peer(self, to: str | int | WorkerInfo) -> Peer | None: ...
    def add_peer(self, record: WorkerRecord) -> Peer: ...
    def make_peer(self, info: WorkerInfo) -> Peer: ...
    def inspection_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def line_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def take_directly(self, link: Link) -> None: ...
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
        self._connector.lost(connection, error)


class _Outgoing(_Incoming):
    """Hears of a connection that this worker made."""

    def connection_opened(self, connection: Connection) -> None:
        self._connector.opened(connection, is_mine=True)


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
        self._identity = identity
        self._options = options
        self._transports = dict(transports)
        self._context = context
        self._limits = Limits(options.max_body_bytes, options.max_message_bytes, options.max_header_bytes)
        self._listeners: list[Listener] = []
        self._links: dict[Connection, Link] = {}
        self._handshaking: set[Connection] = set()
        self._attempts: set[int] = set()
        """Ids of workers this one is connecting to."""
        self._newcomers = Newcomers(agent, context)
        self.recovery = Recovery(agent.loop, context, self._given_up)
        self._host = ""
        self._came: dict[int, asyncio.Future[None]] = {}
        self._joining: dict[wire.Protocol, Connection] = {}
        """Lanes in their handshake, each with the connection that it belongs to."""
        self._complaints = Complaints(logger)
        self.refused = 0

    def identify(self, worker_id: int) -> None:
        self._identity = msgspec.structs.replace(self._identity, id=worker_id)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._links.values())

    # -- listening

    async def listen(self, addresses: Iterable[str], host: str) -> tuple[str, ...]:
        """Listen on all addresses; returns them as others must call them. ``host`` names this machine."""
        self._host = host
        for address in addresses:
            self._listeners.append(await self._transport(address).listen(address, self._accept))
        return tuple(listener.address for listener in self._listeners)

    def _transport(self, address: str) -> Transport:
        scheme = address.partition("://")[0]
        transport = self._transports.get(scheme)
        if transport is None:
            raise WireError(f"no transport for {address!r}; there are {', '.join(sorted(self._transports))}")
        return transport

    def _accept(self) -> tuple[wire.Protocol, _Incoming]:
        def admit(identity: Identity) -> None:
            token = _feature(identity, _LANE)
            if token is not None:
                self._admit_lane(identity, token, protocol)
                return
            self._admit_now()
            if LINE in identity.features:
                self._admit_line(identity)
            elif ONLOOKER not in identity.features:
                self._admit(identity)
            elif self.agent.peer(identity.name) is not None:
                # roles go by names, and what workers may do is not for others
                raise Refused(Refusal.STALE, f"an onlooker has the name of worker {identity.name!r}")

        protocol = wire.Protocol(Handshake(Role.ACCEPTOR, self._identity, self._options.secret, admit), self._limits)
        return protocol, _Incoming(self)

    def _admit_lane(self, identity: Identity, token: str, protocol: wire.Protocol) -> None:
        """Whether a peer may have a further connection: only beside the very one in whose handshake it told of it."""
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        main = peer.connection if peer is not None else None
        if (
            main is None
            or not main.is_open
            or main.peer.incarnation != identity.incarnation
            or _feature(main.peer, _MAIN) != token
        ):
            raise Refused(Refusal.STALE, "there is no connection that this one could belong to")
        protocol.join(main.protocol)
        self._joining[protocol] = main

    def _admit_line(self, identity: Identity) -> None:
        """Whether a peer may have a further connection for its calls: only while it has the one that it belongs to."""
        main = self._main_link(identity)
        if main is None:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has no connection that a line could belong to")
        if len(self._lines_of(main)) >= MAX_LINES:
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} has {MAX_LINES} lines already")
        left = main.inbound.max_handlers - LINE_HANDLERS
        if left < max(self._options.max_handlers_per_peer // 2, len(main.inbound.running)):
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} may not have so many requests running")

    def _main_link(self, identity: Identity) -> Link | None:
        """The connection to that very worker."""
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        main = peer.connection if peer is not None else None
        if main is None or not main.is_open or main.peer.incarnation != identity.incarnation:
            return None
        return self._links.get(main)

    def _lines_of(self, main: Link) -> list[Link]:
        return [link for link in self._links.values() if link.main is main]

    def _admit_now(self) -> None:
        """Whether anybody may come in at this time. Runs before the last word of the handshake, as those below do."""
        if self.agent.is_closing:
            raise Refused(Refusal.CLOSING, f"worker {self._identity.name!r} is shutting down")
        if not self.agent.is_serving:
            # One that has joined already may call before we know who is in the group, and who we are in it
            raise Refused(Refusal.STARTING, f"worker {self._identity.name!r} is still joining its group")

    def _admit(self, identity: Identity) -> None:
        """Whether a peer that proved itself may come in."""
        if identity.id == self._identity.id or identity.name == self._identity.name:
            raise Refused(
                Refusal.STALE, f"worker {identity.name!r} has the name or id of worker {self._identity.name!r}"
            )
        if self.agent.is_elastic:
            self._newcomers.check(identity)
        peer = self.agent.peer(WorkerInfo(identity.name, identity.id))
        if peer is None:
            raise Refused(Refusal.UNKNOWN_WORKER, f"worker {identity.name!r} (id {identity.id}) is not of this group")
        if peer.incarnation != identity.incarnation:
            raise Refused(
                Refusal.STALE, f"worker {identity.name!r} (id {identity.id}) was started again, or belongs elsewhere"
            )
        existing = peer.connection
        if existing is not None:
            if self._identity.id < identity.id and self._links[existing].is_mine:
                raise Refused(Refusal.DUPLICATE, "a connection exists")
            # the peer has lost its end of the connection, and we did not notice
            existing.abort(WireError("the peer connected anew"))
        elif identity.id in self._attempts and self._identity.id < identity.id:
            raise Refused(Refusal.DUPLICATE, "a connection is being made")

    # -- connecting

    async def connect(self, peer: Peer) -> Connection:
        """A connection to a peer, whoever makes it."""
        if peer.info.id == self._identity.id:
            connection = self._connect_to_self(peer)
            await connection.wait_opened()
            return connection
        deadline = asyncio.get_running_loop().time() + self._options.connect_timeout
        known_id = peer.info.id
        self._attempts.add(known_id)
        delays = backoff_delays()
        failure: Exception | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    delay_s = _RETRY_S
                    try:
                        return await self._connect_once(peer)
                    except Refused as refusal:
                        # The peer prefers its own connection to us, which is about to come, or is not ready yet
                        if refusal.kind not in _PASSING:
                            raise
                    except _UnansweredError as error:
                        # The network may be back in a moment. Calls that wait to be sent wait for that.
                        if peer.is_deserted:
                            raise
                        failure = error
                        delay_s = next(delays)
                    await self._wait_for(peer, delay_s)
                    if peer.connection is not None:
                        return peer.connection
        except TimeoutError as error:
            if peer.connection is not None:
                return peer.connection
            if failure is not None:
                raise failure from error
            seconds = self._options.connect_timeout
            raise WireError(f"no connection to worker {peer.info.name!r} within {seconds} s") from error
        finally:
            self._attempts -= {known_id, peer.info.id}
            if peer.connection is None:
                peer.is_verified = not self.agent.is_elastic

    async def _wait_for(self, peer: Peer, delay_s: float) -> None:
        """Give a connection from the other side a moment to come."""
        worker_id = peer.info.id
        came = self._came[worker_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([came], timeout=delay_s)
        finally:
            self._came.pop(worker_id, None)

    async def _connect_once(self, peer: Peer) -> Connection:
        peer.is_deserted = peer.is_dead = False
        record = await self.agent.resolve(peer.info.name)
        # the world may have changed meanwhile: the peer may have connected to us
        if peer.connection is not None:
            return peer.connection
        peer.refuse_the_dead(record.incarnation)
        if record.incarnation != peer.incarnation:  # another has come under its name
            self.agent.add_peer(record)
            self._attempts.add(record.id)
        peer.is_verified = True

        errors: dict[str, Exception] = {}
        for address in self._usable(record):
            token = secrets.token_hex(8) if self._options.bulk_connections and address.startswith("tcp://") else ""
            features = (*self._identity.features, _MAIN + token) if token else self._identity.features
            me = msgspec.structs.replace(self._identity, features=features)
            handshake = Handshake(Role.CONNECTOR, me, self._options.secret, _only(record))
            protocol = wire.Protocol(handshake, self._limits)
            try:
                connection = await self._context.run(self._start, address, protocol)
            except HandshakeError:
                raise
            except (OSError, ProtocolError) as error:
                errors[address] = error
                continue
            self._handshaking.add(connection)
            try:
                await connection.wait_opened()
            except HandshakeError:
                raise
            except (OSError, ProtocolError) as error:
                errors[address] = error
            except BaseException:
                # One that has opened meanwhile carries calls: a loop that was busy may run the timer of the attempt
                # before it wakes who waits for the connection
                if not connection.is_open:
                    connection.abort(WireError("the attempt was given up"))
                raise
            else:
                peer.hosts.add(_host_of(address))
                if token:
                    await self._open_lanes(connection, address, token)
                return connection
            finally:
                self._handshaking.discard(connection)
        raise self._unanswered(peer, record, errors)

    def _unanswered(self, peer: Peer, record: WorkerRecord, errors: Mapping[str, Exception]) -> _UnansweredError:
        """What it means that none of a worker's addresses answers, by the errors of those that were tried."""
        tried = ", ".join(record.addresses) or "it has no address"
        reasons = "; ".join(str(error) for error in errors.values())
        if not errors and any(a.startswith("tcp://") and not self._may_trust(a) for a in record.addresses):
            reasons = (
                "it is on another host, which is not trusted without a secret: set the same ARPC_SECRET on all workers "
                "(or RpcOptions.tls)"
            )
        # there is no point in trying again where nobody listens, or nobody can be tried
        peer.is_deserted = all(
            isinstance(error, ConnectionRefusedError | FileNotFoundError) for error in errors.values()
        )
        # But an address may be good for others only, as 127.0.0.1 is, and a socket's file be tidied away
        refused = [address for address, error in errors.items() if isinstance(error, ConnectionRefusedError)]
        peer.is_dead = peer.is_deserted and any(_host_of(address) in peer.hosts for address in refused)
        reasons = reasons or "none can be reached from here"
        return _UnansweredError(f"none of its addresses answers ({tried}): {reasons}")

    async def _open_lanes(self, main: Connection, address: str, token: str) -> None:
        """Make the further connections for large tensors. Without them it works as well, only not as fast."""
        peer = main.peer

        # of what a main connection can do besides, a lane does nothing
        me = msgspec.structs.replace(self._identity, features=(_LANE + token,))
        for _ in range(self._options.bulk_connections):
            protocol = wire.Protocol(Handshake(Role.CONNECTOR, me, self._options.secret, _only(peer)), self._limits)
            # before the handshake: the first chunk may come with its last word
            protocol.join(main.protocol)
            self._joining[protocol] = main
            try:
                lane = await self._context.run(self._start, address, protocol)
                self._handshaking.add(lane)
                try:
                    await lane.wait_opened()
                except BaseException:
                    if not lane.is_open:
                        lane.abort(WireError("the attempt was given up"))
                    raise
                finally:
                    self._handshaking.discard(lane)
            except (OSError, WireError) as error:
                # the main connection may have been lost meanwhile, and the peer knows
                level = logging.WARNING if main.is_open else logging.DEBUG
                logger.log(
                    level,
                    "no further connection for large tensors to worker %s: %s",
                    peer.name,
                    error,
                    extra={"peer": peer.name},
                )
                return
            finally:
                self._joining.pop(protocol, None)

    async def open_line(self, peer: Peer) -> Line:
        """A further connection to a peer, for a thread to make calls on. Raises `OSError` or `WireError`."""
        record = await self.agent.resolve(peer.info.name)
        main = peer.connection
        if main is None or main.peer.incarnation != record.incarnation:
            raise WireError(f"there is no connection to worker {peer.info.name!r} that a line could belong to")
        usable = [a for a in self._usable(record) if a.startswith(self._line_schemes)]
        if not usable:
            raise WireError(f"worker {peer.info.name!r} has no address that a thread can connect to")

        me = msgspec.structs.replace(self._identity, features=(LINE,))
        protocol = wire.Protocol(Handshake(Role.CONNECTOR, me, self._options.secret, _only(record)), self._limits)
        async with asyncio.timeout(self._options.connect_timeout):
            return await open_line(usable[0], protocol)

    @property
    def _line_schemes(self) -> tuple[str, ...]:
        """How addresses begin that a plain socket can connect to."""
        return ("unix://", "tcp://") if self._options.tls is None else ("unix://",)

    async def is_alive(self, record: WorkerRecord) -> bool:
        """Whether the worker of a record, in that very incarnation, still answers at its addresses."""
        found: list[int] = []

        def look(identity: Identity) -> None:
            found.append(identity.incarnation)
            raise Refused(Refusal.STALE, "only looking whether somebody is there")

        for address in self._usable(record):
            protocol = wire.Protocol(
                Handshake(Role.CONNECTOR, self._identity, self._options.secret, look), self._limits
            )
            try:
                async with asyncio.timeout(self._options.connect_timeout):
                    connection = await self._context.run(self._start, address, protocol)
                    try:
                        await connection.wait_opened()
                    finally:
                        connection.abort()
            except (OSError, ArpcError):
                pass  # what counts is who was found before
        return record.incarnation in found

    def _start(self, address: str, protocol: wire.Protocol) -> asyncio.Task[Connection]:
        # a task, so that uvloop runs the connection's callbacks in this worker's context
        connect = self._transport(address).connect(address, protocol, _Outgoing(self))
        return asyncio.get_running_loop().create_task(connect)

    def _usable(self, record: WorkerRecord) -> list[str]:
        """The addresses of a worker that can work from here, the best first."""
        usable: list[tuple[int, str]] = []
        for address in record.addresses:
            scheme, _, rest = address.partition("://")
            if scheme not in self._transports:
                continue
            if scheme == "tcp" and not self._may_trust(address):
                continue
            if scheme == "unix" and (record.host != self._host or not os.path.exists(rest)):  # noqa: PTH110
                continue
            usable.append((_PREFERENCE.get(scheme, 9), address))
        return [address for _, address in sorted(usable)]

    def _may_trust(self, address: str) -> bool:
        """Whoever answers may run code here, too: without a secret or TLS only this host is trusted."""
        return self._options.is_guarded or self._options.insecure or is_loopback(split_tcp(address)[0])

    def _connect_to_self(self, peer: Peer) -> Connection:
        secret = self._options.secret
        near = wire.Protocol(Handshake(Role.CONNECTOR, self._identity, secret), self._limits)
        far = wire.Protocol(Handshake(Role.ACCEPTOR, self._identity, secret), self._limits)
        name = f"{peer.info.name}-itself"
        connection, _ = self._context.run(connect_pair, (near, _Outgoing(self)), (far, _Incoming(self)), name)
        return connection

    # -- told by connections

    def opened(self, connection: Connection, *, is_mine: bool) -> None:
        main = self._joining.pop(connection.protocol, None)
        if main is not None:
            _attach_lane(main, connection)
            return
        identity = connection.peer
        if ONLOOKER in identity.features:
            self._opened_by_onlooker(connection)
            return
        if LINE in identity.features:
            self._line_opened(connection)
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
        self.agent.take_directly(link)
        if self.agent.is_closing:
            connection.abort(WireError("this worker is shutting down"))
            return
        # of the two ends of the connection to oneself, calls go out on one only
        if is_mine or identity.id != self._identity.id:
            peer.opened(connection, main_by_value=main_by_value)
            peer.hosts.add(_host_of(connection.address))
        came = self._came.pop(identity.id, None)
        if came is not None and not came.done():
            came.set_result(None)
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
        self.agent.take_directly(link)
        connection.redirect(self.agent.inspection_received)
        if self.agent.is_closing:
            connection.abort(WireError("this worker is shutting down"))

    def _line_opened(self, connection: Connection) -> None:
        """A thread of a peer has a connection of its own for its calls."""
        main = self._main_link(connection.peer)
        if main is None or self.agent.is_closing:
            connection.abort(WireError("the connection that it belongs to has ended"))
            return
        inbound = Inbound(
            connection,
            main.peer.info,
            self.agent.deadlines,
            max_handlers=LINE_HANDLERS,
            main_by_value=main.inbound.main_by_value,
        )
        _let_run(main.inbound, -LINE_HANDLERS)
        link = Link(connection, main.peer, inbound, is_mine=False)
        link.main = main
        self._links[connection] = link
        link.peer.lines_here.add(connection)
        connection.owner = link
        self.agent.take_directly(link)
        connection.redirect(self.agent.line_received)

    def lost(self, connection: Connection, error: Exception | None) -> None:
        self._joining.pop(connection.protocol, None)
        link = self._links.pop(connection, None)
        if link is None:
            self.refused += 1
            level = logging.DEBUG if isinstance(error, Refused) else logging.WARNING
            if error is not None and connection not in self._handshaking:
                self._complaints.log(level, "a connection from %s was refused: %s", connection.address, error)
            return
        if isinstance(error, ProtocolError):
            name = link.peer.info.name
            logger.warning("the connection to worker %s was closed: %s", name, error, extra={"peer": name})
        self.agent.link_lost(link)
        link.inbound.cancel_all()
        if link.main is not None:
            link.peer.lines_here.discard(connection)
            _let_run(link.main.inbound, LINE_HANDLERS)
            return  # it says nothing of the peer, which has its connection
        for line in self._lines_of(link):
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
        lanes = [lane for connection in connections for lane in _lanes_of(connection)]
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


# Features of an identity: a token of the connection, which may have lanes, and that of the one which a lane belongs to
_MAIN: Final = "lanes:"
_LANE: Final = "lane-of:"
_PREFERENCE: Final = {"memory": 0, "unix": 1, "tcp": 2}
_CLOSE_S: Final = 2.0


class _UnansweredError(WireError):
    """Nobody answered at any address of a worker."""


def _only(expected: WorkerRecord | Identity) -> Callable[[Identity], None]:
    """Who may answer a connection: that very worker, and not another that has come to its address."""

    def admit(identity: Identity) -> None:
        if (identity.name, identity.id, identity.incarnation) != (expected.name, expected.id, expected.incarnation):
            raise Refused(Refusal.STALE, f"found worker {identity.name!r} where {expected.name!r} was to be")

    return admit


def _host_of(address: str) -> str:
    """The host in an address, by number or name; nothing for one that is of this host in any case."""
    return split_tcp(address)[0] if address.startswith("tcp://") else ""


def _feature(identity: Identity, name: str) -> str | None:
    """What a worker says of itself under that name."""
    for feature in identity.features:
        if feature.startswith(name):
            return feature.removeprefix(name)
    return None


def _let_run(inbound: Inbound, more: int) -> None:
    """Let so many more requests, or fewer, run at once."""
    inbound.max_handlers += more
    if inbound.limit:  # otherwise none may while its caller does not take replies
        inbound.set_limit(inbound.max_handlers)


def _lanes_of(main: Connection) -> list[Connection]:
    return main.bulk_route.connections if isinstance(main.bulk_route, Lanes) else []


def _attach_lane(main: Connection, lane: Connection) -> None:
    if not main.is_open:
        lane.abort(WireError("the connection that it belongs to has ended"))
        return
    if not isinstance(main.bulk_route, Lanes):
        main.bulk_route = Lanes(main)
    main.bulk_route.attach(lane)
