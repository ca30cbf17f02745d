"""Connections on which threads of peers make calls. For those of this worker: `client.thread_connections`.

Such a connection belongs to the one between both workers. Its requests count among those that the peer may have
running: with each of them, fewer may run on the connection between the workers.
"""

from __future__ import annotations

from typing import Final

from arpc.agent.peers.link import Host, Link, main_connection
from arpc.errors import WireError
from arpc.transport.connection import Connection
from arpc.wire.handshake import Identity, Refused
from arpc.wire.messages import Refusal

__all__ = ["MAX_THREADS", "THREAD_HANDLERS", "ThreadConnections"]

MAX_THREADS: Final = 64
"""How many of them a peer may have."""
THREAD_HANDLERS: Final = 64
"""Requests that may run at once on one of them. A thread makes one at a time, but those that it has given up may run
on."""


class ThreadConnections:
    """Accepts them, and keeps them among the links of the connector."""

    def __init__(self, agent: Host, links: dict[Connection, Link], max_handlers: int) -> None:
        """``max_handlers`` is that of a peer, on all of its connections together."""
        self._agent = agent
        self._links = links
        self._max_handlers = max_handlers

    def admit(self, identity: Identity) -> None:
        """Whether a peer may have one more: only while it has the connection that it belongs to. Raises `Refused`."""
        main = self._main_link(identity)
        if main is None:
            raise Refused(Refusal.STALE, f"worker {identity.name!r} has no connection that this one could belong to")
        if len(self.of(main)) >= MAX_THREADS:
            raise Refused(
                Refusal.DUPLICATE, f"worker {identity.name!r} has {MAX_THREADS} connections of threads already"
            )
        left = main.inbound.limit - THREAD_HANDLERS
        if left < max(self._max_handlers // 2, len(main.inbound.running)):
            raise Refused(Refusal.DUPLICATE, f"worker {identity.name!r} may not have so many requests running")

    def _main_link(self, identity: Identity) -> Link | None:
        """The connection to that very worker."""
        main = main_connection(self._agent, identity)
        return None if main is None else self._links.get(main)

    def of(self, main: Link) -> list[Link]:
        return [link for link in self._links.values() if link.main is main]

    def opened(self, connection: Connection) -> None:
        """A thread of a peer has a connection of its own for its calls."""
        main = self._main_link(connection.peer)
        if main is None or self._agent.is_closing:
            connection.abort(WireError("the connection that it belongs to has ended"))
            return
        main.inbound.set_limit(main.inbound.limit - THREAD_HANDLERS)
        self._links[connection] = Link(
            connection,
            main.peer,
            self._agent.deadlines,
            max_handlers=THREAD_HANDLERS,
            main_by_value=main.inbound.main_by_value,
            main=main,
        )
        main.peer.accepted_from_threads.add(connection)
        connection.redirect(self._agent.thread_calls_received)

    @staticmethod
    def lost(link: Link, main: Link) -> None:
        """Such a connection has ended. The peer still has the one that it belongs to."""
        link.peer.accepted_from_threads.discard(link.connection)
        main.inbound.set_limit(main.inbound.limit + THREAD_HANDLERS)
