"""Distributed autograd, beyond the lists of shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import PINNED, SUBJECT, Cell, LatencyRow, Metric, Row, workload
from arpc.bench.systems import GRADIENTS_GROUP

__all__ = ["rows"]

_SECTION: Final = "Distributed autograd: a step forward and backward, and the end of its context"
_GROUP: Final = (("chain", "chain_us", "a chain of 3 workers"), ("fan-out", "fan_out_us", "a fan-out to 8 workers"))
_TRANSFORMER: Final[tuple[Metric, ...]] = (
    ("p50_us", "us", "a transformer of 4 blocks over two workers, 100 tensors in flight: a step", "lower"),
    ("arithmetic", "of a step", "the share of arithmetic in that step", "higher"),
)


def rows() -> Iterator[Row]:
    """Yield one operation, more contexts, more workers, a model; and the share of a pass outside torch's engine."""
    op = workload("autograd_op")
    for placement in PINNED:
        yield LatencyRow(
            f"autograd/op/{placement}",
            _SECTION,
            f"one remote operation, p50, {placement}",
            cells={SUBJECT: Cell("arpc-unix", op, placement), "torch": Cell("torch", op)},
        )
    contexts = workload("autograd_contexts")
    yield LatencyRow(
        "autograd/contexts/same",
        _SECTION,
        "one remote operation in each of 8 contexts at once, p50, same",
        cells={SUBJECT: Cell("arpc-unix", contexts, "same"), "torch": Cell("torch", contexts)},
    )
    group = workload("autograd_group")
    members = {
        SUBJECT: Cell(f"arpc-group-{GRADIENTS_GROUP}", group, "same"),
        "torch": Cell(f"torch-group-{GRADIENTS_GROUP}", group),
    }
    for key, metric, title in _GROUP:
        name = f"autograd/{key}/same"
        yield Row(name, _SECTION, f"{title}, p50, same", metric, "us", "lower", members, max_rounds=3, in_quick=False)
    transformer = workload("autograd_transformer")
    for placement in PINNED:
        step = {SUBJECT: Cell("arpc-unix", transformer, placement), "torch": Cell("torch", transformer, placement)}
        for metric, unit, title, better in _TRANSFORMER:
            key = f"autograd/transformer/{metric}/{placement}"
            yield Row(key, _SECTION, f"{title}, {placement}", metric, unit, better, step, max_rounds=5, in_quick=False)
    for nodes in (100, 1000, 10_000):
        title = f"a pass over {nodes:,} nodes: what is not torch's own engine, as a part of it"
        outside = {SUBJECT: Cell("arpc-unix", workload("autograd_outside", nodes=nodes), "same")}
        key = f"autograd/outside/{nodes}"
        yield Row(key, _SECTION, title, "share", "of a pass", "lower", outside, in_quick=False)
