"""How long calls and handlers take, for counting all the time.

`agent.hooks.observers` are told everything of a request, and may change what happens around it. A meter is told
durations alone: calls are timed by a `TimedSender` around the worker's own, handlers where they are answered.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Protocol

from arpc.agent.client.pending_calls import Call, CallSender
from arpc.agent.hooks.observers import error_of

__all__ = ["Meter", "TimedSender"]

_now = time.perf_counter_ns


class Meter(Protocol):
    """Is told how long things took. Called on the loop; must not raise."""

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        """A call has its result, or its error.

        ``function`` is what was called, the name of a method of a remote value, or the class of a feature's message.
        """

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        """A request was answered, whatever the answer is."""

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        """A request will be answered with an error."""


class TimedSender:
    """Times every request of a worker."""

    def __init__(self, inner: CallSender, meter: Meter) -> None:
        self.inner = inner
        self._meter = meter

    def send(self, call: Call) -> int:
        """Send a request."""
        began_ns = _now()
        name, function = call.peer.info.name, call.called or call.function
        try:
            call_id = self.inner.send(call)
        except BaseException as error:
            self._meter.call_ended(name, function, _now() - began_ns, error)
            raise
        call.recipient.add_done_callback(partial(self._ended, name, function, began_ns))
        return call_id

    def _ended(self, name: str, function: Any, began_ns: int, recipient: Any) -> None:
        duration_ns = _now() - began_ns
        self._meter.call_ended(name, function, duration_ns, error_of(recipient))
