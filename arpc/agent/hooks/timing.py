"""The durations of calls and handlers, for metrics that are always on.

`agent.hooks.observers` receive everything about a request, and may run code around it. A meter receives durations
alone: calls are timed by a `TimedSender` around the worker's own sender, handlers where they are answered.
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
    """Receives the durations of calls and handlers. Called on the loop; must not raise."""

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        """Record a call that has its result, or its error.

        ``function`` is the function, the name of a method of a remote value, or the class of a feature's message.
        """

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        """Record a request that was answered, whatever the answer is."""

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        """Record a request that will be answered with an error."""


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
