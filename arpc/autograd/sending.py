"""How parcels of a pass are sent: after the news of failed passes, if the peer has not heard of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from arpc.autograd.aborts import Aborts
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.passes import Sender
from arpc.autograd.protocol import Parcel, pack_parcel
from arpc.errors import RpcTimeoutError
from arpc.wire.messages import AutogradGradients

__all__ = ["ParcelSender"]


class ParcelSender:
    """Sends the parcels of one worker."""

    def __init__(self, lifetimes: Lifetimes, aborts: Aborts, name_of: Callable[[int], str]) -> None:
        self._lifetimes = lifetimes
        self._aborts = aborts
        self._name_of = name_of

    def send(self, backward_pass: Sender, to: int, parcel: Parcel) -> asyncio.Future[Any]:
        """Send a parcel; the future has the parcel that comes with the answer."""
        context, deadline = backward_pass.context, backward_pass.deadline
        lifetimes = self._lifetimes
        if to in context.unheard:
            return lifetimes.own(self._send_after_news(backward_pass, to, parcel))
        packed = pack_parcel(parcel, context.id, backward_pass.id, int(backward_pass.retain_graph))
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - lifetimes.agent.loop.time())
        return lifetimes.request(AutogradGradients, to, (packed,), timeout_s)

    async def _send_after_news(self, backward_pass: Sender, to: int, parcel: Parcel) -> Any:
        """Send a parcel once the worker that it is for knows of all passes that have failed."""
        try:
            async with asyncio.timeout_at(backward_pass.deadline):
                await self._aborts.settle(backward_pass.context, to)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"worker {self._name_of(to)!r} could not be told in time of another pass that has failed"
            ) from error
        return await self.send(backward_pass, to, parcel)
