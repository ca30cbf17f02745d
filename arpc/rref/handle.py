"""RRef: a handle to an object that stays on its owner, with methods that fetch the object or call it there."""

from __future__ import annotations

import asyncio
import html
import os
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar, cast

from arpc.agent.client.future import Future
from arpc.agent.client.streams import Stream
from arpc.agent.scope import find_scope
from arpc.errors import (
    ArpcError,
    NotInitializedError,
    RpcTimeoutError,
    RRefError,
    SerializationError,
    set_may_have_run,
)
from arpc.ids import GloballyUniqueId, WorkerInfo, address_of
from arpc.options import UNSET, Unset
from arpc.rref.calls import call_method, rref_typeof_on_owner, stream_items, stream_method
from arpc.rref.context import RRefContext
from arpc.rref.create import Creation, start_creation
from arpc.rref.proxies import AsyncProxy, RemoteProxy, StreamProxy, SyncProxy
from arpc.rref.states import ForkId, OwnerState, RRefId
from arpc.rref.user_ref import FetchFuture, OwnerFuture, Use
from arpc.rref.values import NOTHING, Value
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh, name_of_class
from arpc.wire.messages import RRefFetch
from arpc.wire.values.pickler import Pickling

__all__ = ["RRef", "create_remote"]

T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound=OwnerFuture)

_STACK_LIMIT: Final = 12
_PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"
"""The directory of arpc's own code."""
_new_rref = object.__new__


