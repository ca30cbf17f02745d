"""Queries to other workers about forks and creations that are overdue.

A worker that was offered a fork, and does not acknowledge it, is asked whether it has the fork. The creator of an
expected value, whose creation does not arrive, is asked whether the creation is still in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from arpc.ids import WorkerInfo, creator_of
from arpc.rref.control_queue import Item
from arpc.rref.instructions import Send
from arpc.rref.states import ForkId, RRefId
from arpc.wire.messages import RRefCreationQuery, RRefForkQuery

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["Inquiries"]

_SHORTEST_S: Final = 0.05


class Inquiries:
    """The queries of one worker, each sent after `RpcOptions.rref_grace` seconds, and again until it is settled.

    A creator notifies the owner when it gives a creation up. The query covers creators that could not: they are dead,
    were never connected to this worker, or meant another worker that had this one's name.
    """

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._agent = context.agent
        self._forks = context.forks
        self._loop = context.agent.loop
        self._grace_s = max(_SHORTEST_S, context.options.rref_grace)
        self.due: deque[tuple[float, Callable[[int], None], int]] = deque()
        """The time of each query, the method that sends it, and the id that it is about."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def offered(self, fork: ForkId) -> None:
        """Schedule a query about a fork that was offered just now."""
        self._ask_later(self.ask_about_offer, fork)

    def expected(self, rref: RRefId) -> None:
        """Schedule a query about a value that is expected from now on."""
        self._ask_later(self._ask_about_creation, rref)

    def _ask_later(self, ask: Callable[[int], None], id_: int) -> None:
        self.due.append((self._loop.time() + self._grace_s, ask, id_))
        if self._timer is None:
            self._wait()

    def _wait(self) -> None:
        if self.due and not self._is_closed:
            delay_s = max(_SHORTEST_S, self.due[0][0] - self._loop.time())
            # not in the current context: it may be that of a handler, and must not be kept for so long
            self._timer = self._loop.call_later(delay_s, self._look, context=self._context.fresh_context())

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self.due and self.due[0][0] <= now:
            _, ask, id_ = self.due.popleft()
            ask(id_)
        if self._timer is None:
            self._wait()

    def ask_about_offer(self, fork: ForkId) -> None:
        """Send a query about an offered fork now, if it is still not acknowledged."""
        offer = self._forks.offers.get(fork)
        if offer is None or offer.to == self._agent.info:
            return
        peer = self._agent.peer(offer.to.id)
        connection = peer.connection if peer is not None else None
        if peer is not None and (peer.backlog or (connection is not None and connection.unsent_bytes)):
            self.offered(fork)  # the offer may not have been sent yet
        else:
            self._context.post.add(Send(RRefForkQuery, offer.to, (fork,)))

    def offers_answered(self, items: Sequence[Item], unknown: Sequence[ForkId] | None) -> None:
        """Handle the reply to a fork query: the forks that are unknown to the worker; None: ask again later."""
        refused = frozenset(unknown or ())
        for (fork,) in items:
            if fork in refused:
                self._context.carry_out(self._forks.offer_refused(fork))
            elif unknown is not None:
                self._forks.offer_known(fork)
            if fork in self._forks.offers:
                self.offered(fork)

    def _ask_about_creation(self, rref: RRefId) -> None:
        if self._forks.is_expected(rref):
            peer = self._agent.peer(creator_of(rref))
            creator = peer.info if peer is not None else WorkerInfo("", creator_of(rref))
            self._context.post.add(Send(RRefCreationQuery, creator, (rref,)))

    def creations_answered(self, items: Sequence[Item], denied: Sequence[RRefId]) -> None:
        """Handle the reply to a creation query: the values that the creator does not create."""
        not_coming = frozenset(denied)
        for (rref,) in items:
            if rref in not_coming:
                self._context.carry_out(self._forks.creation_denied(rref))
            elif self._forks.is_expected(rref):
                self.expected(rref)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
