"""Creations on their way: what `remote` has sent, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from arpc.agent.client.pending_calls import Call
from arpc.agent.client.sender import as_arguments
from arpc.agent.peers.peer import Peer
from arpc.agent.server.functions import name_of
from arpc.errors import CallCancelledError, RpcTimeoutError, RRefCreationError, SerializationError
from arpc.ids import UNKNOWN_ID, GloballyUniqueId, WorkerInfo, address_of
from arpc.options import UNSET, Unset
from arpc.rref.create_on_owner import KEY, pack_label
from arpc.rref.events import (
    CreationFailed,
    ForkId,
    OwnerHandleDropped,
    RRefId,
    UserDeleted,
)
from arpc.rref.exactly_once import Numbers
from arpc.rref.user_ref import OwnerFuture, Use, as_owner_lost
from arpc.rref.values import Value
from arpc.user_errors import fresh, text_of
from arpc.wire.messages import MessageType, RequestFlag

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["Creation", "start_creation"]

_CREATE: Final = int(MessageType.RREF_CREATE)
_VALUE: Final = int(RequestFlag.VALUE)


def start_creation(
    context: RRefContext,
    to: str | int | WorkerInfo,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float | Unset,
    made: str,
    anchor: object,
    name: str = "",
) -> Creation:
    """Ask a worker to create a value. Nothing is waited for. ``anchor`` is kept until the answer is there.

    ``name`` is what people call the function, if not by its own.
    """
    if not callable(function):
        raise TypeError(f"function should be callable, and {type(function).__qualname__} is not")
    arguments = as_arguments(args)
    agent, forks, next_number = context.agent, context.forks, context.ids.next_number
    peer = agent.peer(to)
    owner = peer.info if peer is not None and peer.connection is not None else _owner(peer, to)
    rref, fork = next_number(), next_number()
    forks.creation_started(rref, fork, owner)
    use = forks.users.get(fork)
    held: Use | Value
    if use is not None:
        held = use
        use.origin = made or name or function
    else:
        held = context.values[rref] = Value(made or name or name_of(function))
    numbers = context.post.numbers(owner.name)
    number, oldest = numbers.take()
    creation = Creation(context, rref, fork, held, numbers, number, anchor, function)
    metadata = {KEY: pack_label(context.incarnation, number, oldest, rref, fork, made or name)}
    is_held = timeout is UNSET
    # by position, which takes less time: type, flags, metadata, is_internal, is_held, is_awaited, called
    call = Call(None, creation, function, arguments, kwargs, timeout, _CREATE, 0, metadata, False, is_held, False, name)
    try:
        agent.create(address_of(to) if isinstance(to, WorkerInfo) else to, call)
    except BaseException:
        creation.take_back()
        raise
    return creation


def _owner(peer: Peer | None, to: str | int | WorkerInfo) -> WorkerInfo:
    """The worker that a creation goes to. Of one that the group is asked about first, nothing but its name is known."""
    if isinstance(to, WorkerInfo):
        return to if peer is None else peer.info
    if peer is None or (isinstance(to, str) and peer.must_be_asked_for):
        return WorkerInfo(str(to), UNKNOWN_ID)
    return peer.info


class Creation(msgspec.Struct, eq=False):
    """One `remote`: kept by its RRef, and by the call while that is under way, as the recipient of its answer."""

    context: RRefContext
    rref: RRefId
    fork: ForkId
    held: Use | Value
    numbers: Numbers
    number: int
    anchor: object
    function: Callable[..., Any]
    call_id: int = 0
    callee: Peer | None = None
    on_cancel: Callable[[], None] | None = None
    is_settled: bool = False
    error: BaseException | None = None
    waiter: asyncio.Future[tuple[Any, ...]] | None = None
    """For the value, which comes with the answer."""
    watcher: OwnerFuture | None = None
    callbacks: list[Callable[[Any], object]] | None = None

    @property
    def makes(self) -> type | None:
        """The class whose object the value will be, if that is what was called."""
        return self.function if isinstance(self.function, type) else None

    def take_back(self) -> None:
        """It was never sent: nobody has to hear of it."""
        context = self.context
        self.numbers.settle(self.number)
        if isinstance(self.held, Use):
            del context.forks.users[self.fork]
        else:
            context.happened(OwnerHandleDropped(self.rref))

    # -- the value with the answer

    def fetch_along(self) -> asyncio.Future[tuple[Any, ...]] | None:
        """Let the answer bring the value, too, if the creation has not left yet: what is awaited is a tuple of it.

        If that is empty, the value has to be asked for.
        """
        agent, peer = self.context.agent, self.callee
        call = peer.held(self.call_id) if peer is not None else None
        if call is None or peer is None or agent.is_intercepted or agent.is_wrapped:
            return None  # interceptors and observers must see a fetch as a call of its own
        call.flags |= _VALUE
        waiter: asyncio.Future[tuple[Any, ...]] = agent.caller.make_waiter()
        self.waiter = waiter
        peer.send_held()
        return waiter

    # -- the end of it

    def future(self) -> OwnerFuture:
        """Done when the function has ended, with None; cancelling it cancels the function."""
        watcher = self.watcher
        if watcher is None:
            watcher = self.watcher = OwnerFuture(loop=self.context.agent.loop)
            if self.is_settled:
                self._tell(watcher)
            else:
                watcher.on_cancel = self._cancel
        return watcher

    def _cancel(self) -> None:
        self.cancel()

    def _tell(self, watcher: OwnerFuture) -> None:
        if watcher.done():
            return
        if self.error is None:
            watcher.set_result(None)
        elif isinstance(self.error, asyncio.CancelledError):
            watcher.on_cancel = None
            watcher.cancel()
        else:
            watcher.set_exception(fresh(self.error))

    # -- as the recipient of a call

    def done(self) -> bool:
        return self.is_settled

    def cancelled(self) -> bool:
        return isinstance(self.error, asyncio.CancelledError)

    def exception(self) -> BaseException | None:
        return self.error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self.is_settled:
            self.context.agent.loop.call_soon(callback, self)
        else:
            self.callbacks = [*(self.callbacks or ()), callback]

    def _call_back(self) -> None:
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            self.context.agent.loop.call_soon(callback, self)

    def cancel(self, msg: Any = None) -> bool:
        """Let the function end; uses of the RRef raise from now on."""
        if self.is_settled:
            return False
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
        self._failed(asyncio.CancelledError())
        return True

    def set_result(self, answer: Any) -> None:
        """The owner has answered, with a tuple of the value or without."""
        if type(answer) is not tuple:
            answer = ()  # which is what None means, and all that can be made of anything else
        self.is_settled = True
        self.anchor = None
        self.numbers.settle(self.number)
        context, held = self.context, self.held
        if isinstance(held, Use):
            held.fetches = None
            following = context.forks.creation_confirmed(held.owner, self.rref, self.fork)
            if following:
                context.carry_out(following)
        else:
            # on oneself: the creation was the worker's own user, and ends
            context.happened(UserDeleted(self.rref, self.fork))
        if self.watcher is not None:
            self._tell(self.watcher)
        if self.callbacks is not None:
            self._call_back()
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def set_exception(self, error: Exception) -> None:
        """It is not known what has become of it, or it was refused."""
        if isinstance(error, SerializationError) and error.is_of_answer:
            self._unreadable(error)
            return
        self.is_settled = True
        self.error = error
        # later, as of any future: what ends with it may be among what is being ended
        self.context.agent.loop.call_soon(self._failed, error)

    def _unreadable(self, error: Exception) -> None:
        """The value came with the answer, but cannot be built here: only `to_here` raises that."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self.set_result(None)

    def _failed(self, error: BaseException) -> None:
        self.is_settled = True
        self.anchor = None
        context, held = self.context, self.held
        if isinstance(error, asyncio.CancelledError):
            self.error = error
            if self.callee is not None:
                self.callee.cancel(self.call_id)
        else:
            # a future's own has a traceback once somebody awaits it, and that refers to the RRef
            self.error = fresh(error)
        failure = self._failure(self.error)
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(fresh(failure))
        if isinstance(held, Use):
            if held.failure is None:
                held.fail(failure)
            # The owner is told, and must be able to tell by the number whether the creation has arrived there: until it
            # has answered the number is in use
            if not context.happened(CreationFailed(self.fork, self.number, text_of(failure))):
                self.numbers.settle(self.number)
        else:
            held.fail(failure)
            context.creation_failed_here(self.rref, self.fork, self.number, text_of(failure))
            self.numbers.settle(self.number)
        if self.watcher is not None:
            self._tell(self.watcher)
        self._call_back()

    def _failure(self, error: BaseException) -> Exception:
        """What uses of the RRef raise from now on."""
        name = f"RRef {GloballyUniqueId.from_int(self.rref)}"
        owner = self.held.owner.name if isinstance(self.held, Use) else self.context.info.name
        made: Exception
        if isinstance(error, asyncio.CancelledError):
            return RRefCreationError(f"the creation of {name} on worker {owner!r} was cancelled")
        if isinstance(error, RpcTimeoutError):
            made = RRefCreationError(
                f"RRef creation via remote() on worker {owner!r} timed out, and it is possible that {name} does not "
                f"exist there"
            )
            made.__cause__ = error
            return made
        if isinstance(error, CallCancelledError):  # by nobody here
            made = RRefCreationError(f"the creation of {name} was cancelled on its owner: {error}")
            made.__cause__ = error
            return made
        assert isinstance(error, Exception)
        return as_owner_lost(error)
