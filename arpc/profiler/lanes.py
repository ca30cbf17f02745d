"""The lanes in which spans are drawn: spans that overlap without one being inside the other need separate lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from arpc.profiler.operators import Operator
from arpc.profiler.spans import Span, WorkerRecord

__all__ = ["Bar", "Lane", "lanes_of"]

Drawn: TypeAlias = Span | Operator


class Bar(NamedTuple):
    """A span or operator drawn in a lane, ``depth`` levels below its top."""

    drawn: Drawn
    depth: int


class Lane(NamedTuple):
    """A row of bars that are beside or inside each other."""

    title: str
    bars: list[Bar]


class _Block(NamedTuple):
    """Bars that stay together in one lane: a span with the operators that it ran."""

    start_ns: int
    end_ns: int
    bars: list[Bar]


def lanes_of(worker: WorkerRecord) -> list[Lane]:
    """Return the lanes of one worker: its own code, its calls, its handlers, its backward passes, other threads."""
    lanes: list[Lane] = []
    own, overflow = _nested(worker.operators)
    if own:
        lanes.append(Lane("main", own))
    groups: dict[str, list[_Block]] = {"calls": [], "handlers": [], "backward": []}
    stray: list[_Block] = [_Block(op.start_ns, op.end_ns, [Bar(op, 0)]) for op in overflow]
    for span in worker.spans:
        inside, outside = _nested(span.operators, span)
        group = {"call": "calls", "handler": "handlers"}.get(span.role, "backward")
        groups[group].append(_Block(span.start_ns, span.end_ns, [Bar(span, 0), *inside]))
        stray += [_Block(op.start_ns, op.end_ns, [Bar(op, 0)]) for op in outside]
    for title, blocks in (*groups.items(), ("threads", stray)):
        packed = _packed(blocks)
        for number, bars in enumerate(packed, 1):
            lanes.append(Lane(title if len(packed) == 1 else f"{title} {number}", bars))
    return lanes


def _nested(operators: Iterable[Operator], within: Span | None = None) -> tuple[list[Bar], list[Operator]]:
    """Return the operators that are beside or inside each other, as bars, and the rest."""
    bars: list[Bar] = []
    others: list[Operator] = []
    open_ends: list[int] = []
    base = 0 if within is None else 1
    for operator in sorted(operators, key=lambda operator: (operator.start_ns, -operator.end_ns)):
        if within is not None and not (within.start_ns <= operator.start_ns <= operator.end_ns <= within.end_ns):
            others.append(operator)
            continue
        while open_ends and open_ends[-1] <= operator.start_ns:
            open_ends.pop()
        if open_ends and operator.end_ns > open_ends[-1]:
            others.append(operator)
            continue
        bars.append(Bar(operator, base + len(open_ends)))
        open_ends.append(operator.end_ns)
    return bars, others


def _packed(blocks: Sequence[_Block]) -> list[list[Bar]]:
    """Distribute blocks over as few lanes as possible, each in the order of time."""
    lanes: list[list[Bar]] = []
    free_from: list[int] = []
    for block in sorted(blocks, key=lambda block: (block.start_ns, -block.end_ns)):
        for place, free_ns in enumerate(free_from):
            if free_ns <= block.start_ns:
                lanes[place] += block.bars
                free_from[place] = block.end_ns
                break
        else:
            lanes.append(list(block.bars))
            free_from.append(block.end_ns)
    return lanes
