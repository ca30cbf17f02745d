"""How parcels of a pass are sent: after the news of failed passes, if the peer has not heard of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from arpc.agent.agent import Agent
from arpc.autograd.aborts import Aborts
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.passes import Sender
from arpc.autograd.protocol import Parcel, parcel_parts
from arpc.errors import RpcTimeoutError
from arpc.wire.messages import AutogradGradients

__all__ = ["ParcelSending"]


class ParcelSending:
    """The part of an `AutogradService` that does it; the rest is in the class that inherits."""

    aborts: Aborts
    lifetimes: Lifetimes
    name_of: Callable[[int], str]
    _agent: Agent

    def send(self, backward_pass: Sender, to: int, parcel: Parcel) -> asyncio.Future[Any]:
        """Send a parcel; the future has the parcel that comes with the answer."""
        context = backward_pass.context
        if to in context.unheard:
            return self.lifetimes.own(self._send_after_news(backward_pass, to, parcel))
        head, tensors = parcel_parts(parcel, context.id, backward_pass.id, int(backward_pass.retain_graph))
        deadline = backward_pass.deadline
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - self._agent.loop.time())
        return self.lifetimes.request(AutogradGradients, to, ([head, *tensors],), timeout_s)

    async def _send_after_news(self, backward_pass: Sender, to: int, parcel: Parcel) -> Any:
        """Send a parcel once the worker that it is for knows of all passes that have failed."""
        try:
            async with asyncio.timeout_at(backward_pass.deadline):
                await self.aborts.settle(backward_pass.context, to)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"worker {self.name_of(to)!r} could not be told in time of another pass that has failed"
            ) from error
        return await self.send(backward_pass, to, parcel)
