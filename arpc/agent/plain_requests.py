"""Requests that are one small message: they are taken straight from the read, and many are answered in it."""

from __future__ import annotations

from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.carriers import Carrier
from arpc.agent.functions import Function
from arpc.agent.noted_replies import NotedReplies
from arpc.agent.outbox import ReplyOutbox
from arpc.agent.requests import UNMEASURED, Inbound, Run
from arpc.agent.scope import current_scope
from arpc.agent.threads import ThreadPool
from arpc.errors import ConnectionClosedError, ProtocolError, SerializationError
from arpc.user_errors import is_a, summary_of
from arpc.wire.frames import BARE_HEADER, BRIEF_HEADER, NO_TERMS, TERMS, bare_lead, brief_kind
from arpc.wire.handful import (
    ARGUMENTS,
    ARGUMENTS_AND_META,
    ARGUMENTS_AND_NOTE,
    LAST_KIND,
    RESULT,
    Handful,
    unpack_arguments,
    unpack_handful,
)
from arpc.wire.messages import Message, MessageType, Request
from arpc.wire.noted import unpack_noted
from arpc.wire.pickling import JUST_A_TENSOR
from arpc.wire.protocol import Bare, Direct

__all__ = ["PlainRequests"]

_pack_brief = BRIEF_HEADER.pack
_pack_bare = BARE_HEADER.pack
_BRIEF_REPLY: Final = brief_kind(int(MessageType.REPLY))
_REPLY_LEAD: Final = bare_lead(_BRIEF_REPLY)
_MAX_TERMS: Final = 256
_NO_SLOTS: Final[list[Any]] = []
_set_scope = current_scope.set
_is_grad_enabled = torch.is_grad_enabled


