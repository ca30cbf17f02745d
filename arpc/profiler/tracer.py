"""Takes part in traces: of this worker's own, and of others whose requests say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.hooks.observers import Handling, Observer
from arpc.agent.peers.link import PeerWatcher
from arpc.agent.server.functions import Prompt
from arpc.errors import ProfilerError
from arpc.ids import IdAllocator, WorkerInfo
from arpc.log import get_logger
from arpc.profiler.operators import OperatorRecorder
from arpc.profiler.recorder import TRACE, TraceHeader, TraceRecorder
from arpc.profiler.spans import WorkerRecord
from arpc.wire.messages import Message, ProfilerControl

__all__ = ["COLLECT", "START", "TIME", "Tracer"]

logger = get_logger("arpc.profiler")

START: Final = "start"
TIME: Final = "time"
COLLECT: Final = "collect"


class Tracer(Observer, PeerWatcher):
    """Stands by until a request brings the header of a trace."""

    key = TRACE

    def __init__(self) -> None:
        self.info = WorkerInfo("", -1)
        self.agent: Agent
        self.recorders: dict[int, TraceRecorder] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Until the time of a trace is over. One that has a timer and no recorder was left before."""
        self._ids = IdAllocator(0)

    def identify(self, info: WorkerInfo) -> None:
        """The group has given this worker its id."""
        self.info = info
        self._ids = IdAllocator(info.id)

    @property
    def handlers(self) -> dict[type[Message], Callable[..., Any]]:
        return {ProfilerControl: Prompt(self._on_control)}

    # -- traces

    def new_id(self) -> int:
        return self._ids.next_number()

    def join(self, header: TraceHeader) -> TraceRecorder | None:
        """Take part in a trace from now on, if this worker does not yet. None for a trace that it has left.

        Requests of other workers that still take part in it may arrive after that.
        """
        trace_id = header.trace_id
        recorder = self.recorders.get(trace_id)
        if recorder is None and trace_id not in self._timers:
            recorder = self.recorders[trace_id] = TraceRecorder(self.info, header)
            self.agent.observe(recorder)
            self._timers[trace_id] = self.agent.loop.call_later(header.left_s, self._expire, trace_id)
        return recorder

    def _expire(self, trace_id: int) -> None:
        self.leave(trace_id)
        self._timers.pop(trace_id, None)

    def leave(self, trace_id: int) -> TraceRecorder | None:
        """Take no part in a trace any more."""
        recorder = self.recorders.pop(trace_id, None)
        if recorder is not None:
            self.agent.unobserve(recorder)
            recorder.end_own()
        return recorder

    def _on_control(self, command: str, *arguments: Any) -> Any:
        if command == TIME:
            return time.perf_counter_ns()
        if command == START:
            self.join(msgspec.convert(arguments[0], TraceHeader))
            return None
        if command == COLLECT:
            recorder = self.leave(arguments[0])
            return None if recorder is None else recorder.record().packed()
        raise ProfilerError(f"worker {self.info.name!r} knows no such order to its profiler: {command!r}")

    async def ask(self, worker: str, *order: Any, timeout_s: float) -> Any:
        """Let the tracer of a worker do something."""
        return await self.agent.request(ProfilerControl, worker, order, timeout_s)

    async def collect(self, worker: str, trace_id: int, *, timeout_s: float) -> WorkerRecord | None:
        """End a worker's part of a trace and get it; None if it has none."""
        record = await self.ask(worker, COLLECT, trace_id, timeout_s=timeout_s)
        return None if record is None else WorkerRecord.unpacked(record)

    # -- as an observer that stands by

    def handler_begins(self, handling: Handling) -> OperatorRecorder | None:
        """The first request of a trace that this worker did not know. Those after it are heard by its recorder."""
        steps: OperatorRecorder | None = None
        try:
            headers = msgspec.convert(handling.headers[TRACE], list[TraceHeader])
        except msgspec.ValidationError as error:
            logger.warning("worker %s asks for a malformed trace: %s", handling.peer.name, error)
            return None
        for header in headers:
            recorder = self.join(header)
            if recorder is not None and recorder not in handling.observers:
                handling.observers += (recorder,)
                steps = recorder.handler_begins(handling) or steps
        return steps

    # -- told by the agent

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """Who makes a trace is gone: nobody will ever ask for it."""
        for trace_id, recorder in list(self.recorders.items()):
            if recorder.header.origin == peer.name:
                self.leave(trace_id)

    # -- the end

    def close(self) -> None:
        for trace_id in list(self.recorders):
            self.leave(trace_id)
        for timer in self._timers.values():
            timer.cancel()
