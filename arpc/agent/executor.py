"""Runs what callers ask for: coroutines, plain functions in threads, generators. Whatever happens becomes one reply."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.carriers import Carriers
from arpc.agent.codec import Codec
from arpc.agent.failures import describe_failure
from arpc.agent.functions import Function, Mode, Prompt
from arpc.agent.observers import Observers
from arpc.agent.plain_requests import PlainRequests
from arpc.agent.reply_window import ReplyWindow, ResultSizes
from arpc.agent.requests import NO_CONTEXT, Inbound, Run
from arpc.agent.scope import current_scope
from arpc.agent.streams import Producer
from arpc.agent.threads import ThreadPool
from arpc.errors import (
    ConnectionClosedError,
    NotAllowedError,
    OverloadedError,
    ProtocolError,
    SerializationError,
    ShutdownError,
    WireError,
)
from arpc.log import get_logger
from arpc.user_errors import is_a, is_coroutine, summary_of, type_name_of
from arpc.wire.frames import BRIEF_HEADER, brief_kind, frame
from arpc.wire.handful import PARCEL_ARGUMENT, unpack_handful
from arpc.wire.messages import WINDOW, FailureKind, Message, MessageType, RequestFlag
from arpc.wire.protocol import Direct

__all__ = ["Executor", "HasInbound", "Service", "Wrapped", "Wrapper"]

logger = get_logger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_FAILURE: Final = int(MessageType.FAILURE)
_pack_brief = BRIEF_HEADER.pack
_BRIEF_REPLY: Final = brief_kind(_REPLY)
_set_scope = current_scope.set
_is_grad_enabled = torch.is_grad_enabled
_COROUTINE: Final = Mode.COROUTINE
_THREAD: Final = Mode.THREAD
_INLINE: Final = Mode.INLINE
# A caller keeps to its own window, twice of it for what is small; and its options may not be the same
_WINDOWS: Final = 16
# By number, with each connection
_MAX_FUNCTIONS: Final = 1 << 16
_NOT_BEGUN: Final = object()
_GENERATORS: Final = frozenset((Mode.GENERATOR, Mode.ASYNC_GENERATOR))


class HasInbound(Protocol):
    """What is kept about a connection, as far as the executor needs it."""

    @property
    def inbound(self) -> Inbound: ...


class Service(NamedTuple):
    """How the messages of a feature are taken."""

    handle: Callable[[HasInbound, Message], None]
    direct: Callable[[HasInbound], dict[int, Direct]]
    """Who takes the plainest of them straight from the read, by their `frames.brief_kind`."""


class Wrapped(Protocol):
    """One message of a feature that names a function."""

    def make(self, function: Function, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Runs the function in its own way; what this returns is the answer."""

    def not_begun(self, error: BaseException) -> None:
        """The function was not called: it is not there, its arguments cannot be unpacked, or the call was cancelled."""


class Wrapper(Protocol):
    """How a feature takes messages that name a function, as requests do."""

    def admit(self, run: Run, message: Message) -> Wrapped | None:
        """What is to run, once the label of the message has been taken off; None if the message is answered so.

        Raises `ProtocolError` if it has no label.
        """

    def direct(self, link: HasInbound, handle: Callable[[HasInbound, Message], None]) -> dict[int, Direct]:
        """As in a `Service`. What it does not take is for ``handle``."""


def _credit(items: Any) -> int:
    """How many items of a stream a caller takes at first."""
    if type(items) is not int or items < 0:
        raise ProtocolError("a stream whose caller does not say how many items it takes")
    return items


