"""The end of a request: exactly one reply, whatever became of the handler."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from arpc.agent.codec import Codec, Packed
from arpc.agent.failures import describe_failure
from arpc.agent.functions import Function
from arpc.agent.observers import Observers
from arpc.agent.placement import LateBuffers
from arpc.agent.requests import NO_CONTEXT, Inbound, Run
from arpc.errors import (
    ConnectionClosedError,
    ProtocolError,
    SerializationError,
)
from arpc.log import get_logger
from arpc.transport.base import SMALL_MESSAGE_BYTES, Connection
from arpc.user_errors import close_coroutine, is_a, summary_of, text_of, type_name_of
from arpc.wire.frames import HEADER, frame
from arpc.wire.handful import RESULT
from arpc.wire.messages import FailureKind, ItemFlag, MessageType
from arpc.wire.pickling import JUST_A_TENSOR, Pickler
from arpc.wire.tensors import Slot

__all__ = ["Replies"]

logger = get_logger("arpc.executor")

_REPLY: Final = int(MessageType.REPLY)
_ITEM: Final = int(MessageType.ITEM)
_FAILURE: Final = int(MessageType.FAILURE)
_pack_header = HEADER.pack
_PLACE_MASK: Final = (1 << 32) - 1


class Replies:
    """The part of an executor that answers; the rest is in the class that inherits."""

    calls_failed: int
    codec: Codec
    failed: Callable[[Run, BaseException], None] | None
    loop: asyncio.AbstractEventLoop
    readmit: Callable[[Inbound], None]
    tell_failure: Callable[[str, BaseException], None] | None
    _calls_ended: int
    _count_withdrawn: Callable[[], None]
    _is_closed: bool
    _observers: Observers
    _pickler: Pickler
    _produce: Callable[[Run, Any], None]
    _window_bytes: int

    def returned(self, run: Run, result: Any) -> None:
        if run.ended:
            close_coroutine(result)
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
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; whatever it raises is the caller's
            self.raised(run, error)
        else:
            self._end(run, data, buffers)

    def _pack_result(self, run: Run, result: Any) -> tuple[bytes, list[memoryview] | None]:
        return self._pack_slots(run, *self._pickle_result(run, result))

    def _pack_slots(self, run: Run, payload: bytes, slots: list[Slot]) -> tuple[bytes, list[memoryview] | None]:
        """A reply, and the memory that follows it; None if there are no tensors beside the payload."""
        meta = run.meta
        if meta:
            meta = run.context.run(self.codec.intercept_reply, run.inbound.caller, meta, slots)
        elif not slots:
            return _pack_header(len(payload), _REPLY, 0, 0, run.id, 0, 0, 0, 0) + payload, None
        stager = self.codec.stager_back(run.meta)
        if slots and stager is None and (handful := self.codec.handful_of_result(payload, slots, meta)) is not None:
            return _pack_header(len(handful), _REPLY, 0, 0, run.id, 0, 0, 0, 0) + handful, None
        return self.codec.frame(_REPLY, 0, run.id, 0, 0, payload, slots, meta, stager)

    def _pickle_result(self, run: Run, result: Any) -> tuple[bytes, list[Slot]]:
        if type(result) is Packed:
            return result
        try:
            payload, slots = self._pickler.dumps_result(
                result, main_by_value=run.inbound.main_by_value, to=run.inbound.caller
            )
        except BaseException as error:
            raise SerializationError(
                f"the result of {run.function.name} ({type_name_of(result)}) cannot be sent: {summary_of(error)}"
            ) from error
        if len(payload) > self.codec.max_payload_bytes:
            raise SerializationError(
                f"the result of {run.function.name} makes a pickle of {len(payload)} bytes, and at most "
                f"{self.codec.max_payload_bytes} are taken: return large data as tensors, or raise "
                f"RpcOptions.max_body_bytes"
            )
        if payload is JUST_A_TENSOR and not run.meta and (lone := self.codec.handful(RESULT, slots)) is not None:
            return lone, []
        return payload, slots

    def _send_item(self, run: Run, item: Any) -> int:
        """Send the next item of a stream, and say how large it is. Called in the handler's context."""
        payload, slots = self._pickle_result(run, item)
        meta = self.codec.intercept_reply(run.inbound.caller, run.meta, slots) if run.meta else None
        place = run.items_sent & _PLACE_MASK
        stager = self.codec.stager_back(run.meta)
        data, buffers = self.codec.frame(_ITEM, 0, run.id, place, 0, payload, slots, meta, stager)
        if buffers.__class__ is LateBuffers:
            buffers.when_filled(partial(_send_filled_item, run.inbound.connection, data))
        elif buffers:
            run.inbound.connection.send_bulk(data, buffers)
        else:
            run.inbound.connection.send(data)
        run.items_sent += 1
        return len(data) + sum([buffer.nbytes for buffer in buffers or ()])

    def refused(self, run: Run, error: BaseException) -> None:
        """Answer a request with an error that came up before its function was called."""
        run.is_refused = True
        self.raised(run, error)

    def raised(self, run: Run, error: BaseException) -> None:
        if run.ended:
            return
        self.calls_failed += 1
        if self.tell_failure is not None:
            self.tell_failure(run.function.name, error)
        if self.failed is not None:
            self.failed(run, error)
        kind = FailureKind.REFUSED if run.is_refused else FailureKind.RAISED
        if is_a(error, asyncio.CancelledError):
            kind = FailureKind.TIMEOUT if run.expired else FailureKind.CANCELLED
            if self._is_closed and not run.expired:
                kind = FailureKind.LEFT
            run.cancel_nested()
            self._count_withdrawn()
        if is_a(error, ProtocolError):
            logger.warning(
                "a malformed request of worker %s: %s",
                run.caller.name,
                text_of(error),
                extra={"peer": run.caller.name, "call_id": run.id},
            )
        data, buffers = self._pack_failure(run, kind, error)
        self._end(run, data, buffers, error)

    def _pack_failure(self, run: Run, kind: FailureKind, error: BaseException) -> tuple[bytes, list[memoryview] | None]:
        """A failure, and the memory that follows it. Whatever the error is, this makes one."""
        inbound, max_bytes = run.inbound, self.codec.max_payload_bytes
        place = run.items_sent & _PLACE_MASK
        main_by_value, to = inbound.main_by_value, inbound.caller
        payload, slots = describe_failure(error, self._pickler, main_by_value=main_by_value, to=to, max_bytes=max_bytes)
        if slots:
            try:
                return self.codec.frame(
                    _FAILURE, kind, run.id, place, 0, payload, slots, None, self.codec.stager_back(None)
                )
            except BaseException:  # noqa: BLE001 - a tensor of a user may raise anything, and the error can do without
                payload, _ = describe_failure(error, None, main_by_value=main_by_value, max_bytes=max_bytes)
        return frame(_FAILURE, kind, run.id, place, 0, payload), None

    def _end_at_once(self, run: Run, data: bytes) -> None:
        """`_end` for a request of which nobody knows but who runs it."""
        run.ended = True
        run.context = NO_CONTEXT
        self._calls_ended += 1
        try:  # noqa: SIM105 - which costs nothing
            run.inbound.connection.send(data)
        except ConnectionClosedError:
            pass  # the caller knows: its own end of the connection is closed too

    def _end(self, run: Run, data: bytes, buffers: list[memoryview] | None, error: BaseException | None = None) -> None:
        run.ended = True
        if run.handling is not None:
            self._observers.ended(run, len(data) + sum([buffer.nbytes for buffer in buffers or ()]), error)
        run.nested = None  # a timer may keep the run's context for long, and their exceptions keep the handler's frames
        run.context = NO_CONTEXT
        run.task = run.args = run.kwargs = None  # it may wait for a thread for a long time still
        self._calls_ended += 1
        inbound = run.inbound
        if run.is_registered:
            inbound.forget(run)
            if inbound.waiting:
                self.loop.call_soon(self.readmit, inbound)
        results = run.results or run.function.results
        if error is None and (buffers or results.are_large or not results.are_known or len(data) > SMALL_MESSAGE_BYTES):
            inbound.learn(results, len(data) + sum([buffer.nbytes for buffer in buffers or ()]))
        if buffers.__class__ is LateBuffers:
            buffers.when_filled(partial(self._send_filled_reply, inbound, run.id, data))
            return
        try:
            if buffers:
                inbound.send_reply(run.id, data, buffers)
            else:
                inbound.connection.send(data)
        except ConnectionClosedError:
            pass  # the caller knows: its own end of the connection is closed too

    def _send_filled_reply(
        self,
        inbound: Inbound,
        call_id: int,
        data: bytes,
        buffers: list[memoryview],
        failure: SerializationError | None,
    ) -> None:
        """The buffers of a reply have been filled from devices."""
        with suppress(ConnectionClosedError):  # then the caller knows
            if failure is None:
                inbound.send_reply(call_id, data, buffers)
                return
            payload, _ = describe_failure(failure, self._pickler, main_by_value=inbound.main_by_value)
            inbound.connection.send(frame(_FAILURE, FailureKind.RAISED, call_id, 0, 0, payload))

    def _await_returned_future(self, run: Run, result: Any) -> None:
        run.inbound.register(run)
        run.task = None  # the one that carried it, if any, is about to end: cancelling it would do nothing

        def settle(future: Any) -> None:
            run.function = Function.of_coroutine(_ended, run.function.name, run.function.results)
            try:
                value = future.result() if hasattr(future, "result") else future.value()
            except BaseException as error:  # noqa: BLE001 - whatever it ended with is the caller's
                self.raised(run, error)
            else:
                self.returned(run, value)

        def settle_on_loop(future: Any) -> None:
            self.loop.call_soon_threadsafe(settle, future)  # it was completed on a thread of its own

        try:
            if is_a(result, asyncio.Future):
                result.add_done_callback(settle)
            elif is_a(result, (torch._C.Future, concurrent.futures.Future)):
                result.add_done_callback(settle_on_loop)
            else:
                raise TypeError(
                    f"a function marked with async_execution must return a Future, and {run.function.name} "
                    f"returned {type_name_of(result)}"
                )
        except BaseException as error:  # noqa: BLE001 - a future of a user's own kind may raise anything
            self.raised(run, error)


def _send_filled_item(
    connection: Connection, data: bytes, buffers: list[memoryview], failure: SerializationError | None
) -> None:
    """The buffers of an item of a stream have been filled from devices."""
    with suppress(ConnectionClosedError):  # then the consumer knows
        if failure is None:
            connection.send_bulk(data, buffers)
        else:
            connection.abort(failure)  # the stream has a gap that nothing fills; a device that fails, fails for good


def _ended() -> None:
    """In place of a function that has returned: it need not be kept for its name's sake."""
