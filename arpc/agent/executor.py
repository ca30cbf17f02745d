"""Runs what callers ask for: coroutines, plain functions in threads, generators. Whatever happens becomes one reply."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

import torch.futures

from arpc.agent.carriers import Carriers, Job
from arpc.agent.codec import Codec
from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.failures import describe_failure
from arpc.agent.functions import Function, Mode
from arpc.agent.scope import Scope, current_scope
from arpc.agent.streams import Producer
from arpc.agent.threads import ThreadPool
from arpc.errors import ConnectionClosedError, ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.transport.base import Connection
from arpc.wire.frames import HEADER, frame
from arpc.wire.messages import FailureKind, Message, MessageType, RequestFlag

__all__ = ["Executor", "Inbound", "Run"]

logger = logging.getLogger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_ITEM: Final = int(MessageType.ITEM)
_FAILURE: Final = int(MessageType.FAILURE)
_pack_header = HEADER.pack
_COROUTINE: Final = Mode.COROUTINE
_THREAD: Final = Mode.THREAD
_INLINE: Final = Mode.INLINE
_GENERATORS: Final = frozenset((Mode.GENERATOR, Mode.ASYNC_GENERATOR))


class Run(Job, Scope):
    """One request while it is handled: a job to carry, and the scope of the code that runs for it."""

    __slots__ = (
        "args",
        "context",
        "coroutine",
        "credit",
        "ended",
        "executor",
        "expired",
        "function",
        "id",
        "inbound",
        "is_stream",
        "kwargs",
        "meta",
        "producer",
        "state",
        "task",
        "tick",
    )

    def __init__(self, executor: Executor, inbound: Inbound, message: Message) -> None:
        self.executor = executor
        self.inbound = inbound
        self.id = message.id
        self.worker = executor.worker
        self.caller = inbound.caller
        timeout_ms = message.timeout_ms
        self.deadline = executor.loop.time() + timeout_ms / 1000 if timeout_ms else None
        self.context = executor.context.copy()
        self.coroutine = None
        self.state = None
        self.task = None
        self.tick = NEVER
        self.ended = False
        self.expired = False
        self.is_stream = bool(message.flags & RequestFlag.STREAM)
        self.credit = inbound.early_credit.pop(message.id, 0) if self.is_stream else 0
        self.producer: Producer | None = None
        self.meta: dict[str, Any] | None = None
        self.kwargs: dict[str, Any] | None = None
        self.function: Function
        self.args: tuple[Any, ...]

    def begin(self) -> Coroutine[Any, Any, Any]:
        args, kwargs = self.args, self.kwargs
        self.args, self.kwargs = (), None
        made = self.function.call(*args, **kwargs) if kwargs else self.function.call(*args)
        return made  # type: ignore[no-any-return]

    def suspended(self) -> None:
        self.inbound.register(self)

    def finished(self, result: Any) -> None:
        self.executor.returned(self, result)

    def failed(self, error: BaseException) -> None:
        self.executor.raised(self, error)

    def add_credit(self, items: int) -> None:
        """The consumer of a stream takes more items."""
        if self.producer is not None:
            self.producer.add_credit(items)
        else:
            self.credit += items

    def cancel(self) -> None:
        """Stop it as soon as it can be stopped; a function in a thread runs to its end, but its result is not used."""
        if self.task is not None:
            self.task.cancel()
        else:
            self.executor.raised(self, asyncio.CancelledError())

    def expire(self) -> None:
        self.expired = True
        self.cancel()


class Inbound:
    """What one connection asked for and has not been answered yet."""

    def __init__(self, connection: Connection, caller: WorkerInfo, deadlines: Deadlines, *, main_by_value: bool) -> None:
        self.connection = connection
        self.caller = caller
        self.main_by_value = main_by_value
        self.functions: dict[int, Function | Exception] = {}
        self.running: dict[int, Run] = {}
        self.waiting: deque[Message] = deque()
        self.early_credit: dict[int, int] = {}
        """Credit for streams whose request still waits."""
        self._deadlines = deadlines
        self._by_tick: dict[int, dict[int, Run]] = {}

    def register(self, run: Run) -> None:
        self.running[run.id] = run
        if run.deadline is None:
            return
        now = run.executor.loop.time()
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
        elif self.waiting:
            self.waiting = deque(message for message in self.waiting if message.id != call_id)
            self.early_credit.pop(call_id, None)

    def add_credit(self, call_id: int, items: int) -> None:
        run = self.running.get(call_id)
        if run is not None:
            run.add_credit(items)
        elif any(message.id == call_id for message in self.waiting):
            self.early_credit[call_id] = self.early_credit.get(call_id, 0) + items

    def cancel_all(self) -> None:
        self.waiting.clear()
        for run in list(self.running.values()):
            run.cancel()


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

    # -- the start of a request

    def admit(self, inbound: Inbound, message: Message) -> None:
        """Run a request, or keep it packed while its caller does not take replies or has too many others running."""
        connection = inbound.connection
        if (
            inbound.waiting
            or len(inbound.running) >= self._max_handlers
            or (connection.is_congested and connection.unsent_bytes > self._window_bytes)
        ):
            inbound.waiting.append(message)
        else:
            self.start(inbound, message)

    def readmit(self, inbound: Inbound) -> None:
        """Something ended or was sent: see whether those that wait may run."""
        connection = inbound.connection
        while (
            inbound.waiting
            and len(inbound.running) < self._max_handlers
            and not (connection.is_congested and connection.unsent_bytes > self._window_bytes)
        ):
            self.start(inbound, inbound.waiting.popleft())

    def start(self, inbound: Inbound, message: Message) -> None:
        run = Run(self, inbound, message)
        try:
            run.context.run(self._prepare, run, message)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self._could_not_start(run, message, error)
            return
        mode = run.function.mode
        if run.is_stream:
            self._start_stream(run)
        elif mode is _COROUTINE:
            self.carriers.start(run)
        elif mode is _THREAD:
            self._start_thread(run)
        elif mode is _INLINE:
            self._run_inline(run)
        else:
            error = TypeError(f"{run.function.name} is a generator: call it with arpc.stream")
            self.raised(run, error)

    def _prepare(self, run: Run, message: Message) -> None:
        """Enter the handler's scope, and unpack what it is called with."""
        current_scope.set(run)
        codec = self.codec
        if message.table_end:
            slots = codec.slots(message)
            if message.meta_end != message.meta_start:
                run.meta = codec.meta(message)
                codec.receive_request(run.inbound.caller, run.meta, slots)
            payload = codec.payload(message, slots)
        else:
            payload = codec.payload(message, []) if message.body else ()
        function_id = message.arg
        if function_id:
            function = run.inbound.functions.get(function_id)
            if function is None:
                raise ProtocolError(f"call {message.id} of function {function_id}, which was never sent")
            if isinstance(function, Exception):
                raise function
            run.function = function
        else:
            call, payload = payload
            run.function = Function(call)
        if message.flags & RequestFlag.KWARGS:
            run.args, run.kwargs = payload
        else:
            run.args = payload

    def _could_not_start(self, run: Run, message: Message, error: BaseException) -> None:
        if not hasattr(run, "function"):
            known = run.inbound.functions.get(message.arg)
            run.function = known if isinstance(known, Function) else Function(_unknown_function)
        if isinstance(error, AttributeError | ImportError | LookupError) and not isinstance(error, SerializationError):
            made = SerializationError(
                f"worker {self.name!r} cannot unpack the call: {type(error).__name__}: {error}. "
                f"What is sent by reference must be importable on the callee"
            )
            made.__cause__ = error
            error = made
        self.raised(run, error)

    def define(self, inbound: Inbound, message: Message) -> None:
        """A peer sends a function that it will call by number."""
        try:
            call = self.context.copy().run(self.codec.payload, message, [])
            inbound.functions[message.arg] = Function(call)
        except Exception as error:  # noqa: BLE001 - importing runs user code; calls of the function fail with this
            made = SerializationError(
                f"the function is not on worker {self.name!r}: {type(error).__name__}: {error}. "
                f"It must be importable there, or be passed as a lambda or closure, which travel by value"
            )
            made.__cause__ = error
            inbound.functions[message.arg] = made

    # -- ways to run

    def _run_inline(self, run: Run) -> None:
        try:
            result = run.context.run(run.begin)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.raised(run, error)
        else:
            self.returned(run, result)

    def _start_thread(self, run: Run) -> None:
        run.inbound.register(run)

        def job() -> Callable[[], None] | None:
            if run.ended:
                return None  # cancelled while it waited for a thread
            try:
                result = run.context.run(run.begin)
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                raised = error
                return lambda: self.raised(run, raised)
            return lambda: self._thread_returned(run, result)

        self.threads.submit(job)

    def _thread_returned(self, run: Run, result: Any) -> None:
        if asyncio.iscoroutine(result) and not run.ended:
            # a plain function that hands out a coroutine means it to be awaited
            self._carry(run, lambda: result)
        else:
            self.returned(run, result)

    def _start_stream(self, run: Run) -> None:
        mode = run.function.mode
        if mode in _GENERATORS:
            self._produce(run, run.context.run(run.begin))
        elif mode is _COROUTINE:
            self.carriers.start(run)
        else:
            self._start_thread(run)

    def _produce(self, run: Run, iterable: Any) -> None:
        """Send the items of something to iterate over; the sending is a coroutine in the handler's place."""
        try:
            producer = run.producer = Producer(iterable, self.threads, lambda item: self._send_item(run, item))
        except TypeError as error:
            self.raised(run, error)
            return
        producer.add_credit(run.credit)
        run.inbound.register(run)
        self._carry(run, producer.produce)

    def _carry(self, run: Run, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        run.coroutine = None
        run.function = Function.of_coroutine(call, run.function.name)
        self.carriers.start(run)

    # -- the end of a request: exactly one reply

    def returned(self, run: Run, result: Any) -> None:
        if run.ended:
            if asyncio.iscoroutine(result):
                result.close()
            return
        if run.function.returns_future:
            self._await_returned_future(run, result)
            return
        if run.is_stream and run.producer is None:
            self._produce(run, result)
            return
        if result is None and not run.meta:
            self._end(run, _pack_header(0, _REPLY, 0, 0, run.id, 0, 0, 0, 0), None)
            return
        try:
            data, buffers = self._pack_result(run, _REPLY, result)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            self.raised(run, error)
        else:
            self._end(run, data, buffers)

    def _pack_result(self, run: Run, type_: int, result: Any) -> tuple[bytes, list[memoryview] | None]:
        inbound = run.inbound
        try:
            payload, slots = self._pickler.dumps_result(result, main_by_value=inbound.main_by_value)
        except Exception as error:
            raise SerializationError(
                f"the result of {run.function.name} ({type(result).__qualname__}) cannot be sent: {error}"
            ) from error
        meta = run.meta
        if meta:
            meta = run.context.run(self.codec.intercept_reply, inbound.caller, meta, slots)
        elif not slots:
            return _pack_header(len(payload), type_, 0, 0, run.id, 0, 0, 0, 0) + payload, None
        return self.codec.frame(type_, 0, run.id, 0, 0, payload, slots, meta)

    def _send_item(self, run: Run, item: Any) -> None:
        data, buffers = self._pack_result(run, _ITEM, item)
        if buffers:
            run.inbound.connection.send_bulk(data, buffers)
        else:
            run.inbound.connection.send(data)

    def raised(self, run: Run, error: BaseException) -> None:
        if run.ended:
            return
        self.calls_failed += 1
        kind = FailureKind.RAISED
        if isinstance(error, asyncio.CancelledError):
            kind = FailureKind.TIMEOUT if run.expired else FailureKind.CANCELLED
        if isinstance(error, ProtocolError):
            logger.warning("a malformed request of worker %s: %s", run.inbound.caller.name, error)
        try:
            payload, slots = describe_failure(error, self._pickler, main_by_value=run.inbound.main_by_value)
            data, buffers = self.codec.frame(_FAILURE, 0, run.id, kind, 0, payload, slots)
        except Exception as reason:
            logger.exception("cannot describe the failure of %s", run.function.name)
            payload, _ = describe_failure(
                RuntimeError(f"{type(error).__qualname__}, which cannot be described: {reason!r}"),
                self._pickler,
                main_by_value=True,
            )
            data, buffers = frame(_FAILURE, 0, run.id, kind, 0, payload), []
        self._end(run, data, buffers)

    def _end(self, run: Run, data: bytes, buffers: list[memoryview] | None) -> None:
        run.ended = True
        self.calls_handled += 1
        inbound = run.inbound
        if run.id in inbound.running:
            inbound.forget(run)
            if inbound.waiting:
                self.loop.call_soon(self.readmit, inbound)
        try:
            if buffers:
                inbound.connection.send_bulk(data, buffers)
            else:
                inbound.connection.send(data)
        except ConnectionClosedError:
            pass  # the caller knows: its own end of the connection is closed too

    def _await_returned_future(self, run: Run, result: Any) -> None:
        run.inbound.register(run)

        def settle(future: Any) -> None:
            run.function = _SETTLED
            try:
                value = future.result() if hasattr(future, "result") else future.value()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self.raised(run, error)
            else:
                self.returned(run, value)

        if isinstance(result, asyncio.Future):
            result.add_done_callback(settle)
        elif isinstance(result, torch.futures.Future | concurrent.futures.Future):
            # completed on a thread of its own
            result.add_done_callback(lambda future: self.loop.call_soon_threadsafe(settle, future))
        else:
            error = TypeError(
                f"a function marked with async_execution must return a Future, and {run.function.name} "
                f"returned {type(result).__qualname__}"
            )
            self.raised(run, error)

    # -- the end of the worker

    async def aclose(self) -> None:
        self.threads.close()
        await self.carriers.aclose()

    def statistics(self) -> dict[str, int]:
        return {
            "calls_handled": self.calls_handled,
            "calls_failed": self.calls_failed,
            **self.threads.statistics(),
            **self.carriers.statistics(),
        }


def _unknown_function() -> None:
    """Stands in the error reply of a call whose function could not be found."""


_SETTLED: Final = Function(_unknown_function)
