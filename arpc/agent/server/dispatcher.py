"""Runs requests: coroutines, plain functions in threads, generators. Every outcome becomes exactly one reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, Protocol

from arpc import torchstate
from arpc.agent.codec import Codec
from arpc.agent.hooks.observers import Observers
from arpc.agent.scope import current_scope
from arpc.agent.server.eager_tasks import EagerTasks
from arpc.agent.server.functions import NOT_KNOWN, Function, InlineHandler, Mode, ResultSizes
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.replies import Replies
from arpc.agent.server.request_queue import RequestQueue
from arpc.agent.server.request_reader import prepare
from arpc.agent.server.returned_futures import await_future
from arpc.agent.server.run import Creation, Run
from arpc.agent.server.thread_job import ThreadJob
from arpc.agent.server.thread_pool import ThreadPool
from arpc.agent.server.thread_replies import ThreadReplies
from arpc.errors import ProtocolError, ShutdownError
from arpc.options import RpcOptions
from arpc.user_errors import is_coroutine
from arpc.wire.messages import FailureKind, Message, RequestFlag

__all__ = ["CreationService", "Dispatcher"]

_COROUTINE: Final = Mode.COROUTINE
_THREAD: Final = Mode.THREAD
_INLINE: Final = Mode.INLINE
_UNKNOWN: Final = Mode.UNKNOWN
_GENERATORS: Final = (Mode.GENERATOR, Mode.ASYNC_GENERATOR)
_STREAM: Final = int(RequestFlag.STREAM)
_now_ns = time.perf_counter_ns

_Handle = Callable[[Inbound, Message], None]


class CreationService(Protocol):
    """Handles the messages of a feature that, like requests, name a function."""

    def admit(self, run: Run, message: Message) -> Creation | None:
        """Return the creation to run; None if there is nothing to run.

        Removes the feature's own metadata from ``run.meta``. Raises `ProtocolError` if it is not there.
        """


class Dispatcher:
    """Runs the requests of all peers of one worker."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        worker: Any,
        name: str,
        context: Context,
        codec: Codec,
        options: RpcOptions,
        observers: Observers,
    ) -> None:
        self.loop = loop
        self.worker = worker
        self.time = loop.time
        self.context = context
        self.codec = codec
        self.name = name
        self.threads = ThreadPool(loop, options.num_worker_threads, name)
        self.tasks = EagerTasks(loop, name)
        self.observers = observers
        self.options = options
        self.replies = Replies(self)
        self._copy_context = context.copy
        self.calls_refused = 0
        self.is_closed = False
        """Whether the worker shuts down, which is then the reason why handlers are cancelled."""
        self.is_watched = False
        """Whether a meter or observers are notified of every request."""

    @property
    def calls_handled(self) -> int:
        return self.replies.calls_ended + self.threads.jobs_answered

    # -- the start of a request

    def request_received(self, inbound: Inbound, message: Message) -> None:
        """Run a call, or queue it, still pickled, while its caller does not read replies or has too many running."""
        if message.id == inbound.latest_id:
            return  # a duplicate: the request runs once
        inbound.latest_id = message.id
        function = inbound.functions.get(message.arg)
        if (
            function is None
            or function.results.are_large
            or inbound.is_full
            or inbound.connection.is_congested
            or message.flags & _STREAM
        ):
            self.queue_of(inbound).admit(message)
        else:
            self.launch(self._run(inbound, function, message))

    def queue_of(self, inbound: Inbound) -> RequestQueue:
        """Return the queue in which requests of a connection wait, created on first use."""
        if inbound.queue is None:
            inbound.queue = RequestQueue(self, inbound)
        return inbound.queue

    def readmit(self, inbound: Inbound) -> None:
        """Start requests of a connection that may have room again."""
        if inbound.queue is None:
            inbound.look_for_room()
        else:
            inbound.queue.readmit()

    def start(self, inbound: Inbound, message: Message, arrived_ns: int = 0, *, is_counted: bool = False) -> None:
        """Run a call now. ``is_counted``: there is room for its large result, and it may have a thread."""
        run = self._run(inbound, inbound.function_of(message), message, arrived_ns)
        run.is_stream = bool(message.flags & _STREAM)
        run.is_counted = is_counted
        self.launch(run)
        if run.is_counted and (run.ended or run.function.mode is not _THREAD):
            run.leave_window()  # its arguments could not be unpickled, or have to be waited for

    def _run(self, inbound: Inbound, function: Function, message: Message, arrived_ns: int = 0) -> Run:
        """Return the `Run` of a request, with its own context. ``arrived_ns``: its arrival, if it has waited since."""
        content = message if message.body or message.memory else None
        run = Run(self, inbound, function, message.id, message.timeout_ms, self._copy_context(), content)
        if self.is_watched:
            run.arrived_ns = arrived_ns or _now_ns()
            if self.observers.installed:
                run.context.run(current_scope.set, run)  # observers read it
                self.observers.watch(run, message)
        return run

    def launch(self, run: Run) -> None:
        """Run a request in the mode of its function."""
        mode = run.function.mode
        if mode is _COROUTINE:
            self.tasks.start(run)  # this unpickles its arguments, too
            return
        # Arguments are unpickled on the loop, to which interceptors belong
        try:
            if mode is not _THREAD:
                self._check(run)
            run.context.run(prepare, run)
            mode = run.function.mode  # the function may have come with the arguments, or has to wait for one of them
            if mode is not _THREAD:
                self._check(run)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; any error is sent to the caller
            self.replies.refused(run, error)
            return
        if mode is _COROUTINE:
            self.tasks.start(run)
        elif mode is _THREAD:
            self._start_thread(run)
        else:
            self._run_inline(run)  # calling a generator function runs none of its code

    @staticmethod
    def _check(run: Run) -> None:
        """Raise the reason why a request cannot run, if there is one."""
        function = run.function
        if function.error is not None:
            raise function.error.with_traceback(None)
        if function.mode is _UNKNOWN and run.message is None:
            raise ProtocolError(f"call {run.id} brings no function")
        if function.mode in _GENERATORS and not run.is_stream and run.creation is None:
            raise TypeError(f"{run.name} is a generator: call it with arpc.stream")

    def refuse(self, inbound: Inbound, message: Message) -> None:
        """Answer a request with a `ShutdownError`, because this worker is shutting down."""
        error = ShutdownError(f"worker {self.name!r} is shutting down")
        self.replies.fail(inbound, message.id, FailureKind.SHUTDOWN, error)

    def reject(self, inbound: Inbound, message: Message, error: Exception) -> None:
        """Answer a request with an error, without reading its content."""
        self.replies.refused(self._run(inbound, NOT_KNOWN, message), error)

    # -- messages of features

    def serve(self, message_class: type[Message], function: Callable[..., Any]) -> _Handle:
        """Return a handler that runs one function for each message of a class. Such messages are never queued."""
        served = Function(function)
        if isinstance(function, InlineHandler):
            served.mode = _INLINE
        served.name = message_class.__name__
        served.is_service = True

        def handle(inbound: Inbound, message: Message) -> None:
            self.launch(self._run(inbound, served, message))

        return handle

    def serve_creations(self, service: CreationService) -> _Handle:
        """Return a handler that passes messages that name a function, as requests do, to a feature.

        Such messages are never queued, because running handlers may wait for the values that they create.
        """
        kept = ResultSizes()  # the results of these functions stay on this worker

        def handle(inbound: Inbound, message: Message) -> None:
            run = self._run(inbound, inbound.function_of(message), message)
            run.results = kept
            try:
                run.meta = self.codec.metadata(message)
                creation = service.admit(run, message)
            except ProtocolError as error:
                self.replies.refused(run, error)
                return
            if creation is None:
                return
            run.creation = creation
            if not run.meta and run.handling is None and not message.body:
                run.message = None  # it had only the feature's own metadata: there is nothing to unpickle
            self.launch(run)

        return handle

    # -- functions

    async def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function in its own mode, for a coroutine that stands in its place, and return its result.

        A generator is returned without being started.
        """
        if function.mode is _THREAD:
            result = await self.threads.call(partial(copy_context().run, function.call, *args, **kwargs))
        else:
            result = function.call(*args, **kwargs)
        if function.returns_future:
            return await await_future(result, function.name)
        # not asyncio.iscoroutine, which is true for generators, too
        return await result if is_coroutine(result) else result

    # -- ways to run

    def _run_inline(self, run: Run) -> None:
        try:
            result = torchstate.call_isolated(run.context.run, run.call)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; any error is sent to the caller
            self.replies.raised(run, error)
        else:
            self.replies.returned(run, result)

    def _start_thread(self, run: Run) -> None:
        inbound, function = run.inbound, run.function
        inbound.register(run)
        job = ThreadJob(run)
        if run.is_counted or function.results.are_large:
            self.queue_of(inbound).submit(job)
        else:
            if (
                not (function.returns_future or run.is_stream or run.arrived_ns)  # the loop has no work at its end
                and (not run.meta or (run.creation is None and self.codec.replies_in_thread(run.meta)))
            ):
                job.replies = inbound.thread_replies or self._share_writing(inbound)
            self.threads.submit(job.work, function.quickness.is_quick, not inbound.connection.is_reading)

    def _share_writing(self, inbound: Inbound) -> ThreadReplies | None:
        """Return the outbox for replies of threads on a connection; None if only the loop can write to it."""
        write_lock = inbound.connection.share_writing()
        if write_lock is not None:
            encode = partial(self.replies.encode, intercept=self.codec.reply_sent_in_thread)
            inbound.thread_replies = ThreadReplies(inbound, write_lock, encode, self.readmit)
        return inbound.thread_replies

    # -- the end of the worker

    async def aclose(self) -> None:
        self.is_closed = True
        await self.tasks.aclose()
        # after the tasks: generators that were stopped are closed in a thread
        self.threads.close()

    def statistics(self) -> dict[str, int]:
        return {
            "calls_handled": self.calls_handled,
            "calls_failed": self.replies.calls_failed,
            "calls_refused": self.calls_refused,
            **self.threads.statistics(),
            **self.tasks.statistics(),
        }
