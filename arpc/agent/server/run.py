"""One request while it is handled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.server.functions import Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.producer import Producer
from arpc.agent.server.reply_window import ResultSizes
from arpc.agent.server.request_reader import unpack
from arpc.agent.server.thread_replies import ThreadReplies
from arpc.ids import WorkerInfo
from arpc.user_errors import close_coroutine
from arpc.wire.messages import Message
from arpc.wire.metadata import Metadata
from arpc.wire.values.content import Content

if TYPE_CHECKING:
    from arpc.agent.server.dispatcher import Dispatcher

__all__ = ["Creation", "Run"]

_NESTED_LIMIT: Final = 32
# Of requests of a quick function, only those with an id that has none of these bits are measured
_UNMEASURED: Final = 15
_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled


class Creation(Protocol):
    """Keeps the result of one request on this worker."""

    def answer(self, run: Run, result: Any) -> Any:
        """The content of the reply to the caller; None if that is all to be said. Called in any thread."""

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
    coroutine: Coroutine[Any, Any, Any] | None = None
    """None until `first_step` has begun."""
    state: torchstate.SavedState | None = None
    """Torch's state of a coroutine that waits, if it is not the default."""
    task: asyncio.Task[Any] | None = None
    """The Task that carries it, once it had to wait."""
    bucket: dict[int, Run] | None = None
    """Those that expire with it, while its deadline is watched."""
    ended: bool = False
    expired: bool = False
    is_refused: bool = False
    """The function was not called, and will not be."""
    is_registered: bool = False
    is_stream: bool = False
    credit: int = 0
    items_sent: int = 0
    nested: list[asyncio.Future[Any]] | None = None
    nested_limit: int = _NESTED_LIMIT
    has_called: bool = False
    """Its thread has made calls, which may not have begun."""
    producer: Producer | None = None
    returned_coroutine: Coroutine[Any, Any, Any] | None = None
    meta: Metadata | None = None
    """What interceptors of the caller sent along."""
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    result: Any = None
    error: BaseException | None = None
    content: Content | None = None
    """The result as it is sent, if a thread has encoded it."""
    pickled: tuple[bytes, list[Any]] | None = None
    """The pickle and the slots of the result, if a thread has made them and the loop does the rest."""
    thread_replies: ThreadReplies | None = None
    """Where a thread may put the answer."""
    results: ResultSizes | None = None
    """Those of what it runs, if that is not its function."""
    creation: Creation | None = None
    """Keeps the result, of a request that is to leave it here."""
    is_counted: bool = False
    """The reply window has let it go to a thread, and is to hear when it leaves that."""
    describe: Callable[[], str] | None = None
    """Finds the name of what it asks for, if that is not its function: the method of a value."""
    handling: Any = None
    """What observers know of it, an `observers.Handling`; None if there are none."""
    awaited_first: list[Awaitable[object]] | None = None
    """What it waits for before it starts, if anything: see `prerequisites`."""
    due: float | None = None
    """Its `deadline`, once that is known."""

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

    # -- its function

    def first_step(self) -> Any:
        """Make the coroutine of the function, and send it None."""
        self.coroutine = coroutine = self.call()
        return coroutine.send(None)

    def call(self) -> Any:
        """Call the function, in its context."""
        if self.message is not None:
            unpack(self, self.message)
        args, kwargs = self.args, self.kwargs
        if args is None:
            return self.function.call()
        # not kept: the code that runs may keep its scope, which is this, for as long as it likes
        self.args = self.kwargs = None
        return self.function.call(*args, **kwargs) if kwargs else self.function.call(*args)

    # -- in a thread

    def work(self) -> Callable[[], None] | ThreadReplies | None:
        """Call the function, in a thread."""
        # taken before the look: a run that ends drops them after it has said so
        args, kwargs, context = self.args or (), self.kwargs, self.context
        function = self.function
        if self.ended:
            return self.leave_window if self.is_counted else None  # cancelled while it waited for a thread
        results, replies = function.results, self.thread_replies
        if results.unsurprising_bytes < 0 and not self.is_counted and (results.are_large or self.host.threads.is_ahead):
            return self._postpone
        self.args = self.kwargs = None
        # Of those that are known to be quick some are measured, to see that they still are
        begin = 0.0 if function.quickness.is_quick and self.id & _UNMEASURED else _clock()
        try:
            call = function.call
            result = context.run(call, *args, **kwargs) if kwargs else context.run(call, *args)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            self.error = error
            result = replies = None
        # The blocks it was in have ended with it. Left are the two things that people switch without a block.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if begin:
            function.quickness.measured(_clock() - begin)
        if self.has_called or self.nested is not None:
            replies = None  # what it called may be on its way still, and is not to be overtaken by the answer
        if replies is not None and context.run(replies.put, self, result):
            return replies
        if self.creation is not None or (self.content is None and self.error is None):
            self.result = result
        return self._worked

    def _worked(self) -> None:
        if self.has_called:
            # the loop may have looked for what threads have done before it looks at what they asked for
            self.has_called = False
            self.inbound.connection.loop.call_soon(torchstate.run_with, torchstate.DEFAULTS, self._worked)
            return
        if self.is_counted:
            self.leave_window()
        result, error, content = self.result, self.error, self.content
        self.result = self.error = self.content = None  # it may be kept for a while, and they may be large
        if self.ended:
            close_coroutine(result)  # it was cancelled meanwhile
        elif error is not None:
            self.host.raised(self, error)
        elif content is not None:
            self.keep(result)
            self.host.replies.returned(self, content)
        else:
            self.host.returned(self, result)

    def keep(self, result: Any) -> None:
        """Let a creation keep its result, unless it was cancelled."""
        creation, self.creation = self.creation, None
        if creation is not None:
            creation.returned(self, result)

    def _postpone(self) -> None:
        """It came to a thread before it was known how large its result is likely to be."""
        if not self.ended:
            self.host.queue.postpone(self)

    def leave_window(self) -> None:
        """It has left its thread, or has no use for one."""
        self.is_counted = False
        window = self.inbound.reply_window
        assert window is not None
        window.thread_ended()

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
            self.host.raised(self, asyncio.CancelledError())

    def expire(self) -> None:
        self.expired = True
        self.cancel()
