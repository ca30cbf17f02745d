"""OpenTelemetry: spans of calls and handlers, and the trace context that is sent from one to the other.

OpenTelemetry is not imported, and costs nothing, unless the program has configured it before its worker starts or turns
it on with `use_opentelemetry`.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

from arpc.agent.agent import Agent
from arpc.agent.hooks.observers import Handling, Kind, Observer, Outcome, Outgoing
from arpc.errors import ConfigurationError
from arpc.extras import install_command
from arpc.user_errors import is_a, summary_of

__all__ = ["Telemetry", "TraceContextRelay", "is_configured"]

_KEY: Final = "traceparent"
_relayed: ContextVar[dict[str, str] | None] = ContextVar("arpc.profiler.traceparent", default=None)


def is_configured() -> bool:
    """Return whether the program has set up OpenTelemetry with a tracer provider that records spans."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return False
    proxy = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return not isinstance(trace.get_tracer_provider(), proxy)


class TraceContextRelay(Observer):
    """A standby observer: on a worker without OpenTelemetry, calls pass on the trace context of their handler."""

    key = _KEY

    def __init__(self) -> None:
        self._handlers: list[Handling] = []

    @property
    def occasions(self) -> list[Handling]:
        return self._handlers

    def request_begins(self, request: Outgoing) -> None:
        carrier = _relayed.get()
        if carrier is not None and request.kind is not Kind.CONTROL:
            request.headers.setdefault(_KEY, carrier)

    def handler_begins(self, handling: Handling) -> None:
        if not any(isinstance(observer, Telemetry) for observer in handling.observers):
            _relayed.set(_carrier(handling))
            self._handlers.append(handling)

    def handler_ends(self, handling: Handling) -> None:
        if handling in self._handlers:
            self._handlers.remove(handling)


class Telemetry(Observer):
    """Records a span for each call and each handler. Raises `ConfigurationError` if OpenTelemetry is not installed."""

    key = _KEY

    def __init__(self, agent: Agent) -> None:
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
            self._context: Any = importlib.import_module("opentelemetry.context")
            propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ConfigurationError(f"opentelemetry-api is not installed here: {install_command('otel')}") from error
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._tracer = self._trace.get_tracer("arpc")
        self._agent = agent
        self._spans: dict[Outgoing | Handling, Any] = {}

    def request_begins(self, request: Outgoing) -> None:
        if request.kind is Kind.CONTROL:
            return
        span = self._spans[request] = self._tracer.start_span(
            request.function,  # few names, however many workers there are: caller and callee are attributes
            kind=self._trace.SpanKind.CLIENT,
            attributes=self._attributes(request),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        if carrier:
            request.headers[_KEY] = carrier

    def request_ends(self, request: Outgoing) -> None:
        self._end(request)

    def handler_begins(self, handling: Handling) -> None:
        if handling.kind is Kind.CONTROL:
            return
        span = self._spans[handling] = self._tracer.start_span(
            handling.function,
            context=self._propagator.extract(_carrier(handling) or {}),
            kind=self._trace.SpanKind.SERVER,
            attributes=self._attributes(handling),
        )
        # in the handler's own context, which ends with it: there is nothing to detach
        self._context.attach(self._trace.set_span_in_context(span))

    def handler_ends(self, handling: Handling) -> None:
        self._end(handling)

    def _attributes(self, call: Outgoing | Handling) -> dict[str, str]:
        return {
            "rpc.system": "arpc",
            "rpc.method": call.function,
            "arpc.kind": call.kind.value,
            "arpc.worker": self._agent.info.name,
            "arpc.peer": call.peer.name,
        }

    def _end(self, call: Outgoing | Handling) -> None:
        span = self._spans.pop(call, None)
        if span is None:
            return
        span.set_attribute("arpc.sent_bytes", call.sent_bytes)
        span.set_attribute("arpc.received_bytes", call.received_bytes)
        if call.outcome is not Outcome.OK:
            outcome = call.outcome.value if call.outcome is not None else ""
            text = outcome if call.error is None else f"{outcome}: {summary_of(call.error)}"
            if call.error is not None and is_a(call.error, Exception):
                with suppress(BaseException):  # it formats the error, which runs user code
                    span.record_exception(call.error)
            span.set_status(self._trace.StatusCode.ERROR, text)
        span.end()


def _carrier(handling: Handling) -> dict[str, str] | None:
    """Return the trace context that came with a request; None if there is none, or if it is malformed."""
    carrier = handling.headers.get(_KEY)
    if isinstance(carrier, dict) and all(isinstance(part, str) for item in carrier.items() for part in item):
        return carrier
    return None
