"""An engine that uses torch's public functions alone, for a torch whose own engine cannot be paused.

What can be computed together is what depends on the same sources. It runs once all of these are resolved, from the
sources down, so nodes above several such groups run several times, and so do their hooks. `choose_engine` takes it only
if the start-up test of the other one fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.engine import Gradients, LocalEngine, RegionEngine, Source
from arpc.autograd.graph import Edge, Planner
from arpc.autograd.heeded import is_heeded
from arpc.autograd.nodes import attach_send
from arpc.log import get_logger

__all__ = ["GroupEngine", "choose_engine", "pausing_works"]

logger = get_logger("arpc.autograd")


class GroupEngine(LocalEngine):
    """Leaves and recvs in groups that depend on the same sources, each group computed in one go."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        retain_graph: bool,
        is_heeded: Callable[[Any, Any], bool] = is_heeded,
        planner: Planner | None = None,
    ) -> None:
        super().__init__(sources, retain_graph=retain_graph, is_heeded=is_heeded, planner=planner)
        self._gradients: list[Gradients | None] = [None] * len(sources)
        self._waiting: dict[int, tuple[list[Tensor], list[Any]]] = {}
        self._ready: list[tuple[int, list[Tensor], list[Any]]] = []

    def walk(self, limit: int) -> bool:
        if not super().walk(limit):
            return False
        plan = self.plan
        reached: dict[Any, int] = {}
        for region in plan.regions.values():
            for node in region.leaves:
                reached[node] = reached.get(node, 0) | region.sources
        leaves = {**plan.leaves, **plan.hooked_leaves}
        for node, variable in leaves.items():
            self._group(reached[node] if node in reached else plan.sources(node))[0].append(variable)
        for region in plan.regions.values():
            for node in region.recvs:
                self._group(region.sources)[1].append(node)
        return True

    def _group(self, sources: int) -> tuple[list[Tensor], list[Any]]:
        return self._waiting.setdefault(sources, ([], []))

    def resolve(self, source: int, gradients: Gradients | None) -> None:
        self._resolved |= 1 << source
        self._gradients[source] = gradients
        unresolved = ~self._resolved
        for sources in [sources for sources in self._waiting if not sources & unresolved]:
            self._ready.append((sources, *self._waiting.pop(sources)))

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_run_all(self) -> bool:
        return not self._waiting and not self._ready

    def work(self) -> int:
        return sum(leaf.numel() for _, leaves, _ in self._ready for leaf in leaves)

    def run(self) -> None:
        ready, self._ready = self._ready, []
        for sources, leaves, recvs in ready:
            entering = self._entering(sources)
            edges: list[Any] = [GradientEdge(node, place) for node in recvs for place in range(node.record.count)]
            found: Sequence[Tensor | None] = (None,) * (len(leaves) + len(edges))
            if entering:
                found = torch.autograd.grad(
                    [GradientEdge(*edge) for edge, _ in entering],
                    [*leaves, *edges],
                    [gradient for _, gradient in entering],
                    retain_graph=True,
                    allow_unused=True,
                )
            for leaf, gradient in zip(leaves, found, strict=False):
                if gradient is not None:
                    self.leaves.add(leaf, gradient)
            place = len(leaves)
            for node in recvs:
                gradients = tuple(found[place : place + node.record.count])
                place += node.record.count
                if all(gradient is None for gradient in gradients):
                    self.silent.append(node.record)
                else:
                    self._deliver(node.record, gradients)

    def _entering(self, sources: int) -> list[tuple[Edge, Tensor]]:
        return [
            (edge, gradient)
            for source, given in enumerate(self._gradients)
            if given is not None and sources >> source & 1
            for edge, gradient in zip(self.sources[source].edges, given, strict=True)
            if gradient is not None
        ]


@functools.cache
def pausing_works() -> bool:
    """Try on a small graph whether torch's engine can be paused. It takes a millisecond, once in a process."""
    try:
        with torch.enable_grad():
            weight = torch.full((2,), 3.0, requires_grad=True)
            shared = weight * 2
            early, late = (shared * 5).sum(), shared * 7
            runs: list[Any] = []
            shared.grad_fn.register_hook(lambda *_: runs.append(None))  # type: ignore[union-attr]
            sources = [
                Source([(early.grad_fn, 0)], None),
                Source.of_send(attach_send([late])),
            ]
        engine = RegionEngine(sources, retain_graph=False)
        is_walked = engine.walk(100)
        engine.resolve(0, [torch.ones(())])
        engine.run()
        ran_early = len(runs)
        engine.resolve(1, [torch.ones(2)])
        engine.run()
        (gradient,) = engine.leaves.take().values()
        is_right = is_walked and not ran_early and len(runs) == 1 and gradient.tolist() == [24.0, 24.0]
    except Exception:
        logger.exception("torch's engine cannot be paused")
        is_right = False
    if not is_right:
        logger.warning(
            "torch %s does not let its engine be paused: a backward pass may run nodes, and hooks, more than once",
            torch.__version__,
        )
    return is_right


def choose_engine() -> type[LocalEngine]:
    """The engine that works with this torch."""
    return RegionEngine if pausing_works() else GroupEngine
