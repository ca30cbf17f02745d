"""A pass in the simplest and most frequent cases: what can run at once runs, and the rest when all answers are there.

Such a worker began the pass, or passes on what came with the one parcel that engaged it. The graph is small. One parcel
goes to each of the others, one answer comes from each, and the gradients in these are for leaves, or for a part of the
graph that leads to no other worker than the one that engaged this one. So nobody waits for what is known here before
the end, and nobody need be asked for what is known there before that. As soon as anything else happens, a
`BackwardPass` goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc import torchstate
from arpc.agent.client.future import Future
from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.context import AutogradContext, Send
from arpc.autograd.failure import node_failure, peer_failure
from arpc.autograd.local_pass import Threads
from arpc.autograd.nodes import LeafNode, edge_into
from arpc.autograd.passes import BackwardPass, Host, take_only_answer
from arpc.autograd.protocol import PackedParcel, Parcel, unpack_parcel
from arpc.autograd.survey import Expectation, Survey, are_apart, survey
from arpc.errors import AutogradError

__all__ = ["BriefPass"]

_leaf_class: Any = LeafNode
_ones_like = torch.ones_like


class BriefPass:
    """A pass that may turn out to be brief. To others it is a `BackwardPass`."""

    failure: BaseException | None = None
    is_over = False
    _answer: Parcel | None = None
    _abort_told: asyncio.Future[Any] | None = None
    _full: BackwardPass | None = None
    """Who has taken over."""
    _over: asyncio.Future[None] | None = None
    _may_leave = False
    """Who engaged this worker has no calls under way, and lets it forget the context if nothing of it stays here."""
    _calls_made = -1
    """How many calls of the context had been made when others were told."""
    _rest: Survey | None = None
    """What is to run when all answers are there."""
    _for_parent: Sequence[tuple[int, Sequence[Tensor | None]]] = ()
    """The gradients that came of it."""

    def __init__(
        self,
        host: Host,
        context: AutogradContext,
        pass_id: int,
        retain_graph: bool,
        deadline: float | None,
        parent: int | None = None,
        threads: Threads | None = None,
    ) -> None:
        self.id = pass_id
        self.context = context
        self.retain_graph = retain_graph
        self.deadline = deadline
        self.parent = parent
        self.threads = threads
        self._host = host
        self._unresolved = context.sends.copy()
        self._arrived: dict[int, list[tuple[int, Send, Sequence[Tensor | None]]]] = {}
        """What waits to be run, by the worker that it came from: the gradients of messages."""
        self._used: list[int] = []
        self._leaves = LeafGradients()
        self._told: dict[int, bool] = {}
        """The others, and whether they are asked what they will send."""
        self._heard: list[int] = []
        self._outstanding: dict[asyncio.Future[PackedParcel | None], int] = {}

    def try_to_start(
        self,
        roots: Sequence[Any],
        nodes: list[Any],
        expectation: Expectation,
        gradients: Sequence[Tensor] | None = None,
    ) -> bool:
        """Begin, to be followed by `wait` at once. False, and nothing has happened, if a `BackwardPass` has to.

        ``roots`` are tensors, or edges that gradients came for, and ``nodes`` is a list of theirs, which grows.
        """
        context, host = self.context, self._host
        graph = self._look(nodes, expectation)
        if graph is None:
            return False
        context.active_pass = self
        try:
            if gradients is None:
                gradients = list(map(_ones_like, roots))
            delivered = graph.try_to_run(roots, gradients, self.retain_graph, host.pace, self._leaves)
            if delivered is None:
                context.active_pass = None
                return False
            told = self._told
            calls_made = self._calls_made = context.calls_made
            # One of its calls that is under way to a worker may need what that worker would forget
            is_calm = calls_made == context.calls_answered
            for peer in told:
                letter = delivered.get(peer, ())
                # Who gets gradients need not be asked what it will send: nothing here waits for that but the end
                asks = told[peer] = not letter
                future = host.send(self, peer, Parcel(letter, True, (), asks, is_calm))
                self._outstanding[future] = peer
            if not told:
                self._finish()
        except BaseException as error:  # noqa: BLE001 - whatever nodes and hooks of users raise
            self.fail(node_failure(error, host.info, context.id, None))
        return True

    def try_to_pass_on(self, parcel: Parcel, expectation: Expectation) -> bool:
        """Begin with the parcel that engaged this worker, see `try_to_start`."""
        gradients, is_first, open_there, asks, self._may_leave = parcel
        # One that has no more to send and does not ask has nothing to run before this one's answer, nor has anybody
        # who waits for it
        if not is_first or open_there or asks:
            return False
        unresolved = self._unresolved
        roots: list[GradientEdge] = []
        entering: list[Tensor] = []
        nodes: list[Any] = []
        for message_id, tensors in gradients:
            send = unresolved.pop(message_id, None)
            if send is None or send.to != self.parent:
                return False
            self._used.append(message_id)
            for (node, place), gradient in zip(send.edges, tensors, strict=True):
                if gradient is not None:
                    roots.append(edge_into((node, place, None)))
                    entering.append(gradient)
                    nodes.append(node)
        for message_id in [message_id for message_id, send in unresolved.items() if send.to == self.parent]:
            del unresolved[message_id]  # it gets none
        return self.try_to_start(roots, nodes, expectation, entering)

    def _look(self, nodes: list[Any], expectation: Expectation) -> Survey | None:
        """What is to run at once, if all that is known here allows for a brief pass. Notes who is to be told."""
        if self.context.running_thread is not None:
            return None
        host, parent, told = self._host, self.parent, self._told
        is_heeded = host.is_heeded
        graph = survey(nodes, is_heeded, expectation)
        if graph is None:
            return None
        for recv in graph.recvs:  # who gets gradients, before those who are only asked
            told[recv.record.sender] = True
        later: list[Any] = []
        for send in self._unresolved.values():
            told[send.to] = True
            for node, _ in send.edges:
                if node.__class__ is not _leaf_class:
                    later.append(node)
                elif node.variable._backward_hooks or is_heeded(node, node.variable):  # noqa: SLF001 - torch has no other way to ask
                    return None  # they are to run with all its gradients
        if host.info.id in told or parent in told:
            return None
        if later:
            rest = self._rest = survey(later, is_heeded, expectation)
            if rest is None or not are_apart(graph, rest):
                return None
            for recv in rest.recvs:
                if recv.record.sender != parent:
                    return None
        return graph

    # -- what happens to it

    async def wait(self) -> None:
        """Until it is over. Raises why it failed."""
        if len(self._outstanding) == 1:
            future, peer = next(iter(self._outstanding.items()))
            waiting = take_only_answer(peer, future, self._answered)
            del future  # whose error has this frame in its traceback: the whole graph would be in a cycle
            await waiting
        elif not self.is_over:
            self._over = asyncio.get_running_loop().create_future()
            for future, peer in self._outstanding.items():
                future.add_done_callback(partial(self._answered, peer))
                del future
            await self._over
        if self._full is not None:
            await self._full.wait()
        elif self.failure is not None:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise why it failed, if it has; see `BackwardPass.raise_failure`."""
        if self._full is not None:
            self._full.raise_failure()
        elif self.failure is not None:
            # given away: its traceback leads to frames that have this pass
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure

    @property
    def answer(self) -> Parcel | None:
        """What the answer to the parent carries."""
        return self._answer if self._full is None else self._full.answer

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
            self.context.roll_back(self.id, self.parent)
            for future in list(self._outstanding):
                _let_go(future)
            if self.parent is None or told_by is not None:
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

    @property
    def unanswered(self) -> list[asyncio.Future[PackedParcel | None]]:
        """The parcels that others have not answered."""
        return list(self._outstanding)

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
                elif not self._arrived or self._try_to_run_rest():
                    self._finish()
                else:
                    self._take_over()
        except BaseException as malformed:  # noqa: BLE001 - it must end here, whatever a peer has sent or a hook raises
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
        gradients, is_first, still_open, _, has_left = parcel
        if not is_first or still_open:
            self._take_over().receive(peer, parcel, is_engaging=True)
            return
        for message_id, _ in gradients:
            if message_id not in unresolved:
                self._take_over().receive(peer, parcel, is_engaging=True)
                return
        self._heard.append(peer)
        if has_left and self.context.calls_made == self._calls_made:
            self.context.known_workers.discard(peer)  # it has no more to hear of the context, not even its end
        for message_id, tensors in gradients:
            send = unresolved.pop(message_id)
            if self._rest is not None and any(node.__class__ is not _leaf_class for node, _ in send.edges):
                self._arrived.setdefault(peer, []).append((message_id, send, tensors))
                continue
            self._used.append(message_id)
            for (node, _), gradient in zip(send.edges, tensors, strict=True):
                if gradient is not None:
                    self._leaves.add(node.variable, gradient)
        if unresolved:
            for message_id in [message_id for message_id, send in unresolved.items() if send.to == peer]:
                del unresolved[message_id]  # it gets none

    def _try_to_run_rest(self) -> bool:
        """Run what waits for the answers, which are there now; False, and nothing has happened, if it takes long."""
        rest = self._rest
        assert rest is not None  # or nothing would wait
        roots: list[GradientEdge] = []
        entering: list[Tensor] = []
        for_leaves: list[tuple[Tensor, Tensor]] = []
        messages = [message for arrived in self._arrived.values() for message in arrived]
        for _, send, tensors in messages:
            for (node, place), gradient in zip(send.edges, tensors, strict=True):
                if gradient is None:
                    continue
                if node.__class__ is _leaf_class:
                    for_leaves.append((node.variable, gradient))
                else:
                    roots.append(edge_into((node, place, None)))
                    entering.append(gradient)
        if roots:
            delivered = rest.try_to_run(roots, entering, self.retain_graph, self._host.pace, self._leaves)
            if delivered is None:
                return False
            if self.parent in delivered:
                self._for_parent = delivered[self.parent]
        for leaf, gradient in for_leaves:
            self._leaves.add(leaf, gradient)
        self._used += [message_id for message_id, _, _ in messages]
        self._arrived = {}
        return True

    def _take_over(self) -> BackwardPass:
        """Let a `BackwardPass` go on from here."""
        arrived, self._arrived = self._arrived, {}
        waiting = {send.to for send in self._unresolved.values()}.difference(self._heard)
        sends = dict(self._unresolved)
        for messages in arrived.values():
            sends.update([(message_id, send) for message_id, send, _ in messages])
        full = self._full = self._host.unfold(self, sends)
        # those that were not asked, and have not said by themselves, are to be asked now
        unasked = [peer for peer, was_asked in self._told.items() if not was_asked and peer in waiting]
        full.take_over(self._leaves, self._used, self._told, unasked, self._heard, self._outstanding)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        for peer, messages in arrived.items():
            gradients = [(message_id, tensors) for message_id, _, tensors in messages]
            full.receive(peer, Parcel(gradients, is_first=True), is_engaging=True)
        return full

    # -- the end

    def _finish(self) -> None:
        gradients = self._leaves.take()  # first: what a peer has sent for them may be no gradients
        parent = self.parent
        # before the end: those of an earlier pass may not fit them any more, which fails this one
        self.context.commit(self.id, gradients, self._told if parent is None else (*self._told, parent))
        self._end()
        if parent is not None:
            has_left = self._may_leave and self._host.container.try_to_leave(self.context, self.id, parent)
            self._answer = Parcel(self._for_parent, is_first=True, leaves=has_left)

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


def _let_go(future: asyncio.Future[Any]) -> None:
    """Nobody needs the answer to a parcel any more, and its receiver is told. Who waits for it is not cancelled."""
    if isinstance(future, Future) and not future.done():
        future.set_result(None)
        future.withdraw()
    else:
        future.cancel()