class PlainRequests(NotedReplies):
    """The part of an executor that takes those; the rest is in the class that inherits."""

    name: str
    threads: ThreadPool
    time: Callable[[], float]
    worker: Any
    unpack: Callable[[Run, Message], None]
    thread_returned: Callable[[Run, Any], None]
    answer_withdrawn: Callable[[], None]
    postpone: Callable[[Run], None]
    _admit: Callable[[Inbound, Message], None]
    _after: Callable[[list[Awaitable[object]], Function], Function]
    _copy_context: Callable[[], Context]
    _idle: list[Carrier]

    def taker(self, inbound: Inbound) -> Direct:  # noqa: PLR0915 - the hot path, written out
        """Runs the plainest of a connection's requests, straight from the read.

        This is `Carriers.start` for a `Run`, written out, and with a `carriers.conveyor`. Torch's state must be
        pristine.
        """
        coroutines = inbound.coroutines
        connection = inbound.connection
        idle = self._idle
        loop = self.loop
        copy_context = self._copy_context
        window_bytes = self._window_bytes
        handful = self.codec.handful
        # what is answered from a device's memory takes longer anyway
        noting: Any = None if self.codec.has_placement else self.codec.noting

        @torchstate.isolating_driver
        def take(id_: int, arg: int, timeout_ms: int, payload: bytes | bytearray) -> None:
            if (
                (function := coroutines.get(arg)) is None
                or inbound.is_full
                or (connection.is_congested and connection.held_bytes > window_bytes)
                or not idle
                or id_ == inbound.latest_id
            ):
                self._take_other(inbound, id_, arg, timeout_ms, payload)
                return
            inbound.latest_id = id_
            carrier = idle[-1]
            context = copy_context()
            run = Run(self, inbound, function, id_, timeout_ms)
            task = carrier.task
            note = None
            _enter_task(loop, task)
            try:
                if payload:
                    if payload[0] == ARGUMENTS:
                        run.args = unpack_arguments(payload)  # which runs no code of others, so needs no context
                    elif payload[0] == ARGUMENTS_AND_NOTE and noting is not None:
                        tensors, requiring, note = unpack_noted(payload)
                        run.meta = {noting.key: note}
                        run.args = context.run(noting.request_noted, inbound.caller, note, tensors, requiring)
                    else:
                        context.run(self._unpack, run, payload)
                result = context.run(carrier.convey, run)
            except BaseException as error:  # noqa: BLE001 - it is the caller's, see `raised`
                _leave_task(loop, task)
                self._take_raised(run, carrier, context, error)
                return
            _leave_task(loop, task)
            data = None
            if run.meta is None and carrier.conveyor.gi_yieldfrom is None:
                if result is None:
                    data = _pack_bare(_REPLY_LEAD, id_, NO_TERMS, 0)
                elif type(result) is Tensor and (lone := handful(RESULT, (result,))) is not None:
                    data = _pack_brief(len(lone), _BRIEF_REPLY, id_, 0, 0, 0) + lone
            if data is None:
                if note is not None and type(result) is Tensor and carrier.conveyor.gi_yieldfrom is None:
                    self._return_noted(run, carrier, noting, note, result)
                else:
                    self._took(run, carrier, context, result)
                return
            self._ended_at_once += 1
            try:
                # first of all, so that the caller goes on while this worker tidies up
                connection.send(data)
            except ConnectionClosedError:
                pass  # the caller knows
            finally:
                # `_stepped`, written out
                if not _is_grad_enabled() or _count_function_modes():
                    torchstate.save_and_reset()
                if carrier.wake_up.done():
                    self.carriers.replace_idle()

        return take

    def bare_taker(self, inbound: Inbound) -> Bare:
        """The same for those that have no arguments, as a function of their ids and terms."""
        take_any = self.taker(inbound)
        known = inbound.bare
        connection = inbound.connection
        idle = self._idle
        loop = self.loop
        copy_context = self._copy_context
        replace_idle = self.carriers.replace_idle
        plain = inbound.bare_plain
        take_plain = self._bare_plain_taker(inbound)

        @torchstate.isolating_driver
        def take(id_: int, terms: bytes) -> None:
            if (
                (expected := known.get(terms)) is None
                or inbound.is_full
                or connection.is_congested
                or not idle
                or id_ == inbound.latest_id
            ):
                if terms in plain:
                    take_plain(id_, terms)
                else:
                    arg, timeout_ms = _learn_terms(inbound, terms)
                    take_any(id_, arg, timeout_ms, b"")
                return
            # From here on this is `taker`'s
            inbound.latest_id = id_
            carrier = idle[-1]
            context = copy_context()
            function, timeout_ms = expected
            run = Run(self, inbound, function, id_, timeout_ms)
            task = carrier.task
            _enter_task(loop, task)
            try:
                result = context.run(carrier.convey, run)
            except BaseException as error:  # noqa: BLE001 - it is the caller's, see `raised`
                _leave_task(loop, task)
                self._take_raised(run, carrier, context, error)
                return
            _leave_task(loop, task)
            if result is None and run.meta is None and carrier.conveyor.gi_yieldfrom is None:
                self._ended_at_once += 1
                try:
                    data = _pack_bare(_REPLY_LEAD, id_, NO_TERMS, 0)
                    left = connection.direct_left
                    if left:
                        # `Connection.send_brief`, written out
                        connection.direct_left = left - 1
                        connection.brief_sent += 1
                        connection._write(data)  # noqa: SLF001
                    else:
                        connection.send_brief(data)
                finally:
                    if not _is_grad_enabled() or _count_function_modes():
                        torchstate.save_and_reset()
                    if carrier.wake_up.done():
                        replace_idle()
            else:
                self._took(run, carrier, context, result)

        return take

    def _bare_plain_taker(self, inbound: Inbound) -> Bare:
        """The same for those that are for a thread, of `Inbound.bare_plain`. This is `_take_other`, written out."""
        known = inbound.bare_plain
        connection = inbound.connection
        register = inbound.register_new
        copy_context = self._copy_context
        submit = self.threads.submit

        def take(id_: int, terms: bytes) -> None:
            if inbound.is_full or connection.is_congested or id_ == inbound.latest_id:
                arg, timeout_ms = TERMS.unpack(terms)
                self._take_other(inbound, id_, arg, timeout_ms, b"")
                return
            inbound.latest_id = id_
            function, timeout_ms = known[terms]
            context = copy_context()
            run = Run(self, inbound, function, id_, timeout_ms, context)
            context.run(_set_scope, run)
            register(run, id_, timeout_ms)
            if inbound.ended is None:
                run.outbox = inbound.outbox or self._open_outbox(inbound)
            if function.is_quick and id_ & UNMEASURED:
                submit(run.work_unmeasured, True, not connection.is_reading)
            else:
                submit(run.work, function.is_quick, not connection.is_reading)

        return take

    def _take_raised(self, run: Run, carrier: Carrier, context: Context, error: BaseException) -> None:
        """Answer a request that has raised when it was taken."""
        carrier.renew()
        run.context = context
        self._stepped(carrier)
        self.raised(run, error)

    def _took(self, run: Run, carrier: Carrier, context: Context, result: Any) -> None:
        """Answer a request that has ended when it was taken, or carry on with it if it waits."""
        run.context = context
        waiting = carrier.conveyor.gi_yieldfrom
        if waiting is not None:
            run.coroutine = waiting
            self.carriers.carry_on(run, result, is_conveyed=True)
            return
        self._stepped(carrier)
        if type(result) is Tensor:
            self._return_tensor(run, result)
        else:
            self.returned(run, result)

    def _return_tensor(self, run: Run, result: Tensor) -> None:
        """What `returned` comes down to for a tensor that is large, or if something rides on the reply."""
        try:
            data, buffers = self._pack_slots(run, JUST_A_TENSOR, [result])
        except BaseException as error:  # noqa: BLE001 - whatever an interceptor raises is the caller's
            self.raised(run, error)
            return
        if buffers is None:
            self._end_at_once(run, data)
        else:
            self._end(run, data, buffers)

    def _stepped(self, carrier: Carrier) -> None:
        """Tidy up after a handler that has ended in its first step."""
        self.carriers.steps_without_wait += 1
        # The blocks it was in have ended with it. Left are the two things that people switch without a block.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if carrier.wake_up.done():
            self.carriers.replace_idle()

    def _take_other(self, inbound: Inbound, id_: int, arg: int, timeout_ms: int, payload: bytes | bytearray) -> None:
        """The same for what is not the first step of a coroutine, or has to wait."""
        if id_ == inbound.latest_id:
            return  # it came twice, and runs once
        inbound.latest_id = id_
        function = inbound.plain.get(arg)
        connection = inbound.connection
        if function is None or inbound.is_full or connection.is_congested:
            self._admit(inbound, Request(0, id_, arg, timeout_ms, 0, 0, 0, bytearray(payload), ()))
            return
        context = self._copy_context()
        run = Run(self, inbound, function, id_, timeout_ms, context)
        context.run(_set_scope, run)
        if payload:
            try:
                run.args = context.run(self._plain_arguments, run, payload)
            except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
                not_found = is_a(error, (AttributeError, ImportError, LookupError))
                self.refused(run, self._not_unpacked(error) if not_found else error)
                return
            if run.has_prerequisites:
                run.function = self._after(run.prerequisites, run.function)
                self.carriers.start(run)
                return
        inbound.register(run)
        if inbound.ended is None and run.meta is None:  # what rides on a reply is put there on the loop
            run.outbox = inbound.outbox or self._open_outbox(inbound)
        self.threads.submit(run.work, function.is_quick, not connection.is_reading)

    def _open_outbox(self, inbound: Inbound) -> ReplyOutbox | None:
        """Where threads put the answers to a connection's requests; None if it can be written by the loop alone."""
        turn = inbound.connection.share_writing()
        if turn is None:
            return None
        inbound.outbox = outbox = ReplyOutbox(inbound, turn, self.codec.brief_result, self.readmit)
        return outbox

    def _unpack(self, run: Run, payload: bytes | bytearray) -> None:
        """Build the arguments of a plain request, in its context."""
        _set_scope(run)
        run.args = self.unpack_plain(run, payload)

    def unpack_plain(self, run: Run, payload: bytes | bytearray) -> tuple[Any, ...]:
        """The arguments in a payload. In the handler's context."""
        try:
            args = self._plain_arguments(run, payload)
        except (AttributeError, ImportError, LookupError, StopIteration) as error:
            run.is_refused = True
            raise self._not_unpacked(error) from error
        except BaseException:
            run.is_refused = True
            raise
        if run.has_prerequisites:
            run.function = self._after(run.prerequisites, run.function)
        return args

    def _plain_arguments(self, run: Run, payload: bytes | bytearray) -> tuple[Any, ...]:
        """The arguments in a payload that has no tensors beside it."""
        args: tuple[Any, ...]
        kind = payload[0]
        if kind > LAST_KIND:
            args = self.codec.read(payload, _NO_SLOTS, run.inbound.caller)
        elif kind == ARGUMENTS:
            args = unpack_arguments(payload)
        else:
            args = self._receive_handful(run, unpack_handful(payload))
            if run.handling is not None:
                raise ProtocolError("what is for observers came with a message that none of them sees")
        return args

    def _receive_handful(self, run: Run, handful: Handful) -> Any:
        codec = self.codec
        kind, slots, meta, _ = handful
        if meta:
            run.meta = codec.added_to(handful)
            codec.receive_request(run.inbound.caller, run.meta, slots)
        return tuple(slots) if kind == ARGUMENTS_AND_META else codec.handful_object(handful, run.inbound.caller)

    def _not_unpacked(self, error: BaseException) -> SerializationError:
        return SerializationError(
            f"worker {self.name!r} cannot unpack the call: {summary_of(error)}. "
            f"What is sent by reference must be importable on the callee"
        )


def _learn_terms(inbound: Inbound, terms: bytes) -> tuple[int, int]:
    """What a request without arguments says of itself. It is kept if it is for a coroutine, or a plain function."""
    arg, timeout_ms = TERMS.unpack(terms)
    for functions, known in (inbound.coroutines, inbound.bare), (inbound.plain, inbound.bare_plain):
        function = functions.get(arg)
        if function is not None:
            if len(known) >= _MAX_TERMS:  # what is left of a deadline is another time with each call
                known.clear()
            known[terms] = function, timeout_ms
    return arg, timeout_ms
