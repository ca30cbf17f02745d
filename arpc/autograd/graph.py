"""Which part of a graph can run when: regions of nodes that the same sources reach.

A *source* is where gradients come in: the roots of the pass, and each message that left this worker. A node may run
once the gradients of all sources that reach it are in, and then gets them all at once. Nodes reached by exactly the
same sources become ready at the same moment: they are a *region*, named by the set of its sources as bits of an int.

Leaves are an exception. Gradients of a leaf are sums, to which each region adds its part whenever it runs, unless the
leaf has hooks: these want the total, so such a leaf is a node like any other.

No torch here, but for what the nodes themselves are: the tests use their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import length_hint
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

from arpc.autograd.nodes import RecvNode

__all__ = ["Edge", "Exit", "Plan", "Planner", "Region"]

Edge: TypeAlias = tuple[Any, int]
"""A node, and which of its inputs. A node has ``next_functions``, the edges that it leads to."""


_leaf_class: Final = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""Nodes of leaves that gradients are accumulated in: most of those that lead nowhere."""
_FEW_NODES: Final = 256
"""As many as are looked at one by one, by `pace`, and some."""
_STRIDES: Final = (*(range(4 << doubled) for doubled in range(8)), *(range(1024),) * 64)
"""How far it is from one node of a chain that is kept to the next: twice as far each time.

So few are kept that they take no large piece of memory. Asked for one, malloc would first tidy up all that was left
behind by the graph of the step before.
"""


class HasEdges(Protocol):
    """A source, as far as a walk is concerned."""

    @property
    def edges(self) -> Sequence[Edge]: ...


class Exit(NamedTuple):
    """An edge from one region into another."""

    node: Any
    place: int
    """Which of the node's next functions."""
    to: Edge


class Region:
    """Nodes that are reached by the same sources."""

    __slots__ = ("exits", "leaves", "nodes", "recvs", "sources")

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.nodes: list[Any] = []
        """Known only if regions share a border."""
        self.recvs: list[Any] = []
        self.leaves: dict[Any, Any] = {}
        """Those without hooks that its nodes, or its sources, lead to directly, and the tensors that they are."""
        self.exits: list[Exit] = []


class Plan:
    """The regions of a graph, by their sources."""

    __slots__ = ("count", "heeded_leaves", "hooked_leaves", "leaves", "nodes", "regions", "sources_of")

    def __init__(
        self,
        nodes: dict[Any, int],
        leaves: dict[Any, Any],
        hooked_leaves: dict[Any, Any],
        regions: dict[int, Region],
        heeded_leaves: dict[Any, Any],
        passed_by: int = 0,
    ) -> None:
        self.nodes = nodes
        """Every node that can run, with a source that reaches it. Leaves without hooks are not among them.

        If there is only one source, a large graph has more nodes than these, about ``passed_by``."""
        self.leaves = leaves
        """All leaves without hooks, and the tensors that they are."""
        self.hooked_leaves = hooked_leaves
        """Those with hooks, which are nodes of their regions too."""
        self.regions = regions
        self.heeded_leaves = heeded_leaves
        """Those of either kind that are to be accumulated by torch in the end."""
        self.sources_of: dict[Any, int] | None = None
        """The region of each node; None if no node is reached by two sources."""
        self.count = len(nodes) + len(leaves) + passed_by
        """How many nodes there are, more or less."""

    @property
    def recvs(self) -> Iterator[Any]:
        """The recv nodes that gradients can reach."""
        for region in self.regions.values():
            yield from region.recvs

    def sources(self, node: Any) -> int:
        """Which region a node belongs to."""
        return 1 << self.nodes[node] if self.sources_of is None else self.sources_of[node]

    def region(self, sources: int) -> Region:
        region = self.regions.get(sources)
        if region is None:
            region = self.regions[sources] = Region(sources)
        return region


