"""The RRefs of one worker: carries out what `forks.Forks` decides, and keeps the values.

Everything runs on the loop, except drops of handles, which may happen on any thread and at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeVar, cast

from arpc.agent.agent import Agent
from arpc.agent.peers.link import PeerWatcher
from arpc.agent.scope import current_scope
from arpc.errors import OwnerLostError, RRefCreationError, RRefError
from arpc.ids import UNKNOWN_ID, GloballyUniqueId, IdAllocator, WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions, Unset
from arpc.rref.calls import runnable
from arpc.rref.control_queue import ControlQueue, Item
from arpc.rref.exactly_once import NumbersByPeer, WindowsByPeer
from arpc.rref.forks import Forks
from arpc.rref.inquiries import Inquiries
from arpc.rref.instructions import (
    AwaitCreation,
    FailValue,
    ForgetFork,
    Instruction,
    MarkConfirmed,
    MarkLost,
    Send,
)
from arpc.rref.service import RRefService
from arpc.rref.states import ForkId, OwnerState, RRefId, UserState
from arpc.rref.user_ref import Use
from arpc.rref.values import Value
from arpc.wire.messages import (
    Message,
    RRefCreationFailed,
    RRefCreationQuery,
    RRefForkQuery,
    RRefForkRequest,
    RRefUserDelete,
)

__all__ = ["HandleClass", "RRefContext"]

logger = get_logger("arpc.rref")

T = TypeVar("T")

_POLL_S: Final = 0.002
_ABOUT_FORKS: Final = (RRefForkRequest, RRefUserDelete, RRefCreationFailed)
"""The messages from users to owners. Their items begin with the ids of RRef and fork."""
_text = GloballyUniqueId.from_int


class HandleClass(NamedTuple):
    """A class that the code of a worker gets in place of `RRef`, whichever worker sends the RRefs."""

    cls: type
    wrap: Callable[[Any], Any]
    """Makes an object of the class from an RRef."""
    unwrap: Callable[[Any], Any]
    """Returns the RRef in an object of the class."""


class RRefContext(PeerWatcher):
    """The RRefs of one worker."""

    def __init__(self, options: RpcOptions, context: Context, name: str) -> None:
        self.options = options
        self.info = WorkerInfo(name, UNKNOWN_ID)
        self.forks = Forks(self.info, Use, Value)
        self.numbers = NumbersByPeer()
        """The numbers of the creations and control messages that this worker sends."""
        self.windows = WindowsByPeer()
        """The windows for the creations and control messages that it receives."""
        self.ids = IdAllocator(UNKNOWN_ID)
        self.agent: Agent
        self.post: ControlQueue
        self.inquiries: Inquiries
        self.backward: Callable[[Any, int, bool, float | Unset], Awaitable[None]]
        """Runs a backward pass from the value of a handle. Set by `AutogradService`, which imports this package."""
        self.handle_class: HandleClass | None = None
        """The class that this worker's code gets in place of `RRef`; None for `RRef` itself."""
        self.get_method: Callable[[Any, str], Any] = getattr
        """Finds a method that a caller names; in allow-list mode it refuses most."""
        self.fresh_context = context.copy
        """Copies the worker's own context, for callbacks: they must not inherit the deadline of a handler."""
        self._answers: dict[ForkId, asyncio.Future[None]] = {}
        """Futures that are done when a fork is confirmed, or never will be."""
        self._ends: dict[ForkId, list[asyncio.Future[None]]] = {}
        self.thread = get_ident()
        """The id of the thread of the worker's loop."""
        self.tells_stacks = options.rref_creation_stacks
        self._is_releasing = False
        self._is_closed = False
        self.service = RRefService(self)
        """Handles the messages about RRefs that this worker receives."""

    def attach(self, agent: Agent) -> None:
        """Set the agent that sends messages. It is made with this context's handlers, so it comes later."""
        self.agent = agent
        self.post = ControlQueue(self)
        self.inquiries = Inquiries(self)

    def identify(self, info: WorkerInfo) -> None:
        """Set the id that the group has given this worker."""
        self.info = info
        self.forks.me = info
        self.ids = IdAllocator(info.id)

    # -- instructions

    def carry_out(self, following: Sequence[Instruction]) -> None:
        """Carry out what the state machine has decided."""
        for instruction in following:
            match instruction:
                case Send():
                    self.post.add(instruction)
                case AwaitCreation(rref):
                    self.inquiries.expected(rref)
                case FailValue(owned, reason):
                    error = RRefCreationError(f"the value of RRef {_text(owned.rref)} was never created: {reason}")
                    cast("Value", owned).fail(error)  # even if nothing waits for it yet: later calls raise the error
                case MarkConfirmed(fork):
                    self._answer(fork)
                case MarkLost(fork, is_refused):
                    self._answer(fork)
                    self._mark_lost(fork, is_refused=is_refused)
                case ForgetFork(fork):
                    self._end(fork)

    def _answer(self, id_: ForkId) -> None:
        """Wake handlers that wait for a fork to be confirmed."""
        waiter = self._answers.pop(id_, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _mark_lost(self, id_: ForkId, *, is_refused: bool) -> None:
        use = self.forks.users.get(id_)
        if use is None:
            return  # no handle is left that could use it
        owner = use.owner.name
        if is_refused:
            text = f"the value of {use} is gone: its owner {owner!r} took the workers that held it for lost"
            use.fail(RRefError(text))
        else:
            use.fail(OwnerLostError(f"worker {owner!r}, the owner of {use}, was lost, and the value with it", owner))

    def _end(self, id_: ForkId) -> None:
        for waiter in self._ends.pop(id_, ()):
            if not waiter.done():
                waiter.set_result(None)

    def settled(
        self, message: type[Message], to: WorkerInfo, items: Sequence[Item], reply: Any, error: Exception | None
    ) -> None:
        """Handle the reply to a control message, or the error with which it was given up."""
        forks, carry_out = self.forks, self.carry_out
        if error is not None:
            if message in _ABOUT_FORKS:
                for rref, id_, *_ in items:
                    forks.owner_unreached(to, rref, id_)
            self._forget_peer(to)
        elif message is RRefForkRequest:
            refused = frozenset(reply or ())
            for rref, id_, _ in items:
                carry_out(forks.fork_refused(id_) if id_ in refused else forks.fork_confirmed(to, rref, id_))
        elif message is RRefCreationFailed:
            for rref, id_, *_ in items:
                carry_out(forks.failure_acknowledged(to, rref, id_))
        elif message is RRefForkQuery:
            self.inquiries.offers_answered(items, reply)
        elif message is RRefCreationQuery:
            self.inquiries.creations_answered(items, reply)
        if message is RRefCreationFailed:
            for *_, number, _ in items:
                self.numbers[to.name].settle(number)
        elif message is RRefUserDelete and self._ends:
            for _, id_ in items:
                self._end(id_)

    # -- sending and receiving RRefs

    def offer(self, rref: RRefId, id_: ForkId, to: WorkerInfo, parent: ForkId | None) -> None:
        """Record that an RRef was packed for a worker."""
        self.forks.fork_offered(rref, id_, to, parent)
        self.inquiries.offered(id_)

    def identified(self, worker: WorkerInfo) -> WorkerInfo:
        """Return a worker with its id, if the id is missing and this worker knows it."""
        peer = self.agent.peer(worker.name) if worker.id == UNKNOWN_ID else None
        return worker if peer is None else peer.info

    def creation_failed_here(self, rref: RRefId, id_: ForkId, number: int, reason: str) -> None:
        """Give up a creation of this worker on itself: if it has not arrived, it is refused from now on."""
        if self.windows[self.info.id].admit(number, self.numbers[self.info.name].oldest):
            self.carry_out(self.forks.creation_abandoned(rref, id_, self.info, reason))
        self.forks.user_deleted(rref, id_)

    def receive(
        self, rref: RRefId, id_: ForkId, owner: WorkerInfo, parent: WorkerInfo, *, is_created: bool
    ) -> Use | Value:
        """Return the fork or the value for an RRef that is being unpacked."""
        is_refused = self.forks.refuses(id_)
        self.carry_out(self.forks.fork_received(rref, id_, owner, parent, is_created))
        if owner == self.info:
            if not is_refused and rref in self.forks.owned:
                return self.forks.owned[rref]
            gone = Value(rref, OwnerState.ABANDONED)
            what = f"the value of RRef {_text(rref)} is gone"
            gone.fail(RRefError(f"{what}: worker {parent.name!r}, which sent it, was taken for lost"))
            return gone
        use = self.forks.users.get(id_)
        if use is None:
            use = Use(rref, id_, owner, parent, UserState.LOST, is_created, handles=0)
            use.failure = RRefError(f"{use} came too late: worker {parent.name!r}, which sent it, had given it up")
            return use
        use.origin = f"received from worker {parent.name}"
        if use.state is UserState.REQUESTED:
            scope = current_scope.get()
            if scope is not None and scope.prerequisites is not None:
                # the handler starts when its RRefs are confirmed
                scope.prerequisites.append(self._answered(id_))
        return use

    def _answered(self, id_: ForkId) -> asyncio.Future[None]:
        waiter = self._answers.get(id_)
        if waiter is None:
            waiter = self._answers[id_] = self.agent.loop.create_future()
        return waiter

    # -- using values

    async def value(self, rref: RRefId, *, is_created: bool) -> Any:
        """Return a value of this worker, once it is ready. Its creation need not have arrived yet.

        Raises the error of its creation, and `RRefError` if the value is gone.
        """
        value = self.forks.owned.get(rref)
        if value is not None:
            self.service.look_for(value)
            if value.is_ready:
                return value.get_nowait()
        self.carry_out(self.forks.value_awaited(rref, is_created))
        value = self.forks.owned.get(rref)
        if value is None:
            raise RRefError(f"the value of RRef {_text(rref)} is gone from worker {self.info.name!r}")
        try:
            return await value.get()
        finally:
            self.forks.owner_handle_dropped(rref)

    async def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function on this worker as a handler of its own would run: on the loop or in a thread."""
        runs, arguments = runnable(function, tuple(args))
        return await self.agent.dispatcher.call(runs, arguments, kwargs)

    def on_loop(self, function: Callable[[], T]) -> T:
        """Run a function on the loop, from any thread, and return its result."""
        return function() if get_ident() == self.thread else self.agent.on_loop(function)

    # -- releasing RRefs

    async def release(self, use: Use) -> None:
        """Release a handle. If it is the fork's last one, wait until the owner has acknowledged that, or is lost."""
        id_ = use.fork
        if id_ not in self.forks.users or self._is_closed:
            return
        waiter = self.agent.loop.create_future()
        self._ends.setdefault(id_, []).append(waiter)
        self.carry_out(self.forks.handle_dropped(use))
        self.post.send_gathered()
        if not use.handles:
            await waiter

    async def release_all(self, timeout_s: float | None) -> bool:
        """End every user of this worker; return False if some owners did not acknowledge that in time."""
        self._is_releasing = True
        self.post.handle_drops()
        for use in list(self.forks.users.values()):
            if use.failure is None:
                use.failure = RRefError(f"{use} was released: worker {self.info.name!r} has shut down")
            while use.handles:
                self.carry_out(self.forks.handle_dropped(use))
        for id_ in list(self.forks.offers):
            self.inquiries.ask_about_offer(id_)
        end = None if timeout_s is None else self.agent.loop.time() + timeout_s
        while self.forks.users or not self.post.is_idle:
            self.post.send_gathered()
            if end is not None and self.agent.loop.time() >= end:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Send nothing from now on, and end all waits in `release`."""
        self._is_closed = True
        self.inquiries.close()
        self.service.close()
        self.post.close()
        for id_ in list(self._ends):
            self._end(id_)

    # -- workers that come and go

    def peer_connected(self, peer: WorkerInfo) -> None:
        if not self._is_closed:
            self.carry_out(self.forks.peer_connected(peer))

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        # A worker that leaves while the group shuts down is not lost: forks it still holds are leaks, to be reported
        if self._is_closed or self._is_releasing or self.agent.is_closing:
            return
        if has_left:
            self._forget_peer(peer)

    def wants(self, peer: WorkerInfo) -> bool:
        # forks that a peer holds, and forks of its values, stay valid until the peer is considered lost
        return not (self._is_closed or self._is_releasing) and self.forks.concerns(peer)

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        if not (self._is_releasing or self.agent.is_closing):
            self._forget_peer(peer)

    def peer_forgotten(self, peer: WorkerInfo) -> None:
        self.numbers.forget(peer.name)
        self.forks.forget(peer)

    def _forget_peer(self, peer: WorkerInfo) -> None:
        """Reclaim the forks of a worker that presumably will not come back."""
        if self._is_closed:
            return
        self.windows.pop(peer.id, None)  # it will not send its messages again
        held = len(self.forks.owned)
        self.carry_out(self.forks.peer_lost(peer))
        dropped = held - len(self.forks.owned)
        if dropped:
            logger.info("worker %s was lost: %d values that only it held are dropped", peer.name or peer.id, dropped)
