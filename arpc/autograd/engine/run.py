"""Runs regions of a graph with torch's engine: completely, or up to a border beyond which no node may run yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from arpc.autograd.engine.pausing import check_pausing, find_border, run_up_to
from arpc.autograd.nodes import ANCHOR, LeafNode, RecvCollector, edge_into, run_backward
from arpc.autograd.passes.plan import Edge, Plan
from arpc.autograd.passes.protocol import Captured, Run

__all__ = ["run_regions"]

_leaf_class: Any = LeafNode
_is_anomaly_enabled: Final = torch._C.is_anomaly_enabled


def run_regions(run: Run, plan: Plan, retain_graph: bool) -> Captured:
    """Run each node of some regions once; return the gradients that leave them, see `PassProtocol.ran`.

    In anomaly mode ``plan.last_begun`` is the node that ran last.
    """
    if _is_anomaly_enabled():
        with _watched(plan):
            return _run(run, plan, retain_graph)
    return _run(run, plan, retain_graph)


def _run(run: Run, plan: Plan, retain_graph: bool) -> Captured:
    if run.may_cross:
        border = find_border(run, plan.owners)
        if border.edges:
            check_pausing()
            return run_up_to(border, run, plan.owners, retain_graph=retain_graph)
    return _run_whole(run, retain_graph)


@contextmanager
def _watched(plan: Plan) -> Iterator[None]:
    """Record which node runs, so that an error can name it."""

    def noter(node: Any) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            plan.last_begun = node

        return note

    handles = [node.register_prehook(noter(node)) for node in plan.owners if not hasattr(node, "variable")]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run_whole(run: Run, retain_graph: bool) -> Captured:
    """Run regions whose outgoing edges all lead to targets."""
    regions, entering = run.regions, run.entering
    targets = regions[0].targets
    if len(regions) > 1:
        targets = {edge: None for region in regions for edge in region.targets}
    roots = tuple([edge_into((node, place, None)) for (node, place), _ in entering])
    gradients = tuple([gradient for _, gradient in entering])
    for region in regions:
        if region.has_hooked_recvs:
            return _run_recvs(run, roots, gradients, targets, retain_graph)
    if not targets:
        return ()  # all leaves were frozen since; without inputs, torch would write to `.grad`
    inputs = tuple([edge_into((node, place, None)) for node, place in targets])
    return zip(targets, run_backward(roots, gradients, retain_graph, False, inputs, True, False), strict=True)


def _run_recvs(
    run: Run, roots: tuple[Any, ...], gradients: tuple[Tensor, ...], targets: Iterable[Edge], retain_graph: bool
) -> Captured:
    """Run regions with recv nodes that have hooks: the engine executes these, and so it does all other recv nodes."""
    leaves = [edge for edge in targets if edge[0].__class__ is _leaf_class]
    inputs = (*[edge_into((node, place, None)) for node, place in leaves], ANCHOR)
    collector = RecvCollector([node.record for region in run.regions for node in region.recvs])
    try:
        found = run_backward(roots, gradients, retain_graph, False, inputs, True, False)
    finally:
        collector.close()
    return [*zip(leaves, found, strict=False), *collector.captured]
