"""Peers whose connection broke: they are sought again, and given up in the end. One verdict for all who ask.

A worker whose process has died leaves nobody behind who listens where it was: that is known at the first attempt. Of
one that was stopped, or that the network keeps away, nothing is known until its time is over.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Final

from arpc.agent.peers.peer import Peer, PeerState
from arpc.ids import WorkerInfo

__all__ = ["Reconnect", "backoff_delays"]

_FIRST_S: Final = 0.05
_LONGEST_S: Final = 1.0
_FACTOR: Final = 2.0

_random: Final = random.Random()  # noqa: S311 - nobody gains from guessing it
os.register_at_fork(after_in_child=_random.seed)  # or workers that are forked from one process would all wait alike


def backoff_delays(dice: random.Random = _random) -> Iterator[float]:
    """Seconds to wait before each further attempt, without end: longer each time, and never the same for two.

    >>> delays = backoff_delays(random.Random(1))
    >>> [round(next(delays), 3) for _ in range(7)]
    [0.028, 0.092, 0.176, 0.251, 0.598, 0.725, 0.826]
    """
    longest_s = _FIRST_S
    while True:
        yield longest_s * dice.uniform(0.5, 1.0)
        longest_s = min(_LONGEST_S, longest_s * _FACTOR)


class Reconnect:
    """Seeks peers of one worker. ``lost`` hears of each that is given up."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        lost: Callable[[Peer, WorkerInfo, str], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._lost = lost
        self._seeking: dict[Peer, asyncio.Task[None]] = {}

    def begin(self, peer: Peer, reason: str, grace_s: float) -> None:
        """There is no connection to a peer any more, and somebody wants to know what became of it within some time."""
        if peer not in self._seeking:
            seeking = self._context.copy().run(self._loop.create_task, self._seek(peer, reason, grace_s))
            self._seeking[peer] = seeking

    def end(self, peer: Peer) -> None:
        """It is known by other ways what became of a peer."""
        seeking = self._seeking.pop(peer, None)
        if seeking is not None:
            seeking.cancel()

    async def _seek(self, peer: Peer, reason: str, grace_s: float) -> None:
        info = peer.info
        try:
            async with asyncio.timeout(grace_s):
                for delay_s in backoff_delays():
                    if await peer.reach() or peer.info != info or peer.state is PeerState.GONE:
                        return  # whoever made that so has told
                    if peer.is_dead:
                        break
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            reason = f"{reason}; it has not come back within {grace_s:g} s"
        finally:
            if self._seeking.get(peer) is asyncio.current_task():
                del self._seeking[peer]
        # the attempt may have been answered in the very moment when time was over
        if peer.connection is None and peer.info == info and peer.state is not PeerState.GONE:
            self._lost(peer, info, reason)

    def __len__(self) -> int:
        """How many peers are sought at the moment."""
        return len(self._seeking)

    async def aclose(self) -> None:
        seeking = list(self._seeking.values())
        self._seeking.clear()
        for task in seeking:
            task.cancel()
        if seeking:
            await asyncio.wait(seeking)
