"""What becomes of answers: a reply, an item or a failure finds its call, once."""

from __future__ import annotations

import asyncio
from asyncio import InvalidStateError
from typing import Any

from arpc.agent.calls import SEQUENCE_BITS, Call
from arpc.agent.codec import Codec
from arpc.agent.failures import rebuild_failure
from arpc.agent.links import Link
from arpc.agent.scope import WorkerScope, current_scope
from arpc.errors import (
    ProtocolError,
    SerializationError,
)
from arpc.ids import WorkerInfo
from arpc.user_errors import set_cause, summary_of, text_of
from arpc.wire.handful import (
    LAST_KIND,
    PARCEL_RESULT,
    RESULT,
    RESULT_AND_META,
    RESULT_AND_NOTE,
    FreshParcel,
    Handful,
    unpack_handful,
    unpack_result,
)
from arpc.wire.messages import (
    ItemFlag,
    Message,
    Reply,
    ReplyFlag,
)
from arpc.wire.noted import unpack_noted
from arpc.wire.protocol import Bare

__all__ = ["Answers"]

_set_result = asyncio.Future.set_result


def _raise(error: BaseException) -> None:
    raise error


class Answers:
    """The part of an agent that takes answers; the rest is in the class that inherits."""

    info: WorkerInfo
    loop: asyncio.AbstractEventLoop
    codec: Codec
    _scope: WorkerScope
    _tasks_are_isolated: bool

    def _take_reply(self, link: Link, id_: int, _arg: int, _timeout_ms: int, payload: bytes | bytearray) -> None:
        if payload and payload[0] != RESULT:
            if payload[0] <= LAST_KIND:
                self._take_tensors(link, id_, payload)
            else:
                self._on_reply(link, Reply(0, id_, 0, 0, 0, 0, 0, bytearray(payload), ()))
            return
        peer = link.peer
        try:
            call = peer.calls.buckets[id_ >> SEQUENCE_BITS].pop(id_)
        except KeyError:
            return  # it was cancelled, or timed out, and the two crossed on their way
        if call.size_bytes:
            peer.release(call)
        try:
            value = unpack_result(payload) if payload else None
        except ProtocolError:
            if not call.future.done():
                call.future.set_exception(self._malformed(call))
            raise
        self._give(link, call, value)

    def _give(self, link: Link, call: Call, value: Any) -> None:
        """The result of a call is there."""
        future: Any = call.future
        if (
            call.is_private
            and self._tasks_are_isolated
            and not link.connection.is_reading
            and (waiting := future._callbacks)  # noqa: SLF001
        ):
            # see `_bare_reply_taker`
            try:
                [(wake_up, context)] = waiting
            except ValueError:
                future.set_result(value)
                return
            future.remove_done_callback(wake_up)
            _set_result(future, value)
            try:
                context.run(wake_up, future)
            except BaseException as error:  # noqa: BLE001 - Ctrl-C in the task is for the loop, not for the read
                self.loop.call_soon(_raise, error)
            return
        try:
            _set_result(future, value)
        except InvalidStateError:
            pass  # it was cancelled, and its task has not run since
        except TypeError:  # it is no future of asyncio's, which is found out at no cost
            if not future.done():
                future.set_result(value)

    def _bare_reply_taker(self, link: Link) -> Bare:
        """`_take_reply` for those of a connection that are None, as a function of their ids.

        A task that waits goes on at once, in the read, as a handler does on the other side: to schedule it for the
        next turn of the loop would take longer than all the rest of this.
        """
        peer = link.peer
        buckets = peer.calls.buckets
        call_soon = self.loop.call_soon

        def take(id_: int, _terms: bytes) -> None:
            try:
                call = buckets[id_ >> SEQUENCE_BITS].pop(id_)
            except KeyError:
                return  # it was cancelled, or timed out, and the two crossed on their way
            if call.size_bytes:
                peer.release(call)
            if call.is_private and (waiting := call.future._callbacks):  # type: ignore[attr-defined] # noqa: SLF001
                # One of asyncio's own, with one callback, which is how its task wakes up
                future: Any = call.future
                try:
                    [(wake_up, context)] = waiting
                except ValueError:  # somebody has found it, as a debugger does, and waits for it, too
                    future.set_result(None)
                    return
                future.remove_done_callback(wake_up)
                future.set_result(None)
                try:
                    context.run(wake_up, future)
                except BaseException as error:  # noqa: BLE001 - Ctrl-C in the task is for the loop, not for the read
                    call_soon(_raise, error)
                return
            try:
                _set_result(call.future, None)  # type: ignore[arg-type]  # which is found out at no cost
            except InvalidStateError:
                pass  # it was cancelled, and its task has not run since
            except TypeError:  # it is no future of asyncio's
                if not call.future.done():
                    call.future.set_result(None)

        return take

    def _take_tuple(self, link: Link, id_: int, arg: int, _timeout_ms: int, payload: bytes | bytearray) -> None:
        """The same for a reply that is a tuple."""
        if payload:
            self._on_reply(link, Reply(ReplyFlag.TUPLE, id_, arg, 0, 0, 0, 0, bytearray(payload), ()))
            return
        peer = link.peer
        try:
            call = peer.calls.buckets[id_ >> SEQUENCE_BITS].pop(id_)
        except KeyError:
            return
        if call.size_bytes:
            peer.release(call)
        if not call.future.done():
            call.future.set_result((None,) if arg else ())

    def _take_tensors(self, link: Link, id_: int, payload: bytes | bytearray) -> None:
        """`_on_reply` for a few small tensors."""
        peer = link.peer
        try:
            call = peer.calls.buckets[id_ >> SEQUENCE_BITS].pop(id_)
        except KeyError:
            return
        if call.size_bytes:
            peer.release(call)
        if call.future.done():
            return
        value: Any
        try:
            if payload[0] == RESULT_AND_NOTE and (noting := self.codec.noting) is not None:
                tensors, requiring, note = unpack_noted(payload)
                (value,) = noting.reply_noted(peer.info, note, tensors, requiring)
            else:
                handful = unpack_handful(payload)
                if payload[0] == PARCEL_RESULT and not handful[2]:
                    value = FreshParcel((handful[3], *handful[1]))
                else:
                    value = self._handful_in_scope(peer.info, handful)
        except ProtocolError:
            call.future.set_exception(self._malformed(call))
            raise
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            call.future.set_exception(self.unreadable(call.name, error))
            del call  # this frame is the error's, too, and the garbage collector does not look into a `Call`
        else:
            self._give(link, call, value)

    def _handful_in_scope(self, peer: WorkerInfo, handful: Handful) -> Any:
        # see `_result`
        token = current_scope.set(self._scope)
        try:
            return self._handful(peer, handful)
        finally:
            current_scope.reset(token)

    def _handful(self, peer: WorkerInfo, handful: Handful) -> Any:
        codec = self.codec
        kind, slots, meta, _ = handful
        if meta:
            codec.receive_reply(peer, codec.added_to(handful), slots)
        return slots[0] if kind == RESULT_AND_META else codec.handful_object(handful, peer)

    def _on_reply(self, link: Link, message: Message) -> None:
        call = link.peer.pop(message.id)
        if call is None or call.future.done():
            return  # it was cancelled, or timed out, and the two crossed on their way
        try:
            value = self._result(link.peer.info, message) if message.body else None
        except ProtocolError:
            call.future.set_exception(self._malformed(call))
            raise
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            call.future.set_exception(self.unreadable(call.name, error))
            del call  # this frame is the error's, too, and the garbage collector does not look into a `Call`
        else:
            if message.flags & ReplyFlag.TUPLE:
                value = (value,) if message.arg else ()
            if isinstance(call.future, asyncio.Future):
                _set_result(call.future, value)
            else:
                call.future.set_result(value)

    def _on_item(self, link: Link, message: Message) -> None:
        call = link.peer.calls.get(message.id)
        if call is None or (items := call.items) is None or call.future.done():
            return
        if message.flags & ItemFlag.LAST:
            items.end_arrived(message.arg, lambda: self._on_reply(link, message))
            return
        try:
            value = self._result(link.peer.info, message) if message.body else None
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            link.peer.cancel(message.id)
            call.future.set_exception(self.unreadable(call.name, error))
            del call  # this frame is the error's, too, and the garbage collector does not look into a `Call`
        else:
            items.item_arrived(message.arg, value)

    def _result(self, peer: WorkerInfo, message: Message) -> Any:
        # Objects that belong to a worker must find this one, whoever's context this callback happens to run in
        token = current_scope.set(self._scope)
        try:
            return self._unpack(peer, message)
        finally:
            current_scope.reset(token)

    def _unpack(self, peer: WorkerInfo, message: Message) -> Any:
        codec = self.codec
        if codec.is_handful(message):
            return self._handful(peer, codec.handful_of(message))
        if message.meta_end == message.meta_start:
            return codec.content(message, peer)
        slots = codec.slots(message, peer)
        codec.receive_reply(peer, codec.meta(message), slots)
        return codec.payload(message, slots, peer)

    @staticmethod
    def _malformed(call: Call) -> SerializationError:
        return SerializationError(f"the result of {call.name} is malformed")

    def unreadable(self, function: str, error: BaseException) -> SerializationError:
        """The error of a call whose result cannot be built here."""
        made = SerializationError(
            f"the result of {function} cannot be unpacked on worker {self.info.name!r}: {summary_of(error)}"
        )
        set_cause(made, error)
        made.is_of_answer = True
        return made

    def _on_failure(self, link: Link, message: Message) -> None:
        call = link.peer.calls.get(message.id)
        if call is not None and call.items is not None:
            call.items.end_arrived(message.arg, lambda: self._fail(link, message))
        else:
            self._fail(link, message)

    def _fail(self, link: Link, message: Message) -> None:
        call = link.peer.pop(message.id)
        if call is None or call.future.done():
            return
        try:
            error = self._failure(link.peer.info, message, call.name)
        except Exception as reason:
            call.future.set_exception(SerializationError(f"the failure of {call.name} is malformed"))
            raise ProtocolError(f"a malformed failure: {text_of(reason)}") from reason
        call.future.set_exception(error)

    def _failure(self, peer: WorkerInfo, message: Message, function: str) -> Exception:
        codec = self.codec
        token = current_scope.set(self._scope)
        try:
            slots = codec.slots(message, peer) if message.table_end else []
            payload = memoryview(message.body)[message.table_end :]
            return rebuild_failure(message.flags, payload, slots, peer, function, codec.policy)
        finally:
            current_scope.reset(token)

    def answer(self, peer: WorkerInfo, message: Message, function: str) -> Any:
        """The result that an answer holds, for a call that this agent does not know. Raises the failure it may be."""
        if isinstance(message, Reply):
            try:
                return self._result(peer, message)
            except ProtocolError as error:
                raise SerializationError(f"the result of {function} is malformed") from error
            except Exception as error:  # the rest is for the thread that waits for it, as Ctrl-C is
                raise self.unreadable(function, error) from error
        try:
            failure = self._failure(peer, message, function)
        except Exception as error:
            raise SerializationError(f"the failure of {function} is malformed") from error
        raise failure
