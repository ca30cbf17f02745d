"""Tables for users, made from the snapshots of many workers. Pure: snapshots in, tables out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from arpc._version import __version__
from arpc.metrics.group import Answer
from arpc.metrics.histogram import SparseCounts, merged, quantile
from arpc.metrics.snapshots import SeriesSnapshot, WorkerSnapshot

__all__ = [
    "ContextRow",
    "GroupSummary",
    "Latency",
    "RRefTableRow",
    "SeriesRow",
    "WorkerRow",
    "join_histories",
    "summarize",
]

_SUMMED: Final = frozenset(
    ("calls", "handled", "errors", "sent_bytes", "received_bytes", "in_flight", "handlers", "cpu_s", "memory_bytes")
)


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in seconds; None where nothing was counted."""

    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Latency:
        return cls(quantile(counts, 0.5), quantile(counts, 0.9), quantile(counts, 0.99))


class SeriesRow(msgspec.Struct, frozen=True):
    """Calls of a function, between two workers, or both: an empty field stands for all."""

    function: str
    caller: str
    callee: str
    per_s: float
    """The rate over the last ten to twenty seconds, as are the percentiles."""
    count: int
    errors: int
    error_types: dict[str, int]
    in_flight: int
    busy: float
    """Seconds of waiting per second: the average number of calls in flight."""
    latency: Latency
    """The latency as the caller measures it."""


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker, as a row."""

    name: str
    id: int
    state: str
    """ok, late (has not answered for five seconds), lost, starting or closing."""
    error: str
    answered_s: float
    """Seconds since its last answer."""
    host: str = ""
    pid: int = 0
    version: str = ""
    uptime_s: float = 0.0
    calls_per_s: float = 0.0
    handled_per_s: float = 0.0
    errors_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    handlers: int = 0
    queued: int = 0
    threads: int = 0
    threads_busy: int = 0
    threads_max: int = 0
    lag_s: float = 0.0
    lag_max_s: float = 0.0
    tasks: int = 0
    memory_bytes: int = 0
    cpus: float = 0.0
    """The number of CPUs that its process keeps busy."""
    rrefs_owned: int = 0
    rrefs_used: int = 0
    contexts: int = 0
    calls_failed: int = 0
    reconnects: int = 0
    peers_given_up: int = 0
    latency: Latency = Latency(None, None, None)
    """The latency of the calls that it handles."""
    shared_memory: dict[str, int] = {}
    history: dict[str, list[float]] = {}


class PairRow(msgspec.Struct, frozen=True):
    """All calls of one worker to another: an edge of the call graph."""

    caller: str
    callee: str
    state: str
    per_s: float
    count: int
    errors: int
    in_flight: int
    waiting: int
    latency: Latency
    sent_bytes: int
    received_bytes: int
    unsent_bytes: int
    reconnects: int


class RRefTableRow(msgspec.Struct, frozen=True):
    """Values of one type and state on one owner."""

    owner: str
    type: str
    state: str
    count: int
    forks: int
    """The number of forks on other workers that the owner counts."""
    oldest_s: float
    users: dict[str, int]
    """How many values of this owner each worker uses, whatever their type: a user does not know the type."""


class ContextRow(msgspec.Struct, frozen=True):
    """An autograd context, over all workers of the group."""

    id: int
    creator: str
    age_s: float
    workers: list[str]
    sends: int
    recvs: int
    gradients: int
    is_running: bool


class GroupSummary(msgspec.Struct, frozen=True):
    """The state of the group at one moment."""

    served_by: str
    version: str
    time_s: float
    counting_s: float
    calls_per_s: float
    errors_per_s: float
    sent_bytes_per_s: float
    in_flight: int
    lag_max_s: float
    latency: Latency
    workers: list[WorkerRow]
    functions: list[SeriesRow]
    series: list[SeriesRow]
    pairs: list[PairRow]
    rrefs: list[RRefTableRow]
    contexts: list[ContextRow]
    history: dict[str, list[float]]


def summarize(answers: Mapping[str, Answer[WorkerSnapshot]], now: float, served_by: str) -> GroupSummary:
    """Return the tables. A lost worker has a row, and its last numbers are left out of the sums."""
    ordered = sorted(answers.values(), key=lambda answer: answer.info.id)
    alive = [answer.value for answer in ordered if answer.value is not None and not answer.error]
    workers = [_worker_row(answer, now) for answer in ordered]
    series = [(worker.name, one) for worker in alive for one in worker.calls]
    history = join_histories(worker.history for worker in alive)
    return GroupSummary(
        served_by=served_by,
        version=__version__,
        time_s=max((worker.time_s for worker in alive), default=0.0),
        counting_s=max((worker.counting_s for worker in alive), default=0.0),
        calls_per_s=_last(history, "calls"),
        errors_per_s=_last(history, "errors"),
        sent_bytes_per_s=_last(history, "sent_bytes"),
        in_flight=sum(worker.in_flight for worker in workers if not worker.error),
        lag_max_s=max((worker.loop.lag_max_s for worker in alive), default=0.0),
        latency=Latency.of(merged(one.recent for _, one in series)),
        workers=workers,
        functions=_by_function(series),
        series=[_series_row(one.function, caller, one.peer, [one]) for caller, one in series],
        pairs=_pairs(alive),
        rrefs=_rrefs(alive),
        contexts=_contexts(alive),
        history=history,
    )


def _worker_row(answer: Answer[WorkerSnapshot], now: float) -> WorkerRow:
    state = answer.state(now)
    name, worker_id, worker = answer.info.name, answer.info.id, answer.value
    answered_s = max(0.0, now - answer.at)
    if worker is None:
        # the worker has just been asked for the first time, or has never answered
        return WorkerRow(name, worker_id, state if state != "ok" else "starting", answer.error, answered_s)
    executor, history = worker.executor, worker.history
    return WorkerRow(
        name=name,
        id=worker_id,
        state=worker.state if state == "ok" and worker.state != "serving" else state,
        error=answer.error,
        answered_s=answered_s,
        host=worker.host,
        pid=worker.pid,
        version=worker.version,
        uptime_s=worker.uptime_s,
        calls_per_s=_last(history, "calls"),
        handled_per_s=_last(history, "handled"),
        errors_per_s=_last(history, "errors"),
        sent_bytes_per_s=_last(history, "sent_bytes"),
        received_bytes_per_s=_last(history, "received_bytes"),
        in_flight=sum(peer.in_flight for peer in worker.peers),
        waiting=sum(peer.waiting for peer in worker.peers),
        handlers=executor.handlers,
        queued=executor.queued + executor.handlers_waiting,
        threads=executor.threads,
        threads_busy=executor.threads_busy,
        threads_max=executor.threads_max,
        lag_s=worker.loop.lag_s,
        lag_max_s=worker.loop.lag_max_s,
        tasks=worker.loop.tasks,
        memory_bytes=worker.memory_bytes,
        cpus=_last(history, "cpu_s"),
        rrefs_owned=sum(group.count for group in worker.rrefs if group.role == "owner"),
        rrefs_used=sum(group.count for group in worker.rrefs if group.role == "user"),
        contexts=len(worker.contexts),
        calls_failed=executor.calls_failed,
        reconnects=worker.reconnects,
        peers_given_up=worker.peers_given_up,
        latency=Latency.of(merged(one.recent for one in worker.handlers)),
        shared_memory=worker.shared_memory,
        history=history,
    )


def _last(history: Mapping[str, list[float]], name: str) -> float:
    values = history.get(name)
    return values[-1] if values else 0.0


def join_histories(histories: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Return the history of the group: sums, and the worst lag. Workers may have begun to count at different times."""
    joined: dict[str, list[float]] = {}
    for history in histories:
        for name, values in history.items():
            known = joined.get(name, [])
            size = max(len(known), len(values))
            padded = [0.0] * (size - len(known)) + known, [0.0] * (size - len(values)) + values
            combine = sum if name in _SUMMED else max
            joined[name] = [combine(pair) for pair in zip(*padded, strict=True)]
    return joined


