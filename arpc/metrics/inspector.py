"""Snapshots of the state of a worker. Making one changes nothing, and nothing is done in between."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from arpc._version import __version__
from arpc.agent.agent import Agent
from arpc.agent.peers.link import Link
from arpc.agent.peers.peer import Peer
from arpc.autograd.service import AutogradService
from arpc.ids import WorkerInfo
from arpc.metrics.recorder import Recorder, Series
from arpc.metrics.snapshots import (
    ContextSnapshot,
    ExecutorSnapshot,
    LoopSnapshot,
    PeerSnapshot,
    RRefGroup,
    SeriesSnapshot,
    WorkerSnapshot,
)
from arpc.rref.context import RRefContext
from arpc.rref.report import rref_rows
from arpc.transport.buffer_pool import BufferPool
from arpc.transport.shm import Arena
from arpc.wire.messages import Inspect

__all__ = ["Inspector", "Traffic"]

_MOST_CONTEXTS: Final = 200
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Traffic:
    """Bytes to and from each peer, over all its connections so far: the counters of each connection begin at 0."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._connections: dict[str, dict[object, tuple[int, int]]] = {}
        self._forgotten = (0, 0)
        """The sum for all peers that the agent has forgotten."""

    def look(self, peers: Iterable[Peer]) -> None:
        """Read the counters. Bytes between the last reading of a connection and its end are missed."""
        for peer in peers:
            name = peer.info.name
            known = self._connections.get(name, {})
            found: dict[object, tuple[int, int]] = {
                connection: (connection.count_sent(), connection.bytes_received) for connection in peer.connections()
            }
            for connection, (sent, received) in known.items():
                if connection not in found:
                    before = self._before.get(name, (0, 0))
                    self._before[name] = (before[0] + sent, before[1] + received)
            self._connections[name] = found
        for name in (self._before.keys() | self._connections.keys()) - {peer.info.name for peer in peers}:
            sent, received = self.of(name)
            self._forgotten = (self._forgotten[0] + sent, self._forgotten[1] + received)
            self._before.pop(name, None)
            self._connections.pop(name, None)

    def of(self, name: str) -> tuple[int, int]:
        """Return the bytes sent to a peer, and received from it."""
        sent, received = self._before.get(name, (0, 0))
        known = self._connections.get(name, {}).values()
        return sent + sum(out for out, _ in known), received + sum(back for _, back in known)

    def total(self) -> tuple[int, int]:
        """Return the bytes sent to all peers together, and received from them."""
        both = [self.of(name) for name in self._before.keys() | self._connections.keys()]
        both.append(self._forgotten)
        return sum(sent for sent, _ in both), sum(received for _, received in both)


