"""A backward pass on one worker: the local engine and the protocol, brought together on the loop.

A small graph runs at once, where its gradients come in. A large one is looked at, and runs, in a thread; what arrives
meanwhile waits until it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from arpc.agent.hooks.observers import Activity
from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.context import AutogradContext, Container, Send
from arpc.autograd.engine import LocalEngine, Source
from arpc.autograd.failure import peer_failure
from arpc.autograd.local_pass import LocalHost, LocalPass, Threads
from arpc.autograd.protocol import PackedParcel, Parcel, PassProtocol, Resolved, unpack_parcel
from arpc.errors import AutogradError, ProtocolError

__all__ = ["WALK_NODES", "BackwardPass", "Brief", "Host", "Sender", "take_only_answer"]

WALK_NODES: Final = 2000
"""After as many, which take about a millisecond, walking goes on in a thread."""


class Sender(Protocol):
    """A pass, as far as its parcels are concerned."""

    id: int
    context: AutogradContext
    retain_graph: bool
    deadline: float | None
    """In the loop's time."""


class Brief(Sender, Protocol):
    """A pass, as far as another one that takes over is concerned."""

    parent: int | None
    threads: Threads | None


class Host(LocalHost, Protocol):
    """What a pass over several workers needs of its own."""

    container: Container
    is_heeded: Callable[[Any, Any], bool]
    """Of a leaf, and its node: whether torch is to accumulate its gradients, with all hooks. See `heeded`."""

    def send(self, backward_pass: Sender, to: int, parcel: Parcel) -> asyncio.Future[PackedParcel | None]:
        """Send a parcel; the future has the parcel that comes with the answer."""

    def name_of(self, worker: int) -> str: ...

    def unfold(self, brief: Brief, sends: Mapping[int, Send]) -> BackwardPass:
        """What takes over from a pass that is not brief after all, given the sends that are not resolved."""


Answer = asyncio.Future[PackedParcel | None]


