"""What overlaps without one being inside the other is drawn in lanes of their own."""

from __future__ import annotations

from arpc.profiler import Operator, Span, WorkerRecord
from arpc.profiler.lanes import lanes_of


def operator(name: str, start: int, end: int) -> Operator:
    return Operator(name, start, end, thread=1, node_id=0)


def span(role: str, name: str, start: int, end: int, operators: tuple[Operator, ...] = ()) -> Span:
    return Span(role, "call", name, start, end, number=1, operators=list(operators))


def worker(*spans: Span, operators: tuple[Operator, ...] = ()) -> WorkerRecord:
    return WorkerRecord("w", 0, 1, "host", list(spans), list(operators), [])


def drawn(record: WorkerRecord) -> dict[str, list[tuple[str, int]]]:
    return {lane.title: [(bar.drawn.name, bar.depth) for bar in lane.bars] for lane in lanes_of(record)}


def test_those_that_overlap_are_apart() -> None:
    record = worker(span("call", "a", 0, 10), span("call", "b", 5, 15), span("call", "c", 10, 20))
    assert drawn(record) == {"calls 1": [("a", 0), ("c", 0)], "calls 2": [("b", 0)]}


def test_operators_are_below_what_ran_them() -> None:
    ran = (operator("outer", 1, 9), operator("inner", 2, 4), operator("next", 9, 10))
    assert drawn(worker(span("handler", "h", 0, 10, ran))) == {
        "handlers": [("h", 0), ("outer", 1), ("inner", 2), ("next", 1)]
    }


def test_operators_of_threads_that_overlap() -> None:
    ran = (operator("one", 1, 5), operator("other", 3, 8))
    assert drawn(worker(span("handler", "h", 0, 10, ran))) == {
        "handlers": [("h", 0), ("one", 1)],
        "threads": [("other", 0)],
    }


def test_a_workers_own_code() -> None:
    record = worker(span("activity", "backward", 0, 5), operators=(operator("mine", 0, 1),))
    assert drawn(record) == {"main": [("mine", 0)], "backward": [("backward", 0)]}
