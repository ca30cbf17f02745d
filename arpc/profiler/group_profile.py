"""`profile`: one trace of all workers that the calls of a block reach."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from arpc.agent.scope import WorkerScope, current_scope
from arpc.errors import CallError, ProfilerError, ShutdownError, UnknownWorkerError
from arpc.profiler.clocks import Clock, measure_clock
from arpc.profiler.keys import function_name
from arpc.profiler.operators import RecorderConfig
from arpc.profiler.recorder import TraceHeader, TraceRecorder
from arpc.profiler.service import current
from arpc.profiler.spans import WorkerRecord
from arpc.profiler.trace import Trace, build_trace
from arpc.profiler.tracer import START, TIME, Tracer

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList

__all__ = ["profile", "record_group"]

_COLLECT_S: Final = 10.0
"""How long a worker may take to send its record."""
_LONGEST_S: Final = 600.0


class profile:  # noqa: N801 - used like a function, as torch's own
    """``async with arpc.profiler.profile() as prof:`` records all workers that the calls of the block reach.

    ::

        async with arpc.profiler.profile() as prof:
            await arpc.rpc_sync("worker1", torch.mul, args=(a, b))
        print(prof.key_averages().table(sort_by="cpu_time_total"))
        prof.export_chrome_trace("trace.json")
        prof.export_html("trace.html")

    This worker takes part from the start, and each other worker from the first call that reaches it, directly or
    through other workers. Each records everything that it does until the block ends. ``operators=False`` leaves out
    torch's operators. With ``everyone=True`` all workers that this one knows take part from the start. After
    ``longest_s`` seconds the workers stop recording by themselves, in case this worker is lost.
    """

    def __init__(
        self,
        *,
        operators: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = False,
        everyone: bool = False,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._config = RecorderConfig(record_shapes, profile_memory)
        self._has_operators = operators
        self._everyone = everyone
        self._longest_s = longest_s
        self._tracer: Tracer | None = None
        self._recorder: TraceRecorder | None = None
        self._start_ns = 0
        self._trace: Trace | None = None

    # -- the block

    if not TYPE_CHECKING:  # a type checker reports these mistakes itself

        def __enter__(self) -> NoReturn:
            raise TypeError("it takes other workers to begin and to end it: use `async with arpc.profiler.profile()`")

        def __exit__(self, *_: object) -> None:
            pass  # Python looks it up before it calls __enter__

    async def __aenter__(self) -> Self:
        if self._tracer is not None:
            raise ProfilerError("this profile has been used already: make another one for each block")
        tracer = current().tracer
        tracer.agent.check_loop()
        self._tracer = tracer
        header = TraceHeader(
            tracer.new_id(), tracer.info.name, self._longest_s, self._config, has_operators=self._has_operators
        )
        function_name(len)  # the first call is slow, and must not be part of the trace
        self._start_ns = time.perf_counter_ns()
        self._recorder = recorder = tracer.join(header)
        assert recorder is not None  # this worker cannot have left a new trace
        if self._everyone:
            names = [peer.info.name for peer in tracer.agent.peers if peer.info.name != tracer.info.name]
            orders = [tracer.ask(name, START, header, timeout_s=_COLLECT_S) for name in names]
            recorder.touched.update(names)
            try:
                await asyncio.gather(*orders, return_exceptions=True)  # workers that do not answer will be `missing`
            except BaseException:
                tracer.leave(header.trace_id)  # the block, whose end would do this, is not entered
                raise
        recorder.begin_own()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tracer, recorder = self._tracer, self._recorder
        assert tracer is not None
        assert recorder is not None
        tracer.leave(recorder.header.trace_id)
        here = recorder.record()
        others, clocks, missing = await _collect(tracer, here, recorder.header.trace_id)
        self._trace = build_trace(here, others, clocks, missing, self._start_ns)

    # -- the trace

    @property
    def trace(self) -> Trace:
        """The recorded trace; raises `ProfilerError` before the end of the block."""
        if self._trace is None:
            raise ProfilerError("the profile is not finished: look at it after its block")
        return self._trace

    @property
    def missing(self) -> dict[str, str]:
        """The workers whose records could not be collected, with the reason."""
        return self.trace.missing

    def events(self) -> EventList:
        """See `Trace.events`."""
        return self.trace.events()

    def key_averages(self, group_by_input_shape: bool = False) -> EventList:
        """Return total times, like ``torch.profiler.profile.key_averages``, separately for each worker."""
        return self.trace.key_averages(group_by_input_shape)

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""
        self.trace.export_chrome_trace(path)

    def export_html(self, path: str | Path, title: str = "arpc trace") -> None:
        """Write a self-contained page that any browser opens."""
        self.trace.export_html(path, title)


async def _collect(
    tracer: Tracer, here: WorkerRecord, trace_id: int
) -> tuple[list[WorkerRecord], dict[str, Clock], dict[str, str]]:
    """Collect the records of all workers that this one reached, and of all that those reached in turn."""
    records: dict[str, WorkerRecord] = {}
    clocks: dict[str, Clock] = {}
    missing: dict[str, str] = {}
    asked = {here.name}
    ahead = set(here.touched) - asked

    async def ask(name: str) -> None:
        try:
            record = await tracer.collect(name, trace_id, timeout_s=_COLLECT_S)
            if record is None:
                missing[name] = "it has no part of this trace: nothing reached it, or it has stopped recording since"
            else:
                clocks[name] = await measure_clock(lambda: tracer.ask(name, TIME, timeout_s=_COLLECT_S))
                records[name] = record
        except (CallError, ShutdownError, UnknownWorkerError) as error:
            missing[name] = str(error)

    while ahead:
        asked |= ahead
        await asyncio.gather(*(ask(name) for name in ahead))
        ahead = {name for record in records.values() for name in record.touched} - asked
    return list(records.values()), clocks, missing


async def record_group(worker: Any, seconds: float, *, operators: bool = True) -> Trace:
    """Record all workers that ``worker`` knows for some seconds, in one trace.

    This is for tools: the observed program needs no change.
    """

    async def record() -> Trace:
        current_scope.set(WorkerScope(worker))
        recording = profile(operators=operators, everyone=True, longest_s=seconds + 3 * _COLLECT_S)
        async with recording:
            await asyncio.sleep(seconds)
        return recording.trace

    return await asyncio.create_task(record())
