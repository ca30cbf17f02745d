"""Forks that were sent to others and have not been heard of since: who was offered one is asked, after a while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import Final

from arpc.agent.agent import Agent
from arpc.rref.control_queue import ControlQueue, Item
from arpc.rref.events import Event, ForkId, OfferKnown, OfferRefused
from arpc.rref.forks import Forks
from arpc.rref.user_ref import Use
from arpc.wire.messages import RRefForkQuery

__all__ = ["OfferWatch"]

_SHORTEST_S: Final = 0.05


class OfferWatch:
    """Looks after the offers of one worker, once each has had ``grace_s`` seconds to be answered."""

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
        self._context = context
        self._grace_s = grace_s
        self._happened = happened
        self._due: deque[tuple[float, ForkId]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def add(self, fork: ForkId) -> None:
        """A fork was offered just now."""
        self._due.append((self._agent.loop.time() + self._grace_s, fork))
        if self._timer is None:
            self._look_again_in(self._grace_s)

    def ask(self, forks: Iterable[ForkId]) -> None:
        """Ask after forks now, as far as they have not been heard of."""
        for fork in forks:
            offer = self._forks.offers.get(fork)
            if offer is None or offer.to == self._agent.info:
                continue
            peer = self._agent.peer(offer.to.id)
            connection = peer.connection if peer is not None else None
            if peer is not None and (peer.backlog or (connection is not None and connection.unsent_bytes)):
                self.add(fork)  # it may not have left yet
            else:
                self._post.add(RRefForkQuery, offer.to, (fork,))

    def answered(self, items: Sequence[Item], unknown: Sequence[int] | None) -> None:
        """A worker has said which of the forks it was asked for are unknown to it; None: not now."""
        refused = frozenset(unknown or ())
        for (fork,) in items:
            if unknown is not None:
                self._happened(OfferRefused(fork) if fork in refused else OfferKnown(fork))
            if fork in self._forks.offers:
                self.add(fork)

    def _look(self) -> None:
        self._timer = None
        now = self._agent.loop.time()
        asked: list[ForkId] = []
        while self._due and self._due[0][0] <= now:
            asked.append(self._due.popleft()[1])
        self.ask(asked)
        if self._due and self._timer is None:
            self._look_again_in(self._due[0][0] - now)

    def _look_again_in(self, delay_s: float) -> None:
        if not self._is_closed:
            self._timer = self._agent.loop.call_later(
                max(_SHORTEST_S, delay_s), self._look, context=self._context.copy()
            )

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
