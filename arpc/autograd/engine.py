"""Runs the local part of a pass with torch's own engine: each node exactly once, however gradients come in.

`RegionEngine` runs whatever regions are ready in one call of torch's engine. If edges lead from them to nodes that are
not ready, the call is *paused*: a send node whose gradient has not come joins as a further root, last in the engine's
queue, so everything behind it stays untouched, and when all else has run it raises. What passed over the border until
then was caught by hooks, and enters later.

Nothing here waits, and nothing here knows of other workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.graph import Edge, Exit, Plan, Planner, Region
from arpc.autograd.nodes import ANCHOR, PauseSignal, RecvRecord, current_run
from arpc.errors import AutogradError

__all__ = ["Delivery", "LocalEngine", "RegionEngine", "Source"]

Gradients: TypeAlias = "Sequence[Tensor | None]"
Delivery: TypeAlias = "tuple[RecvRecord, tuple[Tensor | None, ...]]"

_run_backward: Final = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001 - autograd.grad's own
_NO_GRADIENT: Final = torch.zeros(())
_SPENT: Final = (
    "Trying to backward through the graph a second time, and the first pass has freed it. Pass retain_graph=True to "
    "the first `arpc.autograd.backward`"
)


class Source:
    """Where gradients enter a graph: the roots of a pass, or a message that was sent."""

    __slots__ = ("edges", "token")

    def __init__(self, edges: Sequence[Edge], token: Tensor | None) -> None:
        self.edges = edges
        self.token = token
        """The token of the send; None for the roots, whose gradients are there from the start."""

    @classmethod
    def of_send(cls, token: Tensor) -> Source:
        assert token.grad_fn is not None
        return cls(token.grad_fn.next_functions, token)


class LocalEngine:
    """What both engines have in common: the sources, what was resolved, and what came out."""

    def __init__(self, sources: Sequence[Source], *, retain_graph: bool) -> None:
        self.sources = sources
        self.retain_graph = retain_graph
        self.delivered: list[Delivery] = []
        """Gradients that leave this worker, since somebody took them last."""
        self.silent: list[RecvRecord] = []
        """Those that get no gradient after all, since somebody took them last."""
        self.leaves = LeafGradients()
        self.plan: Plan
        self.live: list[RecvRecord] = []
        """Messages whose tensors may get gradients in this pass."""
        self.last_begun: Any = None
        """In anomaly mode, the node that the engine ran last."""
        self._planner = Planner([source.edges for source in sources])
        self._resolved = 0

    def walk(self, limit: int) -> bool:
        """Look at up to ``limit`` further nodes of the graph. When it returns True the plan is there."""
        if not self._planner.walk(limit):
            return False
        self.plan = self._planner.plan()
        for node in self.plan.recvs:
            record: RecvRecord = node.record
            if record.is_spent:
                raise AutogradError(_SPENT)
            record.deliver = self._deliver
            self.live.append(record)
        return True

    def _deliver(self, record: RecvRecord, gradients: tuple[Tensor | None, ...]) -> None:
        if not self.retain_graph:
            record.is_spent = True
        self.delivered.append((record, gradients))

    def close(self) -> None:
        """The pass is over: torch's own backward must not run into it."""
        for record in self.live:
            record.deliver = None

    def resolve(self, source: int, gradients: Gradients | None) -> None:
        """The gradients of a source have come; None if there are none and never will be."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether there is anything to run."""
        raise NotImplementedError

    def run(self) -> None:
        """Run what is ready. What comes out is in `delivered`, `silent` and `leaves`."""
        raise NotImplementedError

    @property
    def has_run_all(self) -> bool:
        raise NotImplementedError

    def work(self) -> int:
        """How many elements of gradients and leaves the next run is about, more or less."""
        raise NotImplementedError