def _series_row(function: str, caller: str, callee: str, parts: list[SeriesSnapshot]) -> SeriesRow:
    recent: SparseCounts = merged(part.recent for part in parts)
    errors: dict[str, int] = {}
    for part in parts:
        for name, count in part.errors.items():
            errors[name] = errors.get(name, 0) + count
    per_s = sum(sum(part.recent.values()) / part.recent_s for part in parts if part.recent_s > 0)
    count = sum(part.count for part in parts)
    mean_s = sum(part.sum_s for part in parts) / count if count else 0.0
    return SeriesRow(
        function=function,
        caller=caller,
        callee=callee,
        per_s=per_s,
        count=count,
        errors=sum(errors.values()),
        error_types=errors,
        in_flight=sum(part.in_flight for part in parts),
        busy=per_s * mean_s,
        latency=Latency.of(recent),
    )


def _by_function(series: Iterable[tuple[str, SeriesSnapshot]]) -> list[SeriesRow]:
    groups: dict[str, list[SeriesSnapshot]] = {}
    for _, one in series:
        groups.setdefault(one.function, []).append(one)
    return [_series_row(function, "", "", parts) for function, parts in groups.items()]


def _pairs(alive: Iterable[WorkerSnapshot]) -> list[PairRow]:
    rows = []
    for worker in alive:
        by_callee: dict[str, list[SeriesSnapshot]] = {}
        for one in worker.calls:
            by_callee.setdefault(one.peer, []).append(one)
        for peer in worker.peers:
            parts = by_callee.get(peer.name, [])
            if not parts and not peer.sent_bytes:
                continue  # they have exchanged nothing yet
            row = _series_row("", worker.name, peer.name, parts)
            rows.append(
                PairRow(
                    caller=worker.name,
                    callee=peer.name,
                    state=peer.state,
                    per_s=row.per_s,
                    count=row.count,
                    errors=row.errors,
                    in_flight=peer.in_flight,
                    waiting=peer.waiting,
                    latency=row.latency,
                    sent_bytes=peer.sent_bytes,
                    received_bytes=peer.received_bytes,
                    unsent_bytes=peer.unsent_bytes,
                    reconnects=peer.reconnects,
                )
            )
    return rows


