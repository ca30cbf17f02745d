"""The division of a graph for a pass: each node belongs to the earliest message sent from here that reaches it.

Gradients enter a worker's graph at its *sends* (messages that left with tensors) and, where the pass began, at the
roots. The nodes that a send reaches and no earlier send does are its *region*. A region runs when its send is resolved
and all regions that lead into it have run. Later sends lead into regions of earlier ones, never the other way round, so
there is always a region that can run next.

Leaves and recv nodes without hooks belong to no region. They are *targets* of each region that leads to them, and get
the sum of the parts. Those with hooks must see whole gradients, so they are nodes of a region like any other.

This module does not compute with tensors: the tests use nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias

import msgspec

from arpc.autograd.nodes import LeafNode, RecvNode
from arpc.private.torch import backward_hooks

__all__ = ["Edge", "Plan", "Region", "Send"]

Edge: TypeAlias = tuple[Any, int]
"""A node, and the number of one of its inputs. A node has ``next_functions``, the edges that it leads to."""
_NO_REGIONS: Final[frozenset[Any]] = frozenset()


class Send(msgspec.Struct, eq=False):
    """A message that left this worker with tensors that require grad."""

    edges: Sequence[Edge]
    """The edges that the gradients of its tensors enter."""
    node: Any
    """The send node, see `attach_send`."""
    to: int
    """The id of the worker that it was sent to."""
    stamp: int
    """The clock of the context when it was sent: larger than that of any message it depends on."""


class Region(msgspec.Struct, eq=False):
    """The nodes that a send reaches and no earlier one does; or those that only the roots reach."""

    message_id: int
    send: Send | None
    """None for the region of the roots."""
    waits: int
    """The number of events it waits for: its own send, and each region that leads into it."""
    targets: dict[Edge, None] = {}
    """The edges to leaves and recv nodes without hooks: the engine is asked for their gradients."""
    recvs: dict[Any, None] = {}
    """The recv nodes that it can give gradients to."""
    has_hooked_recvs: bool = False
    """Whether some of its recv nodes have hooks, so that the engine has to execute them."""
    touches: AbstractSet[Any] = _NO_REGIONS
    """The regions of earlier sends that its nodes lead into."""
    entering: list[tuple[Edge, Any]] = []
    """The gradients that have arrived for its nodes."""
    size: int = 0
    """The number of its nodes."""
    is_over: bool = False

    def touch(self, other: Region) -> None:
        """Record that a node of this region leads into another region, which has to wait for this one."""
        if other is self or other in self.touches:
            return
        if self.touches is _NO_REGIONS:
            self.touches = set()
        self.touches.add(other)  # type: ignore[attr-defined]  # it is a set now
        other.waits += 1


class Plan(msgspec.Struct, eq=False):
    """The regions of one worker's graph for one pass, in the order of their sends, that of the roots last.

    It is complete once `walk` has returned True. A large graph is better walked in a thread, some nodes at a time.
    """

    sends: Mapping[int, Send]
    """The sends of the context, by message id, in their order."""
    roots: Sequence[Edge] | None = None
    """The edges of the roots; None on a worker where the pass did not begin."""
    cutoff: int = 0
    """The latest stamp of a message that the roots depend on: no later send gets gradients.

    Found in the walk if there are roots.
    """
    has_accumulate_hooks: Callable[[Any, Any], bool] = lambda _node, _leaf: False
    leaf_class: Any = LeafNode
    recv_class: Any = RecvNode
    regions: list[Region] = []
    owners: dict[Any, Region] = {}
    """The region of each node that belongs to one."""
    leaves: dict[Any, Any] = {}
    """The leaves without hooks, by their nodes."""
    accumulated: dict[Any, Any] = {}
    """The leaves whose gradients torch itself has to accumulate in the end, with hooks, by their nodes."""
    last_begun: Any = None
    """The node that torch's engine began last, in anomaly mode; else None."""
    _limit: int = 0
    _steps: Generator[bool, None, None] | None = None

    def walk(self, limit: int) -> bool:
        """Visit up to about ``limit`` further nodes; True if all have been visited."""
        self._limit = limit
        if self._steps is None:
            self._steps = self._walk()
        return next(self._steps, True)

    def _walk(self) -> Generator[bool, None, None]:
        """Visit the nodes of one region after the other. Yields False at each limit of `walk`."""
        # This loop is the cost of a node outside of torch's engine, so it does no more than it must
        owners, leaves, leaf_class, recv_class = self.owners, self.leaves, self.leaf_class, self.recv_class
        roots, cutoff, limit, size = self.roots, self.cutoff, self._limit, 0
        parts: list[tuple[int, Send | None, Sequence[Edge]]] = [
            (number, send, send.edges)
            for number, send in self.sends.items()
            if roots is not None or send.stamp <= cutoff
        ]
        if roots is not None:
            parts.append((-1, None, roots))
        for message_id, send, entrances in parts:
            region = Region(message_id, send, 0 if send is None else 1)
            stack = [*entrances]
            self.regions.append(region)
            while stack:
                edge = stack.pop()
                while (node := edge[0]) is not None:
                    kind = node.__class__
                    if kind is recv_class and not node.record.is_hooked:
                        region.recvs[node] = region.targets[edge] = None
                        break
                    if kind is leaf_class or kind is recv_class:
                        if node in leaves or self._is_target(region, node):
                            region.targets[edge] = None
                        break
                    owner = owners.get(node)
                    if owner is not None:
                        region.touch(owner)
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
        if roots is not None:
            self.cutoff = _latest_stamp(region)

    def _is_target(self, region: Region, node: Any) -> bool:
        """Visit a leaf, or a recv node with hooks; return whether the engine is asked for what the region gives to it.

        A node that must see whole gradients gets an owner, like any other node.
        """
        is_leaf = node.__class__ is self.leaf_class
        if is_leaf:
            leaf = node.variable
            if not leaf.requires_grad:
                return False  # it was frozen since
            if self.has_accumulate_hooks(node, leaf):
                self.accumulated[node] = leaf
            if not backward_hooks(leaf):
                self.leaves[node] = leaf
                return True
        owner = self.owners.get(node)
        if owner is not None:
            region.touch(owner)
            return False
        self.owners[node] = region
        if not is_leaf:  # the engine executes it for `ANCHOR`, which it leads to
            region.recvs[node] = None
            region.has_hooked_recvs = True
        return is_leaf


def _latest_stamp(roots: Region) -> int:
    """Return the latest stamp of the messages that the region of the roots leads to, also through other regions."""
    latest = -1
    seen = {roots}
    todo = [roots]
    for region in todo:  # the list grows meanwhile
        for node in region.recvs:
            latest = max(latest, node.record.stamp)
        if region.touches:
            todo += region.touches - seen
            seen |= region.touches
    return latest
