"""Takes part in traces: those of this worker, and those of other workers whose requests bring a trace header."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.hooks.observers import Handling, Observer
from arpc.agent.peers.link import PeerWatcher
from arpc.agent.server.functions import InlineHandler
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
    """Inactive until a request brings the header of a trace."""

    key = TRACE

    def __init__(self) -> None:
        self.info = WorkerInfo("", -1)
        self.agent: Agent
        self.recorders: dict[int, TraceRecorder] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """The timers that end traces. A trace with a timer and no recorder is one that this worker has left."""
        self._ids = IdAllocator(0)

    def identify(self, info: WorkerInfo) -> None:
        """Set the name and the id that this worker has in its group."""
        self.info = info
        self._ids = IdAllocator(info.id)

    @property
    def handlers(self) -> dict[type[Message], Callable[..., Any]]:
        return {ProfilerControl: InlineHandler(self._on_control)}

    # -- traces

    def new_id(self) -> int:
        return self._ids.next_number()

    def join(self, header: TraceHeader) -> TraceRecorder | None:
        """Join a trace, unless joined already, and return its recorder; None for a trace that this worker has left.

        Requests of workers that have not left it yet may still arrive.
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
        """Leave a trace, and return its recorder; None if this worker takes no part in it."""
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
        """Send an order to the tracer of a worker, and return its reply."""
        return await self.agent.request(ProfilerControl, worker, order, timeout_s)

    async def collect(self, worker: str, trace_id: int, *, timeout_s: float) -> WorkerRecord | None:
        """End a worker's part of a trace and return its record; None if it has none."""
        record = await self.ask(worker, COLLECT, trace_id, timeout_s=timeout_s)
        return None if record is None else WorkerRecord.unpacked(record)

    # -- as a standby observer

    def handler_begins(self, handling: Handling) -> OperatorRecorder | None:
        """Join each trace of which this is the first request here. Later requests are observed by its recorder."""
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

    # -- called by the agent

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        """Leave the traces that the peer makes: their records will never be collected."""
        for trace_id, recorder in list(self.recorders.items()):
            if recorder.header.origin == peer.name:
                self.leave(trace_id)

    # -- the end

    def close(self) -> None:
        for trace_id in list(self.recorders):
            self.leave(trace_id)
        for timer in self._timers.values():
            timer.cancel()