def _rrefs(alive: list[WorkerSnapshot]) -> list[RRefTableRow]:
    users: dict[str, dict[str, int]] = {}
    for worker in alive:
        for group in worker.rrefs:
            if group.role == "user":
                held = users.setdefault(group.owner, {})
                held[worker.name] = held.get(worker.name, 0) + group.count
    return [
        RRefTableRow(
            owner=group.owner,
            type=group.type,
            state=group.state,
            count=group.count,
            forks=group.forks,
            oldest_s=group.oldest_s,
            users=users.get(group.owner, {}),
        )
        for worker in alive
        for group in worker.rrefs
        if group.role == "owner"
    ]


def _contexts(alive: list[WorkerSnapshot]) -> list[ContextRow]:
    names = {worker.id: worker.name for worker in alive}
    rows: dict[int, ContextRow] = {}
    for worker in alive:
        for context in worker.contexts:
            known = rows.get(context.id)
            rows[context.id] = ContextRow(
                id=context.id,
                creator=names.get(context.creator, str(context.creator)),
                age_s=max(context.age_s, known.age_s if known else 0.0),
                workers=[*(known.workers if known else []), worker.name],
                sends=context.sends + (known.sends if known else 0),
                recvs=context.recvs + (known.recvs if known else 0),
                gradients=context.gradients + (known.gradients if known else 0),
                is_running=context.is_running or (known is not None and known.is_running),
            )
    return sorted(rows.values(), key=lambda row: -row.age_s)
