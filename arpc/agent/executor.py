"""Runs what callers ask for: coroutines, plain functions in threads, generators. Whatever happens becomes one reply."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, Final, Protocol

import torch.futures

from arpc import torchstate
from arpc.agent.carriers import Carriers, Job
from arpc.agent.codec import Codec, Packed
from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.failures import describe_failure
from arpc.agent.functions import Function, Mode
from arpc.agent.scope import current_scope
from arpc.agent.streams import Producer
from arpc.agent.threads import ThreadPool
from arpc.errors import ConnectionClosedError, ProtocolError, SerializationError, ShutdownError
from arpc.ids import WorkerInfo
from arpc.transport.base import BulkSend, Connection
from arpc.wire.frames import HEADER, frame
from arpc.wire.messages import WINDOW, FailureKind, ItemFlag, Message, MessageType, RequestFlag
from arpc.wire.pickling import loads
from arpc.wire.tensors import Slot

__all__ = ["Executor", "Inbound", "Run"]

logger = logging.getLogger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_ITEM: Final = int(MessageType.ITEM)
_FAILURE: Final = int(MessageType.FAILURE)
_pack_header = HEADER.pack
_PLACE_MASK: Final = (1 << 32) - 1
# In the place of a context whose request has ended. The two refer to each other: each call would be a cycle to collect
_NO_CONTEXT: Final = Context()
_COROUTINE: Final = Mode.COROUTINE
_THREAD: Final = Mode.THREAD
_INLINE: Final = Mode.INLINE
_STREAM: Final = RequestFlag.STREAM
_NESTED_LIMIT: Final = 32
_GENERATORS: Final = frozenset((Mode.GENERATOR, Mode.ASYNC_GENERATOR))


class Run(Job):
    """One request while it is handled: a job to carry, and the scope of the code that runs for it.

    Most requests end in their first step, so what they do not need is a default of the class.
    """

    coroutine = None
    state = None
    task = None
    tick = NEVER
    ended = False
    expired = False
    is_registered = False
    is_plain = True
    """Neither a stream nor a function that returns a future."""
    is_stream = False
    _deadline: float | None = None
    credit = 0
    items_sent = 0
    nested: list[asyncio.Future[Any]] | None = None
    nested_limit = _NESTED_LIMIT
    producer: Producer | None = None
    returned_coroutine: Coroutine[Any, Any, Any] | None = None
    meta: dict[str, Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    _prerequisites: list[Awaitable[object]] | None = None
    wrapped: Function | None = None
    """What the message calls, where another function of the worker's own runs it; and its flags."""
    flags = 0

    def __init__(self, executor: Executor, inbound: Inbound, function: Function, message: Message) -> None:
        self.executor = executor
        self.inbound = inbound
        self.function = function
        self.message: Message | None = message
        self.id = message.id
        self.timeout_ms = message.timeout_ms
        self.context = executor.context.copy()

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

    def first_step(self) -> Any:
        message = self.message
        if message is None or message.body:
            coroutine = self.begin()
        else:  # a call without arguments needs no more than this
            self.message = None
            current_scope.set(self)
            coroutine = self.function.call()
        self.coroutine = coroutine
        return coroutine.send(None)

    def begin(self) -> Any:
        """Enter the scope, unpack the arguments if that has not been done, and call the function."""
        message = self.message
        if message is not None:
            self.message = None
            current_scope.set(self)
            if not message.body:
                return self.function.call()
            self.executor.unpack(self, message)
        args, kwargs = self.args, self.kwargs
        self.args = self.kwargs = None
        return self.function.call(*(args or ()), **(kwargs or {}))

    def suspended(self) -> None:
        self.inbound.register(self)

    def finished(self, result: Any) -> None:
        if result is None and not self.is_registered and self.meta is None and self.is_plain:
            self.ended = True
            self.context = _NO_CONTEXT
            self.executor.calls_handled += 1
            try:  # noqa: SIM105 - cheaper than suppress(), and this is the hot path
                self.inbound.connection.send(_pack_header(0, _REPLY, 0, 0, self.id, 0, 0, 0, 0))
            except ConnectionClosedError:
                pass  # the caller knows: its own end is closed too
        else:
            self.executor.returned(self, result)

    def failed(self, error: BaseException) -> None:
        if self.returned_coroutine is not None:
            self.returned_coroutine.close()  # it may never have begun
        self.executor.raised(self, error)

    def call_begun(self, future: asyncio.Future[Any]) -> None:
        """The handler has made a call in turn, which is cancelled with it."""
        if self.nested is None:
            self.nested = []
        elif len(self.nested) >= self.nested_limit:
            self.nested = [call for call in self.nested if not call.done()]
            self.nested_limit = max(_NESTED_LIMIT, 2 * len(self.nested))
        self.nested.append(future)

    def cancel_nested(self) -> None:
        nested, self.nested = self.nested, None
        for future in nested or ():
            future.cancel()

    def cancel(self) -> None:
        """Stop it as soon as it can be stopped; a function in a thread runs to its end, but its result is not used."""
        if self.task is not None:
            self.task.cancel()
        else:
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
        self.limit = max_handlers
        """How many requests may run at once."""
        self.running: dict[int, Run] = {}
        self.waiting: OrderedDict[int, Message] = OrderedDict()
        self._deadlines = deadlines
        self._by_tick: dict[int, dict[int, Run]] = {}
        self._replies: dict[int, BulkSend] = {}

    def register(self, run: Run) -> None:
        """Keep a request that did not end at once, so that it can be cancelled and expire."""
        if run.is_registered:
            return
        run.is_registered = True
        self.running[run.id] = run
        if run.deadline is None:
            return
        now = run.executor.time()
        tick = run.tick = self._deadlines.tick(now, max(0.0, run.deadline - now))
        bucket = self._by_tick.get(tick)
        if bucket is None:
            bucket = self._by_tick[tick] = {}
            self._deadlines.watch(tick, self)
        bucket[run.id] = run

    def forget(self, run: Run) -> None:
        self.running.pop(run.id, None)
        if run.tick and (bucket := self._by_tick.get(run.tick)) is not None:
            bucket.pop(run.id, None)

    def expire(self, tick: int) -> None:
        for run in list(self._by_tick.pop(tick, {}).values()):
            run.expire()

    def cancel(self, call_id: int) -> None:
        run = self.running.get(call_id)
        if run is not None:
            run.cancel()
        elif self.waiting.pop(call_id, None) is None and (bulk := self._replies.pop(call_id, None)) is not None:
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
        for run in list(self.running.values()):
            run.cancel()


