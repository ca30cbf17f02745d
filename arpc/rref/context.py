"""A worker's RRefs at work: carries out what `forks.Forks` decides, keeps the values, serves those who ask for them.

Everything belongs to the loop, but for `drop`, which may be called from any thread and at any time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, TypeVar

from arpc.agent.agent import Agent
from arpc.agent.functions import name_of
from arpc.agent.future import Future
from arpc.agent.scope import current_scope
from arpc.errors import (
    ArpcError,
    CallCancelledError,
    OwnerLostError,
    RpcTimeoutError,
    RRefCreationError,
    RRefError,
    SerializationError,
    ShutdownError,
    WorkerLostError,
)
from arpc.ids import GloballyUniqueId, IdAllocator, WorkerInfo
from arpc.options import RpcOptions, Unset
from arpc.rref import forks as fork
from arpc.rref.forks import ForkId, Forks, OwnerState, RRefId, UserFork, UserState, WorkerName
from arpc.rref.methods import prepared
from arpc.rref.post import Item, Post
from arpc.rref.service import ControlService
from arpc.rref.values import Value, fresh
from arpc.wire.messages import Message, RRefChildAccept, RRefCreate, RRefForkQuery, RRefForkRequest, RRefUserDelete

__all__ = ["FetchFuture", "OwnerFuture", "RRefContext", "Use"]

logger = logging.getLogger("arpc.rref")

T = TypeVar("T")

_POLL_S: Final = 0.002
_RECONNECT_S: Final = 0.05
_id = GloballyUniqueId.from_int


class OwnerFuture(Future[Any]):
    """The future of a call to an owner: a lost worker is a lost owner."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, WorkerLostError) and not isinstance(exception, OwnerLostError):
            lost = OwnerLostError(str(exception), exception.worker, may_have_run=exception.may_have_run)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)


