"""The end of a request: exactly one reply, whatever became of the handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from arpc.agent.codec import Codec
from arpc.agent.hooks.observers import Observers
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.remote_exceptions import describe_failure
from arpc.agent.server.run import Run
from arpc.agent.server.thread_replies import NO_CONTEXT
from arpc.errors import ConnectionClosedError, ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.user_errors import is_a, summary_of, text_of, type_name_of
from arpc.wire.frames import frame
from arpc.wire.messages import FailureKind, ItemFlag, MessageType
from arpc.wire.metadata import Metadata, encode_metadata
from arpc.wire.values.content import Content
from arpc.wire.values.packing import Slot

__all__ = ["HandlerMeter", "Replies"]

logger = get_logger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_ITEM: Final = int(MessageType.ITEM)
_FAILURE: Final = int(MessageType.FAILURE)
_PLACE_MASK: Final = (1 << 32) - 1
_NOTHING: Final = Content(b"")
_now_ns = time.perf_counter_ns


_Intercept: TypeAlias = "Callable[[WorkerInfo, Metadata, list[Slot]], Metadata | None]"


class _TakesLoopError(Exception):
    """An interceptor has something to do that belongs to the loop."""


class HandlerMeter(Protocol):
    """Is told how long handlers take. Called on the loop; must not raise."""

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        """A request was answered, whatever the answer is."""

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        """A request will be answered with an error."""


class Replies:
    """Answers the requests of all peers of one worker."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, codec: Codec, observers: Observers, readmit: Callable[[Inbound], None]
    ) -> None:
        """``readmit`` is called when a request has ended and others of its connection wait."""
        self._loop = loop
        self._codec = codec
        self._observers = observers
        self._readmit = readmit
        self.calls_failed = 0
        self.calls_ended = 0
        self.is_closed = False
        """The worker shuts down: handlers that are cancelled now are cancelled for that reason."""
        self.tell_failure: Callable[[str, BaseException], None] | None = None
        """Told the name of each function that fails here, and what it raised."""
        self.meter: HandlerMeter | None = None

    # -- results

    def returned(self, run: Run, result: Any) -> None:
        """Answer a request with its result."""
        try:
            if type(result) is Content:
                content = result  # a handler of the runtime has encoded it
            elif run.meta:
                content = run.context.run(self._encode, run, result, self._codec.reply_sent)
            else:
                content = _NOTHING if result is None else self._encode(run, result)
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
        else:
            self._end(run, _REPLY, 0, 0, content)

    def created(self, run: Run, answer: Any) -> None:
        """Answer the request for a value that stays here."""
        content = None
        if answer is not None:
            # If it cannot be sent, the caller asks for the value, and that call says why
            with suppress(BaseException):
                content = run.context.run(self._encode, run, answer, self._codec.reply_sent)
        self.returned(run, content)  # with the metadata of interceptors, even if there is nothing else to send

    def encode_in_thread(self, run: Run, result: Any) -> Content | None:
        """The content of a reply, in the thread in which the function ended; None if that takes the loop."""
        try:
            return self._encode(run, result, self._codec.reply_sent_in_thread if run.meta else None)
        except _TakesLoopError:
            return None

    def _encode(self, run: Run, result: Any, intercept: _Intercept | None = None) -> Content:
        """The content of a reply, or of an item of a stream.

        ``intercept`` makes the metadata of the reply from that of the request; None means that this takes the loop.
        """
        codec, inbound = self._codec, run.inbound
        pickled, run.pickled = run.pickled, None
        try:
            pickle, slots = pickled or codec.pickler.dumps_result(
                result, main_by_value=inbound.main_by_value, to=inbound.caller
            )
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
        meta = b""
        if run.meta and intercept is not None:
            metadata = intercept(inbound.caller, run.meta, slots)
            if metadata is None:
                run.pickled = pickle, slots  # once: RRefs in it have been handed out
                raise _TakesLoopError
            meta = encode_metadata(metadata) if metadata else b""
        tensors = None
        if slots:
            stager = codec.stager_back(run.meta) if codec.knows_devices or run.meta else None
            tensors = codec.pack(slots, len(pickle), stager)
        return Content(pickle, meta, tensors)

    # -- streams

    def send_item(self, run: Run, item: Any) -> int:
        """Send the next item of a stream, and say how large it is. Called in the handler's context."""
        content = self._encode(run, item, self._codec.reply_sent)
        place, connection = run.items_sent & _PLACE_MASK, run.inbound.connection
        if content.tensors is not None and content.tensors.waits:
            # Without the item the stream has a gap that nothing fills; a device that fails, fails for good
            self._send_when_filled(run, _ITEM, 0, place, content, connection.abort)
        else:
            connection.send_message(_ITEM, 0, run.id, place, 0, content)
        run.items_sent += 1
        return content.size_bytes()

    def stream_ended(self, run: Run) -> None:
        """All items of a stream have been sent."""
        self._end(run, _ITEM, ItemFlag.LAST, run.items_sent & _PLACE_MASK, _NOTHING)

    # -- errors

    def raised(self, run: Run, error: BaseException) -> None:
        """Answer a request with an error, once."""
        if run.ended:
            return
        self.calls_failed += 1
        name = run.name
        if self.tell_failure is not None:
            self.tell_failure(name, error)
        if self.meter is not None:
            self.meter.handler_failed(run.caller.name, name, error)
        kind = FailureKind.REFUSED if run.is_refused else FailureKind.RAISED
        if is_a(error, asyncio.CancelledError):
            kind = FailureKind.TIMEOUT if run.expired else FailureKind.CANCELLED
            if self.is_closed and not run.expired:
                kind = FailureKind.LEFT
            run.cancel_nested()
        if is_a(error, ProtocolError):
            logger.warning(
                "a malformed request of worker %s: %s",
                run.caller.name,
                text_of(error),
                extra={"peer": run.caller.name, "call_id": run.id},
            )
        content = self._encode_failure(run, error)
        self._end(run, _FAILURE, kind, run.items_sent & _PLACE_MASK, content, error)

    def _encode_failure(self, run: Run, error: BaseException) -> Content:
        """The content of a failure. Whatever the error is, this makes one."""
        codec, max_bytes = self._codec, self._codec.max_pickle_bytes
        main_by_value, to = run.inbound.main_by_value, run.inbound.caller
        pickle, slots = describe_failure(error, codec.pickler, main_by_value=main_by_value, to=to, max_bytes=max_bytes)
        if not slots:
            return Content(pickle)
        try:
            return Content(pickle, b"", codec.pack(slots, len(pickle), codec.stager_back(None)))
        except BaseException:  # noqa: BLE001 - a tensor of a user may raise anything, and the error can do without
            pickle, _ = describe_failure(error, None, main_by_value=main_by_value, max_bytes=max_bytes)
            return Content(pickle)

    def fail(self, inbound: Inbound, call_id: int, kind: FailureKind, error: Exception) -> None:
        """Answer a request of which there is no `Run`."""
        pickle, _ = describe_failure(error, self._codec.pickler, main_by_value=inbound.main_by_value)
        inbound.arrived_ns.pop(call_id, None)
        with suppress(ConnectionClosedError):  # then the caller knows
            inbound.connection.send(frame(_FAILURE, kind, call_id, 0, 0, pickle))

    # -- the end

    def _end(
        self, run: Run, type_: int, flags: int, arg: int, content: Content, error: BaseException | None = None
    ) -> None:
        """The one place where a request ends, once."""
        if run.ended:
            return
        inbound = run.inbound
        run.ended = True
        if run.handling is not None:
            self._observers.ended(run, content.size_bytes(), error)
        # A timer may keep the run's context for long: with it the calls it made, whose errors keep the handler's frames
        run.nested = None
        run.context = NO_CONTEXT
        self.calls_ended += 1
        if self.meter is not None and (arrived_ns := inbound.arrived_ns.pop(run.id, 0)):
            self.meter.handler_ended(inbound.caller.name, run.name, _now_ns() - arrived_ns)
        if run.is_registered:
            self._forget(run)
        size_bytes = len(content.pickle)
        tensors = content.tensors
        if tensors is not None:
            size_bytes += tensors.size_bytes
        if error is None:
            results = run.results or run.function.results
            if size_bytes > results.unsurprising_bytes:
                results.saw(size_bytes)
        if tensors is not None and tensors.waits:
            fail = partial(self.fail, inbound, run.id, FailureKind.RAISED)
            self._send_when_filled(run, type_, flags, arg, content, fail)
            return
        try:
            bulk = inbound.connection.send_message(type_, flags, run.id, arg, 0, content)
        except ConnectionClosedError:
            return  # the caller knows: its own end of the connection is closed too
        if bulk is not None:
            inbound.reply_leaves(run.id, bulk)

    def _forget(self, run: Run) -> None:
        """A request that could be cancelled has ended."""
        run.task = run.args = run.kwargs = None  # it may wait for a thread for a long time still
        inbound = run.inbound
        inbound.forget(run)
        if inbound.waiting:
            self._loop.call_soon(self._readmit, inbound)

    def _send_when_filled(
        self, run: Run, type_: int, flags: int, arg: int, content: Content, fail: Callable[[SerializationError], None]
    ) -> None:
        """Send a message once its tensors have been copied from devices; ``fail`` is called if they cannot be."""
        inbound = run.inbound

        def filled(failure: SerializationError | None) -> None:
            with suppress(ConnectionClosedError):  # then the caller knows
                if failure is not None:
                    fail(failure)
                elif (bulk := inbound.connection.send_message(type_, flags, run.id, arg, 0, content)) is not None:
                    inbound.reply_leaves(run.id, bulk)

        assert content.tensors is not None
        self._codec.when_filled(content.tensors, filled)
