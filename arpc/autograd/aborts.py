"""Abort messages: they notify every worker that may have gradients of a failed pass.

An abort is retried until the worker has acknowledged it, or does not need it any more. It may arrive twice, and late:
the first one has rolled back all there is to roll back. A worker that cannot be reached for long is notified by the
next pass, whose parcels list the passes that have failed.
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
    """Notifies other workers of passes that have failed."""

    def __init__(self, container: Container, lifetimes: Lifetimes) -> None:
        self._container = container
        self._lifetimes = lifetimes
        self.unacknowledged: set[tuple[int, int, int]] = set()
        """The context, pass and worker of each abort that is not acknowledged yet."""

    def send(self, context: AutogradContext, pass_id: int, workers: Collection[int]) -> asyncio.Future[Any]:
        """Notify workers that a pass has failed; the future is done when all acknowledged, or retries are pointless."""
        # sent now, and not when the tasks have their first turn
        args = context.id, pass_id
        attempts = [
            self._lifetimes.own(self._retry(context, pass_id, to, self._lifetimes.notify(AutogradAbort, to, args)))
            for to in workers
        ]
        # an error can only be that this worker is shut down, and no caller needs it
        return asyncio.gather(*attempts, return_exceptions=True)

    async def _retry(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> None:
        abort = context.id, pass_id, to
        self.unacknowledged.add(abort)

        def is_moot() -> bool:
            """Whether the worker need not be notified: it is gone, or the context has ended, see `Lifetimes`."""
            peer = self._lifetimes.agent.peer(to)
            is_gone = peer is None or peer.is_dead or peer.state is PeerState.GONE
            return is_gone or context.id not in self._container.contexts

        try:
            if not await self._lifetimes.repeat(attempt, AutogradAbort, to, abort[:2], is_moot):
                logger.warning(
                    "worker %d has not acknowledged that backward pass %d of autograd context %d failed, and may "
                    "have gradients of it until it takes part in another one",
                    to,
                    pass_id,
                    context.id,
                )
        finally:
            self.unacknowledged.discard(abort)
