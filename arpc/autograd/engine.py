"""Runs the local part of a pass with torch's own engine: each node exactly once, however gradients come in.

`RegionEngine` runs whatever regions are ready in one call of torch's engine. If edges lead from them to nodes that are
not ready, the call is *paused*: a send node whose gradient has not come joins as a further root, last in the engine's
queue, so everything behind it stays untouched, and when all else has run it raises. What passed over the border until
then was caught by hooks, and enters later.

Nothing here waits, and nothing here knows of other workers.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.graph import Edge, Exit, Plan, Planner, Region
from arpc.autograd.heeded import accumulate_heeded, is_heeded
from arpc.autograd.nodes import ANCHOR, SEND_NAME, PauseSignal, RecvRecord, current_run, pause_at, run_backward
from arpc.errors import AutogradError

__all__ = ["Delivery", "LocalEngine", "RegionEngine", "Source", "call_engine", "compact"]

Gradients: TypeAlias = "Sequence[Tensor | None]"
Delivery: TypeAlias = "tuple[RecvRecord, Gradients]"

_is_anomaly_enabled: Final = torch._C.is_anomaly_enabled  # what `torch.is_anomaly_enabled` calls
_strided: Final = torch.strided
_SMALL: Final = 1024
"""Elements that are copied in less time than their strides are packed and unpacked."""
_NO_GRADIENT: Final = torch.zeros(())
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long
_SPENT: Final = (
    "Trying to backward through the graph a second time, and the first pass has freed it. Pass retain_graph=True to "
    "the first `arpc.autograd.backward`"
)


class Source(NamedTuple):
    """Where gradients enter a graph: the roots of a pass, or a message that was sent."""

    edges: Sequence[Edge]
    node: Any
    """The node of the send, see `attach_send`; None for the roots, whose gradients are there from the start."""
    to: int = -1
    """The id of the worker that the message went to."""

    @classmethod
    def of_send(cls, node: Any, to: int = -1) -> Source:
        made: Source = _new_tuple(cls, (node.next_functions[1:], node, to))
        return made


class LocalEngine(ABC):
    """What both engines have in common: the sources, what was resolved, and what came out."""

    last_begun: Any = None
    """In anomaly mode, the node that the engine ran last."""
    _resolved = 0

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        retain_graph: bool,
        is_heeded: Callable[[Any, Any], bool] = is_heeded,
        planner: Planner | None = None,
    ) -> None:
        """``planner``: one of the same sources that has looked at some of the graph already."""
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
        self._unheard: set[RecvRecord] = set()
        """Those of them that have not got any yet."""
        # in anomaly mode every node is watched
        self._planner = planner or Planner(sources, is_heeded=is_heeded, keeps_all=_is_anomaly_enabled())
        self._is_accumulated = False

    def walk(self, limit: int) -> bool:
        """Look at up to ``limit`` further nodes of the graph. When it returns True the plan is there."""
        if not self._planner.walk(limit):
            return False
        self.plan = plan = self._planner.plan()
        for region in plan.regions.values():
            for node in region.recvs:
                record: RecvRecord = node.record
                if record.is_spent:
                    raise AutogradError(_SPENT)
                record.deliver = self._deliver
                self.live.append(record)
        self._unheard.update(self.live)
        return True

    def _deliver(self, record: RecvRecord, gradients: tuple[Tensor | None, ...]) -> None:
        if not self.retain_graph:
            record.is_spent = True
        self._unheard.discard(record)
        self.delivered.append((record, [compact(gradient) for gradient in gradients]))

    @property
    def is_to_accumulate(self) -> bool:
        """Whether `accumulate` has something to do, once all has run."""
        heeded = self.plan.heeded_leaves
        return bool(heeded) and not self._is_accumulated and any(leaf in self.leaves for leaf in heeded.values())

    def accumulate(self) -> None:
        """Run the hooks of leaves that wait for the gradients of the whole pass. They may block."""
        self._is_accumulated = True
        accumulate_heeded(self.plan.heeded_leaves, self.leaves)

    def close(self) -> None:
        """The pass is over: torch's own backward must not run into it."""
        for record in self.live:
            record.deliver = None

    @abstractmethod
    def resolve(self, source: int, gradients: Gradients | None) -> None:
        """The gradients of a source have come; None if there are none and never will be."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is anything to run."""

    @abstractmethod
    def run(self) -> None:
        """Run what is ready. What comes out is in `delivered`, `silent` and `leaves`."""

    @property
    @abstractmethod
    def has_run_all(self) -> bool: ...

    @abstractmethod
    def work(self) -> int:
        """How many elements of gradients and leaves the next run is about, more or less."""


