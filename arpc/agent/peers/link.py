"""The state of each connection of an agent, and the interface of features that are notified about its peers."""

from __future__ import annotations

from typing import Final

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound
from arpc.ids import WorkerInfo
from arpc.transport.connection import Connection

__all__ = ["ONLOOKER", "THREAD", "Link", "PeerWatcher"]

ONLOOKER: Final = "onlooker"
"""The handshake feature of a client that is no worker and only inspects: it may send `Inspect`, and is no peer."""
THREAD: Final = "line"
"""The handshake feature of a thread connection, on which a thread of a worker makes its calls, and nothing else."""


class Link(Inbound):
    """The agent's state of one connection: its peer, and the requests of the peer."""

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
        """Whether the peer is no worker, see `ONLOOKER`."""
        self.main = main
        """The link of the main connection between both workers, if this is a thread connection, see `THREAD`."""
        self.goodbye: str | None = None
        connection.owner = self

    @property
    def is_of_thread(self) -> bool:
        return self.main is not None


class PeerWatcher:
    """A feature that is notified which workers can be reached. It is not notified about this worker itself.

    A subclass overrides the methods that it needs; those here do nothing.
    """

    def peer_connected(self, peer: WorkerInfo) -> None:
        """Called when there is a connection, the first or another one."""

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """Called when the connection to a peer has ended.

        ``has_left``: the peer said goodbye, so it will not come back as the same worker.
        """

    def wants(self, peer: WorkerInfo) -> bool:
        """Return whether this feature needs a peer whose connection broke.

        If any watcher does, this worker tries to reach the peer until `peer_connected` or `peer_lost` is called.
        """
        return False

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        """Called when a peer is dead, was replaced by another of its name, or was silent for `RpcOptions.rref_grace`.

        Not called for a peer that said goodbye. A peer that was only cut off may connect again later.
        """

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """Called when a peer of an elastic group that is gone need not be remembered: many others have gone since."""
