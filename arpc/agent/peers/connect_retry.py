"""Repeated attempts to connect: for calls that wait to be sent, and to learn whether a peer is lost.

If the process of a worker has died, nothing listens at its address any more, and the first attempt shows that. A worker
that was stopped, or cannot be reached, is given up only after a timeout.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Final

from arpc.agent.peers.dialer import host_of, only
from arpc.agent.peers.peer import Peer, PeerState
from arpc.errors import HandshakeError, ProtocolError, WireError
from arpc.group.membership import StaleRecordError, WorkerRecord
from arpc.transport.connection import Connection
from arpc.wire.handshake import Refused, Role
from arpc.wire.messages import Refusal

if TYPE_CHECKING:
    from arpc.agent.peers.connector import Connector

__all__ = ["ConnectRetry", "backoff_delays"]

_RETRY_S: Final = 0.02
_PASSING: Final = frozenset((Refusal.DUPLICATE, Refusal.STARTING))
"""Refusals after which to retry."""
_FIRST_S: Final = 0.05
_LONGEST_S: Final = 1.0
_FACTOR: Final = 2.0

_random: Final = random.Random()  # noqa: S311 - an attacker gains nothing from guessing it
os.register_at_fork(after_in_child=_random.seed)  # or workers forked from one process would all wait equally long


def backoff_delays(dice: random.Random = _random) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, without end: growing up to 1 s, with random jitter.

    >>> delays = backoff_delays(random.Random(1))
    >>> [round(next(delays), 3) for _ in range(7)]
    [0.028, 0.092, 0.176, 0.251, 0.598, 0.725, 0.826]
    """
    longest_s = _FIRST_S
    while True:
        yield longest_s * dice.uniform(0.5, 1.0)
        longest_s = min(_LONGEST_S, longest_s * _FACTOR)


class _UnansweredError(WireError):
    """No address of a worker answered."""

    is_deserted = False
    """Whether nothing listens at any address, or there was none to try, so that there is no point in a retry."""


class ConnectRetry:
    """Connects one worker to its peers, with retries."""

    def __init__(self, connector: Connector, context: Context) -> None:
        self._connector = connector
        self._agent = connector.agent
        self._dialer = connector.dialer
        self._bulk = connector.bulk
        self._context = context
        self.searches: dict[Peer, asyncio.Task[None]] = {}
        """The searches for peers whose connection has ended, and that a watcher needs."""

    async def connect(self, peer: Peer) -> Connection:
        """Return a connection to a peer, made by either side. Raises `WireError` if there is none in time."""
        seconds = self._dialer.options.connect_timeout
        delays = backoff_delays()
        failure: Exception | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    delay_s = _RETRY_S
                    try:
                        return await self._connect_once(peer)
                    except Refused as refusal:
                        # The peer prefers a connection of its own, which is about to come, or is not ready yet
                        if refusal.kind not in _PASSING:
                            raise
                    except _UnansweredError as error:
                        # The network may be back in a moment, and calls that are not sent yet can wait for that.
                        if error.is_deserted:
                            raise
                        failure = error
                        delay_s = next(delays)
                    if (connection := await peer.wait_connected(delay_s)) is not None:
                        return connection
        except TimeoutError as error:
            if peer.connection is not None:
                return peer.connection
            if failure is not None:
                raise failure from error
            raise WireError(f"no connection to worker {peer.info.name!r} within {seconds} s") from error
        finally:
            if peer.connection is None:
                peer.is_verified = not self._agent.is_elastic

    async def _connect_once(self, peer: Peer) -> Connection:
        peer.is_dead = False
        try:
            record = await self._agent.resolve(peer.info.name)
        except StaleRecordError as error:
            record = error.known  # the handshake accepts only that very worker
        # during the await, the peer may have connected to this worker
        if peer.connection is not None:
            return peer.connection
        peer.refuse_the_dead(record.incarnation)
        if record.incarnation != peer.incarnation:  # another has taken its name
            self._agent.add_peer(record)
        peer.is_verified = True

        errors: dict[str, Exception] = {}
        for address in self._dialer.usable(record):
            token = self._bulk.token(address)
            protocol = self._dialer.protocol(Role.CONNECTOR, only(record), self._bulk.features(token))
            try:
                connection = await self._dialer.open(address, protocol)
            except HandshakeError:
                raise
            except (OSError, ProtocolError) as error:
                errors[address] = error
                continue
            peer.hosts.add(host_of(address))
            if token:
                await self._bulk.open(connection, address, token)
            return connection
        raise self._unanswered(peer, record, errors)

    def _unanswered(self, peer: Peer, record: WorkerRecord, errors: Mapping[str, Exception]) -> _UnansweredError:
        """Return the error for a worker that does not answer, and set `Peer.is_dead`, by the errors per address."""
        tried = ", ".join(record.addresses) or "it has no address"
        reasons = "; ".join(str(error) for error in errors.values())
        if not errors and any(a.startswith("tcp://") and not self._dialer.may_trust(a) for a in record.addresses):
            reasons = (
                "it is on another host, which is not trusted without a secret: set the same ARPC_SECRET on all workers "
                "(or RpcOptions.tls)"
            )
        unanswered = _UnansweredError(
            f"none of its addresses answers ({tried}): {reasons or 'none can be reached from here'}"
        )
        absent = (ConnectionRefusedError, FileNotFoundError)
        unanswered.is_deserted = all(isinstance(error, absent) for error in errors.values())
        # But an address may only work for other hosts, such as 127.0.0.1, and a socket's file may have been deleted
        refused = [address for address, error in errors.items() if isinstance(error, ConnectionRefusedError)]
        peer.is_dead = unanswered.is_deserted and any(host_of(address) in peer.hosts for address in refused)
        return unanswered

    # -- searches

    def begin_search(self, peer: Peer, reason: str, grace_s: float) -> None:
        """Try to reach a peer whose connection has ended, and give it up after ``grace_s`` or if it is dead."""
        if peer not in self.searches:
            search = self._context.copy().run(self._agent.loop.create_task, self._search(peer, reason, grace_s))
            self.searches[peer] = search

    def end_search(self, peer: Peer) -> None:
        """End the search for a peer, whose state is known by other means."""
        search = self.searches.pop(peer, None)
        if search is not None:
            search.cancel()

    async def _search(self, peer: Peer, reason: str, grace_s: float) -> None:
        info = peer.info
        try:
            async with asyncio.timeout(grace_s):
                for delay_s in backoff_delays():
                    if await peer.reach() or peer.info != info or peer.state is PeerState.GONE:
                        return  # the watchers have been notified
                    if peer.is_dead:
                        break
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            reason = f"{reason}; it has not come back within {grace_s:g} s"
        finally:
            if self.searches.get(peer) is asyncio.current_task():
                del self.searches[peer]
        # the attempt may have succeeded just when the time was over
        if peer.connection is None and peer.info == info and peer.state is not PeerState.GONE:
            self._connector.give_up(info, reason)

    async def aclose(self) -> None:
        """End all searches."""
        searches, self.searches = list(self.searches.values()), {}
        for search in searches:
            search.cancel()
        if searches:
            await asyncio.wait(searches)
