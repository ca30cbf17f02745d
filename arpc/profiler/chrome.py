"""Traces in the format of chrome://tracing, which Perfetto reads too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arpc.profiler.lanes import Drawn, lanes_of
from arpc.profiler.spans import Span, WorkerRecord

if TYPE_CHECKING:
    from arpc.profiler.trace import Trace

__all__ = ["chrome_trace"]


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return the trace: a process for each worker, a thread for each lane, arrows from call to handler and back."""
    events: list[dict[str, Any]] = []
    places: dict[int, tuple[int, int]] = {}
    for worker in trace.workers:
        events += _worker_events(worker, places)
    for number, arrow in enumerate(trace.arrows()):
        call, handler = places[id(arrow.call)], places[id(arrow.handler)]
        events += _flow("request", 2 * number, call, arrow.call.start_ns, handler, arrow.handler.start_ns)
        events += _flow("reply", 2 * number + 1, handler, arrow.handler.end_ns, call, arrow.call.end_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock_error_us": {name: clock.error_ns / 1000 for name, clock in trace.clocks.items()},
            "missing": trace.missing,
        },
    }


def _worker_events(worker: WorkerRecord, places: dict[int, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", worker.id, 0, {"name": f"{worker.name} (process {worker.process} on {worker.host})"})
    yield _meta("process_sort_index", worker.id, 0, {"sort_index": worker.id})
    for number, lane in enumerate(lanes_of(worker), 1):
        yield _meta("thread_name", worker.id, number, {"name": lane.title})
        yield _meta("thread_sort_index", worker.id, number, {"sort_index": number})
        for bar in lane.bars:
            places[id(bar.drawn)] = worker.id, number
            yield _slice(bar.drawn, worker.id, number)


def _meta(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _slice(drawn: Drawn, process: int, thread: int) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": drawn.name,
        "pid": process,
        "tid": thread,
        "ts": drawn.start_ns / 1000,
        "dur": (drawn.end_ns - drawn.start_ns) / 1000,
    }
    if isinstance(drawn, Span):
        event["cat"] = f"{drawn.role},{drawn.kind}"
        event["args"] = _arguments(drawn)
    else:
        event["cat"] = "operator"
        if drawn.shapes:
            event["args"] = {"input shapes": drawn.shapes}
    return event


def _arguments(span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"kind": span.kind}
    if span.peer:
        arguments |= {
            "to" if span.role == "call" else "from": span.peer,
            "outcome": span.outcome,
            "bytes sent": span.sent_bytes,
            "bytes received": span.received_bytes,
        }
    if span.role == "handler":
        arguments["waited (us)"] = (span.start_ns - span.accepted_ns) / 1000
    return arguments


def _flow(
    name: str, number: int, begin: tuple[int, int], begin_ns: int, end: tuple[int, int], end_ns: int
) -> Iterator[dict[str, Any]]:
    common = {"name": name, "cat": "rpc", "id": number}
    yield {**common, "ph": "s", "pid": begin[0], "tid": begin[1], "ts": begin_ns / 1000}
    yield {**common, "ph": "f", "bp": "e", "pid": end[0], "tid": end[1], "ts": end_ns / 1000}
