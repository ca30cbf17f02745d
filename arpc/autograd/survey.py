"""A small graph that runs in one piece: looked at with no more care than that takes, and run by one call of the engine.

Where all gradients that enter a graph are there at once, it matters to nobody which of them reach which nodes. There
are no regions then, and nothing to plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.engine import call_engine, compact
from arpc.autograd.nodes import RecvNode, RecvRecord
from arpc.autograd.pace import SHORT_NODES, Pace

__all__ = ["Expectation", "Survey", "are_apart", "is_plain_leaf", "survey"]

_recv_class: Any = RecvNode
_is_anomaly_enabled = torch._C.is_anomaly_enabled  # what `torch.is_anomaly_enabled` calls
IsHeeded = Callable[[Any, Any], bool]
_PASSED_OVER: Final = 15


class Expectation:
    """Whether graphs are likely to be small. They come again, step after step: what one was, the next will be.

    To look at a part of a large one in vain takes as long as some of its nodes take to run.
    """

    __slots__ = ("_to_pass_over",)

    def __init__(self) -> None:
        self._to_pass_over = 0

    @property
    def is_good(self) -> bool:
        """Whether to look at the next one. Asked once for each."""
        if self._to_pass_over:
            self._to_pass_over -= 1
            return False
        return True

    def disappointed(self) -> None:
        """It was large. Some are passed over now."""
        self._to_pass_over = _PASSED_OVER


class Survey:
    """All that there is to know of a small graph. Its nodes are for a `Pace`, as those of a plan are."""

    __slots__ = ("count", "delivered", "elements", "leaves", "nodes", "recvs", "retain_graph")

    def __init__(
        self, nodes: dict[Any, None], leaves: list[Tensor], recvs: list[Any], elements: int, retain_graph: bool
    ) -> None:
        self.nodes = nodes
        self.count = len(nodes)
        self.leaves = leaves
        """Tensors that get gradients here."""
        self.recvs = recvs
        """The nodes of messages whose tensors do."""
        self.elements = elements
        """How many the leaves have."""
        self.retain_graph = retain_graph
        self.delivered: dict[int, list[tuple[int, Sequence[Tensor | None]]]] = {}
        """What leaves this worker once it has run: by the worker that it goes to, the gradients for its messages."""

    def try_to_run(
        self, roots: Sequence[Any], gradients: Sequence[Tensor], pace: Pace, leaf_gradients: LeafGradients
    ) -> bool:
        """Run it with gradients that enter at roots; False, and nothing has happened, if that would take too long.

        A root is a tensor, or a `GradientEdge`.
        """
        inputs: list[Any] = self.leaves.copy()
        # What would enter a recv node is asked for, so that the engine need not call it
        for node in self.recvs:
            for place in range(node.record.count):
                inputs.append(GradientEdge(node, place))
        if not inputs:
            return True
        elements = self.elements
        for gradient in gradients:
            elements += gradient.numel()
        found = pace.try_to_run(call_engine, self, elements, roots, gradients, inputs, self.retain_graph)
        if found is None:
            return False
        end = 0
        for leaf in self.leaves:
            if found[end] is not None:
                leaf_gradients.add(leaf, found[end])
            end += 1
        for node in self.recvs:
            record: RecvRecord = node.record
            start = end
            end += record.count
            for gradient in found[start:end]:
                if gradient is not None:
                    self._deliver(record, found[start:end])
                    break
        return True

    def _deliver(self, record: RecvRecord, gradients: Sequence[Tensor | None]) -> None:
        if not self.retain_graph:
            record.is_spent = True
        item = record.message_id, list(map(compact, gradients))
        if record.sender in self.delivered:
            self.delivered[record.sender].append(item)
        else:
            self.delivered[record.sender] = [item]


def survey(stack: list[Any], is_heeded: IsHeeded, expectation: Expectation, retain_graph: bool) -> Survey | None:
    """Look at all nodes that some lead to; None if there are many, or there is something special about one of them.

    The list of these nodes grows.
    """
    if _is_anomaly_enabled() or not expectation.is_good:
        return None
    nodes: dict[Any, None] = {}
    leaves: list[Tensor] = []
    recvs: list[Any] = []
    elements = 0
    recv_class = _recv_class
    for node in stack:
        if node in nodes:
            continue
        nodes[node] = None
        if node.__class__ is recv_class:
            record = node.record
            if record.is_spent or record.is_hooked:
                return None
            recvs.append(node)
        elif further := node.next_functions:
            for child, _ in further:
                if child is not None:
                    stack.append(child)
            if len(nodes) > SHORT_NODES:
                expectation.disappointed()
                return None
        elif (leaf := getattr(node, "variable", None)) is not None:
            if is_heeded(node, leaf):
                return None
            leaves.append(leaf)
            elements += leaf.numel()
    return Survey(nodes, leaves, recvs, elements, retain_graph)


def is_plain_leaf(node: Any, is_heeded: IsHeeded) -> bool:
    """Whether a node that leads nowhere is a leaf without hooks: nothing needs to run for a gradient that comes in."""
    leaf = getattr(node, "variable", None)
    return not (leaf is None or leaf._backward_hooks or is_heeded(node, leaf))  # noqa: SLF001 - torch has no other way to ask


def are_apart(first: Survey, second: Survey) -> bool:
    """Whether one graph can run before the other: they share nothing but leaves without hooks."""
    shared = first.nodes.keys() & second.nodes
    return all(not node.next_functions and is_plain_leaf(node, _never) for node in shared)


def _never(_node: Any, _leaf: Any) -> bool:
    return False  # heeded: none of them is, or there would be no survey
