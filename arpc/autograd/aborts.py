"""Passes that have failed: everybody who may have gradients of one hears of it, before any of a later pass.

The news is told again until it has been heard, or is for nobody any more. It may arrive twice, and late: whoever has
heard it once has taken back all there is to take back. And it may not arrive for long. So a worker that has not
confirmed it gets no gradients of a later pass before it has: those would come to lie on what is to be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import chain
from typing import Any, Final

from arpc.agent.peers.peer import PeerState
from arpc.autograd.context import AutogradContext, Container
from arpc.autograd.lifetime import Lifetimes, is_hopeless
from arpc.errors import ArpcError
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

    def tell(self, context: AutogradContext, pass_id: int, workers: Collection[int]) -> asyncio.Future[Any]:
        """Let workers know that a pass has failed; the future is done when they do, or it makes no sense to go on."""
        if not context.unheard:
            context.unheard = {}  # and not the one that all contexts share
        all_telling: list[asyncio.Task[None]] = []
        for to in workers:
            telling = self._lifetimes.own(self._tell(context, pass_id, to, self._attempt(context, pass_id, to)))
            context.unheard.setdefault(to, {})[pass_id] = telling
            all_telling.append(telling)
        # an error, which is that this worker is shut down, is for nobody
        return asyncio.gather(*all_telling, return_exceptions=True)

    async def settle(self, context: AutogradContext, to: int) -> None:
        """Return once a worker knows of all passes of a context that have failed. Raises why it cannot be told."""
        for pass_id, telling in list(context.unheard.get(to, {}).items()):
            try:
                await self._attempt(context, pass_id, to)
            except (ArpcError, OSError):
                # cancelled, this leaves the others to their work
                await asyncio.wait([telling])
                if pass_id in context.unheard.get(to, ()):
                    raise
            else:
                _note_heard(context, pass_id, to)

    def _attempt(self, context: AutogradContext, pass_id: int, to: int) -> asyncio.Future[Any]:
        return self._lifetimes.notify(AutogradAbort, to, (context.id, pass_id), self._lifetimes.attempt_s)

    async def _tell(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> None:
        backoff_s = self._options.control_backoff
        delays = (backoff_s * _BACKOFF_FACTOR**number for number in range(self._options.control_retries))
        # a connection that broke may be there again at once
        for delay_s in chain([0.0], delays):
            await asyncio.wait([attempt])
            if self._is_over(context, pass_id, to, attempt):
                return
            await asyncio.sleep(delay_s)
            # it may have been told meanwhile, because a pass had something for it
            if pass_id not in context.unheard.get(to, ()):
                return
            attempt = self._attempt(context, pass_id, to)
        await asyncio.wait([attempt])
        if not self._is_over(context, pass_id, to, attempt):
            logger.warning(
                "worker %d did not hear that backward pass %d of autograd context %d has failed, and may have "
                "gradients of it: it takes part in no other pass of the context before it does",
                to,
                pass_id,
                context.id,
            )

    def _is_over(self, context: AutogradContext, pass_id: int, to: int, attempt: asyncio.Future[Any]) -> bool:
        """Whether there is nothing to tell any more. A context that has ended is told of in its own way."""
        error = attempt.exception()
        if error is None or is_hopeless(error) or self._is_gone(to):
            _note_heard(context, pass_id, to)
            return True
        return context.id not in self._container.contexts

    def _is_gone(self, to: int) -> bool:
        peer = self._lifetimes.agent.peer(to)
        return peer is None or peer.is_dead or peer.state is PeerState.GONE


def _note_heard(context: AutogradContext, pass_id: int, to: int) -> None:
    unheard = context.unheard.get(to)
    if unheard is not None:
        unheard.pop(pass_id, None)
        if not unheard:
            del context.unheard[to]