class RegionEngine(LocalEngine):
    """The engine that every pass uses, as long as torch lets it."""

    def __init__(self, sources: Sequence[Source], *, retain_graph: bool) -> None:
        super().__init__(sources, retain_graph=retain_graph)
        self._waiting: dict[int, Region] = {}
        self._ready: list[Region] = []
        self._is_looked_through = True
        self._pending: dict[int, list[tuple[Edge, Tensor]]] = {}

    def walk(self, limit: int) -> bool:
        if not super().walk(limit):
            return False
        self._waiting = dict(self.plan.regions)
        return True

    def resolve(self, source: int, gradients: Gradients | None) -> None:
        bit = 1 << source
        self._resolved |= bit
        plan = self.plan
        if gradients is not None:
            for edge, gradient in zip(self.sources[source].edges, gradients, strict=True):
                if gradient is None:
                    continue
                leaf = plan.leaves.get(edge[0])
                if leaf is not None:  # nothing to run
                    self.leaves.add(leaf.variable, gradient)
                else:
                    self._pending.setdefault(plan.sources(edge[0]), []).append((edge, gradient))
        if plan.sources_of is None:
            region = self._waiting.pop(bit)
            if region.recvs or bit in self._pending:
                self._ready.append(region)
        else:
            self._is_looked_through = False

    @property
    def is_ready(self) -> bool:
        if not self._is_looked_through:
            self._is_looked_through = True
            unresolved = ~self._resolved
            for sources in [sources for sources in self._waiting if not sources & unresolved]:
                self._ready.append(self._waiting.pop(sources))
        return bool(self._ready)

    @property
    def has_run_all(self) -> bool:
        return not self._waiting and not self._ready

    def work(self) -> int:
        elements = 0
        for region in self._ready:
            for leaf in region.leaves.values():
                elements += leaf.variable.numel()
            for _, gradient in self._pending.get(region.sources, ()):
                elements += gradient.numel()
        return elements

    def run(self) -> None:
        if not self.is_ready:
            return
        ready, self._ready = self._ready, []
        entering: list[tuple[Edge, Tensor]] = []
        for region in ready:
            entering += self._pending.pop(region.sources, ())
        if entering:
            now = {region.sources for region in ready}
            border = [exit_ for region in ready for exit_ in region.exits if self.plan.sources(exit_.to[0]) not in now]
            if border:
                self._run_paused(ready, entering, border)
            else:
                self._run_plainly(ready, entering)
        expected = [node.record for region in ready for node in region.recvs]
        if expected:
            heard = {record for record, _ in self.delivered}
            self.silent += [record for record in expected if record not in heard]

    def _run_plainly(self, ready: list[Region], entering: list[tuple[Edge, Tensor]]) -> None:
        variables = _variables(ready)
        if self.plan.hooked_leaves:
            variables += self._hooked_of(ready)
        watching = self._watch()
        try:
            gradients = _call_engine(entering, (ANCHOR, *variables), retain_graph=self.retain_graph)
        finally:
            for handle in watching:
                handle.remove()
        for variable, gradient in zip(variables, gradients[1:], strict=True):
            if gradient is not None:
                self.leaves.add(variable, gradient)

    def _hooked_of(self, ready: list[Region]) -> list[Tensor]:
        now = {region.sources for region in ready}
        sources = self.plan.sources
        return [leaf.variable for node, leaf in self.plan.hooked_leaves.items() if sources(node) in now]

    def _run_paused(self, ready: list[Region], entering: list[tuple[Edge, Tensor]], border: list[Exit]) -> None:
        plan, unresolved = self.plan, ~self._resolved
        now = {region.sources for region in ready}
        # who holds back what lies behind the border
        barriers: dict[int, Tensor] = {}
        for exit_ in border:
            missing = plan.sources(exit_.to[0]) & unresolved
            lowest = (missing & -missing).bit_length() - 1
            token = self.sources[lowest].token
            assert token is not None  # the roots are resolved first
            barriers[lowest] = token
        # Nodes and leaves may be shared with other contexts, whose calls of the engine meet the hooks too
        caught: list[tuple[int, Edge, Tensor]] = []
        handles: list[Any] = []
        by_node: dict[Any, list[tuple[int, Edge]]] = {}
        for exit_ in border:
            by_node.setdefault(exit_.node, []).append((exit_.place, exit_.to))
        # Leaves get their parts from the nodes before them: one that is also behind a barrier would never be captured
        leaf_parts: list[tuple[int, Tensor, Tensor]] = []
        for region in ready:
            _ensure_order(region.nodes)
            for node in region.nodes:
                places = [
                    (place, plan.leaves[child].variable)
                    for place, (child, _) in enumerate(node.next_functions)
                    if child in plan.leaves
                ]
                crossings = by_node.get(node)
                if places or crossings:
                    handles.append(node.register_hook(_catcher(crossings or (), places, caught, leaf_parts)))
        hooked = self._hooked_of(ready)
        handles += [variable.register_hook(_total_catcher(variable, leaf_parts)) for variable in hooked]  # type: ignore[no-untyped-call]
        handles += self._watch()
        variables = _variables(ready)
        inputs = (
            ANCHOR,
            *variables,
            *hooked,
            *[GradientEdge(*exit_.to) for exit_ in border],
        )
        for token in barriers.values():
            token.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]  # noqa: SLF001 - last in the engine's queue
        try:
            with _without_pause_warnings():
                _call_engine(entering, inputs, retain_graph=self.retain_graph, barriers=list(barriers.values()))
        except PauseSignal as pause:
            run = pause.run
        else:
            raise AutogradError("torch's engine ran past the end of what was ready: this is a bug of arpc")
        finally:
            for handle in handles:
                handle.remove()
        for caught_in, variable, gradient in leaf_parts:
            if caught_in == run:
                self.leaves.add(variable, gradient)
        for caught_in, edge, gradient in caught:
            if caught_in != run:
                continue
            sources = plan.sources(edge[0])
            assert sources not in now
            self._pending.setdefault(sources, []).append((edge, gradient))

    def _watch(self) -> list[Any]:
        """In anomaly mode, note which node runs, so that an error can name it. Returns what ends that."""
        if not torch.is_anomaly_enabled():
            return []
        hooked = self.plan.hooked_leaves
        return [node.register_prehook(self._noter(node)) for node in self.plan.nodes if node not in hooked]

    def _noter(self, node: Any) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self.last_begun = node

        return note


