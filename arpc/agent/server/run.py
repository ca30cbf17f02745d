"""One request while it is handled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from arpc import torchstate
from arpc.agent.server.functions import Function, ResultSizes
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.producer import Producer
from arpc.agent.server.request_reader import prepare
from arpc.ids import WorkerInfo
from arpc.wire.messages import Message
from arpc.wire.metadata import Metadata

if TYPE_CHECKING:
    from arpc.agent.server.dispatcher import Dispatcher

__all__ = ["NO_CONTEXT", "TO_BE_FETCHED", "Creation", "Run"]

_NESTED_LIMIT: Final = 32
NO_CONTEXT: Final = Context()
"""Replaces a context that is no longer needed, because the context and its request refer to each other."""
TO_BE_FETCHED: Final = ()
"""The reply to a request with a `Creation`, if it does not include the result although the caller may want it."""


class Creation(Protocol):
    """Keeps the result of one request on this worker."""

    def answer(self, run: Run, result: Any) -> Any:
        """Return the object to reply, `TO_BE_FETCHED` if the reply has no result. Called in any thread."""

    def answered(self, run: Run, result: Any) -> None:
        """Record a result. Called in the thread that has it, and that sends the reply itself."""

    def returned(self, run: Run, result: Any) -> None:
        """Keep a result."""

    def failed(self, error: BaseException) -> None:
        """Keep the error that the function raised."""

    def not_made(self, error: BaseException) -> None:
        """Record that there is no result: the function was not called, or was cancelled. The caller gets the error."""


class Run(msgspec.Struct):
    """One request while it is handled, and the `scope.Scope` of the code that runs for it.

    It is a Struct, the kind of object that is cheapest to create, because every request needs one.
    """

    host: Dispatcher
    inbound: Inbound
    function: Function
    id: int
    timeout_ms: int
    context: Context
    """The context of this request alone; `NO_CONTEXT` once it has ended."""
    message: Message | None = None
    """The message that holds the arguments until they are unpickled; None if there are none."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    meta: Metadata | None = None
    """The metadata that interceptors of the caller have added."""
    coroutine: Coroutine[Any, Any, Any] | None = None
    """The coroutine of the handler; None until its function has been called."""
    state: torchstate.SavedState | None = None
    """The torch state of a suspended coroutine, if it is not the default."""
    task: asyncio.Task[Any] | None = None
    """The Task that runs the coroutine, once it had to wait."""
    due: float | None = None
    """The `deadline`, once that is known."""
    ended: bool = False
    expired: bool = False
    is_refused: bool = False
    """Whether the function was not called, and will not be."""
    is_registered: bool = False
    """Whether it can be cancelled and can expire, see `Inbound.register`."""
    is_counted: bool = False
    """Whether the queue let it have a thread, counting its result as large, so that it must call `leave_window`."""
    has_called: bool = False
    """Whether its thread has made calls, which may not have begun."""
    nested: list[asyncio.Future[Any]] | None = None
    nested_limit: int = _NESTED_LIMIT
    awaited_first: list[Awaitable[object]] | None = None
    """The awaitables that it waits for before it starts, if any: see `prerequisites`."""
    returned_coroutine: Coroutine[Any, Any, Any] | None = None
    creation: Creation | None = None
    """Keeps the result, if the request is to leave it on this worker."""
    results: ResultSizes | None = None
    """The sizes of its results, if they are not those of its function."""
    describe: Callable[[], str] | None = None
    """Returns the name of the request, if it is not that of the function: the method of a value, say."""
    handling: Any = None
    """The observers' record of it, an `observers.Handling`; None if there are no observers."""
    arrived_ns: int = 0
    """The time of its arrival, if a meter or observers are notified of it; else 0."""
    is_stream: bool = False
    credit: int = 0
    items_sent: int = 0
    producer: Producer | None = None

    @property
    def deadline(self) -> float | None:
        # Counted from when it is first needed: most requests end without it, and reading the clock is not free
        if self.due is None and self.timeout_ms:
            self.due = self.host.time() + self.timeout_ms / 1000
        return self.due

    @property
    def name(self) -> str:
        """The name shown to users: in errors, metrics, stacks and traces."""
        if self.describe is not None:
            try:
                return str(self.describe())
            except Exception:  # noqa: BLE001, S110 - the function itself reports wrong arguments
                pass
        return self.function.name

    @property
    def worker(self) -> Any:
        return self.host.worker

    @property
    def caller(self) -> WorkerInfo:
        return self.inbound.caller

    @property
    def prerequisites(self) -> list[Awaitable[object]]:
        if self.awaited_first is None:
            self.awaited_first = []
        return self.awaited_first

    # -- its function, on the loop and in its context

    def call(self) -> Any:
        """Call the function, after unpickling its arguments if need be."""
        prepare(self)
        args, kwargs = self.args, self.kwargs
        if not (args or kwargs):
            return self.function.call()
        # dropped, because user code may keep its scope, which is this object, for as long as it likes
        self.args, self.kwargs = (), None
        return self.function.call(*args, **kwargs) if kwargs else self.function.call(*args)

    # -- its result

    def keep(self, result: Any) -> None:
        """Let a creation keep its result, unless it was cancelled."""
        creation, self.creation = self.creation, None
        if creation is not None:
            creation.returned(self, result)

    def leave_window(self) -> None:
        """Notify the queue that this request has left its thread, or needs none."""
        self.is_counted = False
        self.host.queue_of(self.inbound).thread_ended()

    # -- calls it makes

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """Record a call that the handler has made in turn, and that is cancelled with it."""
        if self.nested is None:
            self.nested = []
        elif len(self.nested) >= self.nested_limit:
            self.nested = [call for call in self.nested if not call.done()]
            self.nested_limit = max(_NESTED_LIMIT, 2 * len(self.nested))
        self.nested.append(future)

    def thread_call_begun(self) -> None:
        self.has_called = True

    def cancel_nested(self) -> None:
        nested, self.nested = self.nested, None
        for future in nested or ():
            future.cancel()

    # -- its end

    def cancel(self) -> None:
        """Stop it as soon as it can be stopped; a function in a thread runs to its end, but its result is not used."""
        if self.task is not None:
            self.task.cancel()
        elif self.inbound.claim(self):
            # first, so that a thread that waits for one of these calls continues
            self.cancel_nested()
            self.host.replies.raised(self, asyncio.CancelledError())

    def expire(self) -> None:
        self.expired = True
        self.cancel()
