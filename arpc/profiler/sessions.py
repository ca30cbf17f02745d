"""Profiles of torch that are on: the contexts that they belong to, and the events that calls add to them.

Torch has no callback for the beginning or end of a profile. So the first worker of a process wraps the methods that
begin and end one, of both of torch's classes: the kineto one behind ``torch.profiler.profile`` and
``torch.autograd.profiler.profile``, and the legacy one. A profile belongs to the context in which it began: tasks and
threads that inherit the context are part of it, other tasks on the same loop are not.
"""

from __future__ import annotations

import functools
import time
from contextvars import ContextVar
from typing import Any, Final

from torch.autograd import profiler as kineto
from torch.autograd import profiler_legacy as legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from arpc.agent.scope import current_scope
from arpc.private.torch import build_event_tree
from arpc.profiler.keys import REMOTE_OP
from arpc.profiler.operators import Operator, RecorderConfig, pause_on_thread, resume_on_thread

__all__ = ["Session", "as_function_event", "current_session", "listen_to_torch", "open_sessions"]

_now = time.perf_counter_ns
_CLOCK: Final = "arpc::clock"
_CLOCK_READINGS: Final = 3
_ATTRIBUTE: Final = "_arpc_session"
_MARK: Final = "_arpc_wraps"
_NO_NODE: Final = -1


class Session:
    """One profile, as far as calls are concerned. Times of operators are by the clock of this process."""

    def __init__(self, config: RecorderConfig, *, is_kineto: bool = False) -> None:
        self.config = config
        self.is_kineto = is_kineto
        scope = current_scope.get()
        self.node_id: int = scope.worker.info.id if scope is not None and scope.worker is not None else _NO_NODE
        """The id of the worker of the context in which it began; -1 if there was none."""
        self.operators: list[Operator] = []
        """Spans of calls, and the operators that they ran on other workers."""
        self.is_open = False
        self.started_ns = _now()
        self.started_at_ns = time.time_ns()
        self.readings: list[tuple[int, int]] = []
        """For each mark `_CLOCK` in the profile, the times before and after it was made."""
        self._outer: Session | None = None

    def open(self) -> None:
        """Record the calls that are made in this context from now on."""
        self.is_open = True
        open_sessions.append(self)
        self._outer = current_session.get()
        current_session.set(self)

    def close(self) -> None:
        """Record no more calls."""
        if self.is_open:
            self.is_open = False
            open_sessions.remove(self)
            if current_session.get() is self:  # a profile may end in another context than it began in
                current_session.set(self._outer)
            self._outer = None


# Torch's profiles belong to the process, and so does their list; each call checks whether it is empty
open_sessions: list[Session] = []
current_session: ContextVar[Session | None] = ContextVar("arpc.profiler.session", default=None)


def as_function_event(operator: Operator, origin_ns: int, *, is_legacy: bool) -> FunctionEvent:
    """Convert an operator to an event of torch's profiles, in microseconds since ``origin_ns``."""
    name = operator.name
    return FunctionEvent(  # type: ignore[no-untyped-call]
        id=operator.handle,
        node_id=operator.node_id,
        name=name,
        trace_name=name,
        thread=operator.thread,
        start_us=(operator.start_ns - origin_ns) / 1000,
        end_us=(operator.end_ns - origin_ns) / 1000,
        fwd_thread=operator.fwd_thread,
        input_shapes=operator.shapes,
        stack=[],
        scope=operator.scope,
        cpu_memory_usage=operator.memory_bytes,
        is_async=operator.is_async,
        is_remote=REMOTE_OP in name,
        sequence_nr=operator.sequence_nr,
        is_legacy=is_legacy,
        flops=operator.flops,
    )


def _merge(events: list[FunctionEvent], session: Session, origin_ns: int, *, is_legacy: bool) -> None:
    for event in events:
        if event.node_id == _NO_NODE:
            # torch has one id for a whole process, which may have several workers
            event.node_id = session.node_id
    operators = [as_function_event(operator, origin_ns, is_legacy=is_legacy) for operator in session.operators]
    added = EventList(operators)  # type: ignore[no-untyped-call]
    # a tree of its own: remote operators are no children of local events
    build_event_tree(added)
    events.extend(added)
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _begin(profile: Any, *, is_kineto: bool) -> Session:
    config = RecorderConfig(bool(profile.record_shapes), bool(profile.profile_memory), bool(profile.with_flops))
    session = Session(config, is_kineto=is_kineto)
    setattr(profile, _ATTRIBUTE, session)
    session.open()
    return session


def _read_clock(session: Session) -> None:
    before_ns = _now()
    with kineto.record_function(_CLOCK):
        pass
    session.readings.append((before_ns, _now()))


def _legacy_origin(session: Session, events: list[FunctionEvent]) -> int:
    """Return the time at which the profile began, by the marks in it, and remove the marks."""
    marks = [event for event in events if event.name == _CLOCK]
    events[:] = [event for event in events if event.name != _CLOCK]
    if len(marks) != len(session.readings):
        return session.started_ns
    best = min(range(len(marks)), key=lambda place: session.readings[place][1] - session.readings[place][0])
    before_ns, after_ns = session.readings[best]
    middle_us = (marks[best].time_range.start + marks[best].time_range.end) / 2
    return (before_ns + after_ns) // 2 - int(middle_us * 1000)


def _start_kineto(start: Any, profile: Any) -> None:
    pause_on_thread()
    start(profile)
    _begin(profile, is_kineto=True)


def _start_legacy(start: Any, profile: Any) -> None:
    pause_on_thread()
    start(profile)
    session = _begin(profile, is_kineto=False)
    for _ in range(_CLOCK_READINGS):
        _read_clock(session)


def _exit_kineto(leave: Any, profile: Any, *exception: Any) -> Any:
    session: Session | None = getattr(profile, _ATTRIBUTE, None)
    if session is not None:
        session.close()
    try:
        return leave(profile, *exception)
    finally:
        resume_on_thread()


def _exit_legacy(leave: Any, profile: Any, *exception: Any) -> Any:
    session: Session | None = getattr(profile, _ATTRIBUTE, None)
    was_open = session is not None and session.is_open
    if session is not None:
        session.close()
    try:
        result = leave(profile, *exception)
    finally:
        resume_on_thread()
    if session is not None and was_open and profile.function_events is not None:
        _merge(profile.function_events, session, _legacy_origin(session, profile.function_events), is_legacy=True)
    return result


def _parse_kineto(parse: Any, profile: Any, result: Any, **options: Any) -> Any:
    events = parse(profile, result, **options)
    session: Session | None = getattr(profile, _ATTRIBUTE, None)
    if session is not None:
        origin_ns = session.started_ns + result.trace_start_ns() - session.started_at_ns
        _merge(events, session, origin_ns, is_legacy=False)
    return events


def listen_to_torch() -> None:
    """Wrap torch's profilers, to track the profiles that begin from now on. A second call has no effect."""
    _wrap(kineto.profile, "_start_trace", _start_kineto)
    _wrap(kineto.profile, "__exit__", _exit_kineto)
    _wrap(kineto.profile, "_parse_kineto_results", _parse_kineto)
    _wrap(legacy.profile, "_start_trace", _start_legacy)
    _wrap(legacy.profile, "__exit__", _exit_legacy)


def _wrap(owner: type, name: str, around: Any) -> None:
    method = getattr(owner, name)
    if hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
