"""Profiling of one worker: the standby observers that the agent gets, and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from arpc.agent.agent import Agent
from arpc.agent.hooks.observers import Observer
from arpc.agent.scope import current_scope
from arpc.errors import NotInitializedError
from arpc.ids import WorkerInfo
from arpc.profiler.keys import RemoteProfilerManager
from arpc.profiler.remote import RemoteProfiler
from arpc.profiler.sessions import listen_to_torch
from arpc.profiler.telemetry import Telemetry, TraceContextRelay, is_configured
from arpc.profiler.tracer import Tracer
from arpc.wire.messages import Message

__all__ = ["ProfilerService", "current", "use_opentelemetry"]


def current() -> ProfilerService:
    """Return the profiling service of the worker of this context. Raises `NotInitializedError`."""
    scope = current_scope.get()
    if scope is None or scope.worker is None:
        raise NotInitializedError("profiling belongs to a worker, and this context has none: call arpc.init_rpc first")
    service: ProfilerService = scope.worker.profiler
    return service


class ProfilerService:
    """The profiling of one worker: for its own profiles and for those of its callers."""

    def __init__(self) -> None:
        self.remote = RemoteProfiler()
        """Records calls for torch's own profiles."""
        self.tracer = Tracer()
        """Records this worker for `arpc.profiler.profile`, on this worker and on others."""
        self._relay = TraceContextRelay()
        self._telemetry: Telemetry | None = None
        listen_to_torch()

    @property
    def observers(self) -> tuple[Observer, ...]:
        return (self.remote, self.tracer, self._relay)

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return self.tracer.handlers

    def attach(self, agent: Agent) -> None:
        """Set the agent that makes the calls. It needs the observers of this service, so it is created later."""
        self.tracer.agent = agent
        if is_configured():
            self.use_opentelemetry()

    def identify(self, info: WorkerInfo) -> None:
        """Set the name and the id that this worker has in its group."""
        self.remote.identify(info)
        self.tracer.identify(info)

    def use_opentelemetry(self, enabled: bool = True) -> None:
        """Record calls and handlers of this worker as OpenTelemetry spans, or stop doing so."""
        agent = self.tracer.agent
        if enabled and self._telemetry is None:
            self._telemetry = Telemetry(agent)
            agent.observe(self._telemetry)
        elif not enabled and self._telemetry is not None:
            agent.unobserve(self._telemetry)
            self._telemetry = None

    @property
    def manager(self) -> RemoteProfilerManager:
        """The keys of profiled calls."""
        return self.remote.manager

    def close(self) -> None:
        self.remote.close()
        self.tracer.close()

    def statistics(self) -> dict[str, int]:
        return {**self.remote.statistics(), "traces": len(self.tracer.recorders)}


def use_opentelemetry(enabled: bool = True) -> None:
    """Record calls and handlers of this worker as OpenTelemetry spans, or stop doing so.

    A worker does this automatically if a tracer provider was set before it started. Raises `ConfigurationError` if
    opentelemetry-api is not installed.
    """
    current().use_opentelemetry(enabled)
