"""Snapshots in the format of Prometheus: base units, one name for each quantity, ``_total`` for counters.

Counters begin when a worker begins to count (see `RpcOptions.metrics`): Prometheus treats that like a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from arpc.errors import UnsupportedError
from arpc.extras import install_command
from arpc.metrics.histogram import SparseCounts
from arpc.metrics.snapshots import WorkerSnapshot

__all__ = ["BOUNDS_S", "expose"]

# Every second octave of the histogram, so that the counts are exact: 16 µs, 64 µs, 256 µs, 1 ms ... 67 s
_OCTAVES: Final = range(4, 27, 2)
BOUNDS_S: Final = tuple((1 << octave) / 1e6 for octave in _OCTAVES)

_Gauges = tuple[tuple[str, str, Any], ...]


def expose(snapshots: Sequence[WorkerSnapshot], accept: str = "") -> tuple[bytes, str]:
    """Return the exposition and its content type. Raises `UnsupportedError` if prometheus_client is not installed."""
    try:
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.registry import Collector, CollectorRegistry
    except ImportError as error:
        raise UnsupportedError(f"/metrics needs prometheus_client: {install_command('metrics')}") from error

    class Snapshots(Collector):
        def collect(self) -> Iterator[Any]:
            yield from _families(snapshots)

    registry = CollectorRegistry()
    registry.register(Snapshots())
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def _families(workers: Sequence[WorkerSnapshot]) -> Iterator[Any]:
    from prometheus_client.core import InfoMetricFamily

    info = InfoMetricFamily("arpc_worker", "A worker of the group that answered.", labels=["worker"])
    for worker in workers:
        about = {"id": str(worker.id), "host": worker.host, "pid": str(worker.pid), "version": worker.version}
        info.add_metric([worker.name], about)
    yield info
    yield from _calls(workers)
    yield from _peers(workers)
    yield from _levels(workers)
    yield from _objects(workers)


def _calls(workers: Sequence[WorkerSnapshot]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    series = ["worker", "peer", "function"]
    for name, text in (
        ("call", "Calls to a peer, from when they are made until their result is there"),
        ("handler", "Calls of a peer, from when they arrive until they are answered"),
    ):
        total = CounterMetricFamily(f"arpc_{name}s", f"{text}: how many have ended.", labels=[*series, "outcome"])
        errors = CounterMetricFamily(
            f"arpc_{name}_errors", f"{text}: how many failed, by exception.", labels=[*series, "error"]
        )
        durations = HistogramMetricFamily(f"arpc_{name}_duration_seconds", f"{text}.", labels=series)
        in_flight = GaugeMetricFamily(f"arpc_{name}s_in_flight", f"{text}: how many have not ended.", labels=series)
        for worker in workers:
            for row in worker.calls if name == "call" else worker.handlers:
                key = [worker.name, row.peer, row.function]
                failed = sum(row.errors.values())
                total.add_metric([*key, "ok"], row.count - failed)
                total.add_metric([*key, "error"], failed)
                for error, count in row.errors.items():
                    errors.add_metric([*key, error], count)
                durations.add_metric(key, _buckets(row.durations, row.count), row.sum_s)
                in_flight.add_metric(key, row.in_flight)
        yield from (total, errors, durations, in_flight)


def _buckets(counts: SparseCounts, total: int) -> list[tuple[str, float]]:
    """Return the cumulative counts at `BOUNDS_S`."""
    cumulative = [
        (repr(bound), float(sum(count for index, count in counts.items() if index < 4 * octave)))
        for octave, bound in zip(_OCTAVES, BOUNDS_S, strict=True)
    ]
    return [*cumulative, ("+Inf", float(total))]


def _peers(workers: Sequence[WorkerSnapshot]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    pair = ["worker", "peer"]
    sent = CounterMetricFamily("arpc_sent_bytes", "Bytes sent to a peer over its connection.", labels=pair)
    received = CounterMetricFamily("arpc_received_bytes", "Bytes received from a peer.", labels=pair)
    again = CounterMetricFamily("arpc_reconnects", "Connections to a peer after the first.", labels=pair)
    unsent = GaugeMetricFamily("arpc_unsent_bytes", "Bytes that a peer has not taken yet.", labels=pair)
    window = GaugeMetricFamily("arpc_in_flight_bytes", "Bytes of calls that a peer has not answered.", labels=pair)
    waiting = GaugeMetricFamily("arpc_calls_waiting", "Calls that wait for a connection, or for room.", labels=pair)
    for worker in workers:
        for peer in worker.peers:
            key = [worker.name, peer.name]
            sent.add_metric(key, peer.sent_bytes)
            received.add_metric(key, peer.received_bytes)
            again.add_metric(key, peer.reconnects)
            unsent.add_metric(key, peer.unsent_bytes)
            window.add_metric(key, peer.bytes_in_flight)
            waiting.add_metric(key, peer.waiting)
    yield from (sent, received, again, unsent, window, waiting)


def _levels(workers: Sequence[WorkerSnapshot]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    gauges: _Gauges = (
        ("arpc_uptime_seconds", "Since the worker was started.", lambda w: w.uptime_s),
        ("arpc_resident_memory_bytes", "Memory of the worker's process.", lambda w: w.memory_bytes),
        ("arpc_event_loop_lag_seconds", "How late the loop ran a timer.", lambda w: w.loop.lag_s),
        ("arpc_event_loop_lag_max_seconds", "The worst of the last ten seconds.", lambda w: w.loop.lag_max_s),
        ("arpc_event_loop_tasks", "Tasks on the worker's loop.", lambda w: w.loop.tasks),
        ("arpc_executor_threads", "Threads for plain functions.", lambda w: w.executor.threads),
        ("arpc_executor_threads_max", "How many there may be.", lambda w: w.executor.threads_max),
        ("arpc_executor_threads_busy", "How many run a function.", lambda w: w.executor.threads_busy),
        ("arpc_executor_queue_length", "Plain functions that wait for a thread.", lambda w: w.executor.queued),
        ("arpc_requests_waiting", "Requests that wait for room.", lambda w: w.executor.handlers_waiting),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["worker"])
        for worker in workers:
            gauge.add_metric([worker.name], value(worker))
        yield gauge
    counters: _Gauges = (
        ("arpc_peers_given_up", "Peers that fell silent.", lambda w: w.peers_given_up),
        ("arpc_connections_refused", "Connections that were refused.", lambda w: w.connections_refused),
    )
    for name, text, value in counters:
        counter = CounterMetricFamily(name, text, labels=["worker"])
        for worker in workers:
            counter.add_metric([worker.name], value(worker))
        yield counter


def _objects(workers: Sequence[WorkerSnapshot]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    kind = ["worker", "role", "owner", "type", "state"]
    rrefs = GaugeMetricFamily("arpc_rrefs", "RRefs that a worker owns or uses.", labels=kind)
    oldest = GaugeMetricFamily("arpc_rref_oldest_seconds", "Age of the oldest of them.", labels=kind)
    contexts = GaugeMetricFamily("arpc_autograd_contexts", "Autograd contexts a worker knows.", labels=["worker"])
    context_age = GaugeMetricFamily(
        "arpc_autograd_context_oldest_seconds", "Age of the oldest of them.", labels=["worker"]
    )
    for worker in workers:
        for group in worker.rrefs:
            key = [worker.name, group.role, group.owner, group.type, group.state]
            rrefs.add_metric(key, group.count)
            oldest.add_metric(key, group.oldest_s)
        contexts.add_metric([worker.name], len(worker.contexts))
        context_age.add_metric([worker.name], max((context.age_s for context in worker.contexts), default=0.0))
    yield from (rrefs, oldest, contexts, context_age)
    for key_, name, text in (
        ("capacity_bytes", "arpc_shared_memory_capacity_bytes", "Memory the worker may share with its host."),
        ("resident_bytes", "arpc_shared_memory_resident_bytes", "How much of it the system has given."),
        ("used_bytes", "arpc_shared_memory_used_bytes", "How much of it holds tensors."),
        ("borrowed_bytes", "arpc_shared_memory_borrowed_bytes", "Memory of others that tensors here are in."),
    ):
        yield _memory(workers, key_, name, text)


def _memory(workers: Iterable[WorkerSnapshot], key: str, name: str, text: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(name, text, labels=["worker"])
    for worker in workers:
        if key in worker.shared_memory:
            gauge.add_metric([worker.name], worker.shared_memory[key])
    return gauge
