"""The metrics of a worker and the answers to questions about them: a feature of the agent, with handlers and a meter.

Nothing is counted before the first question, and counting stops after a while without questions, so that a group that
is not monitored pays nothing. `RpcOptions.metrics` and `RpcOptions.http` keep it on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.server.functions import InlineHandler
from arpc.errors import ConfigurationError, OverloadedError, RendezvousError, UnsupportedError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.metrics.group import GroupView
from arpc.metrics.inspector import Inspector, loop_tasks
from arpc.metrics.journal import Journal, WorkerErrors, WorkerLogs
from arpc.metrics.limits import MAX_TRACE_S, TRACE_FORMS
from arpc.metrics.recorder import Recorder
from arpc.metrics.sampler import Sampler
from arpc.metrics.snapshots import LoopSnapshot, WorkerHistory, WorkerSnapshot
from arpc.metrics.stacks import WorkerStack, dump
from arpc.metrics.summary import GroupSummary, summarize
from arpc.options import RpcOptions
from arpc.wire.messages import Inspect, Message

__all__ = ["MetricsService", "RecordTrace"]

T = TypeVar("T")

RecordTrace = Callable[[float, str], Awaitable[bytes]]
"""A function that records a trace; its arguments are the seconds, and one of `TRACE_FORMS`."""

_LEASE_S: Final = 150.0
"""How long counting goes on after a question: longer than the usual interval between two scrapes."""
_MEET_S: Final = 5.0
_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(WorkerSnapshot).decode
_decode_stack = msgspec.msgpack.Decoder(WorkerStack).decode
_decode_logs = msgspec.msgpack.Decoder(WorkerLogs).decode
_decode_errors = msgspec.msgpack.Decoder(WorkerErrors).decode
_decode_history = msgspec.msgpack.Decoder(WorkerHistory).decode


class MetricsService:
    """Counts for one worker, and collects from the whole group for questions about the group."""

    def __init__(
        self,
        options: RpcOptions,
        inspector: Inspector,
        members: Callable[[], Awaitable[Iterable[WorkerRecord]]] | None = None,
        record_trace: RecordTrace | None = None,
    ) -> None:
        """``members`` lists the workers of an elastic group, ``record_trace`` records a group for some seconds."""
        self.inspector = inspector
        self.record_trace = record_trace
        self._is_tracing = False
        self._members = members
        self._options = options
        self._agent: Agent
        self._recorder: Recorder | None = None
        self._journal: Journal | None = None
        self._sampler: Sampler | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._snapshots: GroupView[WorkerSnapshot]
        self._other_questions = 0
        self._answers_given = 0
        self._met_at = float("-inf")
        self._is_closed = False

    # -- what the agent and the runtime need of a feature

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {Inspect: InlineHandler(self.answer)}

    def attach(self, agent: Agent) -> None:
        self._agent = self.inspector.agent = agent
        self._snapshots = GroupView(agent, ("snapshot",), _decode_snapshot, self._meet)
        if self._options.metrics or self._options.http:
            self.begin()

    def identify(self, info: WorkerInfo) -> None:
        self.inspector.info = info
        if self._journal is not None:
            self._journal.worker = info.name

    def close(self) -> None:
        self._is_closed = True
        self._snapshots.close()
        self.end()

    @property
    def traffic(self) -> tuple[int, int]:
        """Numbers of questions asked and answered. They are no work: a group may shut down while they go on."""
        return self._snapshots.questions_asked + self._other_questions, self._answers_given

    # -- counting

    @property
    def is_counting(self) -> bool:
        return self._recorder is not None

    def begin(self) -> None:
        """Start counting."""
        if self._recorder is not None or self._is_closed:
            return
        self._journal = Journal(self.inspector.info.name)
        self._recorder = Recorder(self._agent.loop.time(), self._journal.failed)
        self._agent.set_meter(self._recorder)
        self._sampler = Sampler(self._agent.loop, self._read)

    def end(self) -> None:
        """Stop counting, and discard the counts."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._recorder is not None:
            self._agent.set_meter(None)
            self._recorder = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _read(self) -> dict[str, float]:
        recorder = self._recorder
        assert recorder is not None  # the sampler ends with it
        recorder.tick(self._agent.loop.time())
        sent, received = self.inspector.bytes_moved()
        levels = self.inspector.levels()
        levels["in_flight"] -= min(levels["in_flight"], self._snapshots.under_way)
        return {
            **recorder.totals(),
            **levels,
            "cpu_s": time.process_time(),
            "sent_bytes": float(sent),
            "received_bytes": float(received),
        }

    def _renew(self) -> None:
        """Count for a while, because a question has come."""
        self.begin()
        if self._options.metrics or self._options.http or self._is_closed:
            return
        if self._lease is not None:
            self._lease.cancel()
        self._lease = self._agent.loop.call_later(_LEASE_S, self.end)

    # -- answers

    def answer(self, what: str, *arguments: Any) -> Any:
        """Handle an `Inspect`: for this worker at once, for the group in a coroutine."""
        self._answers_given += 1
        if what == "snapshot":
            self._renew()
            return _encode(self.snapshot())
        if what == "stack":
            return _encode(self.stack())
        if what == "logs":
            self._renew()
            return _encode(self.logs(*arguments))
        if what == "errors":
            self._renew()
            return _encode(self.errors())
        if what == "history":
            self._renew()
            return _encode(self.history())
        if what == "group":
            return self._answer_summary(*arguments)
        if what == "group_stack":
            return self._answer_stacks(*arguments)
        if what == "group_trace":
            return self.trace(*arguments)
        raise ValueError(f"worker {self.inspector.info.name!r} cannot report {what!r}: it has another version of arpc")

    def snapshot(self) -> WorkerSnapshot:
        """Return the current state of this worker."""
        sampler = self._sampler
        tasks = loop_tasks(self._agent.loop)
        if sampler is None:
            return self.inspector.snapshot(self._recorder, LoopSnapshot(0.0, 0.0, tasks), {})
        lag = LoopSnapshot(sampler.lag_s, sampler.lag_max_s, tasks)
        return self.inspector.snapshot(self._recorder, lag, sampler.history.rows())

    def stack(self) -> WorkerStack:
        """Return the handlers, calls and tasks that wait on this worker now."""
        return dump(self._agent, self.inspector.info, os.getpid())

    def logs(self, level: str = "", search: str = "", limit: int = 200) -> WorkerLogs:
        """Return the last log lines of this worker, as far as it counted."""
        if self._journal is None:
            return WorkerLogs(self.inspector.info.name, [])
        return self._journal.logs(level, search, limit)

    def errors(self) -> WorkerErrors:
        """Return the failures of this worker's handlers, as far as it counted."""
        return WorkerErrors(self.inspector.info.name, []) if self._journal is None else self._journal.errors()

    def history(self) -> WorkerHistory:
        """Return the last hour of this worker, as far as it counted."""
        sampler = self._sampler
        return WorkerHistory(self.inspector.info.name, {} if sampler is None else sampler.hour.rows())

    async def _answer_summary(self, patience_s: float) -> bytes:
        return _encode(await self.summary(patience_s))

    async def _answer_stacks(self, patience_s: float) -> bytes:
        return _encode(await self.stacks(patience_s))

    # -- the group

    async def snapshots(self, patience_s: float = 0.5) -> list[WorkerSnapshot]:
        """Return the last snapshots of all workers that have answered and are not lost."""
        answers = await self._snapshots.refresh(patience_s)
        return [answer.value for answer in answers.values() if answer.value is not None and not answer.error]

    async def summary(self, patience_s: float = 0.5) -> GroupSummary:
        """Return the tables of the whole group, for users."""
        answers = await self._snapshots.refresh(patience_s)
        return summarize(answers, self._agent.loop.time(), self.inspector.info.name)

    async def stacks(self, patience_s: float = 2.0) -> list[WorkerStack]:
        """Return the handlers, calls and tasks that wait on all workers that answer in time."""
        return await self._ask(("stack",), _decode_stack, patience_s)

    async def group_logs(
        self, level: str = "", search: str = "", limit: int = 200, worker: str = "", patience_s: float = 2.0
    ) -> list[WorkerLogs]:
        """Return the last log lines of all workers that answer in time, or of one worker."""
        return await self._ask(("logs", level, search, limit), _decode_logs, patience_s, worker)

    async def group_errors(self, worker: str = "", patience_s: float = 2.0) -> list[WorkerErrors]:
        """Return the handler failures of all workers that answer in time, or of one worker."""
        return await self._ask(("errors",), _decode_errors, patience_s, worker)

    async def group_history(self, worker: str = "", patience_s: float = 2.0) -> list[WorkerHistory]:
        """Return the last hour of all workers that answer in time, or of one worker."""
        return await self._ask(("history",), _decode_history, patience_s, worker)

    async def _ask(
        self, question: tuple[Any, ...], decode: Callable[[bytes], T], patience_s: float, worker: str = ""
    ) -> list[T]:
        view = GroupView(self._agent, question, decode, self._meet, only=worker)
        try:
            answers = await view.refresh(patience_s)
            return [answer.value for _, answer in sorted(answers.items()) if answer.value is not None]
        finally:
            self._other_questions += view.questions_asked
            view.close()

    async def trace(self, seconds: float, form: str = "json") -> bytes:
        """Record all workers for some seconds, as ``json`` for Perfetto or as a page of ``html``.

        Raises `OverloadedError` while another trace is recorded.
        """
        if self.record_trace is None:
            raise UnsupportedError(f"worker {self.inspector.info.name!r} cannot record: it has no profiler")
        if form not in TRACE_FORMS or not 0 < seconds <= MAX_TRACE_S:
            raise ConfigurationError(
                f"a trace is of at most {MAX_TRACE_S:g} s and one of {', '.join(TRACE_FORMS)}, "
                f"not {seconds!r} s of {form}"
            )
        if self._is_tracing:
            raise OverloadedError(f"worker {self.inspector.info.name!r} records a trace already: try again later")
        self._is_tracing = True
        try:
            return await self.record_trace(seconds, form)
        finally:
            self._is_tracing = False

    async def _meet(self) -> None:
        """Add the workers that have joined an elastic group."""
        now = self._agent.loop.time()
        if self._members is None or now - self._met_at < _MEET_S:
            return
        self._met_at = now
        try:
            async with asyncio.timeout(1.0):
                records = await self._members()
        except (RendezvousError, OSError, TimeoutError):
            return  # the known workers are enough
        for record in records:
            if not self._agent.is_closing:
                self._agent.add_peer(record)