class Inspector:
    """Makes snapshots of the parts of one worker."""

    def __init__(
        self,
        rrefs: RRefContext,
        autograd: AutogradService,
        arena: Arena | None = None,
        receive_memory: BufferPool | None = None,
    ) -> None:
        self.agent: Agent
        self.info = WorkerInfo("", -1)
        self.arena = arena
        self.receive_memory = receive_memory
        self.traffic = Traffic()
        self._rrefs = rrefs
        self._autograd = autograd
        self._started = time.monotonic()

    def snapshot(
        self, recorder: Recorder | None, loop: LoopSnapshot, history: Mapping[str, list[float]]
    ) -> WorkerSnapshot:
        agent = self.agent
        now = agent.loop.time()
        self.traffic.look(agent.peers)
        state = "closing" if agent.is_closing else "serving" if agent.is_serving else "starting"
        calls, handlers = self._in_flight()
        peers = self._peers(calls)
        return WorkerSnapshot(
            name=self.info.name,
            id=self.info.id,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            state=state,
            time_s=time.time(),
            uptime_s=time.monotonic() - self._started,
            counting_s=0.0 if recorder is None else now - recorder.since,
            memory_bytes=_resident_bytes(),
            calls=_series({} if recorder is None else recorder.calls, calls, now),
            handlers=_series({} if recorder is None else recorder.handlers, handlers, now),
            peers=peers,
            executor=self._executor(),
            loop=loop,
            rrefs=self._rref_groups(),
            contexts=self._contexts(),
            shared_memory=_numbers(self.arena.statistics()) if self.arena is not None else {},
            receive_memory=_numbers(self.receive_memory.statistics()) if self.receive_memory is not None else {},
            history=dict(history),
            reconnects=sum(peer.reconnects for peer in peers),
            peers_given_up=agent.heartbeat.peers_given_up,
            connections_refused=agent.connector.refused,
        )

    def bytes_moved(self) -> tuple[int, int]:
        """Return bytes sent and received. Shared memory counts only as sent: receivers do not count it."""
        self.traffic.look(self.agent.peers)
        sent, received = self.traffic.total()
        return sent + (self.arena.sent_bytes if self.arena is not None else 0), received

    def levels(self) -> dict[str, float]:
        """Return the current numbers of calls in flight and of running handlers, and the memory of the process."""
        agent = self.agent
        return {
            "in_flight": float(sum(peer.calls_in_flight for peer in agent.peers)),
            "handlers": float(sum(len(link.running) for link in self._peer_links())),
            "memory_bytes": float(_resident_bytes()),
        }

    def _peer_links(self) -> list[Link]:
        """Return the links of peers, without those of onlookers."""
        return [link for link in self.agent.connector.links if not link.is_onlooker]

    def _peers(self, calls: Mapping[tuple[str, str], int]) -> list[PeerSnapshot]:
        rows = []
        in_flight: Counter[str] = Counter()
        for (name, _), count in calls.items():
            in_flight[name] += count
        for peer in self.agent.peers:
            sent, received = self.traffic.of(peer.info.name)
            connection = peer.connection
            rows.append(
                PeerSnapshot(
                    name=peer.info.name,
                    state=peer.state.name.lower(),
                    calls_made=peer.calls_made,
                    in_flight=in_flight[peer.info.name],
                    waiting=len(peer.backlog),
                    bytes_in_flight=peer.in_flight_bytes,
                    unsent_bytes=0 if connection is None or not connection.is_open else connection.unsent_bytes,
                    sent_bytes=sent,
                    received_bytes=received,
                    reconnects=max(0, peer.connects - 1),
                )
            )
        return rows

    def _in_flight(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        """Count calls in flight and running handlers, by peer and function."""
        agent = self.agent
        calls = Counter(
            (peer.info.name, call.name)
            for peer in agent.peers
            for _, call in peer.calls
            if call.function is not Inspect  # a question of monitoring, not a call of the program
        )
        calls.update((peer.info.name, name) for peer in agent.peers for _, name, _ in peer.calls_of_threads())
        handlers = Counter(
            (link.caller.name, run.name)
            for link in self._peer_links()
            for run in list(link.running.values())  # threads may remove requests meanwhile
        )
        return calls, handlers

    def _executor(self) -> ExecutorSnapshot:
        counted = self.agent.dispatcher.statistics()
        inbounds = self._peer_links()
        return ExecutorSnapshot(
            threads=counted["threads"],
            threads_max=counted["threads_max"],
            threads_busy=max(0, min(counted["jobs_unfinished"] - counted["jobs_queued"], counted["threads"])),
            queued=counted["jobs_queued"],
            handlers=sum(len(inbound.running) for inbound in inbounds),
            handlers_waiting=sum(len(inbound.waiting) for inbound in inbounds),
            calls_handled=counted["calls_handled"],
            calls_failed=counted["calls_failed"],
        )

    def _rref_groups(self) -> list[RRefGroup]:
        groups: dict[tuple[str, str, str, str], list[float]] = {}
        for row in rref_rows(self._rrefs):
            group = groups.setdefault((row.role, row.owner, row.type, row.state), [0, 0, 0.0])
            group[0] += 1
            group[1] += sum(row.forks.values())
            group[2] = max(group[2], row.age_s)
        return [
            RRefGroup(role, owner, type_, state, int(count), int(forks), oldest_s)
            for (role, owner, type_, state), (count, forks, oldest_s) in groups.items()
        ]

    def _contexts(self) -> list[ContextSnapshot]:
        now = time.monotonic()
        oldest_first = sorted(self._autograd.container.contexts.values(), key=lambda context: context.since)
        return [
            ContextSnapshot(
                id=context.id,
                creator=context.creator,
                age_s=now - context.since,
                sends=len(context.sends),
                recvs=len(context.recvs),
                gradients=len(context.gradients),
                is_running=context.active_pass is not None,
            )
            for context in oldest_first[:_MOST_CONTEXTS]
        ]


def _series(
    known: Mapping[tuple[str, str], Series], in_flight: Mapping[tuple[str, str], int], now: float
) -> list[SeriesSnapshot]:
    rows = []
    for (peer, function), series in known.items():
        recent, since = series.recent()
        counted = series.durations
        under_way = in_flight.get((peer, function), 0)
        rows.append(
            SeriesSnapshot(
                peer=peer,
                function=function,
                count=counted.count,
                sum_s=counted.sum_s,
                errors=dict(series.errors),
                durations=counted.sparse(),
                recent=recent,
                recent_s=now - since,
                in_flight=under_way,
            )
        )
    # also functions of which no call has ended yet
    rows += [
        SeriesSnapshot(peer, function, 0, 0.0, {}, {}, {}, 0.0, count)
        for (peer, function), count in in_flight.items()
        if (peer, function) not in known
    ]
    return rows


def _numbers(counted: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers among the statistics of a part; numbers by worker are summed."""
    return {
        name: sum(value.values()) if isinstance(value, dict) else int(value)
        for name, value in counted.items()
        if isinstance(value, int | float | dict)
    }


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system has no cheap way to read it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def loop_tasks(loop: asyncio.AbstractEventLoop) -> int:
    """Return the number of tasks on a loop."""
    return len(asyncio.all_tasks(loop))
