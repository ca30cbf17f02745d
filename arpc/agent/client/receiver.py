"""Handles the answers to calls: finds the call of a reply, an item or a failure, and ends it once."""

from __future__ import annotations

from typing import Any

from arpc.agent.codec import Codec
from arpc.agent.peers.link import Link
from arpc.agent.scope import WorkerScope, current_scope
from arpc.agent.server.remote_exceptions import rebuild_failure
from arpc.errors import ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.user_errors import set_cause, summary_of, text_of
from arpc.wire.messages import ItemFlag, Message, Reply

__all__ = ["Receiver"]


class Receiver:
    """Handles the answers to the calls of one worker."""

    def __init__(self, name: str, codec: Codec, scope: WorkerScope) -> None:
        """Results are unpickled in ``scope``, so that objects that belong to a worker find this one."""
        self._name = name
        self._codec = codec
        self._scope = scope

    def on_reply(self, link: Link, message: Message) -> None:
        """End a call that has returned."""
        peer = link.peer
        call = peer.calls.pop(message.id)
        if call is None:
            return  # it was cancelled, or timed out, while the reply was on its way
        if call.connection is not None:  # a faulty peer may answer a call that was not sent
            peer.release(call)
        if call.recipient.done():
            return
        try:
            value = self.result(peer.info, message) if message.body or message.memory else None
        except ProtocolError:
            call.recipient.set_exception(SerializationError(f"the result of {call.name} is malformed"))
            raise
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            call.recipient.set_exception(self.unreadable(call.name, error))
        else:
            call.recipient.set_result(value)

    def on_item(self, link: Link, message: Message) -> None:
        """Pass an item to its stream, or end the stream."""
        call = link.peer.calls.get(message.id)
        if call is None or (items := call.items) is None or call.recipient.done():
            return
        if message.flags & ItemFlag.LAST:
            items.arrived(message.arg, lambda: self.on_reply(link, message))
            return
        try:
            value = self.result(link.peer.info, message) if message.body or message.memory else None
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            link.peer.cancel(message.id)
            call.recipient.set_exception(self.unreadable(call.name, error))
        else:
            items.item_arrived(message.arg, value)

    def on_failure(self, link: Link, message: Message) -> None:
        """End a call that has raised, or did not run."""
        call = link.peer.calls.get(message.id)
        if call is not None and call.items is not None:
            call.items.arrived(message.arg, lambda: self._fail(link, message))
        else:
            self._fail(link, message)

    def _fail(self, link: Link, message: Message) -> None:
        call = link.peer.calls.pop(message.id)
        if call is None:
            return
        if call.connection is not None:
            link.peer.release(call)
        if call.recipient.done():
            return
        try:
            error = self.failure(link.peer.info, message, call.name, call.timeout_ms / 1000)
        except Exception as reason:
            call.recipient.set_exception(SerializationError(f"the failure of {call.name} is malformed"))
            raise ProtocolError(f"a malformed failure: {text_of(reason)}") from reason
        call.recipient.set_exception(error)

    # -- content

    def result(self, peer: WorkerInfo, message: Message) -> Any:
        """Return the object in a reply or an item. Raises `ProtocolError`, or whatever unpickling raises."""
        codec = self._codec
        # Not reset: answers are read in a context of the loop, a connection or a callback, and not in one of user code
        if current_scope.get() is not self._scope:
            current_scope.set(self._scope)
        slots = codec.slots(message)
        if message.meta:
            codec.reply_received(peer, codec.metadata(message), slots)
        return codec.content(message, slots, peer)

    def failure(self, peer: WorkerInfo, message: Message, function: str, timeout_s: float = 0.0) -> Exception:
        """Return the error in a failure. Raises `ProtocolError`, or whatever unpickling raises."""
        codec = self._codec
        current_scope.set(self._scope)  # as for a result
        slots = codec.slots(message)
        return rebuild_failure(message.flags, message.body, slots, peer, function, codec.policy, timeout_s)

    def unreadable(self, function: str, error: BaseException) -> SerializationError:
        """Return the error of a call whose result cannot be unpickled here."""
        made = SerializationError(
            f"the result of {function} cannot be unpacked on worker {self._name!r}: {summary_of(error)}"
        )
        set_cause(made, error)
        made.is_of_answer = True
        return made

    def answer(self, peer: WorkerInfo, message: Message, function: str) -> Any:
        """Return the result in an answer, or raise the error in it. For calls on thread connections, in no table."""
        token = current_scope.set(self._scope)
        try:
            if isinstance(message, Reply):
                try:
                    return self.result(peer, message)
                except ProtocolError as error:
                    raise SerializationError(f"the result of {function} is malformed") from error
                except Exception as error:  # others, such as KeyboardInterrupt, go to the waiting thread as they are
                    raise self.unreadable(function, error) from error
            try:
                failure = self.failure(peer, message, function)
            except Exception as error:
                raise SerializationError(f"the failure of {function} is malformed") from error
            raise failure
        finally:
            current_scope.reset(token)
