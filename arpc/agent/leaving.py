"""The calls that a worker still accepts while it leaves an elastic group: those that work under way may have caused.

Peers may go on calling a worker that leaves. If it accepted all of their calls, it could not leave before they stop.
But a handler that runs here may wait for a call back to this worker, which must be accepted. Such a call is possible
under two conditions: work that was under way when the worker began to leave has not ended, and a call of this worker is
in flight, which may have made the peer call back. Work that begins later does not count for the first condition, so it
does not extend the time in which calls are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable

from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound

__all__ = ["EarlierWork"]


class EarlierWork:
    """The requests and calls that were under way when a worker began to leave."""

    def __init__(self, inbounds: Iterable[Inbound], peers: Iterable[Peer]) -> None:
        self._inbounds = list(inbounds)
        self._left = self._under_way(peers)

    def may_cause_calls(self, peers: Iterable[Peer]) -> bool:
        """Return whether a request that arrives now may be a consequence of this work."""
        if self._left:
            self._left &= self._under_way(peers)
        return bool(self._left) and any(peer.calls_in_flight for peer in peers)

    def _under_way(self, peers: Iterable[Peer]) -> set[tuple[object, int]]:
        """Return a key for each request and call under way. Calls on thread connections have ids of their own."""
        requests = {(inbound, id_) for inbound in self._inbounds for id_ in (*inbound.running, *inbound.waiting)}
        calls = {(peer.calls, id_) for peer in peers for id_, _ in peer.calls}
        of_threads = {(peer, id_) for peer in peers for id_, _, _ in peer.calls_of_threads()}
        return {*requests, *calls, *of_threads}
