"""The shortest way back for a tensor, in answer to a call that came with a note."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.carriers import Carrier, Carriers
from arpc.agent.replies import Replies
from arpc.agent.requests import Run
from arpc.errors import ConnectionClosedError
from arpc.wire.frames import BRIEF_HEADER, brief_kind
from arpc.wire.handful import RESULT, RESULT_AND_NOTE
from arpc.wire.messages import MessageType
from arpc.wire.pickling import JUST_A_TENSOR

__all__ = ["NotedReplies"]

_pack_brief = BRIEF_HEADER.pack
_REPLY: Final = int(MessageType.REPLY)
_BRIEF_REPLY: Final = brief_kind(_REPLY)
_is_grad_enabled = torch.is_grad_enabled


class NotedReplies(Replies):
    """The part of an executor that answers so; the rest is in the class that inherits."""

    carriers: Carriers
    _ended_at_once: int

    def _return_noted(self, run: Run, carrier: Carrier, noting: Any, note: bytearray, result: Tensor) -> None:
        """Answer a request that has ended when it was taken, for a worker that has no `placement`."""
        # `PlainRequests._stepped`, written out
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if carrier.wake_up.done():
            self.carriers.replace_idle()
        inbound = run.inbound
        try:
            reply_note = noting.note_reply(inbound.caller, note, result)
            if reply_note is None:
                reply_note = b""
                payload = self.codec.handful(RESULT, (result,))
            else:
                payload = self.codec.handful(RESULT_AND_NOTE, (result,))
            if payload is None:
                meta = {noting.key: reply_note} if reply_note else None
                data, buffers = self.codec.frame(_REPLY, 0, run.id, 0, 0, JUST_A_TENSOR, [result], meta)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            self.carriers.steps_without_wait += 1
            self.raised(run, error)
            return
        if payload is None:
            self.carriers.steps_without_wait += 1
            self._end(run, data, buffers)
            return
        self._ended_at_once += 1
        size = len(payload) + len(reply_note)
        try:  # noqa: SIM105 - which costs nothing
            inbound.connection.send(_pack_brief(size, _BRIEF_REPLY, run.id, 0, 0, 0) + payload + reply_note)
        except ConnectionClosedError:
            pass  # the caller knows