def _variables(regions: list[Region]) -> list[Tensor]:
    """The leaves without hooks that regions lead to."""
    if len(regions) == 1:
        return [leaf.variable for leaf in regions[0].leaves.values()]
    return [
        leaf.variable for leaf in {node: leaf for region in regions for node, leaf in region.leaves.items()}.values()
    ]


def _call_engine(
    entering: list[tuple[Edge, Tensor]],
    inputs: tuple[Any, ...],
    *,
    retain_graph: bool,
    barriers: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:
    roots: list[Any] = [GradientEdge(*edge) for edge, _ in entering]
    gradients = [gradient for _, gradient in entering]
    roots += barriers
    gradients += [_NO_GRADIENT] * len(barriers)
    result: tuple[Tensor | None, ...] = _run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return result


def _catcher(
    crossings: Sequence[tuple[int, Edge]],
    leaves: Sequence[tuple[int, Tensor]],
    caught: list[tuple[int, Edge, Tensor]],
    leaf_parts: list[tuple[int, Tensor, Tensor]],
) -> Callable[[tuple[Tensor | None, ...], Any], None]:
    """A hook that notes what a node hands over the border, and to leaves."""

    def catch(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        run = current_run()
        for place, edge in crossings:
            gradient = gradients[place]
            if gradient is not None:
                caught.append((run, edge, gradient))
        for place, variable in leaves:
            gradient = gradients[place]
            if gradient is not None:
                leaf_parts.append((run, variable, gradient))

    return catch


def _total_catcher(variable: Tensor, leaf_parts: list[tuple[int, Tensor, Tensor]]) -> Callable[[Tensor], None]:
    """A hook that notes what a leaf gets after all hooks of people."""

    def catch(gradient: Tensor) -> None:
        leaf_parts.append((current_run(), variable, gradient))

    return catch


def _ensure_order(nodes: Sequence[Any]) -> None:
    """The very first node of a thread is as low in the engine's queue as a barrier: put it before that."""
    for node in nodes:
        if node._sequence_nr() == 0:  # noqa: SLF001 - the engine's own order
            node._set_sequence_nr(1)  # noqa: SLF001


@contextmanager
def _without_pause_warnings() -> Iterator[None]:
    """Anomaly mode takes a pause for an error of the send node, and says so."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Error detected in torch::distributed::autograd::SendRpcBackward")
        yield
