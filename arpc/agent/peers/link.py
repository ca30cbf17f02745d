"""What an agent keeps about each of its connections, and the interface of those that hear of its peers."""

from __future__ import annotations

from typing import Final

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound
from arpc.ids import WorkerInfo
from arpc.transport.connection import Connection

__all__ = ["ONLOOKER", "THREAD", "Link", "PeerWatcher"]

ONLOOKER: Final = "onlooker"
"""The feature of a caller that is no worker and only looks: it may send `Inspect` messages, and is no peer."""
THREAD: Final = "line"
"""The feature of a further connection on which a thread of a worker makes its calls: it carries nothing else."""


class Link(Inbound):
    """What the agent keeps about one connection: whose it is, and what it asked for."""

    def __init__(
        self,
        connection: Connection,
        peer: Peer,
        deadlines: Deadlines,
        max_handlers: int,
        *,
        main_by_value: bool = True,
        is_onlooker: bool = False,
        main: Link | None = None,
    ) -> None:
        super().__init__(connection, peer.info, deadlines, max_handlers=max_handlers, main_by_value=main_by_value)
        self.peer = peer
        self.is_onlooker = is_onlooker
        """The peer is no worker, see `ONLOOKER`."""
        self.main = main
        """The link of the connection between both workers, if this is that of a thread, see `THREAD`."""
        self.goodbye: str | None = None
        connection.owner = self

    @property
    def is_of_thread(self) -> bool:
        return self.main is not None


class PeerWatcher:
    """A feature that wants to know which workers can be reached. It hears nothing about this worker itself.

    One that inherits from it defines what it needs; the methods here do nothing.
    """

    def peer_connected(self, peer: WorkerInfo) -> None:
        """There is a connection, the first or another one."""

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """The connection is gone. ``has_left``: the peer said goodbye, so it will not come back as the same worker."""

    def wants(self, peer: WorkerInfo) -> bool:
        """Whether a peer whose connection broke matters here.

        If it does to any watcher, the worker tries to reach it, until `peer_connected` or `peer_lost` is called.
        """
        return False

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        """A peer is dead, has been replaced by another of its name, or was silent for `RpcOptions.rref_grace`.

        Not called for a peer that said goodbye. One that was only cut off may connect again, later.
        """

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """A peer that has left or was lost, in an elastic group, need not be remembered: many others went after it."""
