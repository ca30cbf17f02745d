"""Requests of peers while they are handled."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Protocol

import msgspec

from arpc import torchstate
from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.functions import Function
from arpc.agent.outbox import ReplyOutbox
from arpc.agent.reply_window import ReplyWindow, ResultSizes
from arpc.agent.scope import current_scope
from arpc.agent.streams import Producer
from arpc.agent.threads import ThreadPool
from arpc.ids import WorkerInfo
from arpc.transport.base import BulkSend, Connection
from arpc.user_errors import close_coroutine
from arpc.wire.messages import Message, RequestFlag

__all__ = ["Inbound", "Run", "RunHost"]

# In the place of a context that is not needed yet, or no more: the two refer to each other, and each call would be a
# cycle to collect
NO_CONTEXT: Final = Context()
_NESTED_LIMIT: Final = 32
# The last bits of a call's number: one call of sixteen has none of them
UNMEASURED: Final = 15
"""Of requests of a quick function, those with an id that has one of these bits."""
_clock = time.perf_counter


class RunHost(Protocol):
    """What a request needs of the executor that runs it."""

    worker: Any

    @property
    def threads(self) -> ThreadPool: ...
    @property
    def time(self) -> Callable[[], float]: ...
    def unpack(self, run: Run, message: Message) -> None: ...
    def returned(self, run: Run, result: Any) -> None: ...
    def thread_returned(self, run: Run, result: Any) -> None: ...
    def raised(self, run: Run, error: BaseException) -> None: ...
    def answer_withdrawn(self) -> None: ...
    def postpone(self, run: Run) -> None: ...


class Run(msgspec.Struct):
    """One request while it is handled: a `carriers.Job`, and the `scope.Scope` of the code that runs for it.

    A Struct because it is the one object that every request needs, and this is the cheapest kind to make.
    """

    executor: RunHost
    inbound: Inbound
    function: Function
    id: int
    timeout_ms: int
    context: Context = NO_CONTEXT
    """Its own, from when it has to wait until it ends."""
    message: Message | None = None
    """Holds the arguments until they are unpacked."""
    coroutine: Coroutine[Any, Any, Any] | None = None
    state: torchstate.SavedState | None = None
    task: asyncio.Task[Any] | None = None
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
    meta: dict[str, Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    result: Any = None
    error: BaseException | None = None
    outbox: ReplyOutbox | None = None
    """Where a thread may put the answer."""
    results: ResultSizes | None = None
    """Those of what it runs, if that is not its function."""
    never_begun: Callable[[BaseException], None] | None = None
    """Told the error of a request that ends before its coroutine has begun."""
    is_counted: bool = False
    """The reply window has let it go to a thread, and is to hear when it leaves that."""
    handling: Any = None
    """What observers know of it, an `observers.Handling`; None if nobody observes."""
    _deadline: float | None = None
    _prerequisites: list[Awaitable[object]] | None = None

    @property
    def deadline(self) -> float | None:
        # Counted from when it is first asked for: most requests end before anybody does, and reading the clock is not
        # free
        deadline = self._deadline
        if deadline is None and self.timeout_ms:
            deadline = self._deadline = self.executor.time() + self.timeout_ms / 1000
        return deadline

    @property
    def worker(self) -> Any:
        return self.executor.worker

    @property
    def caller(self) -> WorkerInfo:
        return self.inbound.caller

    @property
    def prerequisites(self) -> list[Awaitable[object]]:
        if self._prerequisites is None:
            self._prerequisites = []
        return self._prerequisites

    @property
    def has_prerequisites(self) -> bool:
        """Looking at `prerequisites` would make an empty list."""
        return self._prerequisites is not None

    def first_step(self) -> Any:
        self.coroutine = coroutine = self.begin()
        return coroutine.send(None)

    def begin(self) -> Any:
        """Enter the scope, unpack the arguments if that has not been done, and call the function."""
        message = self.message
        if message is not None:
            self.message = None
            current_scope.set(self)
            if not message.body:
                return self.function.call()
            try:
                self.executor.unpack(self, message)
            except BaseException:
                self.is_refused = True
                raise
        args, kwargs = self.args, self.kwargs
        self.args = self.kwargs = None
        return self.function.call(*(args or ()), **(kwargs or {}))

    def suspended(self) -> None:
        self.inbound.register(self)

    def finished(self, result: Any) -> None:
        self.executor.returned(self, result)

    def failed(self, error: BaseException) -> None:
        # A task that is cancelled before its first step never enters the coroutine
        if self.coroutine is None and self.never_begun is not None:
            self.never_begun(error)
        if self.returned_coroutine is not None:
            close_coroutine(self.returned_coroutine)  # it may never have begun
        self.executor.raised(self, error)

    def work(self) -> Callable[[], None] | ReplyOutbox | None:
        """Call the function, in a thread."""
        # taken before the look: a run that ends drops them after it has said so
        args, kwargs, context = self.args, self.kwargs, self.context
        function = self.function
        if self.ended:
            return self.leave_window if self.is_counted else None  # cancelled while it waited for a thread
        results = function.results
        if not self.is_counted and (results.are_large or (not results.are_known and self.executor.threads.is_ahead)):
            return self._postpone
        self.args = self.kwargs = None
        # Of those that are known to be quick some are measured, to see that they still are
        begin = 0.0 if function.is_quick and self.id & UNMEASURED else _clock()
        try:
            if kwargs:
                result = context.run(function.call, *(args or ()), **kwargs)
            elif args:
                result = context.run(function.call, *args)
            else:
                result = context.run(function.call)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            self.error = error
            if begin:
                function.measured(_clock() - begin)
            return self._worked
        if begin:
            function.measured(_clock() - begin)
        outbox = self.outbox
        # What it called may be on its way still, and is not to be overtaken by the answer
        if outbox is not None and not self.has_called and self.nested is None and outbox.put(self, result):
            self.context = NO_CONTEXT
            return outbox
        self.result = result
        return self._worked

    def work_unmeasured(self) -> Callable[[], None] | ReplyOutbox | None:
        """`work` for a function without arguments that is known to be quick."""
        context = self.context
        function = self.function
        if self.ended:
            return None
        if function.results.are_large:
            return self._postpone
        try:
            result = context.run(function.call)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            self.error = error
            return self._worked
        outbox = self.outbox
        if outbox is not None and not self.has_called and self.nested is None:
            if result is None:
                outbox.put_none(self, self.id)
                self.context = NO_CONTEXT
                return outbox
            if outbox.put(self, result):
                self.context = NO_CONTEXT
                return outbox
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
        result, error = self.result, self.error
        self.result = self.error = None  # it may be kept for a while, and they may be large
        if error is not None:
            self.executor.raised(self, error)
        else:
            self.executor.thread_returned(self, result)

    def _postpone(self) -> None:
        """It came to a thread before it was known how large its result is likely to be."""
        if not self.ended:
            self.executor.postpone(self)

    def leave_window(self) -> None:
        self.is_counted = False
        window = self.inbound.reply_window
        assert window is not None
        window.thread_ended()

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

    def cancel(self) -> None:
        """Stop it as soon as it can be stopped; a function in a thread runs to its end, but its result is not used."""
        if self.task is not None:
            self.task.cancel()
        elif self.outbox is None or self.inbound.claim(self):
            # first, so that a thread that waits for one of them goes on
            self.cancel_nested()
            self.executor.raised(self, asyncio.CancelledError())

    def expire(self) -> None:
        self.expired = True
        self.cancel()


class Inbound:
    """What one connection asked for and has not been answered yet."""

    def __init__(
        self,
        connection: Connection,
        caller: WorkerInfo,
        deadlines: Deadlines,
        *,
        max_handlers: int,
        main_by_value: bool,
    ) -> None:
        self.connection = connection
        self.caller = caller
        self.main_by_value = main_by_value
        self.functions: dict[int, Function | Exception] = {}
        self.coroutines: dict[int, Function] = {}
        """Those of the functions that are nothing but a coroutine to be awaited, as most are."""
        self.plain: dict[int, Function] = {}
        """Those that are nothing but a function to be called in a thread."""
        self.bare: dict[bytes, tuple[Function, int]] = {}
        """Some of the `coroutines`, and the timeouts they were called with, by the `wire.frames.TERMS` of both."""
        self.bare_plain: dict[bytes, tuple[Function, int]] = {}
        """The same for those that are `plain`."""
        self.limit = max_handlers
        """How many requests may run at once."""
        self.running: dict[int, Run] = {}
        self.is_full = False
        """No more requests may run, or others wait already."""
        self.latest_id = -1
        """The last request that came: the same one again is a message that came twice."""
        self.waiting: dict[int, tuple[Message, float]] = {}
        """Requests that must wait, and since when."""
        self._for_handlers: OrderedDict[int, None] = OrderedDict()
        """Those of them that wait because too many others run, or its caller does not take small replies."""
        self.reply_window: ReplyWindow | None = None
        """Where requests wait whose results are likely to be large, from the first such on."""
        self.results_by_value = ResultSizes()
        """Those of functions that come with their arguments, of which none is known to have been called before."""
        self.waiting_bytes = 0
        self.ended: Callable[[Run], None] | None = None
        """Told of the end of each that was registered, see `agent.metering`."""
        self.began_ns: dict[int, int] = {}
        """When those came, by id, while somebody meters."""
        self._deadlines = deadlines
        self._time = connection.loop.time
        self._by_tick: dict[int, dict[int, Run]] = {}
        self._usual_ms = 0
        self._usual_tick = NEVER
        self._usual_until = 0.0
        self._usual_bucket: dict[int, Run] = {}
        self._replies: dict[int, BulkSend] = {}
        self.outbox: ReplyOutbox | None = None
        """Where threads put what they answer without the loop, from the first time that one could."""

    def define(self, number: int, function: Function | Exception) -> None:
        """The caller will call this function by its number; or it cannot be called, and why."""
        self.functions[number] = function
        self.coroutines.pop(number, None)
        self.plain.pop(number, None)
        self.bare.clear()
        self.bare_plain.clear()
        # What is in none of the tables is admitted step by step, see `Executor.request_received`
        if isinstance(function, Function) and not function.results.are_large:
            if function.is_simple:
                self.coroutines[number] = function
            elif function.is_plain:
                self.plain[number] = function

    def results_of(self, message: Message) -> ResultSizes | None:
        """The results of what a request calls; None if it does not wait for these to be taken."""
        if message.flags & RequestFlag.STREAM:
            return None  # it has a window of its own
        function = self.functions.get(message.arg)
        if function.__class__ is Function:
            return function.results
        return None if message.arg else self.results_by_value

    def learn(self, results: ResultSizes, size_bytes: int) -> None:
        """A function has returned something of that size."""
        if results.saw(size_bytes):
            for number, function in list(self.functions.items()):
                if isinstance(function, Function) and function.results is results:
                    self.define(number, function)

    def set_limit(self, max_handlers: int) -> None:
        """Let that many requests run at once."""
        self.limit = max_handlers
        self.look_for_room()

    def look_for_room(self) -> None:
        """See whether requests may run at once again."""
        self.is_full = bool(self._for_handlers) or len(self.running) >= self.limit

    @property
    def has_room_for_waiting(self) -> bool:
        """A request waits for a handler that may have one now."""
        return bool(self._for_handlers) and len(self.running) < self.limit

    @property
    def is_waited_for(self) -> bool:
        """Requests wait, packed or not."""
        return bool(self.waiting) or (self.reply_window is not None and self.reply_window.is_waited_for)

    def keep(self, message: Message) -> None:
        """Keep a request packed for now, until `take_waiting`."""
        self.waiting[message.id] = message, self._time()
        self.waiting_bytes += message.size_bytes

    def keep_for_handler(self, message: Message) -> None:
        """Keep a request packed until others have ended."""
        self.keep(message)
        self.wait_for_handler(message.id)

    def wait_for_handler(self, call_id: int) -> None:
        """Let a request that is kept wait until others have ended."""
        self._for_handlers[call_id] = None
        self.is_full = True

    def next_waiting(self) -> Message | None:
        """The request that has waited longest for a handler."""
        id_, _ = self._for_handlers.popitem(last=False)
        self.look_for_room()
        return self.take_waiting(id_)

    def take_waiting(self, call_id: int) -> Message | None:
        """A request that waits, with the time it has left; None if it was cancelled."""
        message, since = self.waiting.pop(call_id, (None, 0.0))
        if message is not None:
            self.waiting_bytes -= message.size_bytes
            if message.timeout_ms:
                message.timeout_ms = max(1, message.timeout_ms - int((self._time() - since) * 1000))
        return message

    def register(self, run: Run) -> None:
        """Keep a request that did not end at once, so that it can be cancelled and expire."""
        if not run.is_registered:
            self.register_new(run, run.id, run.timeout_ms)

    def register_new(self, run: Run, id_: int, timeout_ms: int) -> None:
        """The same for one that is not registered for sure."""
        run.is_registered = True
        running = self.running
        running[id_] = run
        if len(running) >= self.limit:
            self.is_full = True
        if not timeout_ms:
            return
        now = self._time()
        if timeout_ms != self._usual_ms or now >= self._usual_until:
            self._find_tick(timeout_ms, now)
        run.bucket = bucket = self._usual_bucket
        bucket[id_] = run
        if run._deadline is None:  # noqa: SLF001 - nobody has asked for it before, so it counts from now
            run._deadline = now + timeout_ms / 1000  # noqa: SLF001

    def _find_tick(self, timeout_ms: int, now: float) -> None:
        """Requests of about the same time with the same timeout share a tick: find it once for all."""
        timeout_s = timeout_ms / 1000
        self._usual_ms = timeout_ms
        self._usual_tick = tick = self._deadlines.tick(now, timeout_s)
        self._usual_until = self._deadlines.time_of(tick) - timeout_s
        bucket = self._by_tick.get(tick)
        if bucket is None:
            bucket = self._by_tick[tick] = {}
            self._deadlines.watch(tick, self)
        self._usual_bucket = bucket

    def claim(self, run: Run) -> bool:
        """Take a request out that may have ended in a thread: whoever succeeds answers it. Called in any thread."""
        id_ = run.id
        if self.running.pop(id_, None) is not run:
            return False
        if run.bucket is not None:
            run.bucket.pop(id_, None)
        return True

    def claim_answers(self, answers: deque[tuple[Run, bytes]], limit_bytes: int) -> list[bytes]:
        """The same for many that have ended in threads: the frames of those that are still to be answered."""
        take_run = self.running.pop
        frames: list[bytes] = []
        while answers:
            run, data = answers.popleft()
            id_ = run.id
            if take_run(id_, None) is run:  # this is `claim`, written out
                if (bucket := run.bucket) is not None:
                    bucket.pop(id_, None)
                frames.append(data)
                limit_bytes -= len(data)
                if limit_bytes <= 0:
                    break
            else:
                run.executor.answer_withdrawn()
        return frames

    def forget(self, run: Run) -> None:
        self.running.pop(run.id, None)
        if self.ended is not None:
            self.ended(run)
        if self.is_full:
            self.look_for_room()
        if run.bucket is not None:
            run.bucket.pop(run.id, None)

    def expire(self, tick: int) -> None:
        if tick == self._usual_tick:
            self._usual_ms = 0
        bucket = self._by_tick.pop(tick, {})
        expired = list(bucket.values())
        bucket.clear()  # they refer to it
        for run in expired:
            run.expire()

    def cancel(self, call_id: int) -> None:
        run = self.running.get(call_id)
        if run is not None:
            run.cancel()
        elif self.take_waiting(call_id) is not None:
            self._for_handlers.pop(call_id, None)
            self.began_ns.pop(call_id, None)
            self.look_for_room()
        elif (bulk := self._replies.pop(call_id, None)) is not None:
            self.connection.drop_bulk(bulk)  # the reply is on its way, and nobody wants it any more

    def send_reply(self, call_id: int, data: bytes, buffers: list[memoryview]) -> None:
        """Send a reply with large tensors, which may still be cancelled on its way."""
        bulk = self.connection.send_bulk(data, buffers)
        for sent in [key for key, earlier in self._replies.items() if earlier.is_sent]:
            del self._replies[sent]
        self._replies[call_id] = bulk

    def output_drained(self) -> None:
        """The caller takes bytes again: streams may go on."""
        for run in list(self.running.values()):
            if run.producer is not None:
                run.producer.wake()

    def add_credit(self, call_id: int, items: int) -> None:
        """The consumer of a stream takes more items. It has had some already, so the producer is there."""
        run = self.running.get(call_id)
        if run is not None and run.producer is not None:
            run.producer.add_credit(items)

    def cancel_all(self) -> None:
        self.waiting.clear()
        self._for_handlers.clear()
        self.waiting_bytes = 0
        self.look_for_room()
        for run in list(self.running.values()):
            run.cancel()
        # nobody waits for those that go on, and a deadline may be far away: until then it would keep the connection
        for tick in self._by_tick:
            self._deadlines.unwatch(tick, self)