class HasInbound(Protocol):
    """What is kept about a connection, as far as the executor needs it."""

    @property
    def inbound(self) -> Inbound: ...


class Executor:
    """Runs requests of all peers of one worker."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        worker: Any,
        name: str,
        context: Context,
        codec: Codec,
        threads: int,
        max_handlers_per_peer: int,
        window_bytes: int,
    ) -> None:
        self.loop = loop
        self.worker = worker
        self.time = loop.time
        self.context = context
        self.codec = codec
        self.name = name
        self.threads = ThreadPool(loop, threads, name)
        self.carriers = Carriers(loop, name)
        self.calls_handled = 0
        self.calls_failed = 0
        self._max_handlers = max_handlers_per_peer
        self._window_bytes = window_bytes
        self._pickler = codec.pickler
        self._is_closed = False

    # -- the start of a request

    def request_received(self, link: HasInbound, message: Message) -> None:
        """Run a request, or keep it packed while its caller does not take replies or has too many others running."""
        inbound = link.inbound
        if inbound.waiting or inbound.connection.is_congested or len(inbound.running) >= inbound.limit:
            inbound.waiting[message.id] = message
            self._start_waiting(inbound)
            return
        function = inbound.functions.get(message.arg)
        if function.__class__ is Function and function.is_simple and not message.flags & _STREAM:
            # what almost every request is
            self.carriers.start(Run(self, inbound, function, message))
        else:
            self.start(inbound, message)

    def readmit(self, inbound: Inbound) -> None:
        """Something ended or was sent: see whether those that wait may run."""
        # This is called between two steps of any task, which may have switched something off for itself
        outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
        inbound.limit = self._max_handlers
        try:
            self._start_waiting(inbound)
        finally:
            if outer is not None:
                torchstate.restore(outer)

    def _start_waiting(self, inbound: Inbound) -> None:
        connection = inbound.connection
        while (
            inbound.waiting
            and len(inbound.running) < inbound.limit
            and not (connection.is_congested and connection.unsent_bytes > self._window_bytes)
            and not self._is_closed
        ):
            self.start(inbound, inbound.waiting.popitem(last=False)[1])

    def refuse(self, link: HasInbound, message: Message) -> None:
        """Answer a request that came too late: this worker is being closed."""
        inbound = link.inbound
        error = ShutdownError(f"worker {self.name!r} is shutting down")
        payload, _ = describe_failure(error, self._pickler, main_by_value=inbound.main_by_value)
        with suppress(ConnectionClosedError):  # then the caller knows
            inbound.connection.send(frame(_FAILURE, FailureKind.SHUTDOWN, message.id, 0, 0, payload))

    def start(self, inbound: Inbound, message: Message) -> None:
        """Run a request now."""
        function = inbound.functions.get(message.arg)
        if function.__class__ is not Function or message.flags & RequestFlag.STREAM:
            self._start_special(inbound, function, message)
            return
        run = Run(self, inbound, function, message)
        if function.mode is _COROUTINE and not function.returns_future:
            self.carriers.start(run)
        else:
            self._launch(run)

    def _launch(self, run: Run) -> None:
        """Run it in the way of its function."""
        if run.function.returns_future:
            run.is_plain = False
        mode = run.function.mode
        if mode is _COROUTINE:
            self.carriers.start(run)
        elif mode is _THREAD:
            self._start_thread(run)
        elif mode is _INLINE:
            self._run_inline(run)
        else:
            self.raised(run, TypeError(f"{run.function.name} is a generator: call it with arpc.stream"))

    def serve(
        self, name: str, function: Callable[..., Any], shortcut: Callable[..., Any] | None = None
    ) -> Callable[[HasInbound, Message], None]:
        """A handler that runs one function for each message, whatever the message calls.

        ``shortcut`` is asked before: unless it returns NotImplemented, that is the answer, at a third of the price.
        """
        served = Function(function)
        served.name = name

        def handle(link: HasInbound, message: Message) -> None:
            run = Run(self, link.inbound, served, message)
            if shortcut is not None and not message.table_end:
                try:
                    result = shortcut(*loads(message.body, []))
                except Exception:  # noqa: BLE001 - it is raised again, and told, where there is time for it
                    result = NotImplemented
                if result is not NotImplemented:
                    run.finished(result)
                    return
            self._launch(run)

        return handle

    def serve_wrapped(self, wrapper: Callable[..., Any]) -> Callable[[HasInbound, Message], None]:
        """A handler of messages that name a function as requests do, which ``wrapper`` finds in its scope and runs."""
        served = Function(wrapper)

        def handle(link: HasInbound, message: Message) -> None:
            function = link.inbound.functions.get(message.arg)
            if function.__class__ is not Function and message.arg:
                self._start_special(link.inbound, function, message)  # which says what is wrong with it
                return
            run = Run(self, link.inbound, served, message)
            run.wrapped = function if function.__class__ is Function else None
            run.flags = message.flags
            self.carriers.start(run)

        return handle

    def _start_special(self, inbound: Inbound, function: Function | Exception | None, message: Message) -> None:
        """A stream, a function that came with its arguments, or one that is not there."""
        run = Run(self, inbound, function if isinstance(function, Function) else _UNKNOWN, message)
        if message.flags & RequestFlag.STREAM:
            run.is_stream = True
            run.is_plain = False
        try:
            if isinstance(function, Exception):
                raise function.with_traceback(None)
            if function is None and message.arg:
                raise ProtocolError(f"call {message.id} of function {message.arg}, which was never sent")
            run.context.run(self._enter, run, message)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
            return
        if run.is_stream and run.function.mode in _GENERATORS:
            self._run_inline(run)  # calling a generator function runs none of its code
        else:
            self._launch(run)

    def _enter(self, run: Run, message: Message) -> None:
        current_scope.set(run)
        run.message = None
        self.unpack(run, message)

    def unpack(self, run: Run, message: Message) -> None:
        """Build the arguments of a call.

        Runs in the handler's context, because interceptors and user code may look at it.
        """
        codec = self.codec
        try:
            if message.table_end:
                slots = codec.slots(message)
                if message.meta_end != message.meta_start:
                    run.meta = codec.meta(message)
                    if run.is_stream:
                        run.credit = run.meta.pop(WINDOW, 0)
                    codec.receive_request(run.inbound.caller, run.meta, slots)
                payload = codec.payload(message, slots)
            else:
                payload = codec.payload(message, [])
            if not message.arg:
                call, payload = payload
                if run.function is _UNKNOWN:
                    run.function = Function(call)
                else:
                    run.wrapped = Function(call)
        except (AttributeError, ImportError, LookupError) as error:
            raise SerializationError(
                f"worker {self.name!r} cannot unpack the call: {type(error).__name__}: {error}. "
                f"What is sent by reference must be importable on the callee"
            ) from error
        if message.flags & RequestFlag.KWARGS:
            run.args, run.kwargs = payload
        else:
            run.args = payload
        if run._prerequisites is not None:  # noqa: SLF001 - looking must not make an empty list
            run.function = self._after(run.prerequisites, run.function)

    def _after(self, prerequisites: list[Awaitable[object]], function: Function) -> Function:
        """A function that waits first."""

        async def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            for prerequisite in prerequisites:
                await prerequisite
            return await self.call(function, args, kwargs)

        return Function.of_coroutine(wait_and_call, function.name)

    async def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function returns, run in its own way, for a coroutine that stands in its place.

        A generator is returned as it is, not begun.
        """
        if function.mode is _THREAD:
            context = copy_context()
            result = await self.threads.call(lambda: context.run(function.call, *args, **kwargs))
        else:
            result = function.call(*args, **kwargs)
        if function.returns_future:
            return await _future_of(result, function.name, self.loop)
        # not asyncio.iscoroutine, to which a generator is one
        return await result if inspect.iscoroutine(result) else result

    def define(self, inbound: Inbound, message: Message) -> None:
        """A peer sends a function that it will call by number."""
        try:
            call = self.context.copy().run(self.codec.payload, message, [])
            inbound.functions[message.arg] = Function(call)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            made = SerializationError(
                f"the function is not on worker {self.name!r}: {type(error).__name__}: {error}. "
                f"It must be importable there, or be passed as a lambda or closure, which travel by value"
            )
            made.__cause__ = error
            inbound.functions[message.arg] = made

    # -- ways to run

    def _run_inline(self, run: Run) -> None:
        if run.message is not None and not self._enter_and_go_on(run):
            return
        try:
            result = torchstate.call_isolated(run.context.run, run.begin)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
        else:
            self.returned(run, result)

    def _enter_and_go_on(self, run: Run) -> bool:
        """Unpack the arguments on the loop, to which interceptors belong; False if that has settled how it goes on."""
        message = run.message
        assert message is not None
        try:
            run.context.run(self._enter, run, message)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
            return False
        if run._prerequisites is not None:  # noqa: SLF001
            self.carriers.start(run)
            return False
        return True

    def _start_thread(self, run: Run) -> None:
        if run.message is not None and not self._enter_and_go_on(run):
            return
        run.inbound.register(run)

        def job() -> Callable[[], None] | None:
            # taken before the look: a run that ends drops them after it has said so
            args, kwargs = run.args or (), run.kwargs or {}
            if run.ended:
                return None  # cancelled while it waited for a thread
            run.args = run.kwargs = None
            try:
                result = run.context.run(run.function.call, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
                raised = error
                return lambda: self.raised(run, raised)
            return lambda: self._thread_returned(run, result)

        self.threads.submit(job)

    def _thread_returned(self, run: Run, result: Any) -> None:
        if isinstance(result, Coroutine) and not run.ended:
            # a plain function that hands out a coroutine means it to be awaited
            run.returned_coroutine = result
            self._carry(run, lambda: result)
        else:
            self.returned(run, result)

    def _produce(self, run: Run, iterable: Any) -> None:
        """Send the items of something to iterate over; the sending is a coroutine in the handler's place."""
        try:
            producer = run.producer = Producer(
                iterable,
                self.threads,
                lambda item: self._send_item(run, item),
                run.inbound.connection,
                self._window_bytes,
            )
        except TypeError as error:
            self.raised(run, error)
            return
        producer.add_credit(run.credit)
        run.inbound.register(run)
        self._carry(run, producer.produce)

    def _carry(self, run: Run, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        run.coroutine = None
        run.args = run.kwargs = None
        run.function = Function.of_coroutine(call, run.function.name)
        self.carriers.start(run)

    # -- the end of a request: exactly one reply

    def returned(self, run: Run, result: Any) -> None:
        if run.ended:
            if isinstance(result, Coroutine):
                result.close()
            return
        if run.function.returns_future:
            self._await_returned_future(run, result)
            return
        if run.is_stream and run.producer is None:
            self._produce(run, result)
            return
        if run.is_stream:
            place = run.items_sent & _PLACE_MASK
            self._end(run, _pack_header(0, _ITEM, ItemFlag.LAST, 0, run.id, place, 0, 0, 0), None)
            return
        if result is None and not run.meta:
            self._end(run, _pack_header(0, _REPLY, 0, 0, run.id, 0, 0, 0, 0), None)
            return
        try:
            data, buffers = self._pack_result(run, result)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
        else:
            self._end(run, data, buffers)

    def _pack_result(self, run: Run, result: Any) -> tuple[bytes, list[memoryview] | None]:
        payload, slots = self._pickle_result(run, result)
        meta = run.meta
        if meta:
            meta = run.context.run(self.codec.intercept_reply, run.inbound.caller, meta, slots)
        elif not slots:
            return _pack_header(len(payload), _REPLY, 0, 0, run.id, 0, 0, 0, 0) + payload, None
        return self.codec.frame(_REPLY, 0, run.id, 0, 0, payload, slots, meta)

    def _pickle_result(self, run: Run, result: Any) -> tuple[bytes, list[Slot]]:
        if result.__class__ is Packed:
            return result
        try:
            return self._pickler.dumps_result(result, main_by_value=run.inbound.main_by_value, to=run.inbound.caller)
        except Exception as error:
            raise SerializationError(
                f"the result of {run.function.name} ({type(result).__qualname__}) cannot be sent: {error}"
            ) from error

    def _send_item(self, run: Run, item: Any) -> None:
        """Send the next item of a stream. Called by the producer, which runs in the handler's context."""
        payload, slots = self._pickle_result(run, item)
        meta = self.codec.intercept_reply(run.inbound.caller, run.meta, slots) if run.meta else None
        data, buffers = self.codec.frame(_ITEM, 0, run.id, run.items_sent & _PLACE_MASK, 0, payload, slots, meta)
        if buffers:
            run.inbound.connection.send_bulk(data, buffers)
        else:
            run.inbound.connection.send(data)
        run.items_sent += 1

    def raised(self, run: Run, error: BaseException) -> None:
        if run.ended:
            return
        self.calls_failed += 1
        kind = FailureKind.RAISED
        if isinstance(error, asyncio.CancelledError):
            kind = FailureKind.TIMEOUT if run.expired else FailureKind.CANCELLED
            run.cancel_nested()
        if isinstance(error, ProtocolError):
            logger.warning("a malformed request of worker %s: %s", run.inbound.caller.name, error)
        try:
            payload, slots = describe_failure(
                error, self._pickler, main_by_value=run.inbound.main_by_value, to=run.inbound.caller
            )
            data, buffers = self.codec.frame(_FAILURE, kind, run.id, run.items_sent & _PLACE_MASK, 0, payload, slots)
        except Exception as reason:
            logger.exception("cannot describe the failure of %s", run.function.name)
            payload, _ = describe_failure(
                RuntimeError(f"{type(error).__qualname__}, which cannot be described: {reason!r}"),
                self._pickler,
                main_by_value=True,
            )
            data, buffers = frame(_FAILURE, kind, run.id, run.items_sent & _PLACE_MASK, 0, payload), []
        self._end(run, data, buffers)

    def _end(self, run: Run, data: bytes, buffers: list[memoryview] | None) -> None:
        run.ended = True
        run.nested = None  # a timer may keep the run's context for long, and their exceptions keep the handler's frames
        run.context = _NO_CONTEXT
        run.task = run.args = run.kwargs = None  # it may wait for a thread for a long time still
        self.calls_handled += 1
        inbound = run.inbound
        if run.is_registered:
            inbound.forget(run)
            if inbound.waiting:
                self.loop.call_soon(self.readmit, inbound)
        try:
            if buffers:
                inbound.send_reply(run.id, data, buffers)
                if inbound.limit and inbound.connection.unsent_bytes > self._window_bytes:
                    # What this read brought may ask for much more: none of it runs before the replies have gone out
                    inbound.limit = 0
                    self.loop.call_soon(self.readmit, inbound)
            else:
                inbound.connection.send(data)
        except ConnectionClosedError:
            pass  # the caller knows: its own end of the connection is closed too

    def _await_returned_future(self, run: Run, result: Any) -> None:
        run.inbound.register(run)
        run.task = None  # the one that carried it, if any, is about to end: cancelling it would do nothing

        def settle(future: Any) -> None:
            run.function = Function.of_coroutine(_unknown_function, run.function.name)
            try:
                value = future.result() if hasattr(future, "result") else future.value()
            except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
                self.raised(run, error)
            else:
                self.returned(run, value)

        if isinstance(result, asyncio.Future):
            result.add_done_callback(settle)
        elif isinstance(result, torch.futures.Future | concurrent.futures.Future):
            # completed on a thread of its own
            def settle_on_loop(future: Any) -> None:
                self.loop.call_soon_threadsafe(settle, future)

            result.add_done_callback(settle_on_loop)
        else:
            error = TypeError(
                f"a function marked with async_execution must return a Future, and {run.function.name} "
                f"returned {type(result).__qualname__}"
            )
            self.raised(run, error)

    # -- the end of the worker

    async def aclose(self) -> None:
        self._is_closed = True
        await self.carriers.aclose()
        # after the carriers: generators that were stopped are closed in a thread
        self.threads.close()

    def statistics(self) -> dict[str, int]:
        return {
            "calls_handled": self.calls_handled,
            "calls_failed": self.calls_failed,
            **self.threads.statistics(),
            **self.carriers.statistics(),
        }


async def _future_of(result: Any, name: str, loop: asyncio.AbstractEventLoop) -> Any:
    """The value of what a function marked with `async_execution` returned."""
    if isinstance(result, asyncio.Future):
        return await result
    if not isinstance(result, torch.futures.Future | concurrent.futures.Future):
        raise TypeError(
            f"a function marked with async_execution must return a Future, and {name} returned "
            f"{type(result).__qualname__}"
        )
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def completed(_: object) -> None:
        loop.call_soon_threadsafe(settle)  # it is completed on a thread of its own

    result.add_done_callback(completed)
    await done
    return result.result() if isinstance(result, concurrent.futures.Future) else result.value()


def _unknown_function() -> None:
    """Stands in the error reply of a call whose function could not be found."""


_UNKNOWN: Final = Function(_unknown_function)
