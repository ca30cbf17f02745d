"""Distributed autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.row import PINNED, SUBJECT, Cell, Row, workload
from arpc.bench.systems import GRADIENTS_GROUP

__all__ = ["rows"]

_SECTION: Final = "Distributed autograd: a step forward and backward, and the end of its context"


def rows() -> Iterator[Row]:
    """One operation, more contexts, more workers; and what a pass is beside torch's own engine."""
    op = workload("autograd_op")
    for placement in PINNED:
        yield Row(
            key=f"autograd/op/{placement}",
            section=_SECTION,
            title=f"one remote operation, p50, {placement}",
            metric="p50_us",
            unit="us",
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", op, placement), "torch": Cell("torch", op)},
        )
    contexts = workload("autograd_contexts")
    yield Row(
        key="autograd/contexts/same",
        section=_SECTION,
        title="the same in 8 contexts at once, p50, same",
        metric="p50_us",
        unit="us",
        better="lower",
        cells={SUBJECT: Cell("arpc-unix", contexts, "same"), "torch": Cell("torch", contexts)},
    )
    group = workload("autograd_group")
    for key, metric, title in (
        ("chain", "chain_us", "a chain of 3 workers"),
        ("fan-out", "fan_out_us", "a fan-out to 8 workers"),
    ):
        yield Row(
            key=f"autograd/{key}/same",
            section=_SECTION,
            title=f"{title}, p50, same",
            metric=metric,
            unit="us",
            better="lower",
            cells={
                SUBJECT: Cell(f"arpc-group-{GRADIENTS_GROUP}", group, "same"),
                "torch": Cell(f"torch-group-{GRADIENTS_GROUP}", group),
            },
            max_rounds=3,
            in_quick=False,
        )
    transformer = workload("autograd_transformer")
    for placement in PINNED:
        for key, metric, unit, title in (
            ("transformer", "p50_us", "us", "a step of a transformer of 4 blocks over two workers, p50"),
            ("arithmetic", "arithmetic", "of a step", "the arithmetic's share of that step"),
        ):
            yield Row(
                key=f"autograd/{key}/{placement}",
                section=_SECTION,
                title=f"{title}, {placement}",
                metric=metric,
                unit=unit,
                better="lower" if metric == "p50_us" else "higher",
                cells={
                    SUBJECT: Cell("arpc-unix", transformer, placement),
                    "torch": Cell("torch", transformer, placement),
                },
                in_quick=False,
            )
    for nodes in (100, 1000, 10_000):
        yield Row(
            key=f"autograd/outside/{nodes}",
            section=_SECTION,
            title=f"a pass over {nodes:,} nodes: what is not torch's own engine, as a part of it",
            metric="share",
            unit="of a pass",
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", workload("autograd_outside", nodes=nodes), "same")},
            in_quick=False,
        )
