"""What a worker still takes while it leaves an elastic group: only calls that work under way may have caused.

Others may go on calling a worker that leaves. Were all of their calls taken, it could not leave before they stop. A
handler that runs here may wait for a call back to this worker, so that one must be taken. Such a call has two marks:
work that was under way when the leaving began still is, and a call of this worker is under way, by which the other
worker was asked. Work that begins later counts for neither the first mark nor the time that leaving takes.
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
        """Whether a request that comes now may be the consequence of this work."""
        if self._left:
            self._left &= self._under_way(peers)
        return bool(self._left) and any(peer.calls_in_flight for peer in peers)

    def _under_way(self, peers: Iterable[Peer]) -> set[tuple[object, int]]:
        """What is under way now, by id. Calls of this worker and of its threads are numbered independently."""
        requests = {(inbound, id_) for inbound in self._inbounds for id_ in (*inbound.running, *inbound.waiting)}
        calls = {(peer.calls, id_) for peer in peers for id_, _ in peer.calls}
        of_threads = {(peer, id_) for peer in peers for id_, _, _ in peer.calls_of_threads()}
        return {*requests, *calls, *of_threads}
