"""Values that are expected and whose creation does not arrive: their creators are asked, after a while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Final

from arpc.agent.agent import Agent
from arpc.ids import WorkerInfo, creator_of
from arpc.rref.control_queue import ControlQueue, Item
from arpc.rref.events import CreationDenied, Event, RRefId
from arpc.rref.forks import Forks
from arpc.rref.user_ref import Use
from arpc.wire.messages import RRefCreationQuery

__all__ = ["CreationWatch"]

_SHORTEST_S: Final = 0.05


class CreationWatch:
    """Looks after the expected values of one worker, once each creation has had ``grace_s`` seconds to arrive.

    A creator tells the owner when it gives a creation up. This is for creators that could not: they are dead, were
    never connected to this worker, or speak of another worker that had this one's name.
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
        self._context = context
        self._grace_s = max(_SHORTEST_S, grace_s)
        self._happened = happened
        self._due: deque[tuple[float, RRefId]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def add(self, rref: RRefId) -> None:
        """A value is expected from now on."""
        self._due.append((self._agent.loop.time() + self._grace_s, rref))
        self._look_later()

    def answered(self, items: Sequence[Item], denied: Sequence[RRefId]) -> None:
        """A creator has said which of the values it was asked for it does not create."""
        not_coming = frozenset(denied)
        for (rref,) in items:
            if rref in not_coming:
                self._happened(CreationDenied(rref))
            elif self._forks.is_expected(rref):
                self.add(rref)

    def _look(self) -> None:
        self._timer = None
        now = self._agent.loop.time()
        while self._due and self._due[0][0] <= now:
            _, rref = self._due.popleft()
            if self._forks.is_expected(rref):
                peer = self._agent.peer(creator_of(rref))
                creator = peer.info if peer is not None else WorkerInfo("", creator_of(rref))
                self._post.add(RRefCreationQuery, creator, (rref,))
        self._look_later()

    def _look_later(self) -> None:
        if self._due and self._timer is None and not self._is_closed:
            delay_s = max(_SHORTEST_S, self._due[0][0] - self._agent.loop.time())
            self._timer = self._agent.loop.call_later(delay_s, self._look, context=self._context.copy())

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
