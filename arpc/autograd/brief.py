"""A pass on the worker that began it, in the simplest and most frequent case.

The graph of the roots is small and runs at once, and what was sent to others were leaves: the gradients that come back
need nothing to be run. Then one parcel goes to each of the others, and one answer comes from each. As soon as anything
else happens, a `BackwardPass` goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arpc import torchstate
from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.context import AutogradContext, Send
from arpc.autograd.failure import node_failure, peer_failure
from arpc.autograd.passes import BackwardPass, Host, take_only_answer
from arpc.autograd.protocol import PackedParcel, Parcel, unpack_parcel
from arpc.autograd.survey import Expectation, IsHeeded, Survey, are_plain_leaves, survey
from arpc.errors import AutogradError

__all__ = ["BriefPass"]


class BriefPass:
    """A pass that may turn out to be brief. To others it is a `BackwardPass`."""

    failure: BaseException | None = None
    is_over = False
    _abort_told: asyncio.Future[Any] | None = None
    _full: BackwardPass | None = None
    """Who has taken over."""
    _over: asyncio.Future[None] | None = None

    def __init__(
        self,
        host: Host,
        context: AutogradContext,
        pass_id: int,
        *,
        retain_graph: bool,
        deadline: float | None,
        usual_timeout_s: float | None,
        unfold: Callable[[dict[int, Send]], BackwardPass],
    ) -> None:
        """``unfold`` makes what takes over, given the sends that are not resolved."""
        self.id = pass_id
        self.context = context
        self.retain_graph = retain_graph
        self.deadline = deadline
        self.usual_timeout_s = usual_timeout_s
        self._host = host
        self._unfold = unfold
        self._unresolved = dict(context.sends)
        self._used: list[int] = []
        self._leaves = LeafGradients()
        self._told: dict[int, bool] = {}
        """The others, and whether they were asked what they will send."""
        self._heard: list[int] = []
        self._outstanding: dict[asyncio.Future[PackedParcel | None], int] = {}

    def try_to_start(self, roots: Sequence[Tensor], is_heeded: IsHeeded, expectation: Expectation) -> bool:
        """Begin, to be followed by `wait` at once. False, and nothing has happened, if a `BackwardPass` has to."""
        context, me = self.context, self._host.info.id
        if context.running_thread is not None:
            return False
        for send in self._unresolved.values():
            if send.to == me or not are_plain_leaves(send.source.edges, is_heeded):
                return False
        edges = [(root.grad_fn, root.output_nr) for root in roots]
        graph = survey(edges, is_heeded, expectation, retain_graph=self.retain_graph)
        if graph is None:
            return False
        for record in graph.records:
            if record.sender == me:
                return False
        context.active_pass = self
        try:
            gradients = [torch.ones_like(root) for root in roots]
            if not graph.try_to_run(edges, gradients, self._host.pace, self._leaves):
                context.active_pass = None
                return False
            self._post(graph)
        except Exception as error:  # noqa: BLE001 - whatever nodes and hooks of users raise
            self.fail(node_failure(error, self._host.info, context.id, None))
        except BaseException as error:
            self.fail(AutogradError(f"the backward pass of context {context.id} was ended by {error!r}"))
            raise
        return True

    def _post(self, graph: Survey) -> None:
        delivered = graph.delivered
        for record in graph.records:
            if record.sender not in delivered:
                delivered[record.sender] = []
        for send in self._unresolved.values():
            if send.to not in delivered:
                delivered[send.to] = []
        for peer, gradients in delivered.items():
            # Who gets gradients need not be asked what it will send: nothing here waits for that but the end
            asks = self._told[peer] = not gradients
            future = self._host.send(self, peer, Parcel(gradients, True, (), asks))
            self._outstanding[future] = peer
        if not delivered:
            self._finish()

    # -- what happens to it

    async def wait(self) -> None:
        """Until it is over. Raises why it failed."""
        if len(self._outstanding) == 1:
            await take_only_answer(*next((peer, future) for future, peer in self._outstanding.items()), self._answered)
        elif not self.is_over:
            self._over = asyncio.get_running_loop().create_future()
            for future, peer in self._outstanding.items():
                future.add_done_callback(partial(self._answered, peer))
                del future
            await self._over
        if self._full is not None:
            await self._full.wait()
        elif self.failure is not None:
            # given away: its traceback leads to this frame
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure

    def receive(self, sender: int, parcel: Parcel, *, is_engaging: bool) -> Parcel | None:
        """A parcel has come that is no answer."""
        return self._take_over().receive(sender, parcel, is_engaging=is_engaging)

    def fail(self, error: BaseException, *, told_by: int | None = None) -> None:
        """End it with an error, and take back what it computed; see `BackwardPass.fail`."""
        if self._full is not None:
            self._full.fail(error, told_by=told_by)
        elif not self.is_over:
            self.failure = error
            self._end()
            self.context.roll_back(self.id)
            for future in list(self._outstanding):
                future.cancel()
            self._abort_told = self._host.abort(self.context, self.id, told_by)

    def cancel(self) -> None:
        """Whoever began it is cancelled; see `BackwardPass.cancel`."""
        if self._full is not None:
            self._full.cancel()
        elif self.is_over and self.failure is None:
            self.context.roll_back(self.id)
            self._abort_told = self._host.abort(self.context, self.id)
        else:
            self.fail(AutogradError(f"backward pass {self.id} was cancelled"))

    @property
    def abort_told(self) -> asyncio.Future[Any] | None:
        """Done when all workers have heard of the failure."""
        return self._abort_told if self._full is None else self._full.abort_told

    # -- answers

    def _answered(self, peer: int, future: asyncio.Future[PackedParcel | None]) -> None:
        self._outstanding.pop(future, None)
        if self._full is not None:
            self._full.answered(peer, future)
            return
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if self.is_over:
            return
        if error is not None:
            self.fail(peer_failure(error, self._host.info.id, self.context.id, self._host.name_of(peer)))
            return
        # A callback of the loop may run between two steps of a task that has switched something off for itself
        outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
        try:
            self._take(peer, future.result())
            if self._full is None and not self._outstanding:
                if self._unresolved:
                    self._take_over().receive(peer, Parcel(), is_engaging=True)
                else:
                    self._finish()
        except Exception as malformed:  # noqa: BLE001 - it must end here, whatever a peer has sent
            self.fail(node_failure(malformed, self._host.info, self.context.id, None))
        finally:
            if outer is not None:
                torchstate.restore(outer)

    def _take(self, peer: int, answer: PackedParcel | None) -> None:
        """Resolve what an answer resolves."""
        if answer is None:
            return
        parcel, _ = unpack_parcel(answer)
        unresolved = self._unresolved
        gradients, is_first, still_open, _ = parcel
        if not is_first or still_open or not all(message_id in unresolved for message_id, _ in gradients):
            self._take_over().receive(peer, parcel, is_engaging=True)
            return
        self._heard.append(peer)
        for message_id, tensors in gradients:
            self._used.append(message_id)
            for (node, _), gradient in zip(unresolved.pop(message_id).source.edges, tensors, strict=True):
                if gradient is not None:
                    self._leaves.add(node.variable, gradient)
        for message_id in [message_id for message_id, send in unresolved.items() if send.to == peer]:
            del unresolved[message_id]  # it gets none

    def _take_over(self) -> BackwardPass:
        """Let a `BackwardPass` go on from here."""
        full = self._full = self._unfold(self._unresolved)
        waiting = {send.to for send in self._unresolved.values()}.difference(self._heard)
        # those that were not asked, and have not said by themselves, are to be told again
        told = [peer for peer, was_asked in self._told.items() if was_asked or peer not in waiting]
        full.take_over(self._leaves, self._used, told, self._heard, self._outstanding)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        return full

    # -- the end

    def _finish(self) -> None:
        gradients = self._leaves.take()  # first: what a peer has sent for them may be no gradients
        self._end()
        self.context.commit(self.id, gradients)

    def _end(self) -> None:
        self.is_over = True
        context = self.context
        context.active_pass = None
        context.sends_used += len(self._used)
        if not self.retain_graph:  # what was gone through is freed
            for message_id in self._used:
                context.sends.pop(message_id, None)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
