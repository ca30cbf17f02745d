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
"""In the place of a context that is not needed any more: it and its request refer to each other."""
TO_BE_FETCHED: Final = ()
"""The answer to a request for a `Creation` whose result does not come along, though its caller may want it."""


class Creation(Protocol):
    """Keeps the result of one request on this worker."""

    def answer(self, run: Run, result: Any) -> Any:
        """The content of the reply to the caller; `TO_BE_FETCHED` if that has no result. Called in any thread."""

    def answered(self, run: Run, result: Any) -> None:
        """A thread has a result, and sends the answer to the caller itself."""

    def returned(self, run: Run, result: Any) -> None:
        """Keep a result."""

    def failed(self, error: BaseException) -> None:
        """Keep what the function raised."""

    def not_made(self, error: BaseException) -> None:
        """There will be no result: the function was not called, or was cancelled. The caller gets the error."""


class Run(msgspec.Struct):
    """One request while it is handled, and the `scope.Scope` of the code that runs for it.

    A Struct because it is the one object that every request needs, and this is the cheapest kind to make.
    """

    host: Dispatcher
    inbound: Inbound
    function: Function
    id: int
    timeout_ms: int
    context: Context
    """Its own, until it ends."""
    message: Message | None = None
    """Holds the arguments until they are unpacked, if there are any."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    meta: Metadata | None = None
    """What interceptors of the caller sent along."""
    coroutine: Coroutine[Any, Any, Any] | None = None
    """None until the function of a coroutine has been called."""
    state: torchstate.SavedState | None = None
    """Torch's state of a coroutine that waits, if it is not the default."""
    task: asyncio.Task[Any] | None = None
    """The Task that carries it, once it had to wait."""
    due: float | None = None
    """Its `deadline`, once that is known."""
    ended: bool = False
    expired: bool = False
    is_refused: bool = False
    """The function was not called, and will not be."""
    is_registered: bool = False
    """It can be cancelled, and expires: see `Inbound.register`."""
    is_counted: bool = False
    """The queue has let it go to a thread though its result may be large, and is to hear when it leaves that."""
    has_called: bool = False
    """Its thread has made calls, which may not have begun."""
    nested: list[asyncio.Future[Any]] | None = None
    nested_limit: int = _NESTED_LIMIT
    awaited_first: list[Awaitable[object]] | None = None
    """What it waits for before it starts, if anything: see `prerequisites`."""
    returned_coroutine: Coroutine[Any, Any, Any] | None = None
    creation: Creation | None = None
    """Keeps the result, of a request that is to leave it here."""
    results: ResultSizes | None = None
    """Those of what it runs, if that is not its function."""
    describe: Callable[[], str] | None = None
    """Finds the name of what it asks for, if that is not its function: the method of a value."""
    handling: Any = None
    """What observers know of it, an `observers.Handling`; None if there are none."""
    arrived_ns: int = 0
    """When it came, if a meter or observers hear of it."""
    is_stream: bool = False
    credit: int = 0
    items_sent: int = 0
    producer: Producer | None = None

    @property
    def deadline(self) -> float | None:
        # Counted from when it is first asked for: most requests end before anybody does, and reading the clock is not
        # free
        if self.due is None and self.timeout_ms:
            self.due = self.host.time() + self.timeout_ms / 1000
        return self.due

    @property
    def name(self) -> str:
        """What people call it."""
        if self.describe is not None:
            try:
                return str(self.describe())
            except Exception:  # noqa: BLE001, S110 - the function itself says what is wrong with its arguments
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
        """Call the function, once its arguments are built."""
        prepare(self)
        args, kwargs = self.args, self.kwargs
        if not (args or kwargs):
            return self.function.call()
        # not kept: the code that runs may keep its scope, which is this, for as long as it likes
        self.args, self.kwargs = (), None
        return self.function.call(*args, **kwargs) if kwargs else self.function.call(*args)

    # -- what it leads to

    def keep(self, result: Any) -> None:
        """Let a creation keep its result, unless it was cancelled."""
        creation, self.creation = self.creation, None
        if creation is not None:
            creation.returned(self, result)

    def leave_window(self) -> None:
        """It has left its thread, or has no use for one."""
        self.is_counted = False
        self.host.queue_of(self.inbound).thread_ended()

    # -- calls it makes

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """The handler has made a call in turn, which is cancelled with it."""
        if self.nested is None:
            self.nested = []
        elif len(self.nested) >= self.nested_limit:
            self.nested = [call for call in self.nested if not call.done()]
            self.nested_limit = max(_NESTED_LIMIT, 2 * len(self.nested))
        self.nested.append(future)

    def call_comes(self) -> None:
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
            # first, so that a thread that waits for one of them goes on
            self.cancel_nested()
            self.host.replies.raised(self, asyncio.CancelledError())

    def expire(self) -> None:
        self.expired = True
        self.cancel()
