"""What an agent keeps about each of its connections, and the interface of those that hear of its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.transport.connection import Connection
from arpc.wire.handshake import Identity
from arpc.wire.messages import Message
from arpc.wire.values.policy import Policy

__all__ = ["ONLOOKER", "THREAD", "Host", "Link", "PeerWatcher", "main_connection"]

ONLOOKER: Final = "onlooker"
"""The feature of a caller that is no worker and only looks: it may send `Inspect` messages, and is no peer."""
THREAD: Final = "line"
"""The feature of a further connection on which a thread of a worker makes its calls: it carries nothing else."""


class Host(Protocol):
    """What the connections of a worker need of its agent."""

    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    is_closing: bool
    is_serving: bool
    policy: Policy
    resolve: Callable[[str | int], Awaitable[WorkerRecord]]

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def is_elastic(self) -> bool: ...
    def peer(self, to: str | int | WorkerInfo, /) -> Peer | None: ...
    def add_peer(self, record: WorkerRecord, /) -> Peer: ...
    def make_peer(self, info: WorkerInfo) -> Peer: ...
    def inspection_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def thread_calls_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def messages_received(self, connection: Connection, messages: list[Message]) -> None: ...
    def link_lost(self, link: Link) -> None: ...
    def output_drained(self, connection: Connection) -> None: ...


class Link:
    """What the agent keeps about one connection."""

    __slots__ = ("connection", "goodbye", "inbound", "is_mine", "is_onlooker", "main", "peer")

    def __init__(
        self,
        connection: Connection,
        peer: Peer,
        deadlines: Deadlines,
        *,
        max_handlers: int,
        main_by_value: bool,
        is_mine: bool = False,
        is_onlooker: bool = False,
        main: Link | None = None,
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.inbound = Inbound(connection, peer.info, deadlines, max_handlers=max_handlers, main_by_value=main_by_value)
        self.is_mine = is_mine
        """This worker made the connection."""
        self.is_onlooker = is_onlooker
        """The peer is no worker, see `ONLOOKER`."""
        self.main = main
        """The link of the connection between both workers, if this is that of a thread, see `THREAD`."""
        self.goodbye: str | None = None
        connection.owner = self

    @property
    def is_of_thread(self) -> bool:
        return self.main is not None


def main_connection(agent: Host, identity: Identity) -> Connection | None:
    """The open connection to that very worker, to which a further one of it may belong."""
    peer = agent.peer(WorkerInfo(identity.name, identity.id))
    main = peer.connection if peer is not None else None
    is_it = main is not None and main.is_open and main.peer.incarnation == identity.incarnation
    return main if is_it else None


class PeerWatcher(Protocol):
    """A feature that wants to know which workers can be reached. It hears nothing about this worker itself."""

    def peer_connected(self, peer: WorkerInfo) -> None: ...

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """The connection is gone. ``has_left``: the peer said goodbye, so it will not come back as the same worker."""

    def wants(self, peer: WorkerInfo) -> bool:
        """Whether a peer whose connection broke matters here.

        If it does to any watcher, the worker tries to reach it, until `peer_connected` or `peer_lost` is called.
        """

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        """A peer is dead, has been replaced by another of its name, or was silent for `RpcOptions.rref_grace`.

        Not called for a peer that said goodbye. One that was only cut off may connect again, later.
        """

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """A peer that has left or was lost, in an elastic group, need not be remembered: many others went after it."""
