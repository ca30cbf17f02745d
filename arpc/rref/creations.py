"""Creations on their way: what `remote` has sent, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.arguments import as_arguments
from arpc.agent.functions import name_of
from arpc.agent.peers import Peer
from arpc.errors import CallCancelledError, RpcTimeoutError, RRefCreationError, SerializationError
from arpc.ids import GloballyUniqueId, WorkerInfo
from arpc.options import UNSET, Unset
from arpc.rref.events import (
    CreationConfirmed,
    CreationFailed,
    CreationStarted,
    ForkId,
    OwnerHandleDropped,
    RRefId,
    UserDeleted,
)
from arpc.rref.uses import OwnerFuture, Use, as_owner_lost
from arpc.rref.values import Value, fresh
from arpc.wire.frames import HEADER, HEADER_BYTES
from arpc.wire.messages import MessageType, RequestFlag, RRefCreate

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["Creation"]

_CREATE: Final = int(MessageType.RREF_CREATE)
_unpack_header = HEADER.unpack_from
_pack_header = HEADER.pack


class Creation:
    """One `remote`: kept by its RRef, and by the call while that is under way."""

    __slots__ = (
        "_anchor",
        "_call_id",
        "_context",
        "_error",
        "_fetch",
        "_fork",
        "_future",
        "_number",
        "_numbers",
        "_peer",
        "_watcher",
        "held",
        "makes",
        "may_bring_value",
        "owner",
        "rref",
    )

    def __init__(
        self,
        context: RRefContext,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        made: str,
        anchor: object,
    ) -> None:
        """Ask a worker to create a value. Nothing is waited for. ``anchor`` is kept until the answer is there."""
        if not callable(function):
            raise TypeError(f"function should be callable, and {type(function).__qualname__} is not")
        agent = context.agent
        peer = agent.peer(to)
        owner = peer.info if peer is not None else to if isinstance(to, WorkerInfo) else WorkerInfo(str(to), -1)
        next_number = context.ids.next_number
        self._context = context
        self._peer = peer
        self._anchor = anchor
        self._call_id = 0
        self._future: asyncio.Future[Any] | None = None
        self._watcher: OwnerFuture | None = None
        self._fetch: asyncio.Future[tuple[Any] | None] | None = None
        self._error: BaseException | None = None
        self.may_bring_value = False
        """Worth a try: see `fetch_along`."""
        self.makes = function if isinstance(function, type) else None
        """The class whose object the value will be, if that is what was called."""
        self.owner = owner
        self.rref: RRefId = next_number()
        self._fork: ForkId = next_number()
        self.held: Use | Value
        context.forks.handle(CreationStarted(self.rref, self._fork, owner.name))
        if owner.name == context.info.name:
            self.held = context.values[self.rref] = Value(made or name_of(function))
        else:
            self.held = use = context.forks.users[self._fork]
            use.info = owner
            use.origin = made or name_of(function)
        numbers = self._numbers = context.post.numbers(owner.name)
        self._number = numbers.take()
        content = (context.incarnation, self._number, numbers.oldest, self.rref, self._fork, made)
        try:
            arguments = args if isinstance(args, tuple) else as_arguments(args)
            self._send(peer, to, function, (*content, *arguments), kwargs, timeout)
        except BaseException as error:
            self._take_back()
            if isinstance(error, SerializationError):
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                raise agent.explained(function, arguments, kwargs, to, cause) from cause
            raise

    def _send(
        self,
        peer: Peer | None,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        content: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
    ) -> None:
        agent = self._context.agent
        future: asyncio.Future[Any]
        if peer is None:
            future = OwnerFuture(loop=agent.loop)
            agent.request(RRefCreate, to, content, timeout, future=future, function=function, kwargs=kwargs)
        else:
            if peer.connection is not None:
                peer.connection.gather()  # whoever makes an RRef is about to use it
            future = agent.loop.create_future()
            self._call_id = agent.begin(peer, future, function, content, kwargs, timeout, 0, _CREATE)
            self.may_bring_value = timeout is UNSET
        self._future = future
        future.add_done_callback(self._settled)

    def _take_back(self) -> None:
        """It was never sent: nobody has to hear of it."""
        context = self._context
        self._numbers.settle(self._number)
        if isinstance(self.held, Use):
            del context.forks.users[self._fork]
        else:
            context.happened(OwnerHandleDropped(self.rref))

    # -- the value with the answer

    def fetch_along(self) -> asyncio.Future[tuple[Any] | None] | None:
        """Let the answer bring the value, too, if the creation has not left yet; a tuple of it, or None, follows."""
        self.may_bring_value = False  # one attempt, in the turn of the loop that it was made in
        peer = self._peer
        if peer is None or peer.connection is None:
            return None
        connection = peer.connection
        frame = connection.last_unsent
        call = peer.calls.get(self._call_id)
        if frame is None or call is None or self._context.agent.has_riders:
            return None  # what rides on calls has to know a fetch from a creation
        length, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, table_size = _unpack_header(frame)
        if type_ != _CREATE or id_ != self._call_id or n_buffers:
            return None  # another frame, or one whose tensors follow it
        flags |= RequestFlag.VALUE
        header = _pack_header(length, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, table_size)
        connection.replace_last_unsent(header + frame[HEADER_BYTES:])
        # The answer is for this one from now on, so that whoever fetches hears of it first hand
        self._fetch = call.future = self._context.agent.loop.create_future()
        self._fetch.add_done_callback(self._settled)
        return self._fetch

    # -- the end of it

    def future(self) -> OwnerFuture:
        """Done when the function has ended, with None; cancelling it cancels the function."""
        watcher = self._watcher
        if watcher is None:
            watcher = self._watcher = OwnerFuture(loop=self._context.agent.loop)
            if self._future is not None:
                watcher.on_cancel = self._cancel
            else:
                self._tell(watcher)
        return watcher

    def _cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def _tell(self, watcher: OwnerFuture) -> None:
        if watcher.done():
            return
        if self._error is None:
            watcher.set_result(None)
        elif isinstance(self._error, asyncio.CancelledError):
            watcher.on_cancel = None
            watcher.cancel()
        else:
            watcher.set_exception(fresh(self._error))

    def _settled(self, future: asyncio.Future[Any]) -> None:
        if future is self._fetch and not self._go_on_without(future):
            return
        context, held = self._context, self.held
        self._numbers.settle(self._number)
        self._future = self._anchor = None
        if future.cancelled() or future.exception() is not None:
            self._failed(future)
        elif isinstance(held, Use):
            held.fetches = None
            context.happened(CreationConfirmed(self._fork))
        else:
            # on oneself: the creation was the worker's own user, and ends
            context.happened(UserDeleted(self.rref, self._fork, abandons=False))
        if self._watcher is not None:
            self._tell(self._watcher)

    def _go_on_without(self, fetch: asyncio.Future[Any]) -> bool:
        """The fetch that the answer is for is done. False if that is because nobody waits for it any more."""
        self._fetch = None
        call = self._peer.calls.get(self._call_id) if self._peer is not None else None
        if fetch.cancelled() and call is not None and self._future is not None:
            call.future = self._future
            return False
        if self._future is not None:
            self._future.remove_done_callback(self._settled)
        return True

    def _failed(self, future: asyncio.Future[Any]) -> None:
        context, held = self._context, self.held
        if future.cancelled():
            self._error = asyncio.CancelledError()
            if self._peer is not None:
                self._peer.cancel(self._call_id)
        else:
            # the future's own has a traceback once somebody awaits it, and that refers to the RRef
            error = future.exception()
            assert error is not None
            self._error = fresh(error)
        failure = self._failure(self._error)
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            # cancelled by another way, while somebody waits
            fetch.remove_done_callback(self._settled)
            if not fetch.done():
                fetch.set_exception(fresh(failure))
        if isinstance(held, Use):
            if held.failure is None:
                held.fail(failure)
            goes_on = isinstance(self._error, RpcTimeoutError) and not context.options.timeouts_travel
            # the owner makes the value all the same, for as long as there is a handle here that nobody can use
            context.happened(CreationConfirmed(self._fork) if goes_on else CreationFailed(self._fork))
        else:
            held.fail(failure)
            context.happened(UserDeleted(self.rref, self._fork, abandons=True))

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
