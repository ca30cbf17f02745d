"""A trace as one self-contained page of HTML."""

from __future__ import annotations

import html
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from arpc.profiler.lanes import Drawn, lanes_of
from arpc.profiler.spans import Span

if TYPE_CHECKING:
    from arpc.profiler.trace import Trace

__all__ = ["html_page"]

_OPERATOR = "operator"


def html_page(trace: Trace, title: str) -> str:
    """Return the page: the trace as data in `timeline.html` beside this module, which draws it."""
    data = msgspec.json.encode(_page_data(trace)).decode()
    # a name in the trace must not end the script element that contains it
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = resources.files("arpc.profiler").joinpath("timeline.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)


def _page_data(trace: Trace) -> dict[str, Any]:
    names: dict[str, int] = {}
    bars: list[list[Any]] = []
    workers: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    for worker in trace.workers:
        lanes = []
        for lane in lanes_of(worker):
            lanes.append({"title": lane.title, "first": len(bars), "count": len(lane.bars)})
            for bar in lane.bars:
                places[id(bar.drawn)] = len(bars)
                bars.append(_bar(bar.drawn, bar.depth, names))
        clock = trace.clocks[worker.name]
        workers.append(
            {
                "name": worker.name,
                "process": worker.process,
                "host": worker.host,
                "errorUs": clock.error_ns / 1000,
                "dropped": worker.dropped,
                "lanes": lanes,
            }
        )
    return {
        "workers": workers,
        "names": list(names),
        "bars": bars,
        "arrows": [[places[id(arrow.call)], places[id(arrow.handler)]] for arrow in trace.arrows()],
        "missing": trace.missing,
    }


def _bar(drawn: Drawn, depth: int, names: dict[str, int]) -> list[Any]:
    """Return index of the name, category, depth, beginning and length in microseconds, and details or None."""
    name = names.setdefault(drawn.name, len(names))
    start_us, length_us = drawn.start_ns / 1000, (drawn.end_ns - drawn.start_ns) / 1000
    if not isinstance(drawn, Span):
        return [name, _OPERATOR, depth, start_us, length_us, {"shapes": drawn.shapes} if drawn.shapes else None]
    category = drawn.kind if drawn.role != "handler" else "handler"
    details: dict[str, Any] = {"role": drawn.role, "kind": drawn.kind}
    if drawn.peer:
        details |= {
            "peer": drawn.peer,
            "outcome": drawn.outcome,
            "sent": drawn.sent_bytes,
            "received": drawn.received_bytes,
        }
    if drawn.accepted_ns:
        details["waitedUs"] = (drawn.start_ns - drawn.accepted_ns) / 1000
    return [name, category, depth, start_us, length_us, details]
