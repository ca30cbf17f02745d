"""The lines of peers to this worker: connections on which threads of theirs make calls. Ours: `peers.thread_lines`.

A line belongs to the connection between both workers. Its requests count among those that the peer may have running:
with each line so many fewer may run on the connection itself.
"""

from __future__ import annotations

from typing import Final, Protocol

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.links import Link
from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound
from arpc.errors import WireError
from arpc.ids import WorkerInfo
from arpc.transport.base import Connection
from arpc.wire.handshake import Identity, Refused
from arpc.wire.messages import Message, Refusal

__all__ = ["LINE_HANDLERS", "MAX_LINES", "LinesHere"]

MAX_LINES: Final = 64
"""How many of them a peer may have."""
LINE_HANDLERS: Final = 64
"""Requests of one line that may run at once, of the number that a peer may have. One is made at a time, but those that
their caller has given up may run on."""


class _Host(Protocol):
    """What is needed of the agent."""

    deadlines: Deadlines
    is_closing: bool

    def peer(self, to: str | int | WorkerInfo) -> Peer | None: ...
    def line_received(self, connection: Connection, messages: list[Message]) -> None: ...


class LinesHere:
    """They are links among the others, in the books of the connector."""

    def __init__(self, agent: _Host, links: dict[Connection, Link], max_handlers: int) -> None:
        self._agent = agent
        self._links = links
        self._max_handlers = max_handlers
        """Of a peer, on its connection and all lines together."""

    def admit(self, identity: Identity) -> None:
        """Whether a peer may have one more: only while it has the connection that it belongs to. Raises `Refused`."""
        main = self._main_link(identity)
        if main is None:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has no connection that a line could belong to")
        if len(self.of(main)) >= MAX_LINES:
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} has {MAX_LINES} lines already")
        left = main.inbound.limit - LINE_HANDLERS
        if left < max(self._max_handlers // 2, len(main.inbound.running)):
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} may not have so many requests running")

    def _main_link(self, identity: Identity) -> Link | None:
        """The connection to that very worker."""
        peer = self._agent.peer(WorkerInfo(identity.name, identity.id))
        main = peer.connection if peer is not None else None
        if main is None or not main.is_open or main.peer.incarnation != identity.incarnation:
            return None
        return self._links.get(main)

    def of(self, main: Link) -> list[Link]:
        return [link for link in self._links.values() if link.main is main]

    def opened(self, connection: Connection) -> None:
        """A thread of a peer has a connection of its own for its calls."""
        main = self._main_link(connection.peer)
        if main is None or self._agent.is_closing:
            connection.abort(WireError("the connection that it belongs to has ended"))
            return
        inbound = Inbound(
            connection,
            main.peer.info,
            self._agent.deadlines,
            max_handlers=LINE_HANDLERS,
            main_by_value=main.inbound.main_by_value,
        )
        _let_run(main.inbound, -LINE_HANDLERS)
        link = Link(connection, main.peer, inbound, is_mine=False)
        link.main = main
        self._links[connection] = link
        link.peer.lines_here.add(connection)
        connection.owner = link
        connection.redirect(self._agent.line_received)

    @staticmethod
    def lost(link: Link, main: Link) -> None:
        """A line has ended. That says nothing of the peer, which has its connection."""
        link.peer.lines_here.discard(link.connection)
        _let_run(main.inbound, LINE_HANDLERS)


def _let_run(inbound: Inbound, more: int) -> None:
    """Let so many more requests, or fewer, run at once."""
    inbound.set_limit(inbound.limit + more)
