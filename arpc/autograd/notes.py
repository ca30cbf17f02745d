"""The recorder's short ways: for messages that are a few small tensors, on which nothing else rides."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from types import BuiltinFunctionType
from typing import Any, Final

import torch
from torch import Tensor

from arpc.autograd.context import AutogradContext, Container, current_context_id
from arpc.autograd.engine import Source
from arpc.autograd.nodes import RecvRecord, attach_plain, attach_received
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo

__all__ = ["Notes"]

_IDS: Final = Struct("<QQ")
_pack_ids = _IDS.pack
_unpack_ids = _IDS.unpack
_current = current_context_id.get
_set_current = current_context_id.set
_is_grad_enabled = torch.is_grad_enabled
_requires_grad = attrgetter("requires_grad")
_attach_one = attach_plain[1]
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long


class Notes:
    """The part of a `Recorder` that is `agent.notes.Noting`: all it does in fewer steps, since less can be special."""

    _container: Container

    def note_request(self, peer: WorkerInfo, function: Any, tensors: Sequence[Tensor]) -> bytes | None:
        context_id = _current()
        if context_id is None or not _is_grad_enabled():
            return None
        context = self._container.contexts.get(context_id)
        if context is None:
            return None  # it has ended, and this code outlives it
        requiring = [*filter(_requires_grad, tensors)]
        message_id = 0
        to = peer.id
        if requiring:
            message_id = self._container.new_message_id()
            node = attach_plain[len(requiring)](*requiring)[0].grad_fn
            context.sends[message_id] = _new_tuple(Source, (node.next_functions[1:], node, to))
        elif isinstance(function, BuiltinFunctionType):
            return None
        context.known_workers.add(to)
        context.calls_made += 1
        return _pack_ids(context_id, message_id)

    def request_noted(
        self, peer: WorkerInfo, note: bytearray, tensors: list[Tensor], requiring: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        context_id, message_id = _unpack_ids(note)
        context = self._container.enter(context_id)
        if context is not None:  # it may have ended while the call was on its way
            _set_current(context_id)
            context.known_workers.add(peer.id)
            context.handlers_begun += 1
        return _received(context, peer.id, message_id, tensors, requiring)

    def note_reply(self, peer: WorkerInfo, note: bytearray, result: Tensor) -> bytes | None:
        context_id, _ = _unpack_ids(note)
        context = self._container.contexts.get(context_id)
        if context is None:
            return None
        context.handlers_answered += 1
        if not result.requires_grad:
            return None
        message_id = self._container.new_message_id()
        node = _attach_one(result)[0].grad_fn
        context.sends[message_id] = _new_tuple(Source, (node.next_functions[1:], node, peer.id))
        return _pack_ids(context_id, message_id)

    def reply_noted(
        self, peer: WorkerInfo, note: bytearray, tensors: list[Tensor], requiring: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        context_id, message_id = _unpack_ids(note)
        context = self._container.contexts.get(context_id)
        if context is not None:
            context.calls_answered += 1
            if not _is_grad_enabled():  # some callback of the loop has left it so
                with torch.enable_grad():
                    return _received(context, peer.id, message_id, tensors, requiring)
        return _received(context, peer.id, message_id, tensors, requiring)


def _received(
    context: AutogradContext | None, sender: int, message_id: int, tensors: list[Tensor], requiring: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The tensors of a message with the history they have in a context, if they have one. Grad mode must be on."""
    count = len(requiring)
    if context is None or not message_id:
        for place in requiring:
            tensors[place].requires_grad_()
        return tuple(tensors)
    if not count:
        raise ProtocolError("gradients were announced for a message without tensors that require grad")
    record = RecvRecord(message_id, sender, count)
    if count == len(tensors):
        attached = attach_received((record, *tensors))
        context.recvs[message_id] = attached[0].grad_fn
        return attached
    attached = attach_received((record, *[tensors[place] for place in requiring]))
    context.recvs[message_id] = attached[0].grad_fn
    for place, tensor in zip(requiring, attached, strict=True):
        tensors[place] = tensor
    return tuple(tensors)
