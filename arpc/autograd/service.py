"""Distributed autograd of one worker, as the agent uses it: an interceptor, handlers, and a watcher of lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeAlias

from torch import Tensor

from arpc.agent.agent import Agent
from arpc.agent.client.future import Future
from arpc.agent.hooks.observers import Kind
from arpc.agent.peers.link import PeerWatcher
from arpc.agent.scope import current_scope
from arpc.agent.server.functions import InlineHandler
from arpc.agent.server.thread_pool import ThreadPool
from arpc.autograd.aborts import Aborts
from arpc.autograd.contexts import AutogradContext, Container
from arpc.autograd.engine.accumulate_hooks import has_accumulate_hooks
from arpc.autograd.engine.run_policy import RunPolicy
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.passes.backward_pass import BackwardPass, Threads
from arpc.autograd.passes.messages import (
    NOTHING_LIVE,
    PackedParcel,
    Parcel,
    PassHeading,
    pack_parcel,
    unpack_parcel,
)
from arpc.autograd.passes.roots import check_roots
from arpc.autograd.recording import Recorder
from arpc.errors import ArpcError, AutogradError, ProtocolError, RpcTimeoutError, WorkerLostError
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
from arpc.wire.values.policy import UNRESTRICTED, Policy

__all__ = ["AutogradService"]

_AnswerOfHandler: TypeAlias = "PackedParcel | Coroutine[Any, Any, Any] | None"

_ABORT_S: Final = 5.0
"""How long a failed pass waits for the other workers to acknowledge the abort."""
_REASON_S: Final = 1.0
"""How long a worker waits for the reason of a failure, if the abort came from a worker that did not begin the pass."""


class AutogradService(PeerWatcher):
    """The contexts of one worker, the messages recorded in them, and the passes over them."""

    def __init__(
        self, options: RpcOptions, context: Context, rrefs: RRefContext, policy: Policy = UNRESTRICTED
    ) -> None:
        self.info = WorkerInfo("", -1)
        self.container = Container()
        self.recorder = Recorder(self.container, policy)
        self.lifetimes = Lifetimes(self.container, options, context)
        self.aborts = Aborts(self.container, self.lifetimes)
        self.threads: ThreadPool
        self.run_policy = RunPolicy()
        self.has_accumulate_hooks: Callable[[Any, Any], bool] = has_accumulate_hooks
        """Returns, for a leaf's node and the leaf, whether torch must accumulate its gradients, to run all hooks."""
        self.passes_begun = 0
        self._agent: Agent
        self._options = options
        self._rrefs = rrefs
        self.container.rejoined = self.lifetimes.rejoined

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {
            AutogradGradients: InlineHandler(self._on_gradients),
            AutogradAbort: self._on_abort,
            AutogradBackward: self._on_backward,
            AutogradRelease: InlineHandler(self.lifetimes.on_release),
            AutogradQuery: self.lifetimes.on_query,
        }

    def attach(self, agent: Agent) -> None:
        """Set the agent that sends messages. It is made with this service's handlers, so it comes later."""
        self._agent = agent
        self.lifetimes.agent = agent
        self._rrefs.backward = self.backward_from
        # not the threads of handlers: all of them may be taken by functions that wait for a backward pass
        self.threads = ThreadPool(agent.loop, self._options.num_worker_threads, f"{agent.info.name}-autograd")

    def identify(self, info: WorkerInfo) -> None:
        """Set the id that the group has given this worker."""
        self.info = info
        self.container.identify(info.id)

    # -- events from the agent

    def peer_connected(self, peer: WorkerInfo) -> None:
        """Do nothing: a connection does not show whether a context still exists; its creator is asked."""

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        # passes need not be notified: an unanswered parcel fails them, and so does the loss of their parent
        self.lifetimes.peer_disconnected(peer, has_left=has_left)

    def wants(self, peer: WorkerInfo) -> bool:
        return False  # the creators of contexts are asked, whichever worker is lost

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        # it may have been replaced under its name before its connection was seen to break
        self.lifetimes.peer_disconnected(peer, has_left=True)

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        """Do nothing: contexts refer to workers by id, and no other worker gets the id."""

    # -- for users

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """Return the gradients accumulated in a context on this worker. Raises `AutogradError` if it is unknown."""
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

        ``threads`` run the nodes of this worker that do not run on the loop.
        """
        context = self.container.find(context_id)
        deadline = self._deadline(timeout)
        check_roots(roots)
        if context.active_pass is not None:
            raise self._is_under_way(context)
        self.passes_begun += 1
        if pass_id is None:
            pass_id = self.container.new_pass_id()
        heading = PassHeading(context_id, pass_id, retain_graph)
        started = BackwardPass(self, context, heading, deadline, threads or self.threads, roots=roots)
        started.activity = self._agent.observers.begin_activity("backward", Kind.BACKWARD)
        started.start()
        try:
            await started.wait()
        except BaseException as error:
            is_closed = is_a(error, GeneratorExit)  # a coroutine that is closed may not await anything
            if is_closed or is_a(error, asyncio.CancelledError):
                started.cancel()
            # also if this task is cancelled: the next pass must not find this one, or its gradients, on any worker
            if started.abort_done is not None and not is_closed:
                await asyncio.wait([started.abort_done], timeout=_ABORT_S)
            raise

    async def backward_from(
        self,
        rref: RRef[Any],
        context_id: int,
        retain_graph: bool,
        timeout: float | Unset = UNSET,
        threads: Threads | None = None,
    ) -> None:
        """Run a pass from the value of an RRef, on its owner.

        ``threads`` are as in `backward`, and used if this worker is the owner.
        """
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
        owner = rref.owner().id
        context.known_workers[owner] = context.known_workers.get(owner, 0) + 1
        context.calls_made += 1  # like a call, it brings the context to the owner, which may be leaving it
        pass_id = self.container.new_pass_id()
        failed = sorted(context.aborted_passes)
        args = (*rref.target(), context_id, pass_id, retain_graph, failed)
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - self._agent.loop.time())
        request = self.lifetimes.request(AutogradBackward, address_of(rref.owner()), args, timeout_s)
        try:
            await request
        except (WorkerLostError, RpcTimeoutError, asyncio.CancelledError, GeneratorExit) as error:
            # the owner began the pass and would abort it if it failed, but is lost, or may have succeeded
            context.roll_back(pass_id)
            aborting = self.abort(context, pass_id)
            if isinstance(error, GeneratorExit):
                request.cancel()  # a coroutine that is closed has not cancelled the future that it awaits
            elif aborting is not None:
                await asyncio.wait([aborting], timeout=_ABORT_S)
            raise
        finally:
            del request  # its exception refers to this frame
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
        """Return the time by which a pass has to be over; None for no limit. Raises ValueError for a bad timeout."""
        timeout_s = self._options.rpc_timeout if isinstance(timeout, Unset) else timeout
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout!r}")
        own = self._agent.loop.time() + timeout_s if timeout_s else None
        scope = current_scope.get()
        if scope is None or (inherited := scope.deadline) is None:
            return own
        return inherited if own is None else min(own, inherited)

    def _is_under_way(self, context: AutogradContext) -> AutogradError:
        """Return the error of a pass that begins while another one of its context is under way."""
        return AutogradError(
            f"a backward pass of autograd context {context.id} is under way already, on worker "
            f"{self.info.name!r}: await it before the next one, or use a context for each"
        )

    # -- for passes

    def send(self, backward_pass: BackwardPass, to: int, parcel: Parcel) -> Future[Any]:
        """Send a parcel. The result of the future is the packed parcel that the reply carries, None if it has none."""
        agent, deadline = self._agent, backward_pass.deadline
        timeout_s = 0.0 if deadline is None else max(0.001, deadline - agent.loop.time())
        packed = pack_parcel(parcel, backward_pass.heading)
        answer: Future[Any] = Future(loop=agent.loop)
        try:
            agent.request(AutogradGradients, to, (packed,), timeout_s, future=answer, is_internal=True)
        except ArpcError as error:
            answer.set_exception(error)
        return answer

    def abort(self, context: AutogradContext, pass_id: int, but: int | None = None) -> asyncio.Future[Any] | None:
        """Notify all workers of a context, except ``but``, that a pass has failed; None if there are none.

        The future is done when all have acknowledged, or further retries are pointless.
        """
        context.aborts_sent |= {pass_id}
        others = context.known_workers.keys() - {self.info.id, but}
        return self.aborts.send(context, pass_id, others) if others else None

    def name_of(self, worker: int) -> str:
        peer = self._agent.peer(worker)
        return peer.info.name if peer is not None else str(worker)

    def has_peer_elsewhere(self, context: AutogradContext) -> bool:
        """Whether a worker of a context can compute while this one does, since it has a CPU of its own."""
        peers = map(self._agent.peer, context.known_workers)
        return any(
            peer is not None and peer.connection is not None and peer.connection.is_peer_elsewhere for peer in peers
        )

    # -- handlers

    def _on_gradients(self, packed: PackedParcel) -> _AnswerOfHandler:
        parcel, heading = unpack_parcel(packed)
        if heading is None:
            raise ProtocolError("a parcel of gradients that names no pass")
        caller, deadline = _caller()
        return self._take(caller, parcel, heading, deadline)

    def _take(
        self, caller: int, parcel: Parcel, heading: PassHeading, deadline: float | None = None
    ) -> _AnswerOfHandler:
        context_id, pass_id = heading.context_id, heading.pass_id
        context = self.container.contexts.get(context_id)
        if context is None:
            return self._answer_of_stranger(caller, parcel, heading)
        if heading.failed:
            self._take_back(context, heading.failed)
        if pass_id in context.aborted_passes:
            if context.last_failed == (pass_id, caller):
                return None  # the reason is in flight to the caller, and this error would hide it
            raise AutogradError(f"the backward pass {pass_id} of autograd context {context_id} has failed")
        active: BackwardPass | None = context.active_pass
        if active is not None:
            if active.id != pass_id:
                raise self._is_under_way(context)
            riding = active.receive(caller, parcel, is_engaging=False)
            if active.failure is not None:
                raise fresh(active.failure)  # the parent gets it as well
            return None if riding is None else pack_parcel(riding)
        if pass_id == context.last_pass:
            # All that was live is resolved. But gradients may be in flight to a worker that got a first parcel, and
            # this reply could overtake them.
            return None if caller in context.last_announced_to else pack_parcel(NOTHING_LIVE)
        self.passes_begun += 1
        exchanged = context.early_replies.get(pass_id)
        engaged = BackwardPass(self, context, heading, deadline, self.threads, caller, exchanged)
        engaged.activity = self._agent.observers.begin_activity("backward", Kind.BACKWARD)
        engaged.receive(caller, parcel, is_engaging=True)
        return self._answer_of(engaged) if engaged.is_over else self._wait_for_answer(engaged, caller)

    def _answer_of_stranger(self, caller: int, parcel: Parcel, heading: PassHeading) -> PackedParcel | None:
        """Return the reply to a parcel of a context unknown here. Raises `AutogradError` if it has gradients."""
        context_id, pass_id = heading.context_id, heading.pass_id
        if parcel.gradients:
            self.container.find(context_id)  # raises
        if self.container.has_left_with(context_id, pass_id, caller):
            return None  # the reply in flight says so, and this one could overtake it
        # the messages of the context have not arrived here, or the context has ended
        self.container.record_early_reply(context_id, pass_id, caller, has_announced=parcel.is_first)
        return pack_parcel(NOTHING_LIVE)

    def _take_back(self, context: AutogradContext, failed: Sequence[int]) -> None:
        """Roll back passes that have failed. Their aborts may arrive after a parcel of a later pass."""
        for pass_id in failed:
            if pass_id not in context.aborted_passes:
                active: BackwardPass | None = context.active_pass
                if active is not None and active.id == pass_id:
                    active.fail(AutogradError(f"backward pass {pass_id} has failed on another worker"))
                context.roll_back(pass_id)

    async def _wait_for_answer(self, engaged: BackwardPass, caller: int) -> PackedParcel | None:
        try:
            await engaged.wait()
        except asyncio.CancelledError:
            # The worker that cancels also causes an abort. But it may be lost, and no other worker may know
            ended = AutogradError(f"backward pass {engaged.id} was cancelled by worker {self.name_of(caller)!r}")
            engaged.fail(ended, reported_by=caller)
            raise
        return self._answer_of(engaged)

    def _answer_of(self, ended: BackwardPass) -> PackedParcel | None:
        """Return the reply to the worker that engaged this one, once the pass is over. Raises the pass's failure."""
        ended.raise_failure()
        return None if ended.answer is None else pack_parcel(ended.answer)

    async def _on_backward(
        self, rref: int, is_created: bool, context_id: int, pass_id: int, retain_graph: bool, failed: list[int]
    ) -> None:
        value = await self._rrefs.value(rref, is_created=is_created)
        caller, _ = _caller()
        context = self.container.enter(context_id, caller)
        if context is not None:
            context.known_workers.setdefault(caller, 0)
            self._take_back(context, failed)
            if pass_id in context.aborted_passes:
                raise AutogradError(f"the backward pass {pass_id} of autograd context {context_id} has failed")
        # the caller has set the deadline of this handler, if any
        await self._backward_from_value(value, context_id, pass_id, retain_graph, timeout=0)

    async def _on_abort(self, context_id: int, pass_id: int) -> None:
        context = self.container.contexts.get(context_id)
        if context is None:
            self.container.fail_early(context_id, pass_id)
            return
        # A pass that failed here is aborted all the same: only its parent was notified, and other workers may have
        # finished their part
        if pass_id in context.aborts_sent:
            return
        caller, _ = _caller()
        active: BackwardPass | None = context.active_pass
        if active is not None and active.id == pass_id and pass_id >> LOCAL_BITS != caller and active.unanswered:
            # The reason comes with the reply to a parcel, unless the pass failed nearer to its start. Then this worker
            # is notified from there, too
            patience_s = min(_REASON_S, self.lifetimes.attempt_s / 2)  # or the sender of the abort would give up
            await asyncio.wait(active.unanswered, timeout=patience_s, return_when=asyncio.FIRST_EXCEPTION)
            if pass_id in context.aborts_sent or context_id not in self.container.contexts:
                return
            active = context.active_pass
        aborting: asyncio.Future[Any] | None
        if active is not None and active.id == pass_id:
            active.fail(
                AutogradError(f"backward pass {pass_id} was ended by worker {self.name_of(caller)!r}"),
                reported_by=caller,
            )
            aborting = active.abort_done
        else:
            context.roll_back(pass_id)
            aborting = self.abort(context, pass_id, caller)
        if aborting is not None:
            # The caller may give up, and the other workers are notified all the same
            await asyncio.wait([aborting], timeout=_ABORT_S)

    # -- the end

    def close(self) -> None:
        """End all contexts and passes of this worker."""
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