class Executor(PlainRequests):
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
        max_requests_waiting: int,
        window_bytes: int,
        observers: Observers | None = None,
    ) -> None:
        self.loop = loop
        self.worker = worker
        self.time = loop.time
        self.context = context
        self.codec = codec
        self.name = name
        self.threads = ThreadPool(loop, threads, name)
        self.carriers = Carriers(loop, name)
        self.calls_failed = 0
        self._calls_ended = 0
        self._ended_at_once = 0
        """Those that ended in `take` with None or a small tensor, which are not counted among the others."""
        self._withdrawn: list[None] = []
        """One for each answer of a thread that came after its request had been cancelled."""
        self._copy_context = context.copy
        self._idle = self.carriers.idle
        self._max_waiting = max_requests_waiting
        self.calls_refused = 0
        self._window_bytes = window_bytes
        self._pickler = codec.pickler
        self._is_closed = False
        self.tell_failure: Callable[[str, BaseException], None] | None = None
        """Told the name of each function that fails here, and what it raised."""
        self.failed: Callable[[Run, BaseException], None] | None = None
        """Told of each handler that raises, see `agent.metering`."""
        self.waited: Callable[[Inbound, Message], None] | None = None
        """Told of each request that has begun after it had to wait; it may have ended, too."""
        self._observers = observers or Observers()

    @property
    def calls_handled(self) -> int:
        self._count_withdrawn()
        return self._calls_ended + self._ended_at_once + self.threads.jobs_answered

    def answer_withdrawn(self) -> None:
        """A thread has an answer to a request that was cancelled before. Called in any thread."""
        self._withdrawn.append(None)

    def _count_withdrawn(self) -> None:
        # each has been counted where it was cancelled, and by the pool
        while self._withdrawn:
            self._withdrawn.pop()
            self._calls_ended -= 1

    # -- observers

    def set_observed(self, is_observed: bool) -> None:
        """Tell observers of every request from now on, or only of those that bring a header for one."""
        if is_observed:
            self._admit = partial(self._observers.admit, self._admit)  # type: ignore[method-assign]
            self._run = self._observed_run  # type: ignore[method-assign]
        else:
            del self._admit, self._run  # what is in the class comes to light again

    def _observed_run(self, inbound: Inbound, function: Function, message: Message) -> Run:
        run = Run(self, inbound, function, message.id, message.timeout_ms, self._copy_context(), message)
        self._observers.watch(run, message)
        return run

    # -- the start of a request

    def request_received(self, link: HasInbound, message: Message) -> None:
        """Run any request, or keep it packed while its caller does not take replies or has too many others running."""
        inbound = link.inbound
        if message.id != inbound.latest_id:
            inbound.latest_id = message.id
            self._admit(inbound, message)

    def _admit(self, inbound: Inbound, message: Message) -> None:
        results = inbound.results_of(message)
        is_large = results is not None and results.are_large
        if not (is_large or inbound.is_full or inbound.connection.is_congested):
            self.start(inbound, message)
        elif (
            len(inbound.waiting) < self._max_waiting or not (is_large or inbound.is_full)
        ) and inbound.waiting_bytes <= _WINDOWS * self._window_bytes:
            if is_large and results is not None:
                self._keep_for_window(inbound, message, results)
            else:
                inbound.keep_for_handler(message)
                self._start_waiting(inbound)
        else:
            self._refuse_for_now(inbound, message)

    # -- requests whose results are likely to be large

    def _window(self, inbound: Inbound) -> ReplyWindow:
        if inbound.reply_window is None:
            inbound.reply_window = ReplyWindow(
                inbound.connection, self._window_bytes, self.threads.size, partial(self.readmit, inbound)
            )
        return inbound.reply_window

    def _keep_for_window(self, inbound: Inbound, message: Message, results: ResultSizes) -> None:
        function = inbound.functions.get(message.arg)
        # one that comes with its arguments is not known yet: it waits again if it is for a thread
        in_thread = function.__class__ is Function and function.mode is _THREAD
        window = self._window(inbound)

        def start() -> None:
            if len(inbound.running) >= inbound.limit and message.id in inbound.waiting:
                inbound.wait_for_handler(message.id)
                kept = None
            else:
                kept = None if self._is_closed else inbound.take_waiting(message.id)
            if kept is None:  # it was cancelled, or waits for another reason
                if in_thread:
                    window.thread_ended()
                return
            self.start(inbound, kept, is_counted=in_thread)
            if self.waited is not None:
                self.waited(inbound, kept)

        inbound.keep(message)
        window.enter(results, start, in_thread=in_thread)

    def postpone(self, run: Run) -> None:
        """Let a plain function have a thread when there is room for its result, or at once if that will be small."""
        if not run.function.results.are_large:
            self.threads.submit(run.work, is_quick=run.function.is_quick)
            return
        window = self._window(run.inbound)

        def start() -> None:
            if run.ended:
                window.thread_ended()
            else:
                self._submit_counted(run)

        window.enter(run.function.results, start, in_thread=True)

    def _submit_counted(self, run: Run) -> None:
        run.is_counted = True
        run.outbox = None  # the loop is to hear of its end
        self.threads.submit(run.work, is_quick=run.function.is_quick)

    def _refuse_for_now(self, inbound: Inbound, message: Message) -> None:
        """Too many requests of a caller wait already."""
        self.calls_refused += 1
        error = OverloadedError(f"{len(inbound.waiting)} of its requests wait already")
        self._observers.dropped(inbound, message.id, error)
        if inbound.connection.is_congested:
            # to refuse them all would take as much memory as to keep them
            inbound.connection.abort(
                WireError(f"{len(inbound.waiting)} of its requests wait, and it does not read replies")
            )
            return
        payload, _ = describe_failure(error, self._pickler, main_by_value=inbound.main_by_value)
        with suppress(ConnectionClosedError):  # then the caller knows
            inbound.connection.send(frame(_FAILURE, FailureKind.OVERLOADED, message.id, 0, 0, payload))

    def readmit(self, inbound: Inbound) -> None:
        """Something ended or was sent: see whether those that wait may run."""
        # This is called between two steps of any task, which may have switched something off for itself
        outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
        inbound.look_for_room()
        try:
            self._start_waiting(inbound)
            if inbound.reply_window is not None:
                inbound.reply_window.admit()
        finally:
            if outer is not None:
                torchstate.restore(outer)

    def _start_waiting(self, inbound: Inbound) -> None:
        connection = inbound.connection
        while (
            inbound.has_room_for_waiting
            and not (connection.is_congested and connection.unsent_small_bytes > self._window_bytes)
            and not self._is_closed
        ):
            message = inbound.next_waiting()
            if message is None:
                continue
            self.start(inbound, message)
            if self.waited is not None:
                self.waited(inbound, message)

    def refuse(self, link: HasInbound, message: Message) -> None:
        """Answer a request that came too late: this worker is being closed."""
        inbound = link.inbound
        error = ShutdownError(f"worker {self.name!r} is shutting down")
        payload, _ = describe_failure(error, self._pickler, main_by_value=inbound.main_by_value)
        with suppress(ConnectionClosedError):  # then the caller knows
            inbound.connection.send(frame(_FAILURE, FailureKind.SHUTDOWN, message.id, 0, 0, payload))

    def reject(self, link: HasInbound, message: Message, error: Exception) -> None:
        """Answer a request with an error; nothing of it is looked at."""
        self.refused(self._run(link.inbound, _UNKNOWN, message), error)

    def start(self, inbound: Inbound, message: Message, *, is_counted: bool = False) -> None:
        """Run a request now. ``is_counted``: the reply window has let it go to a thread."""
        function = inbound.functions.get(message.arg)
        if function.__class__ is not Function or message.flags & RequestFlag.STREAM:
            self._start_special(inbound, function, message)
            return
        run = self._run(inbound, function, message)
        run.is_counted = is_counted
        self._launch(run)
        if run.is_counted and (run.ended or run.function.mode is not _THREAD):
            run.leave_window()  # its arguments could not be unpacked, or have to be waited for

    def _run(self, inbound: Inbound, function: Function, message: Message) -> Run:
        return Run(self, inbound, function, message.id, message.timeout_ms, self._copy_context(), message)

    def _launch(self, run: Run) -> None:
        """Run it in the way of its function."""
        mode = run.function.mode
        if mode is _COROUTINE:
            self.carriers.start(run)
        elif mode is _THREAD:
            self._start_thread(run)
        elif mode is _INLINE:
            self._run_inline(run)
        else:
            self.refused(run, TypeError(f"{run.function.name} is a generator: call it with arpc.stream"))

    def serve(
        self, message_class: type[Message], function: Callable[..., Any], shortcut: Callable[..., Any] | None = None
    ) -> Service:
        """Run one function for each message of a class, whatever the message calls.

        ``shortcut`` is asked before: unless it returns NotImplemented, that is the answer, at a third of the price.
        `Prompt.take_parcel` is called instead of the function for a small parcel, with the `Run`, which it makes its
        scope, the bytes and the tensors. It returns what the function would, or the payload of a parcel.
        """
        served = Function(function.call if isinstance(function, Prompt) else function)
        served.name = message_class.__name__
        served.is_service = True
        launch = self._answer_message if isinstance(function, Prompt) else self._launch

        def handle(link: HasInbound, message: Message) -> None:
            launch(self._run(link.inbound, served, message))

        def direct(link: HasInbound) -> dict[int, Direct]:
            inbound = link.inbound
            read = self.codec.read
            kind = brief_kind(int(message_class.type))
            if shortcut is None:
                if not isinstance(function, Prompt):
                    return {}
                if function.take_parcel is None:
                    return {kind: partial(self._take_prompt, inbound, served)}
                return {kind: partial(self._take_parcel, inbound, served, function.take_parcel)}

            def take(id_: int, arg: int, timeout_ms: int, payload: bytes | bytearray) -> None:
                try:
                    result = shortcut(*read(payload, [], inbound.caller))
                except Exception:  # noqa: BLE001 - it is raised again, and told, by the function
                    result = NotImplemented
                if result is NotImplemented:
                    handle(link, message_class(0, id_, arg, timeout_ms, 0, 0, 0, bytearray(payload), ()))
                elif result is None:
                    self._ended_at_once += 1
                    inbound.connection.send(_pack_brief(0, _BRIEF_REPLY, id_, 0, 0, 0))
                else:
                    self.returned(Run(self, inbound, served, id_, timeout_ms, self._copy_context()), result)

            return {kind: take}

        return Service(handle, direct)

    def _take_prompt(
        self,
        inbound: Inbound,
        function: Function,
        id_: int,
        _arg: int,
        timeout_ms: int,
        payload: bytes | bytearray,
    ) -> None:
        run = Run(self, inbound, function, id_, timeout_ms, self._copy_context())
        self._answer(run, self._call_promptly, run, payload)

    def _take_parcel(
        self,
        inbound: Inbound,
        function: Function,
        take_parcel: Callable[..., Any],
        id_: int,
        arg: int,
        timeout_ms: int,
        payload: bytes | bytearray,
    ) -> None:
        """The same for a function that takes a parcel as it is, and answers with another."""
        if not payload or payload[0] != PARCEL_ARGUMENT:
            self._take_prompt(inbound, function, id_, arg, timeout_ms, payload)
            return
        context = self._copy_context()
        run = Run(self, inbound, function, id_, timeout_ms, context)
        try:
            _, tensors, meta, content = unpack_handful(payload)
            if meta:
                raise ProtocolError("something rides on a parcel")
            result = context.run(take_parcel, run, content, tensors)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            torchstate.save_and_reset()
            self.raised(run, error)
            return
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if type(result) is bytes:
            run.context = NO_CONTEXT
            self._calls_ended += 1
            try:  # noqa: SIM105 - which costs nothing
                inbound.connection.send(_pack_brief(len(result), _BRIEF_REPLY, id_, 0, 0, 0) + result)
            except ConnectionClosedError:
                pass  # the caller knows
        else:
            self._answer_with(run, result)

    def _call_promptly(self, run: Run, payload: bytes | bytearray) -> Any:
        """Call a `Prompt` function with what is in a payload. In its context."""
        _set_scope(run)
        return run.function.call(*self.unpack_plain(run, payload))

    def serve_wrapped(self, wrapper: Wrapper) -> Service:
        """Give messages that name a function, as requests do, to a feature.

        They never wait for room: others that run may wait for what they bring.
        """

        def handle(link: HasInbound, message: Message) -> None:
            inbound = link.inbound
            function = inbound.functions.get(message.arg)
            run = self._run(inbound, function if isinstance(function, Function) else _UNKNOWN, message)
            run.results = ResultSizes()  # what the function returns stays here
            try:
                wrapped = wrapper.admit(run, message)
            except ProtocolError as error:
                self.refused(run, error)
                return
            if wrapped is None:
                return
            run.never_begun = wrapped.not_begun
            if isinstance(function, Function):
                # before it is unpacked: what observers put around a function belongs around all of this
                run.function = _wrapped(wrapped, function)
            try:
                self._check_found(function, message)
                run.context.run(self._enter, run, message)
            except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
                wrapped.not_begun(error)
                self.refused(run, error)
                return
            if not isinstance(function, Function):  # it came with its arguments
                run.function = _wrapped(wrapped, run.function)
            self.carriers.start(run)

        return Service(handle, lambda link: wrapper.direct(link, handle))

    def answer(self, run: Run, data: bytes) -> None:
        """The end of a request that a feature has taken, with the frame of the reply."""
        if run.is_registered or run.handling is not None:
            self._end(run, data, None)
        else:
            self._end_at_once(run, data)

    def _answer_message(self, run: Run) -> None:
        self._answer(run, run.begin)

    def _answer(self, run: Run, call: Callable[..., Any], *args: Any) -> None:
        """Run a `Prompt` function here and now, by a call in its context. Torch must be pristine."""
        try:
            result = run.context.run(call, *args)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            torchstate.save_and_reset()
            self.raised(run, error)
            return
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        self._answer_with(run, result)

    def _answer_with(self, run: Run, result: Any) -> None:
        """The end of a `Prompt` function, or of its beginning."""
        if is_coroutine(result):
            run.returned_coroutine = result
            self._carry(run, lambda: result)
        elif result is None and run.handling is None:
            run.context = NO_CONTEXT
            self._calls_ended += 1
            with suppress(ConnectionClosedError):  # then the caller knows
                run.inbound.connection.send(_pack_brief(0, _BRIEF_REPLY, run.id, 0, 0, 0))
        else:
            self.returned(run, result)

    def _start_special(self, inbound: Inbound, function: Function | Exception | None, message: Message) -> None:
        """A stream, a function that came with its arguments, or one that is not there."""
        run = self._run(inbound, function if isinstance(function, Function) else _UNKNOWN, message)
        if message.flags & RequestFlag.STREAM:
            run.is_stream = True
        try:
            self._check_found(function, message)
            run.context.run(self._enter, run, message)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            self.refused(run, error)
            return
        if run.is_stream and run.function.mode in _GENERATORS:
            self._run_inline(run)  # calling a generator function runs none of its code
        else:
            self._launch(run)

    @staticmethod
    def _check_found(function: Function | Exception | None, message: Message) -> None:
        if isinstance(function, Exception):
            raise function.with_traceback(None)
        if function is None and message.arg:
            raise ProtocolError(f"call {message.id} of function {message.arg}, which was never sent")

    def _enter(self, run: Run, message: Message) -> None:
        current_scope.set(run)
        run.message = None
        self.unpack(run, message)

    def unpack(self, run: Run, message: Message) -> None:
        """Build the arguments of a call.

        Runs in the handler's context, because interceptors and user code may look at it.
        """
        codec = self.codec
        caller = run.inbound.caller
        try:
            if not message.arg:
                codec.policy.check_code()
            if codec.is_handful(message):
                payload = self._receive_handful(run, codec.handful_of(message))
            elif message.meta_end == message.meta_start:
                payload = codec.content(message, caller)
            else:
                slots = codec.slots(message, caller)
                run.meta = codec.meta(message)
                if run.is_stream:
                    run.credit = _credit(run.meta.pop(WINDOW, 0))
                codec.receive_request(caller, run.meta, slots)
                payload = codec.payload(message, slots, caller)
            if not message.arg:
                call, payload = payload
                run.function = Function(call)
                run.function.results = run.inbound.results_by_value
            elif run.function.is_service:
                codec.policy.check_plain(payload)
        except (AttributeError, ImportError, LookupError, StopIteration) as error:
            raise self._not_unpacked(error) from error
        if message.flags & RequestFlag.KWARGS:
            run.args, run.kwargs = payload
        else:
            run.args = payload
        if run.has_prerequisites:
            run.function = self._after(run.prerequisites, run.function)
        if run.handling is not None:
            run.function = self._observers.begin_handler(run, message)

    def _after(self, prerequisites: list[Awaitable[object]], function: Function) -> Function:
        """A function that waits first."""

        async def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            for prerequisite in prerequisites:
                await prerequisite
            return await self.call(function, args, kwargs)

        return Function.of_coroutine(wait_and_call, function.name, function.results)

    async def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function returns, run in its own way, for a coroutine that stands in its place.

        A generator is returned as it is, not begun.
        """
        if function.mode is _THREAD:
            context = copy_context()
            run = current_scope.get()
            job = partial(context.run, function.call, *args, **kwargs)
            if run.__class__ is Run and run.results is function.results:
                result = await self._call_in_window(run.inbound, function.results, job)
            else:
                result = await self.threads.call(job)
        else:
            result = function.call(*args, **kwargs)
        if function.returns_future:
            return await _future_of(result, function.name, self.loop)
        # not asyncio.iscoroutine, to which a generator is one
        return await result if is_coroutine(result) else result

    async def expect_result(self, run: Run, function: Function) -> None:
        """Let a handler that has found out what to call wait for room, if the result of that is likely to be large."""
        run.results = results = function.results
        if results.are_large and function.mode is not _THREAD:
            await self._window(run.inbound).wait(results, in_thread=False)

    async def _call_in_window(self, inbound: Inbound, results: ResultSizes, job: Callable[[], Any]) -> Any:
        """Run in a thread what a request calls and returns."""

        def unless_large() -> Any:
            # of those that came before the first result, most have no thread yet when it is known to be large
            return _NOT_BEGUN if results.are_large else job()

        if not results.are_large:
            result = await self.threads.call(unless_large)
            if result is not _NOT_BEGUN:
                return result
        window = self._window(inbound)
        await window.wait(results, in_thread=True)
        try:
            return await self.threads.call(job)
        finally:
            window.thread_ended()

    def define(self, inbound: Inbound, message: Message) -> None:
        """A peer sends a function that it will call by number. Raises `ProtocolError` if there are too many."""
        if len(inbound.functions) >= _MAX_FUNCTIONS:
            raise ProtocolError(f"worker {inbound.caller.name!r} calls more than {_MAX_FUNCTIONS} functions")
        try:
            call = self.context.copy().run(self.codec.function, message, inbound.caller)
            inbound.define(message.arg, Function(call))
        except NotAllowedError as error:
            inbound.define(message.arg, error)
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            made = SerializationError(
                f"the function is not on worker {self.name!r}: {summary_of(error)}. "
                f"It must be importable there, or be passed as a lambda or closure, which travel by value"
            )
            made.__cause__ = error
            inbound.define(message.arg, made)

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
            self.refused(run, error)
            return False
        if run.has_prerequisites:
            self.carriers.start(run)
            return False
        return True

    def _start_thread(self, run: Run) -> None:
        if run.message is not None and not self._enter_and_go_on(run):
            return
        inbound, function = run.inbound, run.function
        inbound.register(run)
        if run.is_counted:
            self._submit_counted(run)
            return
        if function.results.are_large:
            self.postpone(run)
            return
        if inbound.ended is None and run.handling is None and run.meta is None and function.is_plain:
            # none of those who want to hear of its end, or to add to its answer, are there
            run.outbox = None if run.is_stream else inbound.outbox or self._open_outbox(inbound)
        self.threads.submit(run.work, is_quick=function.is_quick)

    def thread_returned(self, run: Run, result: Any) -> None:
        """A plain function has ended in its thread."""
        if result is None and not run.ended and run.meta is None and run.function.is_plain:
            # what `returned` comes down to, if nothing is sent back
            run.ended = True
            run.context = NO_CONTEXT
            self._calls_ended += 1
            inbound = run.inbound
            inbound.forget(run)
            if inbound.waiting:
                self.loop.call_soon(self.readmit, inbound)
            with suppress(ConnectionClosedError):  # then the caller knows
                inbound.connection.send(_pack_brief(0, _BRIEF_REPLY, run.id, 0, 0, 0))
        elif not run.ended and is_coroutine(result):
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
        except BaseException as error:  # noqa: BLE001 - what is no iterable may raise anything when asked whether it is
            self.raised(run, error)
            return
        producer.add_credit(run.credit)
        run.inbound.register(run)
        self._carry(run, producer.produce)

    def _carry(self, run: Run, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        run.coroutine = None
        run.args = run.kwargs = None
        run.function = Function.of_coroutine(call, run.function.name, run.function.results)
        self.carriers.start(run)

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
            "calls_refused": self.calls_refused,
            **self.threads.statistics(),
            **self.carriers.statistics(),
            "handlers_without_wait": self.carriers.steps_without_wait + self._ended_at_once,
        }


async def _future_of(result: Any, name: str, loop: asyncio.AbstractEventLoop) -> Any:
    """The value of what a function marked with `async_execution` returned."""
    if is_a(result, asyncio.Future):
        return await result
    if not is_a(result, (torch._C.Future, concurrent.futures.Future)):
        raise TypeError(
            f"a function marked with async_execution must return a Future, and {name} returned {type_name_of(result)}"
        )
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def completed(_: object) -> None:
        loop.call_soon_threadsafe(settle)  # it is completed on a thread of its own

    result.add_done_callback(completed)
    await done
    return result.result() if is_a(result, concurrent.futures.Future) else result.value()


def _wrapped(wrapped: Wrapped, function: Function) -> Function:
    return Function.of_coroutine(partial(wrapped.make, function), function.name)


def _unknown_function() -> None:
    """Stands in the error reply of a call whose function could not be found."""


_UNKNOWN: Final = Function(_unknown_function)
