"""Fault injection: requests that are lost or late on purpose, under the names of torch's messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from arpc.agent.agent import Agent
from arpc.agent.client.pending_calls import Call, CallSender
from arpc.agent.server.functions import name_of
from arpc.errors import RpcTimeoutError
from arpc.options import Unset
from arpc.torchjit import ScriptFunction, find_builtin
from arpc.torchscript.calls import ScriptCall
from arpc.wire.messages import MessageType, RequestFlag

__all__ = ["MESSAGE_NAMES", "Faults"]

_CALLS: Final = {MessageType.REQUEST: "CALL", MessageType.RREF_CREATE: "REMOTE_CALL"}
_FETCHES: Final = ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL")
_CONTROL: Final = {
    MessageType.RREF_FORK_REQUEST: "RREF_FORK_REQUEST",
    MessageType.RREF_CHILD_ACCEPT: "RREF_CHILD_ACCEPT",
    MessageType.RREF_USER_DELETE: "RREF_USER_DELETE",
    MessageType.AUTOGRAD_RELEASE: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
"""The messages that are sent again when they were lost."""

MESSAGE_NAMES: Final = frozenset(
    (*(f"{kind}_{name}" for kind in ("PYTHON", "SCRIPT") for name in _CALLS.values()), *_FETCHES, *_CONTROL.values())
)


def _is_script(function: Any) -> bool:
    """Whether torch sends it as an operator or a script function, and not as a Python function."""
    return isinstance(function, ScriptFunction | ScriptCall) or find_builtin(function) is not None


class Faults:
    """Wraps the sender of an agent, and loses or delays some requests. Belongs to the loop."""

    def __init__(self, agent: Agent, lost: Iterable[str], delays_s: Mapping[str, float], losses: int) -> None:
        self._agent = agent
        self._lost = frozenset(lost)
        self._delays_s = dict(delays_s)
        self._losses = losses
        self._sends: Counter[tuple[Any, ...]] = Counter()
        self.lost: Counter[str] = Counter()
        """The number of lost messages of each name."""
        self.late: Counter[str] = Counter()
        """The number of late messages of each name."""
        self._inner: CallSender
        agent.wrap_sender(self._around)

    def _around(self, inner: CallSender) -> CallSender:
        self._inner = inner
        return self

    def send(self, call: Call) -> int:
        """Send a request, now or late, or lose it."""
        if call.flags & RequestFlag.STREAM:
            return self._inner.send(call)  # torch has no streams
        names = _names_of(call.type, call.function)
        if not self._lost.isdisjoint(names) and self._is_lost(call):
            self.lost.update(names)
            text = f"{name_of(call.function)} to worker {call.peer.info.name!r} was lost on purpose"
            call.recipient.set_exception(RpcTimeoutError(text))
            return 0
        delay_s = max((self._delays_s.get(name, 0.0) for name in names), default=0.0)
        if not delay_s:
            return self._inner.send(call)
        self.late.update(names)
        self._send_late(call, delay_s)
        return 0

    def _is_lost(self, call: Call) -> bool:
        if call.type not in _CONTROL:
            return self._losses > 0  # requests are never sent again
        # A message that is sent again has the same items, its last argument; the release of a context has no items.
        args = call.args or ()
        what = args if call.type == MessageType.AUTOGRAD_RELEASE else args[-1]
        key = (call.peer.info.name, call.type, repr(what))
        self._sends[key] += 1
        return self._sends[key] <= self._losses

    def _send_late(self, call: Call, delay_s: float) -> None:
        """Send the request later, whether or not the caller still waits. The caller's timeout runs from now on."""
        loop = self._agent.loop
        recipient, timeout = call.recipient, call.timeout
        answered: asyncio.Future[Any] = loop.create_future()
        call.recipient = answered
        call.timeout = 0.0

        def copy(ended: asyncio.Future[Any]) -> None:
            error = ended.exception() if not ended.cancelled() else asyncio.CancelledError()
            if recipient.done():
                return
            if error is not None:
                recipient.set_exception(error)
            else:
                recipient.set_result(ended.result())

        def send() -> None:
            try:
                self._inner.send(call)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                answered.set_exception(error)

        def give_up() -> None:
            if not recipient.done():
                recipient.set_exception(RpcTimeoutError("the request was late on purpose"))

        answered.add_done_callback(copy)
        loop.call_later(delay_s, send)
        timeout_s = self._agent.timeouts.default_s if isinstance(timeout, Unset) else timeout
        if timeout_s:
            timer = loop.call_later(timeout_s, give_up)
            recipient.add_done_callback(lambda _: timer.cancel())


def _names_of(type_: int, function: Any) -> tuple[str, ...]:
    if type_ in _CALLS:
        kind = "SCRIPT" if _is_script(function) else "PYTHON"
        return (f"{kind}_{_CALLS[MessageType(type_)]}",)
    if type_ == MessageType.RREF_FETCH:
        return _FETCHES  # it is unknown here which of the two torch would send
    return (_CONTROL[MessageType(type_)],) if type_ in _CONTROL else ()
