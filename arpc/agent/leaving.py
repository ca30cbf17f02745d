"""What a worker still takes while it leaves an elastic group: only calls that work under way may have caused.

Others may go on calling a worker that leaves. Were all of their calls taken, it could not leave before they stop. A
handler that runs here may wait for a call back to this worker, so that one must be taken. Such a call has two marks:
work that was under way when the leaving began still is, and a call of this worker is under way, by which the other
worker was asked. Work that begins later counts for neither the first mark nor the time that leaving takes.
"""

from __future__ import annotations

from collections.abc import Iterable

from arpc.agent.client.pending_calls import PendingCalls
from arpc.agent.peers.peer import Peer
from arpc.agent.server.inbound import Inbound

__all__ = ["EarlierWork"]


class EarlierWork:
    """The requests and calls that were under way when a worker began to leave."""

    def __init__(self, inbounds: Iterable[Inbound], peers: Iterable[Peer]) -> None:
        peers = list(peers)
        self._requests: list[tuple[Inbound, int]] = [
            (inbound, id_) for inbound in inbounds for id_ in (*inbound.running, *inbound.waiting)
        ]
        self._calls: list[tuple[PendingCalls, int]] = [(peer.calls, id_) for peer in peers for id_, _ in peer.calls]
        self._calls_of_threads = {(peer, id_) for peer in peers for id_, _, _ in peer.calls_of_threads()}

    def may_cause_calls(self, peers: Iterable[Peer]) -> bool:
        """Whether a request that comes now may be the consequence of this work."""
        return self._is_under_way and any(peer.calls_in_flight for peer in peers)

    @property
    def _is_under_way(self) -> bool:
        self._requests = [one for one in self._requests if one[1] in one[0].running or one[1] in one[0].waiting]
        self._calls = [one for one in self._calls if one[0].get(one[1]) is not None]
        peers = {peer for peer, _ in self._calls_of_threads}
        self._calls_of_threads &= {(peer, id_) for peer in peers for id_, _, _ in peer.calls_of_threads()}
        return bool(self._requests or self._calls or self._calls_of_threads)
