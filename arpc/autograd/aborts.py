"""Passes that have failed: every worker that may have gradients of one hears of it.

The news is told again until it has been heard, or is for nobody any more. It may arrive twice, and late: a worker that
has heard it once has taken back all there is to take back. A worker that it does not reach for long hears of it with
the next pass, whose parcels name the passes that have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from arpc.agent.peers.peer import PeerState
from arpc.autograd.contexts import AutogradContext, Container
from arpc.autograd.lifetime import Lifetimes
from arpc.log import get_logger
from arpc.wire.messages import AutogradAbort

__all__ = ["Aborts"]

logger = get_logger("arpc.autograd")


class Aborts:
    """Tells other workers of passes that have failed."""

    def __init__(self, container: Container, lifetimes: Lifetimes) -> None:
        self._container = container
        self._lifetimes = lifetimes
        self.unheard: set[tuple[int, int, int]] = set()
        """Context, pass and worker of the news that is being told."""

    def tell(self, context: AutogradContext, pass_id: int, workers: Collection[int]) -> asyncio.Future[Any]:
        """Let workers know that a pass has failed; the future is done when they do, or it makes no sense to go on."""
        # sent now, and not when the tasks have their first turn
        args = context.id, pass_id
        telling = [
            self._lifetimes.own(self._tell(context, pass_id, to, self._lifetimes.notify(AutogradAbort, to, args)))
            for to in workers
        ]
        # an error, which is that this worker is shut down, is for nobody
        return asyncio.gather(*telling, return_exceptions=True)

    async def _tell(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> None:
        news = context.id, pass_id, to
        self.unheard.add(news)

        def is_moot() -> bool:
            """Whether nobody is to hear of it any more. The end of a context is told in its own way."""
            peer = self._lifetimes.agent.peer(to)
            is_gone = peer is None or peer.is_dead or peer.state is PeerState.GONE
            return is_gone or context.id not in self._container.contexts

        try:
            if not await self._lifetimes.repeat(attempt, AutogradAbort, to, news[:2], is_moot):
                logger.warning(
                    "worker %d did not hear that backward pass %d of autograd context %d has failed, and may have "
                    "gradients of it until it takes part in another one",
                    to,
                    pass_id,
                    context.id,
                )
        finally:
            self.unheard.discard(news)