class RegionEngine(LocalEngine):
    """The engine that every pass uses, as long as torch lets it."""

    _is_looked_through = True

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        retain_graph: bool,
        is_heeded: Callable[[Any, Any], bool] = is_heeded,
        planner: Planner | None = None,
    ) -> None:
        super().__init__(sources, retain_graph=retain_graph, is_heeded=is_heeded, planner=planner)
        self._waiting: dict[int, Region] = {}
        self._ready: list[Region] = []
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
        is_shared = plan.sources_of is not None
        if gradients is not None:
            leaves = plan.leaves
            for edge, gradient in zip(self.sources[source].edges, gradients, strict=True):
                if gradient is None:
                    continue
                node = edge[0]
                if node in leaves:  # nothing to run
                    self.leaves.add(leaves[node], gradient)
                    continue
                sources = plan.sources(node) if is_shared else bit
                if sources in self._pending:
                    self._pending[sources].append((edge, gradient))
                else:
                    self._pending[sources] = [(edge, gradient)]
        if is_shared:
            self._is_looked_through = False
        else:
            region = self._waiting.pop(bit)
            if region.recvs or bit in self._pending:
                self._ready.append(region)

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
            for variable in region.leaves.values():
                elements += variable.numel()
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
            border = self._border_of(ready) if self.plan.sources_of is not None else None
            if border:
                self._run_paused(ready, entering, border)
            else:
                self._run_plainly(ready, entering)
        for region in ready:
            for node in region.recvs:
                if node.record in self._unheard:
                    self.silent.append(node.record)

    def _border_of(self, ready: list[Region]) -> list[Exit]:
        """The edges that lead from what is ready to what is not."""
        now = {region.sources for region in ready}
        return [exit_ for region in ready for exit_ in region.exits if self.plan.sources(exit_.to[0]) not in now]

    def _run_plainly(self, ready: list[Region], entering: list[tuple[Edge, Tensor]]) -> None:
        variables = _variables(ready)
        if self.plan.hooked_leaves:
            variables += self._hooked_of(ready)
        inputs = (ANCHOR, *variables)
        watching = self._watch() if _is_anomaly_enabled() else ()
        try:
            gradients = call_engine(*_columns(entering), inputs, self.retain_graph)
        finally:
            for handle in watching:
                handle.remove()
        if variables:
            for variable, gradient in zip(inputs, gradients, strict=True):
                if gradient is not None:
                    self.leaves.add(variable, gradient)

    def _hooked_of(self, ready: list[Region]) -> list[Tensor]:
        now = {region.sources for region in ready}
        sources = self.plan.sources
        return [variable for node, variable in self.plan.hooked_leaves.items() if sources(node) in now]

    def _run_paused(self, ready: list[Region], entering: list[tuple[Edge, Tensor]], border: list[Exit]) -> None:
        plan, unresolved = self.plan, ~self._resolved
        now = {region.sources for region in ready}
        # who holds back what lies behind the border
        barriers: dict[int, Any] = {}
        for exit_ in border:
            missing = plan.sources(exit_.to[0]) & unresolved
            lowest = (missing & -missing).bit_length() - 1
            barriers[lowest] = self.sources[lowest].node
            assert barriers[lowest] is not None  # the roots are resolved first
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
                    (place, plan.leaves[child])
                    for place, (child, _) in enumerate(node.next_functions)
                    if child in plan.leaves
                ]
                crossings = by_node.get(node)
                if places or crossings:
                    handles.append(node.register_hook(_catcher(crossings or (), places, caught, leaf_parts)))
        hooked = self._hooked_of(ready)
        handles += [variable.register_hook(_total_catcher(variable, leaf_parts)) for variable in hooked]  # type: ignore[no-untyped-call]
        if _is_anomaly_enabled():
            handles += self._watch()
        variables = _variables(ready)
        inputs = (
            ANCHOR,
            *variables,
            *hooked,
            *[GradientEdge(*exit_.to) for exit_ in border],
        )
        for node in barriers.values():
            node._set_sequence_nr(0)  # noqa: SLF001 - last in the engine's queue
            handles.append(pause_at(node))
        try:
            with _without_pause_warnings():
                roots, gradients = _columns(entering)
                call_engine(
                    [*roots, *[GradientEdge(node, 0) for node in barriers.values()]],
                    [*gradients, *[_NO_GRADIENT] * len(barriers)],
                    inputs,
                    self.retain_graph,
                )
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
        """For anomaly mode: note which node runs, so that an error can name it. Returns what ends that."""
        hooked = self.plan.hooked_leaves
        return [node.register_prehook(self._noter(node)) for node in self.plan.nodes if node not in hooked]

    def _noter(self, node: Any) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self.last_begun = node

        return note


def compact(gradient: Tensor | None) -> Tensor | None:
    """A small gradient without strides of its own, a large one as it is.

    To describe strides takes longer than to copy little. Of a large one that was expanded little travels.
    """
    if gradient is None or gradient.layout is not _strided or gradient.is_contiguous() or gradient.numel() > _SMALL:
        return gradient
    return gradient.contiguous()


def _variables(regions: list[Region]) -> list[Tensor]:
    """The leaves without hooks that regions lead to."""
    if len(regions) == 1:
        return list(regions[0].leaves.values())
    return list({node: variable for region in regions for node, variable in region.leaves.items()}.values())


def _columns(entering: list[tuple[Edge, Tensor]]) -> tuple[list[GradientEdge], list[Tensor]]:
    return [GradientEdge(*edge) for edge, _ in entering], [gradient for _, gradient in entering]


def call_engine(
    roots: Sequence[Any], gradients: Sequence[Tensor], inputs: Sequence[Any], retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """Have torch's engine run what roots lead to, as far as the inputs need it: their gradients.

    A root is a tensor, or a `GradientEdge`. So is an input, and no node is run for an edge that leads to it.
    """
    result: tuple[Tensor | None, ...] = run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(inputs), True, False
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
    if not _is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"Error detected in (torch::autograd::Error|{SEND_NAME})")
        yield
