"""One trace of many workers, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.autograd.profiler_util import EventList

from arpc.private.torch import build_event_tree
from arpc.profiler import chrome, timeline
from arpc.profiler.clocks import HERE, Clock, narrow
from arpc.profiler.operators import Operator
from arpc.profiler.sessions import as_function_event
from arpc.profiler.spans import Span, WorkerRecord

__all__ = ["Arrow", "Trace", "build_trace"]


class Arrow(NamedTuple):
    """A call and its handler, on two workers or on one that called itself."""

    caller: str
    call: Span
    callee: str
    handler: Span


class Trace:
    """The work of a group of workers. Times count from the start of the trace, by the clock of the worker that made it.

    `clocks` has the offset of each worker's clock and its error: events on different workers cannot be ordered any more
    precisely than that.
    """

    def __init__(self, workers: list[WorkerRecord], clocks: Mapping[str, Clock], missing: Mapping[str, str]) -> None:
        self.workers = workers
        self.clocks = dict(clocks)
        self.missing = dict(missing)
        """The workers whose records could not be collected, with the reason."""

    @property
    def error_ns(self) -> int:
        """The largest error of a worker's clock."""
        return max((clock.error_ns for clock in self.clocks.values()), default=0)

    @property
    def duration_ns(self) -> int:
        return max((span.end_ns for worker in self.workers for span in worker.spans), default=0)

    def worker(self, name: str) -> WorkerRecord:
        """Return the record of one worker. Raises `KeyError` if there is none."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise KeyError(name)

    def spans(self, *, role: str | None = None, kind: str | None = None) -> Iterator[tuple[WorkerRecord, Span]]:
        """Yield all spans, or those of a role or kind, with their workers."""
        for worker in self.workers:
            for span in worker.spans:
                if role in {None, span.role} and kind in {None, span.kind}:
                    yield worker, span

    def arrows(self) -> list[Arrow]:
        """Return the calls with their handlers, as far as both are known."""
        handlers = {
            (span.peer, worker.name, span.call_id): span for worker, span in self.spans(role="handler") if span.call_id
        }
        found = []
        for worker, call in self.spans(role="call"):
            handler = handlers.get((worker.name, call.peer, call.call_id))
            if handler is not None:
                found.append(Arrow(worker.name, call, call.peer, handler))
        return found

    def operators(self) -> Iterator[tuple[WorkerRecord, Operator]]:
        """Yield all operators of torch, with the workers that ran them."""
        for worker in self.workers:
            for operator in worker.operators:
                yield worker, operator
            for span in worker.spans:
                for operator in span.operators:
                    yield worker, operator

    def events(self) -> EventList:
        """Return operators, calls and backward passes as events of torch's profiles, each with its ``node_id``."""
        events = [as_function_event(operator, 0, is_legacy=True) for _, operator in self.operators()]
        for worker, span in self.spans():
            if span.role == "handler":
                continue
            made = Operator(span.name, span.start_ns, span.end_ns, 0, worker.id, is_async=True)
            events.append(as_function_event(made, 0, is_legacy=True))
        made_list = EventList(events)  # type: ignore[no-untyped-call]
        build_event_tree(made_list)
        return made_list

    def key_averages(self, group_by_input_shape: bool = False) -> EventList:
        """Return total times, like ``torch.profiler.profile.key_averages``, separately for each worker."""
        averages: EventList = self.events().key_averages(group_by_input_shape)  # type: ignore[no-untyped-call]
        return averages

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""
        Path(path).write_bytes(msgspec.json.encode(self.as_chrome_trace()))

    def as_chrome_trace(self) -> dict[str, Any]:
        """Return the object that `export_chrome_trace` writes as JSON."""
        return chrome.chrome_trace(self)

    def export_html(self, path: str | Path, title: str = "arpc trace") -> None:
        """Write a self-contained page that any browser opens."""
        Path(path).write_text(self.as_html(title), encoding="utf-8")

    def as_html(self, title: str = "arpc trace") -> str:
        return timeline.html_page(self, title)


def build_trace(
    here: WorkerRecord,
    others: Iterable[WorkerRecord],
    clocks: Mapping[str, Clock],
    missing: Mapping[str, str],
    start_ns: int,
) -> Trace:
    """Join the records of workers into one trace, by the clock of ``here``, with times that count from ``start_ns``."""
    known: dict[str, Clock] = {here.name: HERE}
    aligned = [_moved(here, -start_ns)]
    for record in others:
        clock = known[record.name] = narrow(clocks[record.name], _pairs(here, record))
        aligned.append(_moved(record, -start_ns - clock.offset_ns))
    aligned.sort(key=lambda worker: worker.id)
    return Trace(aligned, known, missing)


def _pairs(here: WorkerRecord, there: WorkerRecord) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    calls = {span.call_id: span for span in here.spans if span.role == "call" and span.peer == there.name}
    for handler in there.spans:
        if handler.role == "handler" and handler.peer == here.name and handler.outcome == "ok":
            call = calls.get(handler.call_id)
            if call is not None and call.outcome == "ok":
                yield (call.start_ns, call.end_ns), (handler.accepted_ns, handler.end_ns)


def _moved(record: WorkerRecord, by_ns: int) -> WorkerRecord:
    return msgspec.structs.replace(
        record,
        spans=sorted((span.moved(by_ns) for span in record.spans), key=lambda span: (span.start_ns, -span.end_ns)),
        operators=[operator.moved(by_ns) for operator in record.operators],
    )
