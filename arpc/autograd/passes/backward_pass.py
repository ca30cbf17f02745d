"""A backward pass on one worker: it carries out what the protocol decides, on the loop and in threads.

A small graph runs at once, in the callback in which its gradients arrive. A large one is walked, and runs, in a thread;
parcels that arrive meanwhile wait until the thread has finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from arpc import torchstate
from arpc.agent.client.future import Future
from arpc.agent.hooks.observers import Activity
from arpc.autograd.contexts import AutogradContext, Container
from arpc.autograd.engine.accumulate_hooks import accumulate_with_hooks
from arpc.autograd.engine.gradient_sums import GradientSums, own
from arpc.autograd.engine.run import run_regions
from arpc.autograd.engine.run_policy import RunPolicy, extent_of
from arpc.autograd.failure import node_failure, peer_failure
from arpc.autograd.passes.messages import Parcel, PassHeading, unpack_parcel
from arpc.autograd.passes.plan import Edge, Plan, Send
from arpc.autograd.passes.protocol import PassProtocol, Run
from arpc.errors import AutogradError, ProtocolError, RpcTimeoutError
from arpc.ids import WorkerInfo

__all__ = ["BackwardPass", "Host", "Threads"]

WALK_NODES: Final = 2000
"""The number of nodes, about a millisecond's worth, after which the walk continues in a thread."""


class Threads(Protocol):
    """Runs the nodes that do not run on the loop."""

    def call(self, function: Callable[..., Any], /) -> asyncio.Future[Any]:
        """Run a function in some thread; return a future of the loop for its result."""


class Host(Protocol):
    """The interface of a worker to its passes."""

    info: WorkerInfo
    container: Container
    run_policy: RunPolicy
    has_accumulate_hooks: Callable[[Any, Any], bool]
    """Returns, for a leaf's node and the leaf, whether torch must accumulate its gradients, to run all hooks."""

    @property
    def threads(self) -> Threads: ...

    def send(self, backward_pass: BackwardPass, to: int, parcel: Parcel) -> Future[Any]:
        """Send a parcel. The result of the future is the packed parcel that the reply carries, None if it has none."""

    def abort(self, context: AutogradContext, pass_id: int, but: int | None = None) -> asyncio.Future[Any] | None:
        """Notify all workers of the context, except ``but``, that a pass has failed; None if there are none.

        The future is done when all have acknowledged, or further retries are pointless.
        """

    def name_of(self, worker: int) -> str: ...

    def has_peer_elsewhere(self, context: AutogradContext) -> bool:
        """Whether a worker of a context can compute while this one does, since it has a CPU of its own."""


