"""How a graph is divided for a pass: each node belongs to the earliest message sent from here that reaches it.

Gradients enter a worker's graph at its *sends* (messages that left with tensors) and, where the pass began, at the
roots. The nodes that a send reaches and no earlier send does are its *region*. A region runs when its send is resolved
and all regions that lead into it have run. Later sends lead into regions of earlier ones, never the other way round, so
there is always a region that can go on.

Leaves and recv nodes without hooks belong to no region. They are *targets* of each region that leads to them, and get
the sum of its parts. With hooks they must see whole gradients, so they are nodes of a region like any other.

Nothing here computes with tensors: the tests use nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from arpc.autograd.nodes import LeafNode, RecvNode, RecvRecord

__all__ = ["Edge", "Plan", "Planner", "Region", "Send"]

Edge: TypeAlias = tuple[Any, int]
"""A node, and the number of one of its inputs. A node has ``next_functions``, the edges that it leads to."""
HasHooks: TypeAlias = Callable[[Any, Any], bool]


class Send(NamedTuple):
    """A message that left this worker with tensors that require grad."""

    edges: Sequence[Edge]
    """Where the gradients of its tensors go."""
    node: Any
    """See `attach_send`."""
    to: int
    """The id of the worker that it was sent to."""
    stamp: int
    """The clock of the context when it was sent: larger than that of any message it depends on."""


class Region:
    """The nodes that a send reaches and no earlier one does; or those that only the roots reach."""

    __slots__ = (
        "entering",
        "has_hooked_recvs",
        "is_over",
        "message_id",
        "recvs",
        "send",
        "size",
        "targets",
        "touches",
        "waits",
    )

    def __init__(self, message_id: int, send: Send | None) -> None:
        self.message_id = message_id
        self.send = send
        """None for the region of the roots."""
        self.targets: dict[Edge, None] = {}
        """Edges to leaves, and to recv nodes without hooks: what the engine is asked for."""
        self.recvs: dict[RecvRecord, None] = {}
        """The messages whose tensors it can give gradients to."""
        self.has_hooked_recvs = False
        """Some of them have hooks, so that the engine has to execute their nodes."""
        self.touches: set[Region] = set()
        """Regions of earlier sends that its nodes lead into."""
        self.waits = 0 if send is None else 1
        """How many things it waits for: its own send, and the regions that lead into it."""
        self.entering: list[tuple[Edge, Any]] = []
        """Gradients that have come for its nodes."""
        self.size = 0
        """How many nodes it has."""
        self.is_over = False


class Plan:
    """The regions of one worker's graph for one pass, in the order of their sends, that of the roots last."""

    def __init__(
        self,
        regions: Sequence[Region],
        owners: Mapping[Any, Region],
        leaves: Mapping[Any, Any],
        accumulated: Mapping[Any, Any],
        cutoff: int,
    ) -> None:
        self.regions = regions
        self.owners = owners
        """The region of each node that belongs to one."""
        self.leaves = leaves
        """The nodes of leaves without hooks, and the tensors that these are."""
        self.accumulated = accumulated
        """Leaves whose gradients torch itself has to accumulate in the end, with hooks, by their nodes."""
        self.cutoff = cutoff
        """The latest stamp of a message that the roots depend on: no later send gets gradients."""


class Planner:
    """Walks a graph once, as many nodes at a time as it is told: a large one is better walked in a thread."""

    def __init__(
        self,
        sends: Mapping[int, Send],
        roots: Sequence[Edge] | None = None,
        cutoff: int = 0,
        has_accumulate_hooks: HasHooks = lambda _node, _leaf: False,
        *,
        leaf_class: type = LeafNode,
        recv_class: type = RecvNode,
    ) -> None:
        """``sends``: those of the context, by message id, in their order. ``cutoff`` counts if there are no roots."""
        self._roots = roots
        self._cutoff = cutoff
        self._has_accumulate_hooks = has_accumulate_hooks
        self._recv_class: Any = recv_class
        self._ends = frozenset((leaf_class, recv_class))
        self._regions = [
            Region(message_id, send) for message_id, send in sends.items() if roots is not None or send.stamp <= cutoff
        ]
        if roots is not None:
            self._regions.append(Region(-1, None))
        self._begun = 0
        """How many regions have been begun."""
        self._owned_before = 0
        """How many nodes belonged to regions when the last one was begun."""
        self._stack: list[Edge] = []
        self._owners: dict[Any, Region] = {}
        self._leaves: dict[Any, Any] = {}
        self._accumulated: dict[Any, Any] = {}

    def walk(self, limit: int) -> bool:
        """Visit up to about ``limit`` further nodes; True if all have been visited."""
        # This loop is what a node costs outside of torch's engine, so it does no more than it must
        ends, owners, stack, regions = self._ends, self._owners, self._stack, self._regions
        region: Any = regions[self._begun - 1] if self._begun else None
        while True:
            while stack:
                edge = stack.pop()
                node = edge[0]
                while node is not None:
                    if node.__class__ in ends and self._is_end(region, edge):
                        break
                    if node in owners:
                        if owners[node] is not region:
                            region.touches.add(owners[node])
                        break
                    owners[node] = region
                    edges = node.next_functions
                    if not edges:
                        break
                    if len(edges) > 1:
                        stack += edges[1:]
                    edge = edges[0]  # most of a graph is chains
                    limit -= 1
                    if not limit:
                        stack.append(edge)
                        return False
                    node = edge[0]
            if region is not None:
                region.size = len(owners) - self._owned_before
                self._owned_before = len(owners)
            if self._begun == len(regions):
                return True
            region = regions[self._begun]
            self._begun += 1
            stack += self._roots or () if region.send is None else region.send.edges

    def _is_end(self, region: Region, edge: Edge) -> bool:
        """Take note of a leaf or a recv that a region leads to; False if it is a node like any other."""
        node = edge[0]
        if node.__class__ is self._recv_class:
            record: RecvRecord = node.record
            if not record.is_hooked:
                region.recvs[record] = None
                region.targets[edge] = None
                return True
            if node not in self._owners:
                region.recvs[record] = None
                region.has_hooked_recvs = True
                self._owners[node] = region
                return True  # not on to `ANCHOR`
        elif node in self._leaves or self._is_plain_leaf(node):
            region.targets[edge] = None
            return True
        elif not node.variable.requires_grad:
            return True  # it was frozen since, and gets none
        elif node not in self._owners:
            region.targets[edge] = None
        return False

    def _is_plain_leaf(self, node: Any) -> bool:
        """Whether the node of a leaf, seen for the first time or with hooks, needs to see no whole gradients."""
        leaf = node.variable
        if not leaf.requires_grad:
            return False
        if self._has_accumulate_hooks(node, leaf):
            self._accumulated[node] = leaf
        if leaf._backward_hooks:  # noqa: SLF001 - torch has no other way to ask
            return False
        self._leaves[node] = leaf
        return True

    def plan(self) -> Plan:
        """The plan, once all has been visited."""
        for region in self._regions:
            for other in region.touches:
                other.waits += 1
        if self._roots is not None:
            self._cutoff = _latest_stamp(self._regions[-1])
        return Plan(self._regions, self._owners, self._leaves, self._accumulated, self._cutoff)


def _latest_stamp(roots: Region) -> int:
    """The latest stamp of the messages that the region of the roots leads to, through whatever other regions."""
    latest = -1
    seen = {roots}
    todo = [roots]
    while todo:
        region = todo.pop()
        for record in region.recvs:
            latest = max(latest, record.stamp)
        if region.touches:
            todo += region.touches - seen
            seen |= region.touches
    return latest