class Planner:
    """Walks a graph, as far at a time as it is told: a large one is better walked in a thread."""

    def __init__(
        self,
        sources: Sequence[HasEdges],
        recv_class: type = RecvNode,
        is_heeded: Callable[[Any, Any], bool] = lambda _node, _leaf: False,
        *,
        keeps_all: bool = False,
    ) -> None:
        """``keeps_all``: the plan is to have all nodes in any case, however many there are."""
        self._sources = sources
        self._is_heeded = is_heeded
        self._recv_class = recv_class
        self._owner: dict[Any, int] = {}
        self._leaves: dict[Any, Any] = {}
        self._hooked: dict[Any, Any] = {}
        self._heeded: dict[Any, Any] = {}
        self._regions: dict[int, Region] = {}
        """One for each source, right if no source reaches nodes of another."""
        self._is_shared = False
        self._stack: list[Any] = []
        self._keeps_all = keeps_all or len(sources) != 1
        self._seen: set[Any] = {None}  # which is where many edges lead
        self._passed_by = 0
        self._has_forked = False
        """There is, or was, more than one way to go on."""

    def walk(self, limit: int) -> bool:
        """Visit up to about ``limit`` further nodes; whether all have been visited."""
        if self._keeps_all:
            return self._walk(limit)
        if not self._regions:
            self._regions[1] = Region(1)
            self._stack += [node for node, _ in self._sources[0].edges]
            self._has_forked = len(self._stack) != 1
        if self._stack and not self._has_forked:
            limit = self._follow(limit)
        if not self._pass_by(limit):
            return False
        if self._passed_by <= _FEW_NODES:  # they are few: now take all of them
            self._regions.clear()
            self._owner.clear()
            self._keeps_all, self._passed_by = True, 0
            return self._walk(2 * _FEW_NODES)
        return True

    def _walk(self, limit: int) -> bool:
        # This loop is what a node costs outside of torch's own engine: it does no more than it must
        recv_class, owner, leaves, stack, regions = (
            self._recv_class,
            self._owner,
            self._leaves,
            self._stack,
            self._regions,
        )
        sources = self._sources
        source = len(regions) - 1
        region: Any = regions[1 << source] if regions else None
        while True:
            while stack:
                node = stack.pop()
                while node is not None:
                    if node in owner:
                        if owner[node] != source:
                            self._is_shared = True
                        break
                    if node.__class__ is recv_class:
                        owner[node] = source
                        region.recvs.append(node)
                        break
                    edges = node.next_functions
                    if not edges:
                        variable = leaves[node] if node in leaves else self._plain_leaf(node)
                        if variable is not None:
                            region.leaves[node] = variable
                            break
                    owner[node] = source
                    limit -= 1
                    if len(edges) == 1 and limit > 0:  # most of a graph is chains
                        node = edges[0][0]
                        continue
                    for child, _ in edges:
                        if child is not None:
                            stack.append(child)
                    if limit <= 0:
                        return False
                    break
            source += 1
            if source == len(sources):
                return True
            region = regions[1 << source] = Region(1 << source)
            for node, _ in sources[source].edges:
                stack.append(node)

    def _follow(self, limit: int) -> int:
        """`_pass_by` as long as there is only one way to go: none of these nodes can be met again, and none is kept.

        Returns how many more may be visited.
        """
        recv_class = self._recv_class
        node = self._stack.pop()
        steps = repeat(None, limit)
        for _ in steps:
            edges = node.next_functions
            if len(edges) == 2 and edges[1][0] is None:  # no recv has two
                node = edges[0][0]
            elif len(edges) == 2:
                (child, _), (other, _) = edges
                if child is None:
                    node = other
                elif other.__class__ is _leaf_class:
                    self._leaf_passed_by(other)
                    node = child
                elif child.__class__ is _leaf_class:
                    self._leaf_passed_by(child)
                    node = other
                else:
                    self._has_forked = True
                    break
            elif len(edges) == 1 and node.__class__ is not recv_class:
                node = edges[0][0]
            else:
                self._has_forked = True
                break
            if node is None:
                break
        if node is not None:
            self._stack.append(node)
        left = length_hint(steps)
        self._passed_by += limit - left
        return left

    def _pass_by(self, limit: int) -> bool:
        """`walk` for the leaves and recvs of a large graph that one source reaches: nobody asks for its other nodes.

        To keep a node is half of what it costs to visit it. So of a chain one of some is kept, and one from which it
        goes on in several directions: who comes to the same nodes by another way soon meets one of these, and leaves
        more of them behind.
        """
        recv_class, stack, seen = self._recv_class, self._stack, self._seen
        keep = seen.add
        passed_by = self._passed_by
        end = passed_by + limit
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            if passed_by >= end:
                stack.append(node)
                break
            for stride in _STRIDES:
                for step in stride:
                    edges = node.next_functions
                    if len(edges) == 2:  # which no recv has
                        (child, _), (other, _) = edges
                        node = child if other is None else self._fork(node, child, other)
                    elif len(edges) == 1 and node.__class__ is not recv_class:
                        node = edges[0][0]
                    else:
                        self._end_of_chain(node, edges)
                        node = None
                    if node in seen:
                        passed_by += step + 1
                        break
                else:
                    passed_by += len(stride)
                    if passed_by < end:
                        keep(node)
                        continue
                    stack.append(node)
                break
            else:  # a very long chain: the same again
                seen.discard(node)
                stack.append(node)
        self._passed_by = passed_by
        return not stack

    def _fork(self, node: Any, child: Any, other: Any) -> Any:
        """Where to go on from a node with two edges."""
        if other.__class__ is _leaf_class:
            self._leaf_passed_by(other)
        elif child.__class__ is _leaf_class:
            self._leaf_passed_by(child)
            return other
        else:
            self._seen.add(node)
            self._stack.append(other)
        return child

    def _end_of_chain(self, node: Any, edges: Sequence[Edge]) -> None:
        self._seen.add(node)
        if node.__class__ is self._recv_class:
            self._owner[node] = 0
            self._regions[1].recvs.append(node)
        elif edges:
            for child, _ in edges:
                if child.__class__ is _leaf_class:
                    self._leaf_passed_by(child)
                else:
                    self._stack.append(child)
        else:
            self._leaf_passed_by(node)

    def _leaf_passed_by(self, node: Any) -> None:
        """A node that leads nowhere, for the first time or again."""
        leaves = self._regions[1].leaves
        if node not in leaves:
            variable = self._plain_leaf(node)
            if variable is None:
                self._owner[node] = 0
            else:
                leaves[node] = variable

    def _plain_leaf(self, node: Any) -> Any:
        """The tensor of a node that leads nowhere, if it is a leaf without hooks; notes it if so."""
        variable = getattr(node, "variable", None)
        if variable is None or not variable.requires_grad:
            return None  # no leaf, or one that was frozen since, and gets none
        if self._is_heeded(node, variable):
            self._heeded[node] = variable
        if variable._backward_hooks:  # noqa: SLF001 - torch has no other way to ask
            self._hooked[node] = variable
            return None
        self._leaves[node] = variable
        return variable

    def plan(self) -> Plan:
        """The regions, once all has been visited."""
        if not self._is_shared:
            return Plan(self._owner, self._leaves, self._hooked, self._regions, self._heeded, passed_by=self._passed_by)
        plan = Plan(self._owner, self._leaves, self._hooked, {}, self._heeded)
        self._divide(plan)
        return plan

    def _divide(self, plan: Plan) -> None:
        """Find the regions of nodes that are reached by several sources."""
        leaves = self._leaves
        children = {node: self._children(node) for node in self._owner}
        masks = plan.sources_of = self._masks(children)
        for number, source in enumerate(self._sources):
            region = plan.region(1 << number)
            for node, _ in source.edges:
                if node in leaves:
                    region.leaves[node] = leaves[node]
        for node, sources in masks.items():
            region = plan.region(sources)
            region.nodes.append(node)
            if node.__class__ is self._recv_class:
                region.recvs.append(node)
            for place, edge in enumerate(children[node]):
                child = edge[0]
                if child is None:
                    continue
                leaf = leaves.get(child)
                if leaf is not None:
                    region.leaves[child] = leaf
                elif masks[child] != sources:
                    region.exits.append(Exit(node, place, edge))

    def _children(self, node: Any) -> tuple[Edge, ...]:
        edges: tuple[Edge, ...] = () if node.__class__ is self._recv_class else node.next_functions
        return edges

    def _masks(self, children: dict[Any, tuple[Edge, ...]]) -> dict[Any, int]:
        leaves = self._leaves
        masks = dict.fromkeys(self._owner, 0)
        missing = dict.fromkeys(self._owner, 0)
        for number, source in enumerate(self._sources):
            for node, _ in source.edges:
                if node not in leaves:
                    masks[node] |= 1 << number
        for edges in children.values():
            for child, _ in edges:
                if child is not None and child not in leaves:
                    missing[child] += 1
        # from the top: each node before those that it leads to
        order = [node for node, count in missing.items() if not count]
        for node in order:  # which grows meanwhile
            mask = masks[node]
            for child, _ in children[node]:
                if child is not None and child not in leaves:
                    masks[child] |= mask
                    missing[child] -= 1
                    if not missing[child]:
                        order.append(child)
        return masks
