"""Creations in flight: the requests that `remote` has sent, and their outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.client.pending_calls import Call
from arpc.agent.client.sender import as_arguments
from arpc.agent.peers.peer import Peer
from arpc.agent.server.functions import name_of
from arpc.errors import (
    CallCancelledError,
    RpcTimeoutError,
    RRefCreationError,
    SerializationError,
    UnknownWorkerError,
    not_run,
)
from arpc.ids import UNKNOWN_ID, GloballyUniqueId, WorkerInfo, address_of
from arpc.options import UNSET, Unset
from arpc.rref.exactly_once import Numbers
from arpc.rref.service import KEY, pack_label
from arpc.rref.states import UserState
from arpc.rref.user_ref import OwnerFuture, Use, as_owner_lost
from arpc.rref.values import Value
from arpc.user_errors import fresh, text_of
from arpc.wire.messages import MessageType, RequestFlag

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["Creation", "start_creation"]

_CREATE: Final = int(MessageType.RREF_CREATE)
_VALUE: Final = int(RequestFlag.VALUE)
_CREATING: Final = UserState.CREATING


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
    """Ask a worker to create a value, without waiting. ``anchor`` is kept alive until the reply has arrived.

    ``made`` is the stack of the code that asks, or empty. ``name`` is the name shown to users, if not the function's.
    """
    if not callable(function):
        raise TypeError(f"function should be callable, and {type(function).__qualname__} is not")
    if args.__class__ is not tuple:
        args = as_arguments(args)
    agent, forks, next_number = context.agent, context.forks, context.ids.next_number
    peer = agent.peer(to)
    connected = peer if peer is not None and peer.connection is not None else None
    owner = _owner(context, peer, to) if connected is None else connected.info
    rref, fork, numbers = next_number(), next_number(), context.numbers[owner.name]
    number, oldest = numbers.take()
    made = made or name
    creation = Creation(
        rref,
        fork,
        owner,
        context.info,
        _CREATING,
        False,
        origin=made,
        context=context,
        function=function,
        numbers=numbers,
        number=number,
        anchor=anchor,
    )
    if owner != context.info:
        forks.creation_started(creation)
    else:
        creation.value = forks.creation_on_oneself_started(rref)
        creation.value.made = creation.made
    metadata = {KEY: pack_label(number, oldest, rref, fork, made)}
    is_held = timeout is UNSET
    # by position, which takes less time: type, flags, metadata, is_internal, is_held, is_awaited, called
    call = Call(peer, creation, function, args, kwargs, timeout, _CREATE, 0, metadata, False, is_held, False, name)
    try:
        if connected is not None:
            creation.call_id = agent.caller.sender.send(call)
            creation.callee = connected
        else:
            agent.create(address_of(to) if isinstance(to, WorkerInfo) else to, call)
    except BaseException:
        creation.take_back()
        agent.check_loop()
        raise
    return creation


def _owner(context: RRefContext, peer: Peer | None, to: str | int | WorkerInfo) -> WorkerInfo:
    """Return the worker that a creation goes to; with its name only, if the group must be asked for its id first."""
    if isinstance(to, WorkerInfo):
        return to if peer is None else peer.info
    if peer is None and isinstance(to, int):
        # creations are numbered by the name of their owner, which is not known
        text = f"worker {context.info.name!r} has not met the worker with the id {to} yet: call remote() with its name"
        raise not_run(UnknownWorkerError(text))
    if peer is None or (isinstance(to, str) and peer.must_ask_group):
        return WorkerInfo(str(to), UNKNOWN_ID)
    return peer.info


class Creation(Use, kw_only=True):
    """One call of `remote`: the first user of its RRef, and the recipient of the reply."""

    context: RRefContext
    function: Callable[..., Any]
    """The function that makes the value."""
    numbers: Numbers
    number: int
    anchor: object
    value: Value | None = None
    """The value of a creation on this worker itself, which has no user; else None."""
    call_id: int = 0
    callee: Peer | None = None
    on_cancel: Callable[[], None] | None = None
    is_settled: bool = False
    error: BaseException | None = None
    waiter: asyncio.Future[Any] | None = None
    """The future of a reply that carries the value, see `fetch_along`."""
    callbacks: list[Callable[[Any], object]] | None = None

    @property
    def made(self) -> str:
        return self.origin or name_of(self.function)

    def take_back(self) -> None:
        """Undo a creation that was never sent: no worker needs to be notified."""
        self.numbers.settle(self.number)
        if self.value is None:
            del self.context.forks.users[self.fork]
        else:
            self.context.forks.owner_handle_dropped(self.rref)

    def fetch_along(self) -> asyncio.Future[Any] | None:
        """Have the reply carry the value, and return a future of the reply; None if the creation was sent already.

        The reply is the value in a tuple, or `TO_BE_FETCHED`.
        """
        peer, agent = self.callee, self.context.agent
        if peer is None or (call := peer.held(self.call_id)) is None:
            return None
        if agent.is_intercepted or agent.is_wrapped:
            return None  # interceptors and observers must see a fetch as a call of its own
        call.flags |= _VALUE
        waiter = self.waiter = agent.caller.make_waiter()
        peer.drain()
        return waiter

    def future(self) -> OwnerFuture:
        """Return a future that is done, with None, when the function has ended; cancelling it cancels the function.

        Called once. Only the handle keeps the future: its error refers to the code that awaits it, so to the handle.
        """
        watcher = OwnerFuture(loop=self.context.agent.loop)
        watcher.on_cancel = self.cancel
        self.add_done_callback(partial(_complete, watcher))
        return watcher

    # -- as the recipient of a call

    def done(self) -> bool:
        return self.is_settled

    def cancelled(self) -> bool:
        return isinstance(self.error, asyncio.CancelledError)

    def exception(self) -> BaseException | None:
        return self.error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.callbacks = [*(self.callbacks or ()), callback]
        if self.is_settled:
            self._tell()

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the function. Uses of the RRef raise from now on."""
        if self.is_settled:
            return False
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
        self._failed(asyncio.CancelledError())
        return True

    def set_result(self, answer: Any) -> None:
        """Record the owner's reply, with the value or without."""
        self.is_settled = True
        self.anchor = self.fetches = None
        self.numbers.settle(self.number)
        context = self.context
        if self.value is None:
            following = context.forks.creation_confirmed(self)
            if following:
                context.carry_out(following)
        else:
            # on this worker itself: the creation was the worker's own user, and ends
            context.forks.user_deleted(self.rref, self.fork)
        if self.callbacks is not None:
            self._tell()
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def set_exception(self, error: Exception) -> None:
        """Record that the creation was refused, or that its outcome is unknown."""
        if isinstance(error, SerializationError) and error.is_of_answer:
            # the value came with the reply, but cannot be built here: only `to_here` raises that
            self._fail_waiter(error)
            self.set_result(None)
            return
        self.is_settled = True
        self.error = error
        # later, like the callbacks of any future: `_failed` ends other futures, which the caller may be ending now
        self.context.agent.loop.call_soon(self._failed, error)

    def _fail_waiter(self, error: Exception) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _failed(self, error: BaseException) -> None:
        self.is_settled = True
        self.anchor = None
        context = self.context
        if isinstance(error, asyncio.CancelledError):
            self.error = error
            if self.callee is not None:
                self.callee.cancel(self.call_id)
        else:
            # a copy, since the traceback of an error that code awaits would refer to the RRef
            self.error = fresh(error)
        failure = self._failure(self.error)
        self._fail_waiter(fresh(failure))
        if self.value is not None:
            self.value.fail(failure)
            context.creation_failed_here(self.rref, self.fork, self.number, text_of(failure))
            self.numbers.settle(self.number)
        else:
            if self.failure is None:
                self.fail(failure)
            # The owner is notified, and finds out by the number whether the creation has arrived there: the number is
            # in use until the owner has replied
            following = context.forks.creation_failed(self, self.number, text_of(failure))
            context.carry_out(following)
            if not following:
                self.numbers.settle(self.number)
        self._tell()

    def _tell(self) -> None:
        """Schedule the callbacks."""
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            self.context.agent.loop.call_soon(callback, self)

    def _failure(self, error: BaseException) -> Exception:
        """Return the error that uses of the RRef raise from now on."""
        name, owner = f"RRef {GloballyUniqueId.from_int(self.rref)}", self.owner.name
        if isinstance(error, asyncio.CancelledError):
            return RRefCreationError(f"the creation of {name} on worker {owner!r} was cancelled")
        if isinstance(error, RpcTimeoutError):
            made = RRefCreationError(
                f"RRef creation via remote() on worker {owner!r} timed out, and it is possible that {name} does not "
                f"exist there"
            )
        elif isinstance(error, CallCancelledError):  # not by this worker
            made = RRefCreationError(f"the creation of {name} was cancelled on its owner: {error}")
        else:
            assert isinstance(error, Exception)
            return as_owner_lost(error)
        made.__cause__ = error
        return made


def _complete(watcher: OwnerFuture, creation: Creation) -> None:
    """Complete a future with the outcome of a creation."""
    if watcher.done():
        return
    if creation.error is None:
        watcher.set_result(None)
    elif creation.cancelled():
        watcher.on_cancel = None
        watcher.cancel()
    else:
        watcher.set_exception(fresh(creation.error))
