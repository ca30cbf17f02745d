"""Attempts to connect to peers: whoever makes the connection in the end, tried again as long as there is a point."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from arpc.agent.peers.bulk_connections import BulkConnections
from arpc.agent.peers.dialer import Dialer, host_of, only
from arpc.agent.peers.peer import Peer
from arpc.agent.peers.reconnect import backoff_delays
from arpc.errors import HandshakeError, ProtocolError, WireError
from arpc.group.membership import GroupNotAskedError, WorkerRecord
from arpc.transport.connection import Connection
from arpc.wire.handshake import Refused, Role
from arpc.wire.messages import Refusal

__all__ = ["ConnectRetry"]

_RETRY_S: Final = 0.02
_PASSING: Final = frozenset((Refusal.DUPLICATE, Refusal.STARTING))
"""Refusals after which to try again."""


class _Host(Protocol):
    """What is needed of the agent."""

    resolve: Callable[[str | int], Awaitable[WorkerRecord]]

    @property
    def is_elastic(self) -> bool: ...
    def add_peer(self, record: WorkerRecord) -> Peer: ...


class _UnansweredError(WireError):
    """Nobody answered at any address of a worker."""


class ConnectRetry:
    """Those of one worker that are under way."""

    def __init__(self, agent: _Host, dialler: Dialer, lanes: BulkConnections) -> None:
        self._agent = agent
        self._dialler = dialler
        self._lanes = lanes
        self.ids: set[int] = set()
        """Ids of workers this one is connecting to."""
        self._came: dict[int, asyncio.Future[None]] = {}

    async def connect(self, peer: Peer) -> Connection:
        """A connection to a peer, whoever makes it."""
        deadline = asyncio.get_running_loop().time() + self._dialler.options.connect_timeout
        known_id = peer.info.id
        self.ids.add(known_id)
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
            seconds = self._dialler.options.connect_timeout
            raise WireError(f"no connection to worker {peer.info.name!r} within {seconds} s") from error
        finally:
            self.ids -= {known_id, peer.info.id}
            if peer.connection is None:
                peer.is_verified = not self._agent.is_elastic

    async def _wait_for(self, peer: Peer, delay_s: float) -> None:
        """Give a connection from the other side a moment to come."""
        worker_id = peer.info.id
        came = self._came[worker_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([came], timeout=delay_s)
        finally:
            self._came.pop(worker_id, None)

    def came(self, worker_id: int) -> None:
        """There is a connection to that worker."""
        came = self._came.pop(worker_id, None)
        if came is not None and not came.done():
            came.set_result(None)

    async def _connect_once(self, peer: Peer) -> Connection:
        peer.is_deserted = peer.is_dead = False
        try:
            record = await self._agent.resolve(peer.info.name)
        except GroupNotAskedError as error:
            record = error.known  # who answers there must be that very worker
        # the world may have changed meanwhile: the peer may have connected to us
        if peer.connection is not None:
            return peer.connection
        peer.refuse_the_dead(record.incarnation)
        if record.incarnation != peer.incarnation:  # another has come under its name
            self._agent.add_peer(record)
            self.ids.add(record.id)
        peer.is_verified = True

        errors: dict[str, Exception] = {}
        for address in self._dialler.usable(record):
            token = self._lanes.token(address)
            protocol = self._dialler.protocol(Role.CONNECTOR, only(record), self._lanes.features(token))
            try:
                connection = await self._dialler.open(address, protocol)
            except HandshakeError:
                raise
            except (OSError, ProtocolError) as error:
                errors[address] = error
                continue
            peer.hosts.add(host_of(address))
            if token:
                await self._lanes.open(connection, address, token)
            return connection
        raise self._unanswered(peer, record, errors)

    def _unanswered(self, peer: Peer, record: WorkerRecord, errors: Mapping[str, Exception]) -> _UnansweredError:
        """What it means that none of a worker's addresses answers, by the errors of those that were tried."""
        tried = ", ".join(record.addresses) or "it has no address"
        reasons = "; ".join(str(error) for error in errors.values())
        if not errors and any(a.startswith("tcp://") and not self._dialler.may_trust(a) for a in record.addresses):
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
        peer.is_dead = peer.is_deserted and any(host_of(address) in peer.hosts for address in refused)
        reasons = reasons or "none can be reached from here"
        return _UnansweredError(f"none of its addresses answers ({tried}): {reasons}")