class FetchFuture(OwnerFuture):
    """The future of a fetch, which nobody cancels on the owner but the owner itself when it shuts down."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, CallCancelledError):
            lost = OwnerLostError(f"the owner has shut down: {exception}", self.owner)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)

    owner = ""


class Use:
    """One fork of this worker, as its handle and the context share it."""

    __slots__ = ("_answered", "failure", "fetches", "fork", "info", "made")

    def __init__(self, user: UserFork, info: WorkerInfo, made: str) -> None:
        self.fork = user
        self.info = info
        self.made = made
        self.failure: Exception | None = None
        """Why it cannot be used."""
        self.fetches: set[OwnerFuture] = set()
        """Those who wait for a value that may never be created."""
        self._answered: asyncio.Future[None] | None = None

    @property
    def is_confirmed(self) -> bool:
        return self.fork.state is UserState.CONFIRMED

    def answered(self) -> Awaitable[None]:
        """Wait until the owner has confirmed it, or never will. Never raises."""
        if self._answered is None:
            self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def answer(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def fail(self, failure: Exception) -> None:
        """It cannot be used any more. Those who wait for its value hear of it now."""
        self.failure = failure
        fetches, self.fetches = self.fetches, set()
        for future in fetches:
            stop = future.on_cancel
            if not future.done():
                future.set_exception(fresh(failure))
                if stop is not None:
                    stop()

    def __str__(self) -> str:
        return f"UserRRef(RRefId = {self.fork.rref}, ForkId = {self.fork.fork})"


class RRefContext(ControlService):
    """The RRefs of one worker."""

    def __init__(self, options: RpcOptions, context: Context, name: str, incarnation: int) -> None:
        self.options = options
        self.forks = Forks(name, -1)
        self.values: dict[RRefId, Value] = {}
        self.uses: dict[ForkId, Use] = {}
        self.ids = IdAllocator(-1)
        self.info = WorkerInfo(name, -1)
        self.agent: Agent
        self.post: Post
        self.backward: Callable[[Any, int, bool], Awaitable[None]]
        """Runs a backward pass from the value of a handle; set by the runtime, since autograd knows RRefs already."""
        self._context = context
        self._incarnation = incarnation
        self._dropped: deque[fork.HandleDropped | fork.OwnerHandleDropped] = deque()
        self._is_drain_scheduled = False
        self._leases: dict[WorkerName, asyncio.Task[None]] = {}
        self._lost: set[WorkerName] = set()
        self._offered: deque[tuple[float, ForkId]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._ends: dict[ForkId, list[asyncio.Future[None]]] = {}
        self._is_releasing = False
        self._is_closed = False
        self._carry_out: dict[type[fork.Instruction], Callable[[Any], object]] = {
            fork.SendForkRequest: self._send_fork_request,
            fork.SendChildAccept: self._send_child_accept,
            fork.SendUserDelete: self._send_user_delete,
            fork.DropValue: lambda drop: self.values.pop(drop.rref, None),
            fork.FailValue: lambda fail: self._fail_value(fail.rref),
            fork.MarkConfirmed: lambda mark: self.uses[mark.fork].answer(),
            fork.MarkLost: lambda mark: self._mark_lost(self.uses[mark.fork]),
            fork.ForgetFork: lambda forget: self._forget(forget.fork),
            fork.RunCreation: lambda _: None,  # by whoever asked
        }
        super().__init__()

    def attach(self, agent: Agent) -> None:
        """The agent that messages go through. It was made with this context's handlers, so it comes later."""
        self.agent = agent
        self.post = Post(agent, self.options, self._context, self._incarnation, self._settled)

    def identify(self, info: WorkerInfo) -> None:
        """The group has given this worker its id."""
        self.info = info
        self.forks.id = info.id
        self.ids = IdAllocator(info.id)

    # -- events and instructions

    def happened(self, event: fork.Event) -> Sequence[fork.Instruction]:
        """Tell the state machine of an event, and do what it says."""
        instructions = self.forks.handle(event)
        for instruction in instructions:
            self._carry_out[type(instruction)](instruction)
        return instructions

    def _send_fork_request(self, send: fork.SendForkRequest) -> None:
        self.post.add(RRefForkRequest, send.to, (send.rref.to_int(), send.fork.to_int(), send.is_created))

    def _send_child_accept(self, send: fork.SendChildAccept) -> None:
        self.post.add(RRefChildAccept, send.to, (send.fork.to_int(),))

    def _send_user_delete(self, send: fork.SendUserDelete) -> None:
        self.post.add(RRefUserDelete, send.to, (send.rref.to_int(), send.fork.to_int(), send.abandons))

    def _fail_value(self, rref: RRefId) -> None:
        value = self.values.get(rref)
        if value is not None:
            value.fail(
                RRefCreationError(f"the value of RRef {rref} was never created: its creator gave up, or was lost")
            )

    def _mark_lost(self, use: Use) -> None:
        owner = use.info.name
        if owner in self._lost:
            use.fail(OwnerLostError(f"worker {owner!r}, the owner of {use}, was lost, and the value with it", owner))
        else:
            use.fail(
                RRefError(f"the value of {use} is gone: its owner {owner!r} took the workers that held it for lost")
            )
        use.answer()

    def _forget(self, id_: ForkId) -> None:
        use = self.uses.pop(id_, None)
        if use is not None and use.fork.state is UserState.LOST:
            self._end(id_)

    def _end(self, id_: ForkId) -> None:
        for waiter in self._ends.pop(id_, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _settled(
        self, message: type[Message], to: WorkerName, items: Sequence[Item], reply: Any, error: Exception | None
    ) -> None:
        """A control message was answered, or given up."""
        if message is RRefForkRequest and error is None:
            refused = frozenset(reply)
            for _, id_, _ in items:
                self.happened(fork.ForkRefused(_id(id_)) if id_ in refused else fork.ForkConfirmed(_id(id_)))
        elif message is RRefForkQuery and error is None:
            self._queried(items, reply)
        elif message is RRefUserDelete:
            for rref, id_, _ in items:
                if error is not None:
                    self.happened(fork.DeleteUndelivered(to, _id(rref), _id(id_)))
                self._end(_id(id_))
        if error is not None:
            self._peer_lost(to)

    # -- making them

    def remote(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        made: str,
    ) -> tuple[Use | Value, RRefId, OwnerFuture]:
        """Ask a worker to create a value. Nothing is waited for."""
        if not callable(function):
            raise TypeError(f"function should be callable, and {type(function).__qualname__} is not")
        peer = self.agent.peer(to)
        owner = peer.info if peer is not None else to if isinstance(to, WorkerInfo) else WorkerInfo(str(to), -1)
        rref, id_ = self.ids.next(), self.ids.next()
        self.happened(fork.CreationStarted(rref, id_, owner.name))
        made = made or name_of(function)
        use: Use | Value
        if owner.name == self.info.name:
            use = self.values[rref] = Value(made)
        else:
            use = self.uses[id_] = Use(self.forks.users[id_], owner, made)
        future = OwnerFuture(loop=self.agent.loop)
        numbers = self.post.numbers(owner.name)
        number = numbers.take()
        arguments = (
            self._incarnation,
            number,
            numbers.oldest,
            rref.to_int(),
            id_.to_int(),
            made,
            function,
            tuple(args),
            kwargs,
        )
        settled = partial(self._creation_settled, use, rref, id_, number, owner.name)
        future.add_done_callback(settled)
        try:
            self.agent.request(RRefCreate, to, arguments, timeout, future=future)
        except BaseException as error:
            future.remove_done_callback(settled)
            future.cancel()
            numbers.settle(number)
            self._give_up(use, rref, id_)
            if isinstance(error, SerializationError):
                raise SerializationError(f"{name_of(function)} cannot be called remotely: {error}") from error.__cause__
            raise
        return use, rref, future

    def _give_up(self, use: Use | Value, rref: RRefId, id_: ForkId) -> None:
        """A creation that was never sent: nobody has to hear of it."""
        if isinstance(use, Use):
            del self.forks.users[id_]
            del self.uses[id_]
        else:
            self.happened(fork.OwnerHandleDropped(rref))

    def _creation_settled(
        self, use: Use | Value, rref: RRefId, id_: ForkId, number: int, owner: WorkerName, future: asyncio.Future[Any]
    ) -> None:
        self.post.numbers(owner).settle(number)
        error = self._creation_error(owner, rref, future)
        if isinstance(use, Value):
            # on oneself: the creation was the worker's own user, and ends
            if error is not None:
                use.fail(error)
            self.happened(fork.UserDeleted(rref, id_, abandons=error is not None))
            return
        if error is None:
            use.fetches.clear()
            self.happened(fork.CreationConfirmed(id_))
            return
        if use.failure is None:
            use.fail(error)
        self.happened(fork.CreationFailed(id_))
        use.answer()

    def _creation_error(self, owner: WorkerName, rref: RRefId, future: asyncio.Future[Any]) -> Exception | None:
        if future.cancelled():
            return RRefCreationError(f"the creation of RRef {rref} on worker {owner!r} was cancelled")
        error = future.exception()
        if error is not None:
            error = fresh(
                error
            )  # the future's own has a traceback once somebody awaits it, and that refers to the RRef
        if isinstance(error, RpcTimeoutError):
            made = RRefCreationError(
                f"RRef creation via remote() on worker {owner!r} timed out, and it is possible that RRef {rref} does "
                f"not exist there"
            )
            made.__cause__ = error
            return made
        assert error is None or isinstance(error, Exception)
        return error

    def offer(self, rref: RRefId, id_: ForkId, to: WorkerName, parent: ForkId | None) -> None:
        """A handle was packed for a worker."""
        self.happened(fork.ForkOffered(rref, id_, to, parent))
        self._offered.append((self.agent.loop.time(), id_))
        if self._sweep is None and not self._is_closed:
            self._sweep = self.agent.loop.call_later(
                max(self.options.rref_grace, _RECONNECT_S), self._look_after_offers, context=self._context.copy()
            )

    def share(self, rref: RRefId, value: Value) -> None:
        """A value of this worker is about to become known to others."""
        if rref not in self.values:
            self.values[rref] = value
            self.happened(fork.ValueShared(rref))

    def receive(
        self, rref: RRefId, id_: ForkId, owner: WorkerInfo, parent: WorkerName, *, is_created: bool
    ) -> Use | Value:
        """A handle is being unpacked."""
        is_refused = self.forks.refuses(id_)
        self.happened(fork.ForkReceived(rref, id_, owner.name, parent, is_created))
        if owner.name == self.info.name:
            if not is_refused and rref in self.forks.owned:
                return self.values.setdefault(rref, Value())
            gone = Value()
            gone.fail(
                RRefError(f"the value of RRef {rref} is gone: worker {parent!r}, which sent it, was taken for lost")
            )
            return gone
        user = self.forks.users.get(id_)
        if user is None:
            use = Use(UserFork(rref, id_, owner.name, parent, UserState.LOST, is_created), owner, "")
            use.failure = RRefError(f"{use} came too late: worker {parent!r}, which sent it, had given it up")
            return use
        use = self.uses.setdefault(id_, Use(user, owner, f"received from worker {parent}"))
        if user.state is UserState.REQUESTED:
            scope = current_scope.get()
            if scope is not None and scope.prerequisites is not None:
                # the handler starts when its RRefs are confirmed
                scope.prerequisites.append(use.answered())
        return use

    # -- using them

    async def value(self, rref: RRefId, *, is_created: bool) -> Any:
        """A value of this worker, once it is there. It may be asked for before its creation has arrived."""
        value = self.values.get(rref)
        if value is not None and value.is_ready:
            return value.get_nowait()
        self.happened(fork.ValueAwaited(rref, is_created))
        if rref not in self.forks.owned:
            raise RRefError(f"the value of RRef {rref} is gone from worker {self.info.name!r}")
        try:
            return await self.values.setdefault(rref, Value()).get()
        finally:
            self.happened(fork.OwnerHandleDropped(rref))

    async def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function here as if it had been called by itself."""
        return await self.agent.executor.call(prepared(function), args, kwargs)

    def on_loop(self, function: Callable[[], T]) -> T:
        """Run something on the loop, from whatever thread this is."""
        loop = self.agent.loop
        try:
            if asyncio.get_running_loop() is loop:
                return function()
        except RuntimeError:
            pass
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asked
                done.set_exception(error)

        try:
            loop.call_soon_threadsafe(run, context=copy_context())
        except RuntimeError:
            raise ShutdownError(f"the event loop of worker {self.info.name!r} is closed") from None
        return done.result()

    # -- letting go of them

    def drop(self, event: fork.HandleDropped | fork.OwnerHandleDropped) -> None:
        """A handle is gone. Called by the garbage collector: on any thread, between any two instructions."""
        self._dropped.append(event)
        # A race costs a spare wake-up, never a lost one: the flag is cleared before the queue is emptied
        if not self._is_drain_scheduled and not self._is_closed:
            self._is_drain_scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and the worker gone with it
                self.agent.loop.call_soon_threadsafe(self._drain, context=self._context.copy())

    def _drain(self) -> None:
        self._is_drain_scheduled = False
        while self._dropped and not self._is_closed:
            self.happened(self._dropped.popleft())

    async def release(self, use: Use) -> None:
        """Let go of a fork, and wait until its owner knows that, or is lost."""
        id_ = use.fork.fork
        if id_ not in self.uses or self._is_closed:
            return
        waiter = self.agent.loop.create_future()
        self._ends.setdefault(id_, []).append(waiter)
        self.happened(fork.HandleDropped(id_))
        self.post.hurry()
        if not use.fork.handles:
            await waiter

    @property
    def is_quiet(self) -> bool:
        """Nothing is on its way to other workers."""
        return self.post.is_idle and not self._dropped

    async def release_all(self, timeout_s: float | None) -> bool:
        """End every user of this worker; False if some owners did not confirm that in time."""
        self._is_releasing = True
        self._drain()
        for use in list(self.uses.values()):
            if use.failure is None:
                use.failure = RRefError(f"{use} was released: worker {self.info.name!r} has shut down")
            while use.fork.handles:
                self.happened(fork.HandleDropped(use.fork.fork))
        self._query(list(self.forks.offers))
        end = None if timeout_s is None else self.agent.loop.time() + timeout_s
        while self.forks.users or not self.is_quiet:
            self.post.hurry()
            if end is not None and self.agent.loop.time() >= end:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Send nothing any more."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for lease in self._leases.values():
            lease.cancel()
        self.post.close()
        for id_ in list(self._ends):
            self._end(id_)

    # -- offers nobody answers

    def _look_after_offers(self) -> None:
        """Ask after forks that were sent a while ago and have not been heard of since."""
        self._sweep = None
        due = self.agent.loop.time() - self.options.rref_grace
        asked: list[ForkId] = []
        while self._offered and self._offered[0][0] <= due:
            asked.append(self._offered.popleft()[1])
        self._query(asked)
        if self._offered:
            left_s = max(_RECONNECT_S, self._offered[0][0] - due)
            self._sweep = self.agent.loop.call_later(left_s, self._look_after_offers, context=self._context.copy())

    def _query(self, ids: Sequence[ForkId]) -> None:
        for id_ in ids:
            offer = self.forks.offers.get(id_)
            if offer is None:
                continue
            peer = self.agent.peer(offer.to)
            connection = peer.connection if peer is not None else None
            if peer is not None and (peer.backlog or (connection is not None and connection.unsent_bytes)):
                self._offered.append((self.agent.loop.time(), id_))  # it may still be here
            elif offer.to != self.info.name:
                self.post.add(RRefForkQuery, offer.to, (id_.to_int(),))

    def _queried(self, items: Sequence[Item], unknown: Sequence[int] | None) -> None:
        refused = frozenset(unknown or ())
        for (number,) in items:
            id_ = _id(number)
            if unknown is not None:
                self.happened(fork.OfferRefused(id_) if number in refused else fork.OfferKnown(id_))
            if id_ in self.forks.offers:
                self._offered.append((self.agent.loop.time(), id_))
        if self._offered and self._sweep is None and not self._is_closed:
            self._sweep = self.agent.loop.call_later(
                max(self.options.rref_grace, _RECONNECT_S), self._look_after_offers, context=self._context.copy()
            )

    # -- workers that come and go

    def peer_connected(self, peer: WorkerInfo) -> None:
        if peer.name in self._lost and not self._is_closed:
            self._lost.discard(peer.name)
            self.happened(fork.PeerReturned(peer.name, peer.id))

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        # who leaves when all let go and leave is not lost: what is still counted then is a leak, to be reported
        if self._is_closed or self._is_releasing or self.agent.is_closing:
            return
        if has_left:
            self._peer_lost(peer.name)
        elif peer.name not in self._leases and self._concerns(peer):
            lease = self._context.copy().run(self.agent.loop.create_task, self._keep_lease(peer))
            self._leases[peer.name] = lease

    def _concerns(self, peer: WorkerInfo) -> bool:
        """Whether there is anything between this worker and a peer."""
        forks = self.forks
        return (
            any(user.owner == peer.name for user in forks.users.values())
            or any(offer.to == peer.name for offer in forks.offers.values())
            or any(
                peer.name in owned.forks.values()
                or (owned.state is OwnerState.EXPECTED and owned.rref.created_on == peer.id)
                for owned in forks.owned.values()
            )
        )

    async def _keep_lease(self, peer: WorkerInfo) -> None:
        """Give a lost worker its time to come back. Both sides try: neither may have another reason to connect."""
        try:
            async with asyncio.timeout(self.options.rref_grace):
                while True:
                    try:
                        await self.agent.request(RRefForkQuery, peer.name, (self._incarnation, 0, 0, []))
                        return
                    except (ArpcError, OSError):
                        await asyncio.sleep(_RECONNECT_S)
        except TimeoutError:
            self._peer_lost(peer.name)
        finally:
            self._leases.pop(peer.name, None)

    def _peer_lost(self, name: WorkerName) -> None:
        """A worker will not come back, as far as anyone can tell."""
        if self._is_closed:
            return
        peer = self.agent.peer(name)
        lease = self._leases.pop(name, None)
        if lease is not None and lease is not asyncio.current_task():
            lease.cancel()
        self._lost.add(name)
        self.forget_deliveries(name)
        held = len(self.forks.owned)
        self.happened(fork.PeerLost(name, peer.info.id if peer is not None else -1))
        if held != len(self.forks.owned):
            logger.info(
                "worker %s was lost: %d values that only it held are dropped", name, held - len(self.forks.owned)
            )
