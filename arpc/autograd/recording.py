"""Records which tensors leave and enter this worker in a context, and so where its graph is cut.

A call is recorded if a context is active and grad mode is on. The context is sent with it even if no argument requires
grad, because the result may; except for a builtin operator, whose result requires grad only if an argument does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class, in spite of its name
from types import BuiltinFunctionType
from typing import Any, Final

import torch
from torch import Tensor

from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.scope import current_scope
from arpc.agent.server.run import Run
from arpc.autograd.contexts import ENDLESS, AutogradContext, Container, current_context_id
from arpc.autograd.nodes import RecvRecord, attach_recv, attach_send
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo
from arpc.wire.messages import AutogradGradients
from arpc.wire.values.packing import Slot
from arpc.wire.values.policy import UNRESTRICTED, Policy

__all__ = ["Recorder"]

_IDS: Final = Struct("<QQQ")
_pack_ids = _IDS.pack
_unpack_ids: Callable[[bytes], Any] = _IDS.unpack
_current = current_context_id.get
_set_current = current_context_id.set
_current_scope = current_scope.get
_is_grad_enabled = torch.is_grad_enabled
_requires_grad = attrgetter("requires_grad")


class Recorder(Interceptor):
    """The interceptor that records. It adds to a message the ids of the context and of the message, and the clock.

    A message id of 0 means that nothing was recorded. In a reply the clock is then the number of calls after which this
    worker has left the context, because nothing was ever recorded in it; or 0 if it has not left.
    """

    key = "grad"
    replies_in_threads = True

    def __init__(self, container: Container, policy: Policy = UNRESTRICTED) -> None:
        self._container = container
        self._policy = policy
        self._contexts = container.contexts
        self.occasions = container.callable
        """The contexts in which calls may be made: without any, no call is looked at."""

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> bytes | None:
        context_id = _current()
        if context_id is None or not _is_grad_enabled():
            return None
        context = self._contexts.get(context_id) or self._container.rejoin(context_id)
        if context is None:
            return None  # the context has ended, and this code outlives it
        to = peer.id
        ids = self._record_send(context, to, slots) if slots else None
        if ids is None:
            if isinstance(function, BuiltinFunctionType):
                return None
            ids = _pack_ids(context_id, 0, context.clock)
        known = context.known_workers
        known[to] = known.get(to, 0) + 1
        context.calls_made += ENDLESS if is_stream else 1
        return ids

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        context_id, message_id, stamp = _checked(meta)
        if self._policy.is_restricted:
            # a worker that may not send gradients may not end the context either, which would be kept for ever
            self._policy.check_message(peer, AutogradGradients)
        context = self._container.enter(context_id, peer.id)
        if context is None:
            return  # the context ended while the call was in flight
        _set_current(context_id)
        context.known_workers.setdefault(peer.id, 0)
        context.handlers_begun += 1
        if message_id:
            self._record_recv(context, peer.id, message_id, stamp, slots)
        elif stamp:
            context.receive_stamp(stamp)

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        context_id, _, _ = _checked(meta)
        context = self._contexts.get(context_id)
        if context is None:
            return None
        run: Any = _current_scope()
        answered = 0 if run.__class__ is Run and run.is_stream else 1  # items do not count as the answer to a stream
        if slots and (ids := self._record_send(context, peer.id, slots, answered)) is not None:
            return ids
        with context.lock:
            context.handlers_answered += answered
        has_left = not context.recvs and self._container.try_to_leave_unused(context, peer.id)
        return _pack_ids(context_id, 0, context.handlers_begun if has_left else 0)

    def reply_sent_in_thread(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        # Without tensors that require grad this worker may leave the context, which only the loop may do
        context = self._contexts.get(_checked(meta)[0])
        return self._record_send(context, peer.id, slots, answered=1) if context is not None and slots else None

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        context_id, message_id, stamp = _checked(meta)
        context = self._contexts.get(context_id)
        if context is None:
            return
        context.calls_answered += 1
        if message_id:
            self._record_recv(context, peer.id, message_id, stamp, slots)
        elif stamp:
            context.worker_left(peer.id, stamp)

    def _record_send(self, context: AutogradContext, to: int, slots: list[Slot], answered: int = 0) -> bytes | None:
        """Record the tensors of a message that require grad; return its metadata, None if there are no such tensors."""
        tensors = _tensors_requiring_grad(slots)
        if not tensors:
            return None
        if _is_grad_enabled():
            node = attach_send(tensors)
        else:  # a generator that is suspended inside a no_grad block
            with torch.enable_grad():
                node = attach_send(tensors)
        message_id, stamp = context.record_send(self._container.new_message_id, node, to, answered)
        return _pack_ids(context.id, message_id, stamp)

    def _record_recv(
        self, context: AutogradContext, sender: int, message_id: int, stamp: int, slots: list[Any]
    ) -> None:
        context.receive_stamp(stamp)  # before any code can use the tensors
        tensors = _tensors_requiring_grad(slots)
        if not tensors:
            raise ProtocolError("gradients were announced for a message without tensors that require grad")
        record = RecvRecord(message_id, sender, len(tensors), stamp)
        if _is_grad_enabled():
            attached = attach_recv(tensors, record)
        else:
            with torch.enable_grad():
                attached = attach_recv(tensors, record)
        context.recvs[message_id] = attached[0].grad_fn


def _tensors_requiring_grad(slots: Sequence[Any]) -> list[Any]:
    try:
        return list(filter(_requires_grad, slots))
    except AttributeError:  # some slots are other memory
        return [slot for slot in slots if isinstance(slot, Tensor) and slot.requires_grad]


def _checked(meta: Any) -> tuple[int, int, int]:
    try:
        ids: tuple[int, int, int] = _unpack_ids(meta)
    except (StructError, TypeError) as error:
        raise ProtocolError("malformed ids of an autograd context") from error
    return ids
