"""What an agent keeps about each of its connections, and who hears of the peers behind them."""

from __future__ import annotations

from typing import Final, Protocol

from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound
from arpc.ids import WorkerInfo
from arpc.transport.connection import Connection

__all__ = ["LINE", "ONLOOKER", "Link", "PeerWatcher"]

ONLOOKER: Final = "onlooker"
"""The feature of a caller that is no worker and only looks: it may send `Inspect` messages, and is in no books."""
LINE: Final = "line"
"""The feature of a further connection on which a thread of a worker makes its calls: it carries nothing else."""


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

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """A peer that has left or was lost, in an elastic group, need not be remembered: many others went after it."""
