"""OpenTelemetry: spans of calls and handlers are one trace, over workers with and without it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import arpc
from arpc.errors import ConfigurationError
from arpc.profiler import telemetry
from arpc.testing import Cluster, cluster


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a provider of this test alone has got."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
async def trio(exported: InMemorySpanExporter) -> AsyncIterator[Cluster]:
    async with cluster(3) as group:
        yield group


async def call_on(to: str, function: Any, *args: Any) -> Any:
    return await arpc.rpc_sync(to, function, args=args)


async def see_span() -> int:
    return trace.get_current_span().get_span_context().span_id


async def fail() -> None:
    raise ValueError("no")


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {f"{span.name} {span.kind.name}": span for span in exported.get_finished_spans()}


async def test_a_call_through_two_workers_is_one_trace(trio: Cluster, exported: InMemorySpanExporter) -> None:
    seen = await arpc.rpc_sync("worker1", call_on, args=("worker2", see_span))
    spans = by_name(exported)
    first = spans["call_on CLIENT"]
    second = spans["call_on SERVER"]
    third = spans["see_span CLIENT"]
    last = spans["see_span SERVER"]
    assert first.parent is None
    for parent, child in ((first, second), (second, third), (third, last)):
        assert child.parent is not None
        assert child.parent.span_id == parent.context.span_id
        assert child.context.trace_id == parent.context.trace_id
    assert seen == last.context.span_id
    assert last.attributes is not None
    assert dict(last.attributes) | {"rpc.system": "arpc", "arpc.worker": "worker2", "arpc.peer": "worker1"} == dict(
        last.attributes
    )


async def test_failures_are_told(trio: Cluster, exported: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"):
        await arpc.rpc_sync("worker1", fail)
    for span in by_name(exported).values():
        assert not span.status.is_ok
        assert span.events[0].name == "exception"


async def test_a_worker_without_it_passes_the_context_on(trio: Cluster, exported: InMemorySpanExporter) -> None:
    trio[1].profiler.use_opentelemetry(False)
    await arpc.rpc_sync("worker1", call_on, args=("worker2", see_span))
    spans = by_name(exported)
    assert "call_on SERVER" not in spans
    first, last = spans["call_on CLIENT"], spans["see_span SERVER"]
    assert last.parent is not None
    assert last.parent.span_id == first.context.span_id


async def test_it_is_off_unless_it_is_set_up() -> None:
    async with cluster(2) as group:
        assert group[0].agent.observers.installed == []
        arpc.profiler.use_opentelemetry()
        arpc.profiler.use_opentelemetry()
        assert len(group[0].agent.observers.installed) == 1
        arpc.profiler.use_opentelemetry(False)
        assert group[0].agent.observers.installed == []


async def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(1):
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
        with pytest.raises(ConfigurationError, match="otel"):
            arpc.profiler.use_opentelemetry()
        assert not telemetry.is_configured()
