"""Creations on their way: what `remote` has sent, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from arpc.agent.arguments import as_arguments
from arpc.agent.functions import name_of
from arpc.agent.peers import Peer
from arpc.errors import CallCancelledError, RpcTimeoutError, RRefCreationError, SerializationError
from arpc.ids import UNKNOWN_ID, GloballyUniqueId, WorkerInfo, address_of
from arpc.options import UNSET, Unset
from arpc.rref.delivery import Numbers
from arpc.rref.events import (
    CreationFailed,
    ForkCounted,
    ForkId,
    OwnerHandleDropped,
    RRefId,
    UserDeleted,
)
from arpc.rref.labels import pack_label
from arpc.rref.states import UserState
from arpc.rref.uses import OwnerFuture, Use, as_owner_lost
from arpc.rref.values import Value
from arpc.user_errors import fresh, text_of
from arpc.wire.frames import HEADER, brief_kind
from arpc.wire.messages import MessageType, RequestFlag, RRefCreate
from arpc.wire.pickling import SCALARS

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["Creation", "start_creation"]

_CREATE: Final = int(MessageType.RREF_CREATE)
_CREATE_WITH_SCALAR: Final = brief_kind(_CREATE, RequestFlag.SCALAR)
_unpack_header = HEADER.unpack_from
_Future = asyncio.Future  # uvloop's own `create_future` does the same in three times the time
_are_scalars = SCALARS.issuperset
_set_result = asyncio.Future.set_result
# Where the flags are in a frame
_FLAGS: Final = 5
_WANTED: Final = tuple(bytes((flags | RequestFlag.VALUE,)) for flags in range(256))


def start_creation(
    context: RRefContext,
    to: str | int | WorkerInfo,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float | Unset,
    made: str,
    anchor: object,
) -> Creation:
    """Ask a worker to create a value. Nothing is waited for. ``anchor`` is kept until the answer is there."""
    agent = context.agent
    peer = agent.peer(to)
    owner = peer.info if peer is not None else to if isinstance(to, WorkerInfo) else WorkerInfo(str(to), UNKNOWN_ID)
    name = owner.name
    forks, next_number = context.forks, context.ids.next_number
    rref, fork = next_number(), next_number()
    forks.creation_started(rref, fork, owner)
    use = forks.users.get(fork)
    held: Use | Value
    if use is not None:
        held = use
    else:
        held = context.values[rref] = Value()
    numbers = context.post.numbers(name)
    number, oldest = numbers.take_with_oldest()
    try:
        brings = function in context.awaited and not made
    except BaseException:  # noqa: BLE001 - not hashable, so not a function of a module
        brings = False
    creation = Creation(context, peer, owner, rref, fork, held, numbers, number, anchor, brings)
    label = pack_label(context.incarnation, number, oldest, rref, fork, made)
    try:
        if (
            peer is not None
            and use is not None
            and timeout is UNSET
            and not kwargs
            and not made
            and args.__class__ is tuple
        ):
            kind = _CREATE_WITH_SCALAR if brings else _CREATE
            sent = agent.begin_shortly(peer, creation, function, args, kind, label, is_urgent=brings)
            if sent is not None:
                creation.call_id, frame = sent
                if not brings:
                    creation.frame = frame
                use.origin = function  # whose name few ask for; it is one of a module, which lives for ever
                return creation
        creation.brings = False
        creation.send(to, function, args, kwargs, timeout, made, label)
    except BaseException as error:
        creation.take_back()
        if isinstance(error, RuntimeError):
            agent.check_loop()
        raise
    return creation


class Creation(msgspec.Struct, eq=False):
    """One `remote`: kept by its RRef, and by the call while that is under way, as the `Recipient` of its answer."""

    context: RRefContext
    peer: Peer | None
    owner: WorkerInfo
    rref: RRefId
    fork: ForkId
    held: Use | Value
    numbers: Numbers
    number: int
    anchor: object
    brings: bool
    """It was asked to bring the value if that is a scalar, which nobody can change: see `RRefContext.awaited`."""
    call_id: int = 0
    frame: bytes | None = None
    """What was sent, in case it has not left yet: then the answer may still be asked to bring the value."""
    made_class: type | None = None
    is_settled: bool = False
    error: BaseException | None = None
    waiter: asyncio.Future[tuple[Any, ...]] | None = None
    """For the value, which comes with the answer."""
    call: asyncio.Future[Any] | None = None
    """Stands between the agent and this creation, unless that took the shortest way."""
    watcher: OwnerFuture | None = None

    @property
    def makes(self) -> type | None:
        """The class whose object the value will be, if that is what was called."""
        origin = self.held.origin if isinstance(self.held, Use) else None
        return origin if isinstance(origin, type) else self.made_class

    # -- the start of it

    def send(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        made: str,
        label: bytes,
    ) -> None:
        """Send any creation."""
        if not callable(function):
            raise TypeError(f"function should be callable, and {type(function).__qualname__} is not")
        origin = made or name_of(function)
        if isinstance(self.held, Use):
            self.held.origin = origin
        else:
            self.held.made = origin
        self.made_class = function if isinstance(function, type) else None
        agent, peer = self.context.agent, self.peer
        arguments = as_arguments(args)
        call: asyncio.Future[Any]
        if peer is None:
            call = OwnerFuture(loop=agent.loop)
            address = address_of(to) if isinstance(to, WorkerInfo) else to
            agent.request(
                RRefCreate, address, arguments, timeout, future=call, function=function, kwargs=kwargs, label=label
            )
        else:
            connection = peer.connection
            if connection is not None:
                connection.gather()  # whoever makes an RRef is about to use it
            call = agent.loop.create_future()
            call_id = agent.begin(peer, call, function, arguments, kwargs, timeout, 0, _CREATE, label=label)
            self.call_id = call_id
            if connection is not None and timeout is UNSET:
                self.frame = _frame_of(connection.last_unsent, call_id)
        self.call = call
        call.add_done_callback(self._call_ended)

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
        """Let the answer bring the value, too, if the creation has not left yet: the future is for a tuple of it.

        If that is empty, the value has to be asked for.
        """
        agent = self.context.agent
        if agent.has_riders or agent.is_interposed:
            return None  # what rides on calls, or sees them all, has to know a fetch from a creation
        if self.brings:
            if self.waiter is not None:
                return None
            waiter = self.waiter = _Future(loop=agent.loop)
            return waiter
        frame, self.frame = self.frame, None  # one attempt, in the turn of the loop that it was made in
        connection = self.peer.connection if self.peer is not None else None
        if frame is None or connection is None:
            return None
        if not connection.amend(frame, frame[:_FLAGS] + _WANTED[frame[_FLAGS]] + frame[_FLAGS + 1 :]):
            return None
        waiter = self.waiter = _Future(loop=agent.loop)
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
        if self.call is not None:
            self.call.cancel()
        elif not self.is_settled:
            self._failed(asyncio.CancelledError())

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

    def _call_ended(self, call: asyncio.Future[Any]) -> None:
        self.call = None
        if call.cancelled():
            self._failed(asyncio.CancelledError())
        elif (error := call.exception()) is None:
            self.set_result(call.result())
        elif isinstance(error, SerializationError) and error.is_of_answer:
            self._unreadable(error)
        else:
            self._failed(error)

    def done(self) -> bool:
        return self.is_settled

    def set_result(self, answer: Any) -> None:
        """The owner has answered, with a tuple of the value or without."""
        if type(answer) is not tuple:
            answer = ()  # which is what None means, and all that can be made of anything else
        self.is_settled = True
        if self.anchor is not None:
            self.anchor = None
        if self.frame is not None:
            self.frame = None
        self.numbers.settle(self.number)
        context, held = self.context, self.held
        if isinstance(held, Use):
            if self.waiter is not None:
                if self.brings is not (bool(answer) and _are_scalars(map(type, answer))):
                    self._learn(held.origin)
            elif self.brings:
                self._learn(held.origin)
            if held.fetches is not None:
                held.fetches = None
            following = context.forks.creation_confirmed(self.fork)
            if following:
                context.carry_out(following)
            if held.state is UserState.LOST:
                context.happened(ForkCounted(held.owner, self.rref, self.fork))
        else:
            # on oneself: the creation was the worker's own user, and ends
            context.happened(UserDeleted(self.rref, self.fork))
        if self.brings:
            self.brings = False
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                _set_result(waiter, answer)
        if self.watcher is not None:
            self._tell(self.watcher)

    def _learn(self, function: Any) -> None:
        """It was not foreseen that the value is a scalar that somebody waits for, or that it is not."""
        if self.brings:
            self.context.awaited.discard(function)
        elif not isinstance(function, str):
            self.context.awaited.add(function)

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
        """The value is there, and came with the answer, but cannot be built here: that is for who waits for it."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self.set_result(None)

    def _failed(self, error: BaseException) -> None:
        self.is_settled = True
        self.brings = False
        self.anchor = self.frame = None
        context, held = self.context, self.held
        if isinstance(error, asyncio.CancelledError):
            self.error = error
            if self.peer is not None:
                self.peer.cancel(self.call_id)
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

    def _failure(self, error: BaseException) -> Exception:
        """What uses of the RRef raise from now on."""
        name, owner = f"RRef {GloballyUniqueId.from_int(self.rref)}", self.owner.name
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


def _frame_of(frame: bytes | None, call_id: int) -> bytes | None:
    """The frame of a creation whose tensors, if any, are in it."""
    if frame is None:
        return None
    _, type_, _, n_buffers, id_, *_ = _unpack_header(frame)
    return frame if type_ == _CREATE and id_ == call_id and not n_buffers else None