class BackwardPass(msgspec.Struct, eq=False):
    """One pass on one worker. It begins with either ``roots`` or the parcel of a ``parent``."""

    host: Host
    context: AutogradContext
    heading: PassHeading
    """The header of the requests of this pass."""
    deadline: float | None
    """The time by which the pass has to be over, in the loop's time; None for no limit."""
    threads: Threads
    parent: int | None = None
    """The worker whose parcel came first, if this worker did not begin the pass."""
    exchanged: Mapping[int, bool] | None = None
    """Workers that got `NOTHING_LIVE` before the context was known here; and whether they had sent a first parcel."""
    roots: Sequence[Tensor] = ()
    failure: BaseException | None = None
    is_over: bool = False
    answer: Parcel | None = None
    """The parcel that the reply to the parent carries."""
    abort_done: asyncio.Future[Any] | None = None
    """Done when all workers have acknowledged the abort; None if none was sent."""
    activity: Activity | None = None
    """The pass as observers see it."""
    _variables: Any = msgspec.field(default_factory=copy_context)
    """The context variables of the code that began the pass here: hooks see these, whichever callback continues it."""
    _is_busy: bool = False
    """Whether a thread walks or runs the graph."""
    _nodes_per_run: float = inf
    """See `PassProtocol.next_run`. Only worth it if others can work on the first gradients meanwhile."""
    _may_leave: bool = False
    """Whether the parent, with no calls in flight, allows this worker to forget a context that it has no use for."""
    _plan: Plan | None = None
    """The plan; None once the pass has failed."""
    _protocol: PassProtocol | None = None
    """The protocol, from the completion of the plan until the pass has failed; else None."""
    _timer: asyncio.TimerHandle | None = None
    _over: asyncio.Future[None] | None = None
    _result: Any = None
    """The result of a thread."""
    _accumulated: dict[Tensor, Tensor] | None = None
    """The gradients that torch has accumulated at the very end, with hooks; None if it has not."""
    _for_parent: Parcel | None = None
    """The parcel for the reply to the parent, while hooks run at the very end."""
    _entering: Sequence[tuple[Edge, Tensor]] = ()
    """The gradients of the roots."""
    _inbox: list[tuple[int, Parcel]] = []
    """Parcels that wait until a thread has finished."""
    _outstanding: dict[Future[Any], int] = {}
    """The futures of unanswered parcels, and the workers they were sent to."""
    _calls_before: dict[int, int] = {}
    """By worker: the number of calls made in the context when the first parcel was sent to it."""

    def __post_init__(self) -> None:
        context = self.context
        sends: Mapping[int, Send] = context.sends.copy()  # in one step: threads may add to them
        edges: list[Edge] | None = None
        if self.parent is None:
            # User code may change the roots, and the list of them, before a thread gets to them
            edges = [(root.grad_fn, root.output_nr) for root in self.roots]
            self._entering = list(zip(edges, map(torch.ones_like, self.roots), strict=True))
            self.roots = ()
        elif exchanged := self.exchanged:
            # Messages sent since then to workers that had sent a first parcel get no gradients in this pass
            sends = {number: send for number, send in sends.items() if not exchanged.get(send.to)}
        self._plan = Plan(sends, edges, self.heading.cutoff, self.host.has_accumulate_hooks)
        context.active_pass = self
        if context.running_thread is not None:
            # the thread of a pass that was ended: in the same graph, its nodes would deliver to this pass
            self._wait_for_thread(context.running_thread, self._earlier_thread_returned)

    @property
    def id(self) -> int:
        return self.heading.pass_id

    # -- events

    def start(self) -> None:
        """Begin the pass on the worker of the roots. To be followed by `wait`."""
        _call_pristine(self._advance)

    def receive(self, sender: int, parcel: Parcel, *, is_engaging: bool) -> Parcel | None:
        """Handle a parcel; return the parcel that its reply carries, if any.

        The parcel that began the pass here, ``is_engaging``, is answered when the pass is over here, with `answer`.
        """
        if is_engaging:
            self._may_leave = parcel.leaves
        self._inbox.append((sender, parcel))
        return self._advance(None if is_engaging else sender)

    @property
    def unanswered(self) -> list[Any]:
        """The futures of the parcels that were not answered yet."""
        return list(self._outstanding)

    @property
    def waiter(self) -> asyncio.Future[None] | None:
        """The future that `wait` awaits. Stacks show its task as waiting for the unanswered parcels."""
        return self._over

    async def wait(self) -> None:
        """Wait until the pass is over here. Raises its failure."""
        if not self.is_over:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of the pass, if it has one, to the code that began the pass here. Raises it only once."""
        if self.failure is not None:
            # not kept: its traceback leads to frames that refer to this pass, so the whole graph would be in a cycle
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure

    def fail(self, error: BaseException, *, reported_by: int | None = None) -> None:
        """End the pass here with an error, and roll back its gradients.

        Workers that this one has sent parcels to are notified by the cancellation of their handlers, and the parent by
        the reply. So the error reaches the worker that began the pass, which aborts it on all others: some may have
        finished their part. ``reported_by`` is the worker that notified this one, if one did.
        """
        if self.is_over:
            return
        self.failure = error
        self._end()
        # the error's traceback leads here, and may be kept for long: forget the graph
        self._protocol = self._plan = None
        self._entering = ()
        self._inbox = []
        self.context.roll_back(self.id, self.parent)
        for future in list(self._outstanding):
            future.cancel()
        if self.parent is None or reported_by is not None:
            self.abort_done = self.host.abort(self.context, self.id, reported_by)

    def cancel(self) -> None:
        """End the pass because its caller is cancelled: roll it back even if it just succeeded."""
        if self.is_over and self.failure is None:
            self.context.roll_back(self.id)
            self.abort_done = self.host.abort(self.context, self.id)
        else:
            self.fail(AutogradError(f"backward pass {self.id} was cancelled"))

    # -- progress

    def _advance(self, answering: int | None = None) -> Parcel | None:
        """Run all that can run, and send the results; return the parcel for the reply to ``answering``, if any."""
        if self._is_busy or self.is_over:
            return None
        try:
            protocol = self._protocol or self._make_protocol()
            if protocol is None:
                return None
            inbox = self._inbox
            while True:
                while inbox:
                    sender, parcel = inbox.pop(0)
                    try:
                        protocol.received(sender, parcel)
                    except KeyError as error:
                        raise self._freed(sender, error.args[0]) from None
                if protocol.is_cut:
                    self._post_early(protocol)
                run = protocol.next_run(self._nodes_per_run)
                if run is None:
                    return self._post(protocol, answering)
                if not self._run(protocol, run):
                    return None
        except BaseException as error:  # noqa: BLE001 - nodes and hooks of users may raise anything
            self.fail(self._described(error))
        return None

    def _make_protocol(self) -> PassProtocol | None:
        """Complete the plan, and return the protocol for it; None if a thread has taken over."""
        plan, heading = self._plan, self.heading
        assert plan is not None  # it is not over
        if not plan.walk(WALK_NODES):
            self._run_in_thread(partial(_walk_on, plan))
            return None
        heading.cutoff = plan.cutoff
        protocol = self._protocol = PassProtocol(
            self.host.info.id, plan, GradientSums(), heading.pass_id, heading.retain_graph
        )
        nodes_per_slice = self.host.run_policy.nodes_per_slice
        if len(plan.owners) > nodes_per_slice and self.host.has_peer_elsewhere(self.context):
            self._nodes_per_run = nodes_per_slice
        if exchanged := self.exchanged:
            protocol.announced_to.update(exchanged)
            protocol.announced_by.update(worker for worker, has_announced in exchanged.items() if has_announced)
        if self._entering:
            protocol.enter_roots(self._entering)
            self._entering = ()
        return protocol

    def _run(self, protocol: PassProtocol, run: Run) -> bool:
        """Run some regions; return False if a thread has taken over."""
        plan, policy = protocol.plan, self.host.run_policy
        job: Callable[..., Any] = run_regions
        if self.activity is not None:
            job = self.activity.step(job)
        extent = extent_of(run, plan)
        if not protocol.is_cut and policy.is_short(extent, run, plan):
            protocol.ran(run, policy.run(extent, job, run, plan, protocol.retain_graph))
            return True
        in_thread = partial(policy.run, extent, job, run, plan, protocol.retain_graph)
        self._run_in_thread(in_thread, partial(protocol.ran, run))
        return False

    def _freed(self, sender: int, message_id: int) -> AutogradError:
        """Return the error of gradients for a message whose graph is gone."""
        return AutogradError(
            f"worker {self.host.name_of(sender)!r} has gradients for message {message_id} of autograd "
            f"context {self.context.id}, of which worker {self.host.info.name!r} has no graph any more. Pass "
            f"retain_graph=True to the first of several backward passes"
        )

    # -- other workers

    def _post(self, protocol: PassProtocol, answering: int | None) -> Parcel | None:
        riding: Parcel | None = None
        for_parent: Parcel | None = None
        for peer, parcel in protocol.post():
            if peer == answering:
                riding = parcel
            elif peer == self.parent:
                for_parent = parcel
            else:
                self._send(protocol, peer, parcel)
        if protocol.is_done:
            self._finish(protocol, for_parent)
        elif for_parent is not None:
            assert self.parent is not None
            self._send(protocol, self.parent, for_parent)
        return riding

    def _post_early(self, protocol: PassProtocol) -> None:
        """Send the gradients that are known while further regions wait to be run."""
        for peer, parcel in protocol.post():
            self._send(protocol, peer, parcel)

    def _send(self, protocol: PassProtocol, to: int, parcel: Parcel) -> None:
        protocol.sent()
        context = self.context
        self._calls_before.setdefault(to, context.calls_made)
        # a call of this worker in flight may need the context that the peer would forget
        parcel.leaves = context.calls_made == context.calls_answered
        if context.aborted_passes:
            self.heading.failed = sorted(context.aborted_passes)
        future = self.host.send(self, to, parcel)
        self._outstanding[future] = to
        future.add_done_callback(self._answered, context=self._variables)

    def _answered(self, future: Future[Any]) -> None:
        """Handle the reply to a parcel, or its error."""
        peer = self._outstanding.pop(future)
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if self.is_over:
            return
        if error is not None:
            self.fail(peer_failure(error, self.host.info.id, self.context.id, self.host.name_of(peer)))
            return
        assert self._protocol is not None  # it has sent a parcel
        self._protocol.acknowledged()
        answer = future.result()
        if answer is not None:
            try:
                parcel, _ = unpack_parcel(answer)
            except ProtocolError as malformed:
                self.fail(malformed)
                return
            if parcel.leaves and self.context.calls_made == self._calls_before[peer]:
                self.context.known_workers.pop(peer, None)  # it needs no release of the context any more
            self._inbox.append((peer, parcel))
        _call_pristine(self._advance)

    # -- threads

    def _run_in_thread(self, job: Callable[[], Any], then: Callable[[Any], None] | None = None) -> None:
        """Run a job in a thread, and go on when it has finished; ``then`` takes its result."""

        def run() -> None:
            if not self.is_over:  # the pass may end before a thread gets to it
                self._result = job()

        future = self.context.running_thread = self.threads.call(run)
        self._wait_for_thread(future, partial(self._thread_returned, then))

    def _wait_for_thread(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        self._is_busy = True
        future.add_done_callback(then)
        if self.deadline is not None:
            # Later, since a thread has often finished before the loop's next turn, and a timer costs more than a check
            future.get_loop().call_soon(self._set_timer, future)

    def _set_timer(self, future: asyncio.Future[Any]) -> None:
        # a parcel that waits for its reply has a deadline of its own; a thread has none
        if self.deadline is not None and not future.done() and not self.is_over:
            self._timer = future.get_loop().call_at(self.deadline, self._expire)

    def _expire(self) -> None:
        self.fail(RpcTimeoutError(f"the backward pass of autograd context {self.context.id} did not end in time"))

    def _waited_for_thread(self) -> None:
        self._is_busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _earlier_thread_returned(self, _: asyncio.Future[Any]) -> None:
        self._waited_for_thread()
        _call_pristine(self._advance)

    def _thread_returned(self, then: Callable[[Any], None] | None, future: asyncio.Future[Any]) -> None:
        self.context.running_thread = None
        self._waited_for_thread()
        # not through the future: gradients are kept without a copy only if nothing else refers to them
        result, self._result = self._result, None
        error = None if future.cancelled() else future.exception()
        if self.is_over:
            return
        if error is not None:
            self.fail(self._described(error))
            return
        if then is not None:
            try:
                _call_pristine(partial(then, result))
            except BaseException as raised:  # noqa: BLE001 - the pass must end here, whatever a peer or a hook caused
                self.fail(self._described(raised))
                return
        del result
        _call_pristine(self._advance)

    # -- the end

    def _finish(self, protocol: PassProtocol, for_parent: Parcel | None) -> None:
        """End a pass with nothing left to run, send or wait for, except hooks that run at the very end."""
        sums: GradientSums = protocol.sums  # type: ignore[assignment]  # they were made here
        to_accumulate = protocol.plan.accumulated
        if to_accumulate and self._accumulated is None:
            edges = [edge for edge in sums if edge[0] in to_accumulate]
            if edges:
                self._for_parent = for_parent
                leaves, gradients = [node.variable for node, _ in edges], [sums.pop(edge) for edge in edges]
                self._run_in_thread(partial(accumulate_with_hooks, leaves, gradients), self._take_accumulated)
                return
        for_parent = for_parent or self._for_parent
        taken = sums.take_leaves()  # first: it raises if objects that a peer sent are no gradients
        if (accumulated := self._accumulated) is not None:
            taken |= {leaf: own(leaf, accumulated[leaf]) for leaf in accumulated}
        # before the end: gradients of an earlier pass may not fit them any more, which fails this one
        pass_id = self.heading.pass_id
        self.context.commit(pass_id, taken, protocol.announced_to)
        self._end()
        if (
            self._may_leave
            and self.parent is not None
            and self.host.container.try_to_leave(self.context, pass_id, self.parent)
        ):
            for_parent = for_parent or Parcel()
            for_parent.leaves = True
        self.answer = for_parent

    def _take_accumulated(self, accumulated: dict[Tensor, Tensor]) -> None:
        self._accumulated = accumulated

    def _end(self) -> None:
        self.is_over = True
        context = self.context
        if self.activity is not None:
            self.activity.end()
        if self._protocol is not None:
            used = self._protocol.used
            context.sends_used += len(used)
            if not self.heading.retain_graph:  # their graphs were freed
                for message_id in used:
                    context.sends.pop(message_id, None)
        if self._timer is not None:
            self._timer.cancel()
        context.active_pass = None
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _described(self, error: BaseException) -> BaseException:
        last_begun = None if self._plan is None else self._plan.last_begun
        return node_failure(error, self.host.info, self.context.id, last_begun)


def _walk_on(plan: Plan) -> None:
    while not plan.walk(WALK_NODES):
        pass


def _call_pristine(call: Callable[[], object]) -> None:
    """Call a function in the default state of torch: the caller may be a task that has changed the state."""
    outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
    try:
        call()
    finally:
        if outer is not None:
            torchstate.restore(outer)
