"""Questions to other workers about RRefs that were not heard of for a while.

A worker that was offered a fork, and does not answer, is asked whether it has the fork. The creator of an expected
value, whose creation does not arrive, is asked whether it is still on its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import Final

from arpc.agent.agent import Agent
from arpc.ids import WorkerInfo, creator_of
from arpc.rref.control_queue import ControlQueue, Item
from arpc.rref.events import CreationDenied, Event, ForkId, OfferKnown, OfferRefused, RRefId
from arpc.rref.forks import Forks
from arpc.rref.user_ref import Use
from arpc.wire.messages import RRefCreationQuery, RRefForkQuery

__all__ = ["Inquiries"]

_SHORTEST_S: Final = 0.05


class _Delayed:
    """Calls a function with each id that was added ``delay_s`` seconds before."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, delay_s: float, ask: Callable[[Iterable[int]], None]
    ) -> None:
        self._loop = loop
        self._context = context
        self._delay_s = max(_SHORTEST_S, delay_s)
        self._ask = ask
        self.due: deque[tuple[float, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def add(self, id_: int) -> None:
        self.due.append((self._loop.time() + self._delay_s, id_))
        self._look_later()

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        ids = []
        while self.due and self.due[0][0] <= now:
            ids.append(self.due.popleft()[1])
        self._ask(ids)
        self._look_later()

    def _look_later(self) -> None:
        if self.due and self._timer is None and not self._is_closed:
            delay_s = max(_SHORTEST_S, self.due[0][0] - self._loop.time())
            self._timer = self._loop.call_later(delay_s, self._look, context=self._context.copy())

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()


class Inquiries:
    """The questions of one worker, each asked after ``grace_s`` seconds, and again until it is settled.

    A creator tells the owner when it gives a creation up. The question to it is for creators that could not: they are
    dead, were never connected to this worker, or speak of another worker that had this one's name.
    """

    def __init__(
        self,
        agent: Agent,
        forks: Forks[Use],
        post: ControlQueue,
        context: Context,
        grace_s: float,
        happened: Callable[[Event], object],
    ) -> None:
        self._agent = agent
        self._forks = forks
        self._post = post
        self._happened = happened
        self.offers = _Delayed(agent.loop, context, grace_s, self.ask_about_offers)
        self.creations = _Delayed(agent.loop, context, grace_s, self._ask_about_creations)

    def offered(self, fork: ForkId) -> None:
        """A fork was offered just now."""
        self.offers.add(fork)

    def expected(self, rref: RRefId) -> None:
        """A value is expected from now on."""
        self.creations.add(rref)

    def ask_about_offers(self, forks: Iterable[ForkId]) -> None:
        """Ask about forks now, as far as they have not been heard of."""
        for fork in forks:
            offer = self._forks.offers.get(fork)
            if offer is None or offer.to == self._agent.info:
                continue
            peer = self._agent.peer(offer.to.id)
            connection = peer.connection if peer is not None else None
            if peer is not None and (peer.backlog or (connection is not None and connection.unsent_bytes)):
                self.offers.add(fork)  # it may not have left yet
            else:
                self._post.add(RRefForkQuery, offer.to, (fork,))

    def offers_answered(self, items: Sequence[Item], unknown: Sequence[ForkId] | None) -> None:
        """A worker has said which of the forks it was asked about are unknown to it; None: ask again later."""
        refused = frozenset(unknown or ())
        for (fork,) in items:
            if unknown is not None:
                self._happened(OfferRefused(fork) if fork in refused else OfferKnown(fork))
            if fork in self._forks.offers:
                self.offers.add(fork)

    def _ask_about_creations(self, rrefs: Iterable[RRefId]) -> None:
        for rref in rrefs:
            if self._forks.is_expected(rref):
                peer = self._agent.peer(creator_of(rref))
                creator = peer.info if peer is not None else WorkerInfo("", creator_of(rref))
                self._post.add(RRefCreationQuery, creator, (rref,))

    def creations_answered(self, items: Sequence[Item], denied: Sequence[RRefId]) -> None:
        """A creator has said which of the values it was asked about it does not create."""
        not_coming = frozenset(denied)
        for (rref,) in items:
            if rref in not_coming:
                self._happened(CreationDenied(rref))
            elif self._forks.is_expected(rref):
                self.creations.add(rref)

    def close(self) -> None:
        self.offers.close()
        self.creations.close()
