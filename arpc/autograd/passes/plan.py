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

from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple, TypeAlias

from arpc.autograd.nodes import LeafNode, RecvNode, RecvRecord
from arpc.private.torch import backward_hooks

__all__ = ["Edge", "Plan", "Planner", "Region", "Send"]

Edge: TypeAlias = tuple[Any, int]
"""A node, and the number of one of its inputs. A node has ``next_functions``, the edges that it leads to."""
HasHooks: TypeAlias = Callable[[Any, Any], bool]
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long


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


_NONE: Final[frozenset[Any]] = frozenset()


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
        """Some of its recvs have hooks, so that the engine has to execute their nodes."""
        self.touches: AbstractSet[Region] = _NONE
        """Regions of earlier sends that its nodes lead into."""
        self.waits = 0 if send is None else 1
        """How many things it waits for: its own send, and the regions that lead into it."""
        self.entering: list[tuple[Edge, Any]] = []
        """Gradients that have come for its nodes."""
        self.size = 0
        """How many nodes it has."""
        self.is_over = False

    def touch(self, other: Region) -> None:
        """A node of this region leads into another one, which has to wait for it."""
        if other is self or other in self.touches:
            return
        if self.touches is _NONE:
            self.touches = set()
        self.touches.add(other)  # type: ignore[attr-defined]  # it is a set now
        other.waits += 1


class Plan(NamedTuple):
    """The regions of one worker's graph for one pass, in the order of their sends, that of the roots last."""

    regions: Sequence[Region]
    owners: Mapping[Any, Region]
    """The region of each node that belongs to one."""
    leaves: Mapping[Any, Any]
    """The nodes of leaves without hooks, and the tensors that these are."""
    accumulated: Mapping[Any, Any]
    """Leaves whose gradients torch itself has to accumulate in the end, with hooks, by their nodes."""
    cutoff: int
    """The latest stamp of a message that the roots depend on: no later send gets gradients."""


class Planner:
    """Walks a graph once, as many nodes at a time as the caller allows: a large one is better walked in a thread."""

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
        self._cutoff = cutoff
        self._has_roots = roots is not None
        self._has_accumulate_hooks = has_accumulate_hooks
        if roots is None:
            parts = [(Region(id_, send), send.edges) for id_, send in sends.items() if send.stamp <= cutoff]
        else:
            parts = [(Region(id_, send), send.edges) for id_, send in sends.items()]
            parts.append((Region(-1, None), roots))
        self._regions = [region for region, _ in parts]
        self._owners: dict[Any, Region] = {}
        self._leaves: dict[Any, Any] = {}
        self._accumulated: dict[Any, Any] = {}
        self._limit = 0
        self._steps = self._walk(parts, leaf_class, recv_class)

    def walk(self, limit: int) -> bool:
        """Visit up to about ``limit`` further nodes; True if all have been visited."""
        self._limit = limit
        return next(self._steps, True)

    def _walk(
        self, parts: Sequence[tuple[Region, Sequence[Edge]]], leaf_class: Any, recv_class: Any
    ) -> Generator[bool, None, None]:
        """Visit the nodes of one region after the other. Yields False at each limit of `walk`."""
        # This loop is what a node costs outside of torch's engine, so it does no more than it must
        owners, leaves, limit, size = self._owners, self._leaves, self._limit, 0
        for region, entrances in parts:
            stack = [*entrances]
            while stack:
                edge = stack.pop()
                while (node := edge[0]) is not None:
                    kind = node.__class__
                    if kind is recv_class:
                        record = node.record
                        if record.is_hooked:
                            self._visit_hooked_recv(region, node)
                        else:
                            region.recvs[record] = None
                            region.targets[edge] = None
                        break
                    if kind is leaf_class and (node in leaves or self._is_plain_leaf(node)):
                        region.targets[edge] = None
                        break
                    if node in owners:
                        if owners[node] is not region:
                            region.touch(owners[node])
                        break
                    if kind is leaf_class:
                        if node.variable.requires_grad:  # or it was frozen since, and gets none
                            region.targets[edge] = None
                            owners[node] = region
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
                        yield False
                        limit = self._limit
            region.size, size = len(owners) - size, len(owners)

    def _visit_hooked_recv(self, region: Region, node: Any) -> None:
        """A recv node that must see whole gradients is owned, like any other node. It leads on to `ANCHOR` alone."""
        owner = self._owners.get(node)
        if owner is not None:
            region.touch(owner)
            return
        self._owners[node] = region
        region.recvs[node.record] = None
        region.has_hooked_recvs = True

    def _is_plain_leaf(self, node: Any) -> bool:
        """Whether the node of a leaf, seen for the first time or with hooks, needs to see no whole gradients."""
        leaf = node.variable
        if not leaf.requires_grad:
            return False
        if self._has_accumulate_hooks(node, leaf):
            self._accumulated[node] = leaf
        if backward_hooks(leaf):
            return False
        self._leaves[node] = leaf
        return True

    def plan(self) -> Plan:
        """The plan, once all has been visited."""
        cutoff = _latest_stamp(self._regions[-1]) if self._has_roots else self._cutoff
        return _new_tuple(Plan, (self._regions, self._owners, self._leaves, self._accumulated, cutoff))  # type: ignore[no-any-return]


def _latest_stamp(roots: Region) -> int:
    """The latest stamp of the messages that the region of the roots leads to, through whatever other regions."""
    if not roots.touches:
        return max([record.stamp for record in roots.recvs], default=-1)
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
