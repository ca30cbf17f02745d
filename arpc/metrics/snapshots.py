"""The structures of a worker's answers about its state. They are sent as msgpack, or as JSON."""

from __future__ import annotations

import msgspec

from arpc.metrics.histogram import SparseCounts

__all__ = [
    "ContextSnapshot",
    "ExecutorSnapshot",
    "LoopSnapshot",
    "PeerSnapshot",
    "RRefGroup",
    "SeriesSnapshot",
    "WorkerHistory",
    "WorkerSnapshot",
]


class SeriesSnapshot(msgspec.Struct, frozen=True):
    """Calls of one function between two workers."""

    peer: str
    function: str
    count: int
    sum_s: float
    errors: dict[str, int]
    durations: SparseCounts
    recent: SparseCounts
    recent_s: float
    """The seconds in which ``recent`` was counted."""
    in_flight: int


class PeerSnapshot(msgspec.Struct, frozen=True):
    """A peer, which may be this worker itself, and the connection to it."""

    name: str
    state: str
    calls_made: int
    in_flight: int
    waiting: int
    """Calls that wait for a connection, or for room in the window."""
    bytes_in_flight: int
    unsent_bytes: int
    sent_bytes: int
    received_bytes: int
    reconnects: int


class ExecutorSnapshot(msgspec.Struct, frozen=True):
    """The thread pool and the handlers of a worker."""

    threads: int
    threads_max: int
    threads_busy: int
    queued: int
    """Plain functions that wait for a thread."""
    handlers: int
    """Handlers that run, or wait for something."""
    handlers_waiting: int
    """Requests that wait because their caller has too many others running."""
    calls_handled: int
    calls_failed: int


class LoopSnapshot(msgspec.Struct, frozen=True):
    """The lag of the loop, and its tasks."""

    lag_s: float
    """The lag at the last probe."""
    lag_max_s: float
    """The worst lag of the last ten seconds or so."""
    tasks: int


class RRefGroup(msgspec.Struct, frozen=True):
    """RRefs of one role, owner, type and state."""

    role: str
    owner: str
    type: str
    state: str
    count: int
    forks: int
    oldest_s: float


class ContextSnapshot(msgspec.Struct, frozen=True):
    """The state of an autograd context on one worker."""

    id: int
    creator: int
    age_s: float
    sends: int
    recvs: int
    gradients: int
    is_running: bool


class WorkerHistory(msgspec.Struct, frozen=True):
    """The last hour of one worker in steps of ten seconds, the oldest first."""

    worker: str
    history: dict[str, list[float]]


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """The state of one worker."""

    name: str
    id: int
    pid: int
    host: str
    version: str
    state: str
    time_s: float
    """The Unix time on that worker."""
    uptime_s: float
    counting_s: float
    """How long calls have been counted."""
    memory_bytes: int
    calls: list[SeriesSnapshot]
    handlers: list[SeriesSnapshot]
    peers: list[PeerSnapshot]
    executor: ExecutorSnapshot
    loop: LoopSnapshot
    rrefs: list[RRefGroup]
    contexts: list[ContextSnapshot]
    shared_memory: dict[str, int]
    receive_memory: dict[str, int]
    history: dict[str, list[float]]
    reconnects: int
    peers_given_up: int
    connections_refused: int
