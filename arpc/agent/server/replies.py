"""Answers requests: each gets exactly one answer, whatever the outcome of its handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from arpc.agent.server.functions import Function, Mode, RunInstead
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.producer import Producer
from arpc.agent.server.remote_exceptions import describe_failure
from arpc.agent.server.returned_futures import await_future
from arpc.agent.server.run import NO_CONTEXT, TO_BE_FETCHED, Creation, Run
from arpc.errors import ConnectionClosedError, ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.user_errors import close_coroutine, is_a, is_coroutine, summary_of, text_of, type_name_of
from arpc.wire.frames import frame
from arpc.wire.messages import FailureKind, ItemFlag, MessageType
from arpc.wire.metadata import Metadata, encode_metadata
from arpc.wire.values.content import Content
from arpc.wire.values.packing import Slot

if TYPE_CHECKING:
    from arpc.agent.hooks.timing import Meter
    from arpc.agent.server.dispatcher import Dispatcher

__all__ = ["Replies", "TakesLoopError"]

logger = get_logger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_ITEM: Final = int(MessageType.ITEM)
_FAILURE: Final = int(MessageType.FAILURE)
_PLACE_MASK: Final = (1 << 32) - 1
_NOTHING: Final = Content(b"")
_now_ns = time.perf_counter_ns


_Intercept: TypeAlias = "Callable[[WorkerInfo, Metadata, list[Slot]], Metadata | None]"


class TakesLoopError(Exception):
    """An interceptor has to run on the loop. The arguments are the pickle and the slots of the result."""


class Replies:
    """Answers the requests of all peers of one worker, or runs what replaces a function that has returned."""

    def __init__(self, host: Dispatcher) -> None:
        self._host = host
        self._codec = host.codec
        self.calls_failed = 0
        self.calls_ended = 0
        self.on_failure: Callable[[str, BaseException], None] | None = None
        """Called with the name of each function that fails here, and its error."""
        self.meter: Meter | None = None

    # -- results

    def returned(self, run: Run, result: Any) -> None:
        """Handle the result of a function, or of its coroutine."""
        if type(result) is RunInstead:
            self._run_instead(run, result)
        elif (run.is_stream or not run.function.is_final) and self._goes_on(run, result):
            pass
        elif run.creation is not None:
            self._keep(run, run.creation, result)
        elif run.meta:
            self._reply_in_context(run, self.encode, result)
        else:
            try:
                content = _NOTHING if result is None else self.encode(run, result)
            except BaseException as error:  # noqa: BLE001 - pickling runs user code; any error is sent to the caller
                self.raised(run, error)
            else:
                self.end(run, content)

    def _reply_in_context(self, run: Run, encode: Callable[..., Content], *result: Any) -> None:
        """Encode a result, with the metadata of interceptors, in the request's context, and answer the request."""
        try:
            content = run.context.run(encode, run, *result, self._codec.reply_sent)
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; any error is sent to the caller
            self.raised(run, error)
        else:
            self.end(run, content)

    def pickled(self, run: Run, pickle: bytes, slots: list[Slot]) -> None:
        """Answer a request whose result a thread has pickled, and whose interceptors need the loop."""
        self._reply_in_context(run, self._content, pickle, slots)

    def _keep(self, run: Run, creation: Creation, result: Any) -> None:
        """Answer the request for a value that stays on this worker."""
        answer = creation.answer(run, result)
        run.keep(result)
        if answer is None and not run.meta:
            self.end(run, _NOTHING)
            return
        try:
            content = run.context.run(self.encode, run, answer, self._codec.reply_sent)
        except BaseException:  # noqa: BLE001 - pickling runs user code; the caller's fetch raises the error
            self._reply_in_context(run, self.encode, TO_BE_FETCHED)
        else:
            self.end(run, content)

    def encode(self, run: Run, result: Any, intercept: _Intercept | None = None) -> Content:
        """Return the content of a reply, or of an item of a stream. Called in any thread.

        ``intercept`` makes the metadata of the reply from that of the request. Raises `TakesLoopError` if it returns
        None, and `SerializationError` if the result cannot be pickled.
        """
        codec, inbound = self._codec, run.inbound
        try:
            pickle, slots = codec.pickler.dumps_result(result, main_by_value=inbound.main_by_value, to=inbound.caller)
        except BaseException as error:
            raise SerializationError(
                f"the result of {run.name} ({type_name_of(result)}) cannot be sent: {summary_of(error)}"
            ) from error
        if len(pickle) > codec.max_pickle_bytes:
            raise SerializationError(
                f"the result of {run.name} makes a pickle of {len(pickle)} bytes, and at most "
                f"{codec.max_pickle_bytes} are taken: return large data as tensors, or raise "
                f"RpcOptions.max_body_bytes"
            )
        return self._content(run, pickle, slots, intercept) if slots or run.meta else Content(pickle)

    def _content(self, run: Run, pickle: bytes, slots: list[Slot], intercept: _Intercept | None) -> Content:
        """Return the content of a pickle, with its tensors and the metadata of interceptors."""
        codec, meta = self._codec, b""
        if run.meta and intercept is not None:
            metadata = intercept(run.caller, run.meta, slots)
            if metadata is None:
                raise TakesLoopError(pickle, slots)  # not to be pickled again: RRefs in it have been handed out
            meta = encode_metadata(metadata) if metadata else b""
        if not slots:
            return Content(pickle, meta)
        stager = codec.stager_back(run.meta) if codec.knows_devices or run.meta else None
        return codec.pack(slots, pickle, meta, stager)

    # -- code that runs instead of a function that has returned

    def _goes_on(self, run: Run, result: Any) -> bool:
        """Run the result if it is to be awaited, or streamed; returns whether it is."""
        function = run.function
        if function.returns_future:
            self._carry(run, partial(await_future, result, run.name))
        elif function.mode is not Mode.COROUTINE and is_coroutine(result):
            # a plain function that returns a coroutine means it to be awaited
            run.returned_coroutine = result
            self._carry(run, lambda: result)
        elif not run.is_stream:
            return False
        elif run.producer is None:
            self._produce(run, result)
        else:
            self.stream_ended(run)
        return True

    def _carry(self, run: Run, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine of the runtime in the name of the function."""
        run.coroutine = None
        run.args, run.kwargs = (), None
        run.function = Function.of_coroutine(call, run.function.name, run.function.results)
        self._host.tasks.start(run)

    def _produce(self, run: Run, iterable: Any) -> None:
        """Send the items of an iterable, in a coroutine that runs in the handler's place."""
        host, connection = self._host, run.inbound.connection
        try:
            run.producer = Producer(
                iterable, host.threads, partial(self.send_item, run), connection, host.options.window_bytes, run.credit
            )
        except BaseException as error:  # noqa: BLE001 - an object of the user may raise anything
            self.raised(run, error)
            return
        run.inbound.register(run)
        self._carry(run, run.producer.produce)

    def _run_instead(self, run: Run, to: RunInstead) -> None:
        """Run another function instead of one that has returned a `RunInstead`."""
        host = self._host
        function, run.args, run.kwargs = to
        run.coroutine = run.task = None
        run.function = function if run.handling is None else host.observers.run_instead(run, function)
        if not function.results.are_large or function.mode is Mode.THREAD or run.creation is not None:
            host.launch(run)
            return
        run.inbound.register(run)
        host.queue_of(run.inbound).enter(
            function.results, lambda: None if run.ended else host.launch(run), in_thread=False
        )

    # -- streams

    def send_item(self, run: Run, item: Any) -> int:
        """Send the next item of a stream; returns its size in bytes. Called in the handler's context."""
        content = self.encode(run, item, self._codec.reply_sent)
        place, connection = run.items_sent & _PLACE_MASK, run.inbound.connection
        if content.waits:
            # On failure, abort: without the item the stream has a gap for good, and a failed device does not recover
            self._send_when_filled(run, _ITEM, 0, place, content, connection.abort)
        else:
            connection.send_message(_ITEM, 0, run.id, place, 0, content)
        run.items_sent += 1
        return content.size_bytes()

    def stream_ended(self, run: Run) -> None:
        """Answer the request of a stream whose items have all been sent."""
        self.end(run, _NOTHING, _ITEM, ItemFlag.LAST, run.items_sent & _PLACE_MASK)

    # -- errors

    def refused(self, run: Run, error: BaseException) -> None:
        """Answer a request with an error that occurred before its function was called."""
        run.is_refused = True
        self.raised(run, error)

    def raised(self, run: Run, error: BaseException) -> None:
        """Answer a request, once, with an error of its function, or of a step before or after that."""
        if run.returned_coroutine is not None:
            close_coroutine(run.returned_coroutine)  # it may never have been started
        if run.ended:
            return
        creation, run.creation = run.creation, None
        is_cancelled = is_a(error, asyncio.CancelledError)
        if creation is not None:
            if not (run.is_refused or is_cancelled):
                creation.failed(error)
                self._reply_in_context(run, self.encode, TO_BE_FETCHED)
                return
            creation.not_made(error)
        self.calls_failed += 1
        name = run.name
        if self.on_failure is not None:
            self.on_failure(name, error)
        if self.meter is not None:
            self.meter.handler_failed(run.caller.name, name, error)
        kind = FailureKind.REFUSED if run.is_refused else FailureKind.RAISED
        if is_cancelled:
            kind = FailureKind.TIMEOUT if run.expired else FailureKind.CANCELLED
            if self._host.is_closed and not run.expired:
                kind = FailureKind.LEFT
            run.cancel_nested()
        if is_a(error, ProtocolError):
            logger.warning(
                "a malformed request of worker %s: %s",
                run.caller.name,
                text_of(error),
                extra={"peer": run.caller.name, "call_id": run.id},
            )
        self.end(run, self._encode_failure(run, error), _FAILURE, kind, run.items_sent & _PLACE_MASK, error)

    def _encode_failure(self, run: Run, error: BaseException) -> Content:
        """Return the content of a failure, whatever the error is."""
        codec, max_bytes = self._codec, self._codec.max_pickle_bytes
        main_by_value, to = run.inbound.main_by_value, run.inbound.caller
        pickle, slots = describe_failure(error, codec.pickler, main_by_value=main_by_value, to=to, max_bytes=max_bytes)
        if not slots:
            return Content(pickle)
        try:
            return codec.pack(slots, pickle, b"", codec.stager_back(None))
        except BaseException:  # noqa: BLE001 - a tensor of a user may raise anything; the description needs none
            pickle, _ = describe_failure(error, None, main_by_value=main_by_value, max_bytes=max_bytes)
            return Content(pickle)

    def fail(self, inbound: Inbound, call_id: int, kind: FailureKind, error: Exception) -> None:
        """Answer a request with an error, by its id alone, without its `Run`."""
        pickle, _ = describe_failure(error, self._codec.pickler, main_by_value=inbound.main_by_value)
        with suppress(ConnectionClosedError):  # the caller's end is closed, too
            inbound.connection.send(frame(_FAILURE, kind, call_id, 0, 0, pickle))

    # -- the end

    def end(
        self,
        run: Run,
        content: Content,
        type_: int = _REPLY,
        flags: int = 0,
        arg: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """End a request on the loop, once, and send its answer: by default, a reply with this content."""
        if run.ended:
            return
        inbound = run.inbound
        run.ended = True
        if run.arrived_ns:
            self._notify_watchers(run, content, error)
        # A timer may keep the run's context for long, and so its calls, whose errors keep the handler's frames
        run.nested = None
        run.context = NO_CONTEXT
        self.calls_ended += 1
        if run.is_registered:
            self._forget(run)
        if error is None:
            results = run.results or run.function.results
            size_bytes = len(content.pickle) if content.schema is None else content.size_bytes()
            if size_bytes > results.ignored_up_to_bytes:
                results.saw(size_bytes)
        if content.waits:
            fail = partial(self.fail, inbound, run.id, FailureKind.RAISED)
            self._send_when_filled(run, type_, flags, arg, content, fail)
            return
        try:
            bulk = inbound.connection.send_message(type_, flags, run.id, arg, 0, content)
        except ConnectionClosedError:
            return  # the caller's end is closed, too
        if bulk is not None:
            inbound.reply_leaves(run.id, bulk)

    def _notify_watchers(self, run: Run, content: Content, error: BaseException | None) -> None:
        if run.handling is not None:
            self._host.observers.ended(run, content.size_bytes(), error)
        if self.meter is not None:
            self.meter.handler_ended(run.caller.name, run.name, _now_ns() - run.arrived_ns)

    def _forget(self, run: Run) -> None:
        """Remove a registered request, which has ended."""
        run.task = run.kwargs = None  # its job may still wait for a thread for a long time
        run.args = ()
        inbound = run.inbound
        inbound.forget(run)
        if inbound.waiting:
            self._host.loop.call_soon(self._host.readmit, inbound)

    def _send_when_filled(
        self, run: Run, type_: int, flags: int, arg: int, content: Content, fail: Callable[[SerializationError], None]
    ) -> None:
        """Send a message once its tensors have been copied from devices; ``fail`` is called if they cannot be."""
        inbound = run.inbound

        def filled(failure: SerializationError | None) -> None:
            with suppress(ConnectionClosedError):  # the caller's end is closed, too
                if failure is not None:
                    fail(failure)
                elif (bulk := inbound.connection.send_message(type_, flags, run.id, arg, 0, content)) is not None:
                    inbound.reply_leaves(run.id, bulk)

        self._codec.when_filled(content, filled)