def _count_cancellations() -> int:
    """How often the current task was cancelled: more often than before an await if that is why it has ended."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def take_only_answer(peer: int, future: Answer, answered: Callable[[int, Answer], None]) -> None:
    """Take the only answer there is to wait for here, and not in a turn of the loop of its own."""
    cancelled_before = _count_cancellations()
    try:
        await future
    except (Exception, asyncio.CancelledError):
        # the future of a pass that fails meanwhile is cancelled, which is not to cancel who waits for it
        if not future.done() or _count_cancellations() > cancelled_before:
            raise
        answered(peer, future)
    else:
        answered(peer, future)
    finally:
        del future  # whose error has this frame in its traceback: the whole graph would be in a cycle


class BackwardPass(LocalPass):
    """One pass on one worker. ``parent`` is the worker whose parcel came first; None on the one that began the pass."""

    activity: Activity | None = None
    """What observers know of it."""
    _host: Host
    _last_begun: Any = None
    _is_planned = False
    _unwatched: list[tuple[int, asyncio.Future[PackedParcel | None]]] | None = None
    """Parcels that were sent when it began, until somebody waits."""

    def __init__(
        self,
        host: Host,
        context: AutogradContext,
        pass_id: int,
        make_engine: Callable[..., LocalEngine],
        *,
        retain_graph: bool,
        deadline: float | None,
        parent: int | None,
        roots: Sequence[Tensor] = (),
        threads: Threads | None = None,
        sends: Mapping[int, Send] | None = None,
    ) -> None:
        """``sends``: those that are to be resolved, if not all of the context's."""
        super().__init__(host, context, pass_id, retain_graph, deadline, threads)
        self._parent = parent
        self._roots = roots
        self._inbox: list[tuple[int, Parcel]] = []
        self._outstanding: set[asyncio.Future[PackedParcel | None]] = set()
        self._used: list[int] = []
        sources: list[Source] = []
        if roots:
            sources.append(Source([(root.grad_fn, root.output_nr) for root in roots], None))
        self._places: dict[int, int] = {}
        """Which source each send is."""
        destinations: dict[int, int] = {}
        for message_id, send in (context.sends if sends is None else sends).items():
            self._places[message_id] = len(sources)
            destinations[message_id] = send.to
            sources.append(send)
        self._engine = make_engine(sources, retain_graph=retain_graph)
        self._protocol = PassProtocol(host.info.id, destinations)
        context.active_pass = self
        if context.running_thread is not None:
            # of a pass that was ended: in the same graph its nodes would take this one for their own
            self._wait_for_thread(context.running_thread, self._earlier_thread_returned)

    # -- what happens to it

    def take_over(
        self,
        leaves: LeafGradients,
        used: Iterable[int],
        told: Iterable[int],
        unasked: Iterable[int],
        heard: Iterable[int],
        outstanding: Collection[asyncio.Future[PackedParcel | None]],
    ) -> None:
        """Go on where a `BriefPass` has got to: what it computed, the sends it resolved, and who was told by whom.

        Some of its parcels have not been answered: `answered` is to be called when they are.
        """
        self._engine.leaves = leaves
        self._used += used
        self._outstanding.update(outstanding)
        self._protocol.take_over(told, unasked, heard, len(outstanding))

    def start(self) -> None:
        """Begin, on the worker that has the roots. To be followed by `wait` at once."""
        self._unwatched = []
        self._advance()

    def receive(self, sender: int, parcel: Parcel, *, is_engaging: bool) -> Parcel | None:
        self._inbox.append((sender, parcel))
        return self._advance(None if is_engaging else sender)

    @property
    def unanswered(self) -> list[asyncio.Future[PackedParcel | None]]:
        return list(self._outstanding)

    async def wait(self) -> None:
        if self._unwatched is not None:
            unwatched, self._unwatched = self._unwatched, None
            if len(unwatched) == 1:
                await take_only_answer(*unwatched[0], self.answered)
            else:
                for peer, future in unwatched:
                    future.add_done_callback(partial(self.answered, peer))
                    del future
            del unwatched
        await super().wait()

    # -- how it goes on

    def _advance(self, answering: int | None = None) -> Parcel | None:
        """Run what can run and tell others what came of it; returns what they are told by an answer."""
        if self._is_busy or self.is_over:
            return None
        try:
            if not self._run_inline():
                return None
            return self._post(answering)
        except BaseException as error:  # noqa: BLE001 - whatever nodes and hooks of users raise
            self.fail(self._described(error))
            return None

    def _run_inline(self) -> bool:
        """Run until nothing is ready; False if a thread has taken over."""
        engine = self._engine
        if not self._is_planned:
            if not engine.walk(WALK_NODES):
                self._run_in_thread(self._walk_on)
                return False
            self._take_plan()
        pace = self._host.pace
        run = engine.run if self.activity is None else self.activity.step(engine.run)
        while True:
            if self._inbox:
                self._open_inbox()
            if not engine.is_ready:
                return True
            elements = engine.work()
            if not pace.is_short(engine.plan, elements):
                self._run_in_thread(partial(pace.run, run, engine.plan, elements))
                return False
            pace.run(run, engine.plan, elements)
            self._take_results()

    def _walk_on(self) -> None:
        while not self._engine.walk(WALK_NODES):
            pass

    def _take_plan(self) -> None:
        self._is_planned = True
        engine = self._engine
        if self._roots:
            engine.resolve(0, list(map(torch.ones_like, self._roots)))
        resolved = self._protocol.planned(engine.live)
        if resolved:
            self._resolve(resolved)

    def _open_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for sender, parcel in inbox:
            try:
                resolved = self._protocol.received(sender, parcel)
            except KeyError as error:
                raise AutogradError(
                    f"worker {self._host.name_of(sender)!r} has gradients for message {error.args[0]} of autograd "
                    f"context {self.context.id}, of which worker {self._host.info.name!r} has no graph any more. Pass "
                    f"retain_graph=True to the first of several backward passes"
                ) from None
            self._resolve(resolved)

    def _resolve(self, resolved: Resolved) -> None:
        for message_id, gradients in resolved:
            if gradients is not None:
                self._used.append(message_id)
            self._engine.resolve(self._places[message_id], gradients)

    def _take_results(self) -> None:
        engine = self._engine
        if engine.delivered or engine.silent:
            delivered, engine.delivered = engine.delivered, []
            silent, engine.silent = engine.silent, []
            resolved = self._protocol.ran(delivered, silent)
            if resolved:
                self._resolve(resolved)

    # -- threads

    def _earlier_thread_returned(self, _: asyncio.Future[None]) -> None:
        self._waited_for_thread()
        if not self.is_over:
            self._call_pristine(self._advance)

    def _go_on(self) -> None:
        try:
            if not self._is_planned:
                self._take_plan()
            else:
                self._take_results()
                if not self._inbox and self._protocol.is_done and not self._engine.is_ready:
                    self._finish()  # nobody else has to do with it any more
                    return
        except BaseException as error:  # noqa: BLE001 - whatever nodes and hooks of users raise
            self.fail(self._described(error))
        else:
            self._advance()

    # -- other workers

    def _post(self, answering: int | None) -> Parcel | None:
        protocol = self._protocol
        riding: Parcel | None = None
        for_parent: Parcel | None = None
        for peer, parcel in protocol.post():
            if peer == answering:
                riding = parcel
                protocol.ride()
            elif peer == self._parent:
                for_parent = parcel
                protocol.ride()
            else:
                self._send(peer, parcel)
        if for_parent is not None:
            if protocol.is_done:
                self.answer = for_parent
            else:
                assert self._parent is not None
                protocol.sent()
                self._send(self._parent, for_parent)
        if protocol.is_done:
            self._finish()
        return riding

    def _send(self, to: int, parcel: Parcel) -> None:
        future = self._host.send(self, to, parcel)
        self._outstanding.add(future)
        if self._unwatched is not None:
            self._unwatched.append((to, future))
        else:
            future.add_done_callback(partial(self.answered, to))

    def answered(self, peer: int, future: asyncio.Future[PackedParcel | None]) -> None:
        """A parcel has been answered, or will not be."""
        self._outstanding.discard(future)
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if self.is_over:
            return
        if error is not None:
            self.fail(peer_failure(error, self._host.info.id, self.context.id, self._host.name_of(peer)))
            return
        self._protocol.acknowledged()
        answer = future.result()
        if answer is not None:
            try:
                self._inbox.append((peer, unpack_parcel(answer)[0]))
            except ProtocolError as malformed:
                self.fail(malformed)
                return
        self._call_pristine(self._advance)

    # -- the end

    def _finish(self) -> None:
        """Nothing is left to be run, told or waited for, but for hooks that wait for the very end."""
        if self._engine.plan.heeded_leaves and self._engine.is_to_accumulate:
            self._run_in_thread(self._engine.accumulate)
            return
        gradients = self._engine.leaves.take()  # first: what a peer has sent for them may be no gradients
        # before the end: those of an earlier pass may not fit them any more, which fails this one
        self.context.commit(self.id, gradients, self._protocol.announced_to)
        self._end()

    def _let_go(self) -> None:
        if self.activity is not None:
            self.activity.end()
        engine = self._engine
        if engine.live:
            engine.close()
        self._last_begun = engine.last_begun
        del self._engine
        self._roots = ()
        self._inbox = []
        context = self.context
        context.sends_used += len(self._used)
        if not self.retain_graph:  # what was gone through is freed
            for message_id in self._used:
                context.sends.pop(message_id, None)

    def _node_last_begun(self) -> Any:
        return self._last_begun if self.is_over else self._engine.last_begun
