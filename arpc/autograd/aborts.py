"""Passes that have failed: every worker that may have gradients of one hears of it.

The news is told again until it has been heard, or is for nobody any more. It may arrive twice, and late: a worker that
has heard it once has taken back all there is to take back. A worker that it does not reach for long hears of it with
the next pass, whose parcels name the passes that have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import chain
from typing import Any, Final

from arpc.agent.peers.peer import PeerState
from arpc.autograd.contexts import AutogradContext, Container
from arpc.autograd.lifetime import Lifetimes, is_hopeless
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.wire.messages import AutogradAbort

__all__ = ["Aborts"]

logger = get_logger("arpc.autograd")

_BACKOFF_FACTOR: Final = 1.5


class Aborts:
    """Tells other workers of passes that have failed."""

    def __init__(self, container: Container, lifetimes: Lifetimes, options: RpcOptions) -> None:
        self._container = container
        self._lifetimes = lifetimes
        self._options = options
        self.unheard: set[tuple[int, int, int]] = set()
        """Context, pass and worker of the news that is being told."""

    def tell(self, context: AutogradContext, pass_id: int, workers: Collection[int]) -> asyncio.Future[Any]:
        """Let workers know that a pass has failed; the future is done when they do, or it makes no sense to go on."""
        telling = [
            self._lifetimes.own(self._tell(context, pass_id, to, self._attempt(context, pass_id, to))) for to in workers
        ]
        # an error, which is that this worker is shut down, is for nobody
        return asyncio.gather(*telling, return_exceptions=True)

    def _attempt(self, context: AutogradContext, pass_id: int, to: int) -> asyncio.Future[Any]:
        return self._lifetimes.notify(AutogradAbort, to, (context.id, pass_id), self._lifetimes.attempt_s)

    async def _tell(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> None:
        news = context.id, pass_id, to
        self.unheard.add(news)
        try:
            if not await self._has_told(context, pass_id, to, attempt):
                logger.warning(
                    "worker %d did not hear that backward pass %d of autograd context %d has failed, and may have "
                    "gradients of it until it takes part in another one",
                    to,
                    pass_id,
                    context.id,
                )
        finally:
            self.unheard.discard(news)

    async def _has_told(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> bool:
        backoff_s = self._options.control_backoff
        delays = (backoff_s * _BACKOFF_FACTOR**number for number in range(self._options.control_retries))
        # a connection that broke may be there again at once
        for delay_s in chain([0.0], delays):
            await asyncio.wait([attempt])
            if self._is_over(context, to, attempt):
                return True
            await asyncio.sleep(delay_s)
            attempt = self._attempt(context, pass_id, to)
        await asyncio.wait([attempt])
        return self._is_over(context, to, attempt)

    def _is_over(self, context: AutogradContext, to: int, attempt: asyncio.Future[Any]) -> bool:
        """Whether there is nothing to tell any more. The end of a context is told in its own way."""
        error = attempt.exception()
        is_heard = error is None or is_hopeless(error) or self._is_gone(to)
        return is_heard or context.id not in self._container.contexts

    def _is_gone(self, to: int) -> bool:
        peer = self._lifetimes.agent.peer(to)
        return peer is None or peer.is_dead or peer.state is PeerState.GONE
