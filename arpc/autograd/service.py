"""Distributed autograd of one worker, as the agent meets it: an interceptor, handlers, and an ear for lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from arpc.agent.agent import Agent
from arpc.agent.hooks.observers import Kind
from arpc.agent.scope import current_scope
from arpc.agent.server.functions import Prompt
from arpc.agent.server.thread_pool import ThreadPool
from arpc.autograd.aborts import Aborts
from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.at_once import run_at_once
from arpc.autograd.brief import BriefPass
from arpc.autograd.context import AutogradContext, Container, Send
from arpc.autograd.engine import LocalEngine, Source
from arpc.autograd.fallback import choose_engine
from arpc.autograd.graph import Planner
from arpc.autograd.heeded import is_heeded
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.local_pass import LocalPass, Threads
from arpc.autograd.lone import LonePass, is_lone
from arpc.autograd.pace import Pace
from arpc.autograd.passes import WALK_NODES, BackwardPass, Brief
from arpc.autograd.protocol import (
    NOTHING_LIVE,
    PackedParcel,
    Parcel,
    pack_parcel,
    unpack_parcel,
)
from arpc.autograd.recording import Recorder
from arpc.autograd.roots import nodes_of_roots
from arpc.autograd.sending import ParcelSender
from arpc.autograd.survey import Expectation
from arpc.errors import AutogradError, RpcTimeoutError, WorkerLostError
from arpc.ids import LOCAL_BITS, WorkerInfo, address_of
from arpc.options import UNSET, RpcOptions, Unset
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef
from arpc.user_errors import fresh, is_a
from arpc.wire.messages import (
    AutogradAbort,
    AutogradBackward,
    AutogradGradients,
    AutogradQuery,
    AutogradRelease,
    Message,
)

__all__ = ["AutogradService"]

_AnswerOfHandler: TypeAlias = "PackedParcel | Coroutine[Any, Any, Any] | None"


_is_anomaly_enabled: Final = torch._C.is_anomaly_enabled  # what `torch.is_anomaly_enabled` calls
_ABORT_S: Final = 5.0
"""How long a pass that has failed waits for the others to hear of it."""
_REASON_S: Final = 1.0
"""How long one that was told so by a worker which did not begin it waits to hear why."""


class AutogradService:
    """The contexts of one worker, what is recorded in them, and the passes over them."""

    def __init__(self, options: RpcOptions, context: Context, rrefs: RRefContext) -> None:
        self.info = WorkerInfo("", -1)
        self.container = Container()
        self.recorder = Recorder(self.container)
        self.lifetimes = Lifetimes(self.container, options, context)
        self.aborts = Aborts(self.container, self.lifetimes, options)
        self.send = ParcelSender(self.lifetimes, self.aborts, self.name_of).send
        """See `passes.Host`."""
        self.threads: ThreadPool
        self.pace = Pace()
        self.is_heeded: Callable[[Any, Any], bool] = is_heeded
        """Of a leaf, and its node: whether torch is to accumulate its gradients, with all hooks. See `heeded`."""
        self.passes_begun = 0
        self._expected_of_roots = Expectation()
        self._expected_of_others = Expectation()
        self._expected_of_relays = Expectation()
        self._agent: Agent
        self._options = options
        self._rrefs = rrefs

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {
            AutogradGradients: Prompt(self._on_gradients),
            AutogradAbort: self._on_abort,
            AutogradBackward: self._on_backward,
            AutogradRelease: Prompt(self.lifetimes.on_release),
            AutogradQuery: self.lifetimes.on_query,
        }

    def attach(self, agent: Agent) -> None:
        """The agent that messages go through. It was made with this service's handlers, so it comes later."""
        self._agent = agent
        self.lifetimes.agent = agent
        self._rrefs.backward = self.backward_from
        # not those of the executor: they may all be taken by functions that wait for a backward pass
        self.threads = ThreadPool(agent.loop, self._options.num_worker_threads, f"{agent.info.name}-autograd")

    def identify(self, info: WorkerInfo) -> None:
        """The group has given this worker its id."""
        self.info = info
        self.container.identify(info.id)

    # -- told by the agent

    def peer_connected(self, peer: WorkerInfo) -> None:
        self.lifetimes.peer_connected(peer)

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        # passes need not be told: a parcel that is not answered fails them, and so does the loss of their parent
        self.lifetimes.peer_disconnected(peer, has_left=has_left)

    def wants(self, peer: WorkerInfo) -> bool:
        return False  # the creators of contexts are asked, whoever it was that is lost

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        # it may have been replaced by another of its name before its connection was seen to break
        self.lifetimes.peer_disconnected(peer, has_left=True)

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """Nothing is kept of it: contexts go by ids, which no other worker gets."""

    # -- for people

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """What has been accumulated on this worker in a context."""
        if self.container.has_left(context_id):
            return {}
        return dict(self.container.find(context_id).gradients)

    async def backward(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        retain_graph: bool,
        timeout: float | Unset = UNSET,
        threads: Threads | None = None,
        pass_id: int | None = None,
    ) -> None:
        """Run a pass from the roots, over all workers that they depend on.

        ``threads``: where nodes of this worker run that do not run on the loop.
        """
        context = self.container.find(context_id)
        deadline = self._deadline(timeout)
        nodes = nodes_of_roots(roots)
        if context.active_pass is not None:
            raise self._is_under_way(context)
        self.passes_begun += 1
        if pass_id is None:
            pass_id = self.container.new_pass_id()
        expected = self._expected_of_roots
        started: LocalPass | BriefPass | None = None
        if expected.to_pass_over:
            expected.to_pass_over -= 1  # a large one again, most likely: that takes no looking at it
        elif not self._agent.observers.installed:
            brief = BriefPass(self, context, pass_id, retain_graph, deadline, None, threads)
            if brief.try_to_start(roots, nodes, expected):
                started = brief
        if started is None:
            started = self._start(context, roots, nodes[: len(roots)], pass_id, retain_graph, deadline, threads)
        try:
            await started.wait()
        except BaseException as error:
            if is_a(error, asyncio.CancelledError):
                started.cancel()
            # also who is cancelled: the next pass must not meet this one, nor its gradients, anywhere
            if started.abort_told is not None:
                await asyncio.wait([started.abort_told], timeout=_ABORT_S)
            raise

    def _start(
        self,
        context: AutogradContext,
        roots: Sequence[Tensor],
        nodes: Sequence[Any],
        pass_id: int,
        retain_graph: bool,
        deadline: float | None,
        threads: Threads | None,
    ) -> LocalPass:
        """Begin a pass that is not brief. ``nodes``: those of the roots."""
        planner: Planner | None = None
        if not (
            context.sends
            or context.running_thread is not None
            or self._agent.observers.installed
            or _is_anomaly_enabled()
        ):
            planner = Planner([Source([(node, 0) for node in nodes], None)], is_heeded=self.is_heeded)
            if planner.walk(WALK_NODES) and is_lone(plan := planner.plan()):
                lone = LonePass(self, context, pass_id, retain_graph, deadline, threads)
                lone.start(roots, plan)
                return lone
        full = self._make_pass(
            context,
            pass_id,
            retain_graph=retain_graph,
            deadline=deadline,
            parent=None,
            roots=roots,
            threads=threads,
            planner=planner,
        )
        full.start()
        return full

    async def backward_from(
        self,
        rref: RRef[Any],
        context_id: int,
        retain_graph: bool,
        timeout: float | Unset = UNSET,
        threads: Threads | None = None,
    ) -> None:
        """Run a pass from the value of an RRef, on its owner. ``threads`` is that of `backward`, for an own value."""
        deadline = self._deadline(timeout)
        if rref.is_owner():
            try:
                async with asyncio.timeout_at(deadline):
                    value = await rref.local_value()
            except TimeoutError as error:
                raise RpcTimeoutError(f"{rref!r} had no value in time for a backward pass from it") from error
            pass_id = self.container.new_pass_id()
            await self._backward_from_value(value, context_id, pass_id, retain_graph, timeout, threads)
            return
        if context_id == -1:
            raise AutogradError("User RRefs require 'dist_autograd_ctx_id' to be specified: pass ctx_id")
        context = self.container.find(context_id)
        context.known_workers.add(rref.owner().id)
        context.calls_made += 1  # it brings the context to the owner as a call does, which may be leaving it
        pass_id = self.container.new_pass_id()
        args = (*rref._target(), context_id, pass_id, retain_graph)  # noqa: SLF001 - how calls name the value to its owner
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - self._agent.loop.time())
        try:
            await self.lifetimes.request(AutogradBackward, address_of(rref.owner()), args, timeout_s)
        except (WorkerLostError, RpcTimeoutError, asyncio.CancelledError):
            # who began the pass tells the others if it fails: that was the owner, which is lost or may have succeeded
            context.roll_back(pass_id)
            if (told := self.abort(context, pass_id)) is not None:
                await asyncio.wait([told], timeout=_ABORT_S)
            raise
        context.calls_answered += 1

    async def _backward_from_value(
        self,
        value: Any,
        context_id: int,
        pass_id: int,
        retain_graph: bool,
        timeout: float | Unset,
        threads: Threads | None = None,
    ) -> None:
        if not isinstance(value, Tensor):
            raise AutogradError(f"RRef should contain a tensor for .backward(), not {type(value).__qualname__}")
        if context_id == -1:
            await (threads or self.threads).call(partial(value.backward, retain_graph=retain_graph))
        else:
            await self.backward(context_id, [value], retain_graph, timeout, threads, pass_id)

    def _deadline(self, timeout: float | Unset) -> float | None:
        """When a pass has to be over."""
        timeout_s = self._options.rpc_timeout if isinstance(timeout, Unset) else timeout
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout!r}")
        own = self._agent.loop.time() + timeout_s if timeout_s else None
        scope = current_scope.get()
        if scope is None or (inherited := scope.deadline) is None:
            return own
        return inherited if own is None else min(own, inherited)

    def _is_under_way(self, context: AutogradContext) -> AutogradError:
        """Why a pass cannot begin here."""
        return AutogradError(
            f"a backward pass of autograd context {context.id} is under way already, on worker "
            f"{self.info.name!r}: await it before the next one, or use a context for each"
        )

    def _make_pass(
        self,
        context: AutogradContext,
        pass_id: int,
        sends: Mapping[int, Send] | None = None,
        *,
        retain_graph: bool,
        deadline: float | None,
        parent: int | None,
        roots: Sequence[Tensor] = (),
        threads: Threads | None = None,
        planner: Planner | None = None,
    ) -> BackwardPass:
        make_engine: Callable[..., LocalEngine] = choose_engine()
        if planner is not None:
            make_engine = partial(make_engine, planner=planner)
        elif self.is_heeded is not is_heeded:
            make_engine = partial(make_engine, is_heeded=self.is_heeded)
        made = BackwardPass(
            self,
            context,
            pass_id,
            make_engine,
            retain_graph=retain_graph,
            deadline=deadline,
            parent=parent,
            roots=roots,
            threads=threads,
            sends=sends,
        )
        made.activity = self._agent.observers.begin_activity("backward", Kind.BACKWARD)
        return made

    # -- for passes

    def unfold(self, brief: Brief, sends: Mapping[int, Send]) -> BackwardPass:
        """What takes over from a pass that is not brief after all, given the sends that are not resolved."""
        return self._make_pass(
            brief.context,
            brief.id,
            sends,
            retain_graph=brief.retain_graph,
            deadline=brief.deadline,
            parent=brief.parent,
            threads=brief.threads,
        )

    def abort(self, context: AutogradContext, pass_id: int, but: int | None = None) -> asyncio.Future[Any] | None:
        """Tell all who know a context that a pass has failed; the future is done when they have heard."""
        context.aborts_told |= {pass_id}
        others = context.known_workers - {self.info.id, but}
        return self.aborts.tell(context, pass_id, others) if others else None

    def name_of(self, worker: int) -> str:
        peer = self._agent.peer(worker)
        return peer.info.name if peer is not None else str(worker)

    # -- handlers

    def _on_gradients(self, packed: PackedParcel) -> _AnswerOfHandler:
        scope = current_scope.get()
        assert scope is not None
        assert scope.caller is not None  # this is a handler
        return self._take(scope.caller.id, *unpack_parcel(packed, heading=3))

    def _take(self, caller: int, parcel: Parcel, numbers: Sequence[int]) -> _AnswerOfHandler:
        context_id, pass_id, retain_graph = numbers[:3]
        context = self.container.contexts.get(context_id)
        if context is None:
            if parcel.gradients:
                self.container.find(context_id)
            if self.container.has_told_that_it_left(context_id, pass_id, caller):
                return None  # which the answer says that is on its way, and this would be there first
            # what was sent to here has not come, or nobody wants it any more
            self.container.tell_early(context_id, pass_id, caller, has_announced=parcel.is_first)
            return pack_parcel(NOTHING_LIVE)
        if pass_id in context.aborted_passes:
            if context.last_failed == (pass_id, caller):
                return None  # why it failed is on its way there, and this would hide it
            raise AutogradError(f"the backward pass {pass_id} of autograd context {context_id} has failed")
        active: LocalPass | BriefPass | None = context.active_pass
        if active is not None:
            if active.id != pass_id:
                raise self._is_under_way(context)
            riding = active.receive(caller, parcel, is_engaging=False)
            if active.failure is not None:
                raise fresh(active.failure)  # the parent is told as well
            return None if riding is None else pack_parcel(riding)
        if pass_id == context.last_pass:
            # All that was live has been answered for. But that may be on its way to whoever was told what it is, and
            # this would be there first.
            return None if caller in context.last_announced_to else pack_parcel(NOTHING_LIVE)
        return self._begin(context, pass_id, bool(retain_graph), caller, parcel)

    def _begin(
        self, context: AutogradContext, pass_id: int, retains: bool, caller: int, parcel: Parcel
    ) -> _AnswerOfHandler:
        """Take part in a pass that was not known here."""
        self.passes_begun += 1
        if self._agent.observers.installed or pass_id in context.told_early:
            return self._engage(context, pass_id, retains, caller, parcel)
        answer = run_at_once(self, context, pass_id, caller, parcel, self._expected_of_others, retains)
        if answer is None:
            return self._engage(context, pass_id, retains, caller, parcel)
        gradients, has_left = answer
        return pack_parcel(Parcel(gradients, is_first=True, leaves=has_left))

    def _engage(
        self, context: AutogradContext, pass_id: int, retain_graph: bool, caller: int, parcel: Parcel
    ) -> _AnswerOfHandler:
        """Take part in a pass for longer than a moment."""
        _, deadline = _caller()
        engaged: BackwardPass | BriefPass
        engaged = brief = BriefPass(self, context, pass_id, retain_graph, deadline, caller)
        told = context.told_early.get(pass_id, {})
        if told or self._agent.observers.installed or not brief.try_to_pass_on(parcel, self._expected_of_relays):
            # What has been sent since to those who had announced before it was known here gets nothing in this pass
            sends = {message_id: send for message_id, send in context.sends.items() if not told.get(send.to)}
            engaged = self._make_pass(
                context, pass_id, sends, retain_graph=retain_graph, deadline=deadline, parent=caller
            )
            if told:
                heard = [worker for worker, has_announced in told.items() if has_announced]
                engaged.take_over(LeafGradients(), (), told, (), heard, ())
            engaged.receive(caller, parcel, is_engaging=True)
        return self._answer_of(engaged) if engaged.is_over else self._wait_for_answer(engaged, caller)

    async def _wait_for_answer(self, engaged: BackwardPass | BriefPass, caller: int) -> PackedParcel | None:
        try:
            await engaged.wait()
        except asyncio.CancelledError:
            # Who cancels tells all others, too. But it may be lost, and nobody else know why there is no more to come
            ended = AutogradError(f"backward pass {engaged.id} was cancelled by worker {self.name_of(caller)!r}")
            engaged.fail(ended, told_by=caller)
            raise
        return self._answer_of(engaged)

    def _answer_of(self, ended: BackwardPass | BriefPass) -> PackedParcel | None:
        """What the worker that engaged this one is told at the end. Raises why the pass failed."""
        ended.raise_failure()
        return None if ended.answer is None else pack_parcel(ended.answer)

    async def _on_backward(
        self, rref: int, is_created: bool, context_id: int, pass_id: int, retain_graph: bool
    ) -> None:
        value = await self._rrefs.value(rref, is_created=is_created)
        context = self.container.enter(context_id)
        if context is not None:
            context.known_workers.add(_caller()[0])
            if pass_id in context.aborted_passes:
                raise AutogradError(f"the backward pass {pass_id} of autograd context {context_id} has failed")
        # who asked has set the deadline of this handler, if any
        await self._backward_from_value(value, context_id, pass_id, retain_graph, timeout=0)

    async def _on_abort(self, context_id: int, pass_id: int) -> None:
        context = self.container.contexts.get(context_id)
        if context is None:
            self.container.fail_early(context_id, pass_id)
            return
        # One that failed here is told on: only its parent has heard, and others may have finished their part
        if pass_id in context.aborts_told:
            return
        caller, _ = _caller()
        active: LocalPass | BriefPass | None = context.active_pass
        if active is not None and active.id == pass_id and pass_id >> LOCAL_BITS != caller and active.unanswered:
            # Why it failed comes with an answer, unless it failed above this worker, which then hears from there, too
            patience_s = min(_REASON_S, self.lifetimes.attempt_s / 2)  # or who tells it would give up
            await asyncio.wait(active.unanswered, timeout=patience_s, return_when=asyncio.FIRST_EXCEPTION)
            if pass_id in context.aborts_told or context_id not in self.container.contexts:
                return
            active = context.active_pass
        told: asyncio.Future[Any] | None
        if active is not None and active.id == pass_id:
            active.fail(
                AutogradError(f"backward pass {pass_id} was ended by worker {self.name_of(caller)!r}"), told_by=caller
            )
            told = active.abort_told
        else:
            context.roll_back(pass_id)
            told = self.abort(context, pass_id, caller)
        if told is not None:
            # Who asks may give up, and the others are told all the same
            await asyncio.wait([told], timeout=_ABORT_S)

    # -- the end

    def close(self) -> None:
        """Take part in nothing any more."""
        self.lifetimes.close()
        for context_id in list(self.container.contexts):
            self.lifetimes.forget(context_id)
        self.threads.close()

    def statistics(self) -> dict[str, int]:
        contexts = self.container.contexts.values()
        return {
            "contexts": len(contexts),
            "passes": sum(context.active_pass is not None for context in contexts),
            "passes_begun": self.passes_begun,
            "sends": sum(len(context.sends) for context in contexts),
            "recvs": sum(len(context.recvs) for context in contexts),
        }


def _caller() -> tuple[int, float | None]:
    scope = current_scope.get()
    assert scope is not None
    assert scope.caller is not None  # these are handlers
    return scope.caller.id, scope.deadline
