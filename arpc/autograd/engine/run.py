"""Runs regions of a graph with torch's engine: in one go, or up to a border where others must not run yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from arpc.autograd.engine.pausing import check_pausing, find_border, run_up_to
from arpc.autograd.engine.run_policy import Extent
from arpc.autograd.nodes import ANCHOR, LeafNode, RecvCollector, edge_into, run_backward
from arpc.autograd.passes.plan import Edge, Region
from arpc.autograd.passes.protocol import Captured, Run

__all__ = ["Engine"]

_leaf_class: Any = LeafNode
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long
_is_anomaly_enabled: Final = torch._C.is_anomaly_enabled


class Engine:
    """Torch's engine, for one pass on one worker. Nothing here waits, and nothing knows of other workers."""

    last_begun: Any = None
    """In anomaly mode, the node that ran last."""

    def __init__(self, owners: Mapping[Any, Region], leaves: Mapping[Any, Any], *, retain_graph: bool) -> None:
        """``owners``, ``leaves``: see `Plan`."""
        self._owners = owners
        self._leaves = leaves
        self._retain_graph = retain_graph

    def run(self, run: Run) -> Captured:
        """Run each node of some regions once; the gradients that leave them, see `PassProtocol.ran`."""
        if _is_anomaly_enabled():
            with self._watched():
                return self._run(run)
        return self._run(run)

    def _run(self, run: Run) -> Captured:
        if run.may_cross:
            border = find_border(run, self._owners)
            if border.edges:
                check_pausing()
                return run_up_to(border, run, self._owners, retain_graph=self._retain_graph)
        return _run_whole(run, retain_graph=self._retain_graph)

    def extent(self, run: Run) -> Extent:
        """How much a run is about, more or less."""
        leaves, regions = self._leaves, run.regions
        count = elements = 0
        for _, gradient in run.entering:
            elements += gradient.numel()
        for region in regions:
            targets = region.targets
            count += region.size + len(targets)
            if leaves:
                for node, _ in targets:
                    if node in leaves:
                        elements += leaves[node].numel()
        return _new_tuple(Extent, (count, elements, partial(self._nodes_of, regions)))  # type: ignore[no-any-return]

    def _nodes_of(self, regions: Sequence[Region]) -> Iterator[Any]:
        running = set(regions)
        return (node for node, owner in self._owners.items() if owner in running)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note which node runs, so that an error can name it."""
        handles = [node.register_prehook(self._noter(node)) for node in self._owners if not hasattr(node, "variable")]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _noter(self, node: Any) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self.last_begun = node

        return note


def _run_whole(run: Run, *, retain_graph: bool) -> Captured:
    """Run regions that no edge leaves but to targets."""
    regions, entering, _ = run
    targets = regions[0].targets
    if len(regions) > 1:
        targets = {edge: None for region in regions for edge in region.targets}
    roots = tuple([edge_into((node, place, None)) for (node, place), _ in entering])
    gradients = tuple([gradient for _, gradient in entering])
    for region in regions:
        if region.has_hooked_recvs:
            return _run_recvs(run, roots, gradients, targets, retain_graph)
    if not targets:
        return ()  # all leaves were frozen since; asked for nothing, torch would write to `.grad`
    inputs = tuple([edge_into((node, place, None)) for node, place in targets])
    return zip(targets, run_backward(roots, gradients, retain_graph, False, inputs, True, False), strict=True)


def _run_recvs(
    run: Run, roots: tuple[Any, ...], gradients: tuple[Tensor, ...], targets: Iterable[Edge], retain_graph: bool
) -> Captured:
    """Run regions with recv nodes that have hooks: the engine executes these, and so it does all other recv nodes."""
    leaves = [edge for edge in targets if edge[0].__class__ is _leaf_class]
    inputs = (*[edge_into((node, place, None)) for node, place in leaves], ANCHOR)
    collector = RecvCollector([record for region in run.regions for record in region.recvs])
    try:
        found = run_backward(roots, gradients, retain_graph, False, inputs, True, False)
    finally:
        collector.close()
    return [*zip(leaves, found, strict=False), *collector.captured]
