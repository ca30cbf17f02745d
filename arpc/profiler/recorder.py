"""Records the calls, handlers and activities of one worker for a trace."""

from __future__ import annotations

import os
import socket
import time
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, NamedTuple

from arpc.agent.hooks.observers import Activity, Handling, Kind, Observer, Outgoing
from arpc.ids import WorkerInfo
from arpc.profiler.keys import call_key
from arpc.profiler.operators import Operator, OperatorRecorder, RecorderConfig, is_recording_thread, recorder_of
from arpc.profiler.spans import Span, WorkerRecord
from arpc.torchstate import current_steps

__all__ = ["TRACE", "TraceHeader", "TraceRecorder"]

TRACE: Final = "trace"
"""The key of a trace's headers in requests."""
_HANDLER_NAMES: Final = {Kind.FETCH: "to_here", Kind.BACKWARD: "gradients"}
_MAX_SPANS: Final = 100_000
_MAX_OPERATORS: Final = 500_000
_parent: ContextVar[int] = ContextVar("arpc.profiler.parent", default=0)


class TraceHeader(NamedTuple):
    """The description of a trace in a request, so that its receiver joins the trace."""

    trace_id: int
    origin: str
    """The worker that makes the trace."""
    left_s: float
    """The seconds after which every worker stops recording the trace by itself."""
    config: RecorderConfig
    has_operators: bool = True


class _Open(NamedTuple):
    number: int
    parent: int
    recorder: OperatorRecorder | None
    operators: list[Operator]


class TraceRecorder(Observer):
    """One worker's part of one trace."""

    key = TRACE

    def __init__(self, info: WorkerInfo, header: TraceHeader) -> None:
        self.info = info
        self.header = header
        self.touched: set[str] = set()
        self.spans: list[Span] = []
        self.operators: list[Operator] = []
        self.dropped = 0
        self._operators_kept = 0
        self._ends_at = time.monotonic() + header.left_s
        self._numbers = count(1)
        self._calls: dict[Outgoing, tuple[int, int]] = {}
        self._handlers: dict[Handling, _Open] = {}
        self._activities: dict[Activity, _Open] = {}
        self._own: OperatorRecorder | None = None
        self._own_token: Any = None

    # -- the worker's own code, and the result

    def begin_own(self) -> None:
        """Also record operators of this thread outside of handlers. No effect in the middle of a recorded handler."""
        if self.header.has_operators and not is_recording_thread():
            self._own = OperatorRecorder(self.info.id)
            self.operators = self._own.subscribe(self.header.config)
            self._own_token = self._own.enter()
            if current_steps.get() is None:
                current_steps.set(self._own)  # for the threads that the block uses

    def end_own(self) -> None:
        if self._own is not None:
            self._own.leave(self._own_token)
            self._own.close()
            if current_steps.get() is self._own:
                current_steps.set(None)
            self._own = None

    def record(self) -> WorkerRecord:
        """Return everything recorded so far, including calls and handlers that have not ended."""
        now = time.perf_counter_ns()
        for request, (number, parent) in self._calls.items():
            self._add_call(request, number, parent, now, "under way")
        for handling, opened in self._handlers.items():
            if opened.recorder is not None:
                opened.recorder.collect()
            self._add_handler(handling, opened, now, "under way")
        for activity, opened in self._activities.items():
            if opened.recorder is not None:
                opened.recorder.collect()
            self._add_activity(activity, opened, now)
        self._calls, self._handlers, self._activities = {}, {}, {}
        host = socket.gethostname()
        return WorkerRecord(
            self.info.name,
            self.info.id,
            os.getpid(),
            host,
            self.spans,
            self.operators,
            sorted(self.touched),
            self.dropped,
        )

    def _add(self, span: Span) -> None:
        if len(self.spans) < _MAX_SPANS:
            self.spans.append(span)
            self._operators_kept += len(span.operators)
        else:
            self.dropped += 1

    # -- calls

    def request_begins(self, request: Outgoing) -> None:
        if request.kind is Kind.CONTROL:
            return
        if self.header.left_s:
            left = self._ends_at - time.monotonic()
            sent = self.header._replace(left_s=max(0.001, left))
            request.headers.setdefault(TRACE, []).append(sent)
            self.touched.add(request.peer.name)
        self._calls[request] = next(self._numbers), _parent.get()

    def request_ends(self, request: Outgoing) -> None:
        if (begun := self._calls.pop(request, None)) is not None:
            number, parent = begun
            outcome = request.outcome.value if request.outcome is not None else ""
            self._add_call(request, number, parent, request.ended_ns, outcome)

    def _add_call(self, request: Outgoing, number: int, parent: int, end_ns: int, outcome: str) -> None:
        self._add(
            Span(
                role="call",
                kind=request.kind.value,
                name=call_key(request, self.info.name),
                start_ns=request.began_ns,
                end_ns=end_ns,
                number=number,
                parent=parent,
                peer=request.peer.name,
                call_id=request.id,
                outcome=outcome,
                sent_bytes=request.sent_bytes,
                received_bytes=request.received_bytes,
            )
        )

    # -- handlers

    def handler_begins(self, handling: Handling) -> OperatorRecorder | None:
        if handling.kind is Kind.CONTROL or handling in self._handlers:
            return None
        number = next(self._numbers)
        # operators of a backward pass belong to its activity, which lasts longer than its single requests
        opened = self._opened(
            number, recorder_of(handling, self.info.id) if handling.kind is not Kind.BACKWARD else None
        )
        self._handlers[handling] = opened
        _parent.set(number)
        return opened.recorder

    def _opened(self, number: int, recorder: OperatorRecorder | None) -> _Open:
        if recorder is None or not self.header.has_operators or self._operators_kept > _MAX_OPERATORS:
            return _Open(number, _parent.get(), None, [])
        return _Open(number, _parent.get(), recorder, recorder.subscribe(self.header.config))

    def handler_ends(self, handling: Handling) -> None:
        opened = self._handlers.pop(handling, None)
        if opened is None:
            return
        if opened.recorder is not None:
            opened.recorder.close()
        outcome = handling.outcome.value if handling.outcome is not None else ""
        self._add_handler(handling, opened, handling.ended_ns, outcome)

    def _add_handler(self, handling: Handling, opened: _Open, end_ns: int, outcome: str) -> None:
        self._add(
            Span(
                role="handler",
                kind=handling.kind.value,
                name=_HANDLER_NAMES.get(handling.kind, handling.function),
                start_ns=handling.began_ns or handling.accepted_ns,
                end_ns=end_ns,
                number=opened.number,
                peer=handling.peer.name,
                call_id=handling.id,
                accepted_ns=handling.accepted_ns,
                outcome=outcome,
                sent_bytes=handling.sent_bytes,
                received_bytes=handling.received_bytes,
                operators=opened.operators,
            )
        )

    # -- activities

    def activity_begins(self, activity: Activity) -> OperatorRecorder | None:
        opened = self._opened(next(self._numbers), OperatorRecorder(self.info.id))
        self._activities[activity] = opened
        return opened.recorder

    def activity_ends(self, activity: Activity) -> None:
        opened = self._activities.pop(activity, None)
        if opened is None:
            return
        if opened.recorder is not None:
            opened.recorder.close()
        self._add_activity(activity, opened, activity.ended_ns)

    def _add_activity(self, activity: Activity, opened: _Open, end_ns: int) -> None:
        self._add(
            Span(
                role="activity",
                kind=activity.kind.value,
                name=activity.name,
                start_ns=activity.began_ns,
                end_ns=end_ns,
                number=opened.number,
                parent=opened.parent,
                operators=opened.operators,
            )
        )