class RRef(Generic[T_co]):
    """A reference to a value on some worker, its owner.

    `remote` makes one for the result of a function on another worker; ``RRef(value)`` makes one for an object of this
    worker. It can be passed in calls and returned from them. The value lives as long as any worker in the group holds
    an RRef to it.

    ::

        counter = arpc.remote("ps", Counter)            # the object is made on "ps", and stays there
        await counter.rpc_sync().add(3)                 # runs there
        value = await counter.remote().total()          # `await rref` fetches a copy of the value

    A call that returns an RRef does not wait, so calls can be chained. An error while the value is created is raised by
    each use of the RRef.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_creation",
        "_future",
        "_is_released",
        "_type",
        "_use",
        "_value",
    )

    _future: Future[Any] | None
    """The future of the creation, once `_get_future` was called; None before."""
    _type: Future[type[T_co]] | Any
    """The value's type, if known: a future once `_get_type` was called; else the maker's hint, or the class called."""

    def __init__(self, value: T_co, type_hint: object = None) -> None:
        scope = find_scope()
        if scope is None or scope.worker is None:
            raise NotInitializedError(
                "an RRef belongs to a worker, and this context has none: call arpc.init_rpc first"
            )
        context: RRefContext = scope.worker.rref_context
        made = _stack() if context.options.rref_creation_stacks else "RRef()"
        stays = type_hint is not None and isinstance(value, ScriptModule)
        held = Value(context.ids.next_number(), OwnerState.READY, made=made, content=value, stays=stays)
        self.set_up(context, None, held)
        self._type = type_hint

    def set_up(
        self, context: RRefContext, use: Use | None, value: Value | None, creation: Creation | None = None
    ) -> None:
        """Fill in a new handle, either to a ``use`` of this worker or to a ``value`` that this worker owns."""
        self._context = context
        self._use = use
        self._value = value
        self._creation = creation
        self._future = None
        self._type = None
        self._is_released = False

    @classmethod
    def of(cls, context: RRefContext, held: Use | Value) -> Self:
        """Return an RRef to a use or a value of a worker's context. For arpc's own code."""
        made = _new_rref(cls)
        made.set_up(context, held if isinstance(held, Use) else None, held if isinstance(held, Value) else None)
        return made

    @property
    def _rref(self) -> RRefId:
        held = self._value if self._use is None else self._use
        assert held is not None
        return held.rref

    # -- owner and state

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        return self._context.identified(self._owner)

    def owner_name(self) -> str:
        return self._owner.name

    @property
    def _owner(self) -> WorkerInfo:
        """The owner; its id may be unknown. Calls go to a known id, so that a successor under its name gets none."""
        return self._context.info if self._use is None else self._use.owner

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._use is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has confirmed that it counts this RRef. The RRef can be used before that."""
        return self._use is None or self._use.is_confirmed

    def ids(self) -> tuple[GloballyUniqueId, GloballyUniqueId | None]:
        """Return the id shared by all RRefs to the value, and the id of this fork; the latter is None on the owner."""
        fork = None if self._use is None else GloballyUniqueId.from_int(self._use.fork)
        return GloballyUniqueId.from_int(self._rref), fork

    @property
    def failure(self) -> BaseException | None:
        """The error that each use would raise, as far as this worker knows; None if none is known."""
        if self._use is not None:
            return self._use.failure
        return self._value.error if self._value is not None else None

    def __repr__(self) -> str:
        if self._use is None:
            return f"OwnerRRef({GloballyUniqueId.from_int(self._rref)})"
        return str(self._use)

    if not TYPE_CHECKING:  # a type checker reports the mistake itself

        def __getattr__(self, name: str) -> NoReturn:
            # copy, pickle and notebooks probe for names with an underscore, and need no advice
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(
                f"{self._summary} has no attribute {name!r}. The value is on worker {self.owner_name()!r}: call its "
                f"method there with `await rref.rpc_sync().{name}(...)`, or fetch a copy with `(await rref).{name}`"
            )

    @property
    def _summary(self) -> str:
        """Class, owner and state, for display: ``RRef[Counter] on 'ps' (confirmed)``."""
        known = self.known_type()
        held = "" if known is None else f"[{name_of_class(known)}]"
        return f"RRef{held} on {self.owner_name()!r} ({self._state()})"

    def _state(self) -> str:
        if self._is_released:
            return "released"
        if self.failure is not None:
            return f"failed: {type(self.failure).__name__}"
        if self._use is None:
            return "owned here" if self._value is not None and self._value.is_ready else "being made"
        return "confirmed" if self._use.is_confirmed else "pending"

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:
        """Print the summary in IPython."""
        printer.text(self._summary)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return f"<code>{html.escape(self._summary)}</code>"

    # -- the value

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.to_here().__await__()

    async def to_here(self, timeout: float | Unset = UNSET) -> T_co:
        """Return a copy of the value, once it is created; on the owner, the value itself.

        Raises the error that the creation raised, `RRefCreationError` if the creation timed out, was cancelled or was
        lost, `OwnerLostError` if the owner is lost, and `RpcTimeoutError` if the value does not arrive in time.
        """
        use, creation = self._use, self._creation
        if self._is_released or (use is not None and use.failure is not None):
            self._check("to_here() called")
        if use is None:
            assert self._value is not None
            return await self._wait_here(self._value, timeout)
        if creation is not None and not creation.is_settled and timeout is UNSET:
            waiter = creation.fetch_along()
            if waiter is not None:
                try:
                    answer = await waiter
                except BaseException:
                    creation.waiter = None
                    raise
                finally:
                    del waiter  # its exception refers to this frame
                value: T_co
                if answer:
                    value = answer[0]
                    return value
        context = self._context
        future, is_created = self.owner_future(FetchFuture), use.is_created
        context.agent.request(RRefFetch, address_of(use.owner), (use.rref, is_created), timeout, future=future)
        if not is_created:
            # `Use.fail` ends the fetch if it turns out that there will be no value
            if use.fetches is None:
                use.fetches = set()
            use.fetches.add(future)
        try:
            return cast("T_co", await future)
        except GeneratorExit:
            future.cancel()  # a coroutine that is closed has not cancelled the future that it awaits
            raise
        except RuntimeError:
            context.agent.check_loop()
            raise
        finally:
            if use.fetches is not None:
                use.fetches.discard(future)
            del future  # its exception refers to this frame

    async def _wait_here(self, value: Value, timeout: float | Unset) -> T_co:
        self._context.service.look_for(value)
        if value.is_ready:
            return cast("T_co", value.get_nowait())
        timeout_s = self._context.options.rpc_timeout if isinstance(timeout, Unset) else timeout
        try:
            async with asyncio.timeout(timeout_s or None):
                return cast("T_co", await value.get())
        except TimeoutError as error:
            if value.is_ready:
                raise  # the TimeoutError is the function's own
            raise RpcTimeoutError(f"{self!r} had no value within {timeout_s} s") from error

    async def local_value(self) -> T_co:
        """Return the value itself, once it is created. Raises `RRefError` on any worker but the owner."""
        if self._value is None:
            raise RRefError(
                f"For {self!r}, can't call local_value() on user {self._context.info}. Call it on owner {self.owner()}"
            )
        self._check("local_value() called")
        self._context.service.look_for(self._value)
        return cast("T_co", await self._value.get())

    async def backward(self, ctx_id: int = -1, retain_graph: bool = False, *, timeout: float | Unset = UNSET) -> None:
        """Run a backward pass from the value, a scalar tensor, on its owner, in the autograd context ``ctx_id``.

        Without ``ctx_id``, which is possible on the owner only, it calls the value's own ``backward()``. ``timeout`` is
        as in `arpc.autograd.backward`.
        """
        self._check("backward() called")
        await self._context.backward(self, ctx_id, retain_graph, timeout)

    def _check(self, what: str) -> None:
        if self._is_released:
            raise RRefError(f"{self!r} has been released. It cannot have {what} on it after that")
        use = self._use
        if use is not None and use.failure is not None:
            raise fresh(use.failure)

    # -- calls on the value

    def rpc_async(self, timeout: float | Unset = UNSET) -> AsyncProxy[T_co]:
        """``rref.rpc_async().method(...)`` calls a method of the value on its owner and returns a `Future`."""
        return AsyncProxy(self, self._call_method, timeout)

    def rpc_sync(self, timeout: float | Unset = UNSET) -> SyncProxy[T_co]:
        """``await rref.rpc_sync().method(...)`` calls a method of the value on its owner."""
        return SyncProxy(self, self._call_method, timeout)

    def remote(self, timeout: float | Unset = UNSET) -> RemoteProxy[T_co]:
        """``rref.remote().method(...)`` calls a method of the value and returns at once an RRef to its result."""
        return RemoteProxy(self, self._remote_method, timeout)

    def stream(self, timeout: float | Unset = UNSET, window: int = 16) -> StreamProxy[T_co]:
        """``async for item in rref.stream().method(...)`` receives the items of a method as it yields them.

        ``async for item in rref.stream()`` receives the items of the value itself, such as a generator held there. A
        second loop continues where the first one stopped, but items that were in flight are lost: at most ``window``.
        """
        return StreamProxy(self, self._stream_method, timeout, window)

    def _call_method(self, name: str, timeout: float | Unset, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self.owner_future(OwnerFuture)
        self.call_on_owner(future, call_method, (name, *args), kwargs, timeout, name=self.name_of_method(name), depth=3)
        return future

    def _remote_method(self, name: str, timeout: float | Unset, /, *args: Any, **kwargs: Any) -> RRef[Any]:
        arguments, called = (*self.target(), name, *args), self.name_of_method(name)
        return create_remote(
            self._context, self._owner, call_method, arguments, kwargs, timeout, anchor=self, name=called
        )

    def _stream_method(
        self, name: str | None, timeout: float | Unset, window: int, /, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        to, stream_of = address_of(self._owner), self._context.agent.stream
        future = self.owner_future(OwnerFuture)
        stream: Stream[Any]
        if name is None:
            stream = stream_of(to, stream_items, self.target(), None, timeout, window, future)
        else:
            arguments, called = (*self.target(), name, *args), self.name_of_method(name)
            stream = stream_of(to, stream_method, arguments, kwargs, timeout, window, future, called)
        stream.anchor = self
        return stream

    # -- for arpc's own code

    def target(self) -> tuple[int, bool]:
        """Return the arguments with which a call names the value to its owner: its id, and `UserFork.is_created`.

        Raises the failure of the RRef, if one is known, and `RRefError` if it was released.
        """
        use = self._use
        if self._is_released or (use is not None and use.failure is not None):
            try:
                self._check("methods called")
            except ArpcError as error:
                set_may_have_run(error, may_have_run=False)  # the stored error is about another call
                raise
        if use is not None:
            return use.rref, use.is_created
        value = cast("Value", self._value)
        self._context.on_loop(lambda: self._context.forks.value_shared(value))
        return value.rref, False

    def owner_future(self, kind: type[F]) -> F:
        """Return a future for a call to the owner. It keeps the RRef alive until the call has ended."""
        future = kind(loop=self._context.agent.loop)
        future.anchor = self
        return future

    def call_on_owner(
        self,
        future: OwnerFuture,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
        *,
        name: str = "",
        depth: int = 5,
    ) -> None:
        """Call a function on the owner, with `target` before its arguments. ``future`` is an `owner_future`.

        ``name`` is the name shown to users, if not the function's own; ``depth`` is that of the user's stack frame.
        """
        arguments, context, use = (*self.target(), *args), self._context, self._use
        to = address_of(context.info if use is None else use.owner)
        context.agent.call(to, function, arguments, kwargs, timeout, depth=depth, future=future, name=name)

    def known_type(self) -> type | None:
        """Return the type of the value if this worker knows it, without a message; else None."""
        known = self._type
        if known is not None:
            if isinstance(known, type):
                return known
            if isinstance(known, Future) and known.done() and not known.cancelled() and known.exception() is None:
                asked: type = known.result()
                return asked
        if self._value is not None and self._value.content is not NOTHING:
            return type(self._value.content)
        if self._creation is not None and isinstance(self._creation.function, type):
            self._type = self._creation.function  # cached, since every method call looks it up
            return self._creation.function
        return None

    def name_of_method(self, name: str) -> str:
        """Return the name of a method as shown to users: with the value's class, if that is known here."""
        known = self.known_type()
        return name if known is None else _name_of_method(known, name)

    def pack(self, context: RRefContext, pickling: Pickling) -> tuple[str, int, RRefId, ForkId, str, bool]:
        """Make a fork for the receiver of a pickle, and return its data. It is offered once the pickle is complete.

        Raises `SerializationError` if the pickle is for no worker, or if the RRef belongs to another worker's context.
        """
        to, number = pickling.to, self._rref
        if to is None:
            self.__reduce__()
        if self._context is not context:
            holder, sender = self._context.info.name, context.info.name
            raise SerializationError(f"{self!r} belongs to worker {holder!r} and cannot be sent by worker {sender!r}")
        self._check("forks made")
        fork = context.ids.next_number()
        use, value = self._use, self._value
        if use is not None:
            is_created = use.is_created
            pickling.packed.append(lambda: context.on_loop(lambda: context.offer(number, fork, to, use.fork)))
        else:
            assert value is not None
            is_created = not context.forks.is_expected(number)

            def share_and_offer() -> None:
                context.forks.value_shared(value)
                context.offer(number, fork, to, None)

            pickling.packed.append(lambda: context.on_loop(share_and_offer))
        owner = self.owner()
        return owner.name, owner.id, number, fork, context.info.name, is_created

    # -- names that torch has, too

    def _get_type(self, timeout: float | Unset = UNSET) -> Future[type[T_co]]:
        """Return a future of the value's type. The owner is asked only once."""
        if not isinstance(self._type, Future):
            future = self.owner_future(OwnerFuture)
            self.call_on_owner(future, rref_typeof_on_owner, timeout=timeout, depth=3)
            self._type = future
        return self._type

    def _get_future(self) -> Future[Any] | None:
        """Return the future of the creation on the worker that called `remote`, else None. Its result is None."""
        if self._future is None and self._creation is not None:
            self._future = self._creation.future()
        return self._future

    # -- the end of it

    async def release(self) -> None:
        """Release the value now, and wait until the owner has acknowledged that. The handle cannot be used any more."""
        if self._is_released:
            return
        self._is_released = True
        if self._use is not None:
            try:
                await self._context.release(self._use)
            except RuntimeError:
                self._context.agent.check_loop()
                raise
        elif (value := self._value) is not None:
            if self._context.forks.owned.get(value.rref) is value:
                self._context.forks.owner_handle_dropped(value.rref)
            self._value = Value(value.rref, OwnerState.READY, content=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def __del__(self) -> None:
        # Runs on any thread, at any time, perhaps on a half-made object: see ControlQueue.drop
        try:
            if self._is_released:
                return
        except AttributeError:  # it was never set up
            return
        context, use, value = self._context, self._use, self._value
        if use is not None:
            context.post.drop(use)
        elif value is not None and context.forks.owned.get(value.rref) is value:
            context.post.drop(value)

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            f"{self!r} can be pickled as part of a call only: its owner must count every worker that receives it, and "
            f"cannot know how often a pickle is read. Pass it to arpc.rpc_async"
        )


@lru_cache(maxsize=1024)
def _name_of_method(kind: type, name: str) -> str:
    return f"{name_of_class(kind)}.{name}"


def _stack() -> str:
    """Return the stack of the user's code, without arpc's own frames."""
    frames = [frame for frame in traceback.extract_stack(limit=_STACK_LIMIT) if not frame.filename.startswith(_PACKAGE)]
    return "".join(traceback.format_list(frames))


def create_remote(
    context: RRefContext,
    to: str | int | WorkerInfo,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float | Unset,
    *,
    anchor: object = None,
    name: str = "",
) -> RRef[Any]:
    """Return an RRef to the result of a function on a worker, without waiting. May be called in any thread.

    ``anchor`` is kept alive until the function has run. ``name`` is the name shown to users, if not the function's own.
    """
    made = _stack() if context.tells_stacks else ""
    if get_ident() == context.thread:
        creation = start_creation(context, to, function, args, kwargs, timeout, made, anchor, name)
    else:
        start = partial(start_creation, context, to, function, args, kwargs, timeout, made, anchor, name)
        creation = context.on_loop(start)
    value = creation.value
    rref: RRef[Any] = _new_rref(RRef)
    rref.set_up(context, creation if value is None else None, value, creation)
    return rref
