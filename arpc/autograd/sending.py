"""How parcels of a pass are sent: on the shortest way there is for most, and after news of failed passes for some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from arpc.agent.agent import Agent
from arpc.agent.future import Future
from arpc.autograd.aborts import Aborts
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.passes import Sender
from arpc.autograd.protocol import ASKS, IS_FIRST, LEAVES, SIMPLE_REQUEST, Parcel, parcel_parts
from arpc.errors import RpcTimeoutError
from arpc.wire.handful import PARCEL_ARGUMENT
from arpc.wire.messages import AutogradGradients

__all__ = ["ParcelSending"]

_pack_request: Final = SIMPLE_REQUEST.pack


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
        return self._send_plainly(backward_pass, to, head, tensors) or self._send_parts(
            backward_pass, to, head, tensors
        )

    def send_first(
        self,
        backward_pass: Sender,
        to: int,
        gradients: Sequence[tuple[int, Sequence[Any]]],
        *,
        asks: bool,
        leaves: bool,
    ) -> asyncio.Future[Any]:
        """The same for a parcel that is the first to a worker, and says that nothing else is open."""
        context = backward_pass.context
        if len(gradients) == 1 and to not in context.unheard:
            ((message_id, tensors),) = gradients
            bits = IS_FIRST | (ASKS if asks else 0) | (LEAVES if leaves else 0)
            head = _pack_request(0, context.id, backward_pass.id, backward_pass.retain_graph, bits, message_id)
            if (future := self._send_plainly(backward_pass, to, head, tensors)) is not None:
                return future
        return self.send(backward_pass, to, Parcel(gradients, True, (), asks, leaves))

    def _send_plainly(
        self, backward_pass: Sender, to: int, head: bytes, tensors: Sequence[Any]
    ) -> asyncio.Future[Any] | None:
        """Send the parts of a parcel on the shortest way there is; None, and nothing has happened, if it takes more."""
        agent = self._agent
        usual_s = backward_pass.usual_timeout_s
        if (
            usual_s is None
            or (peer := agent.peer(to)) is None
            or (payload := agent.codec.parcel(PARCEL_ARGUMENT, head, tensors)) is None
        ):
            return None
        future: Future[Any] = Future(loop=agent.loop)
        call_id = agent.request_plain(AutogradGradients, peer, payload, usual_s, future, backward_pass.has_one_answer)
        if not call_id:
            return None
        future.callee = peer
        future.call_id = call_id
        return future

    def _send_parts(self, backward_pass: Sender, to: int, head: bytes, tensors: Sequence[Any]) -> asyncio.Future[Any]:
        agent = self._agent
        deadline = backward_pass.deadline
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - agent.loop.time())
        return self.lifetimes.send_tensors(AutogradGradients, to, head, tensors, timeout_s)

    async def _send_after_news(self, backward_pass: Sender, to: int, parcel: Parcel) -> Any:
        """Send a parcel once the worker that it is for knows of all passes that have failed."""
        try:
            async with asyncio.timeout_at(backward_pass.deadline):
                await self.aborts.settle(backward_pass.context, to)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"worker {self.name_of(to)!r} could not be told in time of another pass that has failed"
            ) from error
        backward_pass.usual_timeout_s = None  # some of it has passed
        return await self.send(backward_pass, to, parcel)
