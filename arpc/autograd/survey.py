"""A small graph that runs in one piece: looked at with no more care than that takes, and run by one call of the engine.

Where all gradients that enter a graph are there at once, it matters to nobody which of them reach which nodes. There
are no regions then, and nothing to plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.engine import compact
from arpc.autograd.nodes import LeafNode, RecvNode, RecvRecord, edge_into, run_backward
from arpc.autograd.pace import SHORT_NODES, SHORT_S, Pace

__all__ = ["Delivered", "Expectation", "Survey", "are_apart", "survey"]

Delivered: TypeAlias = "dict[int, list[tuple[int, Sequence[Tensor | None]]]]"
"""What leaves a worker: by the one that it goes to, the gradients for its messages."""
IsHeeded: TypeAlias = "Callable[[Any, Any], bool]"

_recv_class: Any = RecvNode
_leaf_class: Any = LeafNode
_is_anomaly_enabled = torch._C.is_anomaly_enabled  # what `torch.is_anomaly_enabled` calls
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long
_numel: Final = Tensor.numel
_is_contiguous: Final[Callable[[Any], bool]] = Tensor.is_contiguous
_PASSED_OVER: Final = 15


class Expectation:
    """Whether graphs are likely to be small. They come again, step after step: what one was, the next will be.

    To look at a part of a large one in vain takes as long as some of its nodes take to run.
    """

    __slots__ = ("to_pass_over",)

    def __init__(self) -> None:
        self.to_pass_over = 0
        """How many are not looked at now, since one was large."""


class Survey(NamedTuple):
    """All that there is to know of a small graph."""

    nodes: dict[Any, None]
    leaves: list[Tensor]
    """Tensors that get gradients here."""
    recvs: list[Any]
    """The nodes of messages whose tensors do."""

    def try_to_run(
        self,
        roots: Sequence[Any],
        gradients: Sequence[Tensor],
        retain_graph: bool,
        pace: Pace,
        leaf_gradients: LeafGradients,
    ) -> Delivered | None:
        """Run it with gradients that enter at roots; None, and nothing has happened, if that would take too long.

        A root is a tensor, or a `GradientEdge`.
        """
        nodes, leaves, recvs = self
        delivered: Delivered = {}
        # What would enter a recv node is asked for, as that of a leaf is, so the engine does not call it
        inputs: list[Any] = [*leaves]
        for node in recvs:
            for place in range(node.record.count):
                inputs.append(edge_into((node, place, None)))  # noqa: PERF401 - mostly there are one or two
        if not inputs:
            return delivered
        key = len(nodes), sum(map(_numel, leaves)) + sum(map(_numel, gradients))
        run = tuple(roots), tuple(gradients), retain_graph, False, tuple(inputs), True, False
        found: tuple[Tensor, ...] | None
        if key in pace.short:  # `Pace.try_to_run`, written out
            begun = perf_counter()
            found = run_backward(*run)
            if perf_counter() - begun > SHORT_S:
                pace.short.discard(key)
        else:
            found = pace.try_to_run(run_backward, nodes, key, *run)
        if found is None:
            return None
        end = 0
        for leaf in leaves:
            if (gradient := found[end]) is not None:
                leaf_gradients.add(leaf, gradient)
            end += 1
        for node in recvs:
            record: RecvRecord = node.record
            start, end = end, end + record.count
            tensors: Sequence[Tensor | None] = found[start:end]
            try:
                are_plain = all(map(_is_contiguous, tensors))
            except (TypeError, RuntimeError):  # one is None, or sparse
                are_plain = False
            if not are_plain:
                tensors = list(map(compact, tensors))
                if all(tensor is None for tensor in tensors):
                    continue
            if not retain_graph:
                record.is_spent = True
            delivered.setdefault(record.sender, []).append((record.message_id, tensors))
        return delivered


def survey(stack: list[Any], is_heeded: IsHeeded, expectation: Expectation) -> Survey | None:
    """Look at all nodes that some lead to; None if there are many, or there is something special about one of them.

    The list of these nodes grows.
    """
    if expectation.to_pass_over:
        expectation.to_pass_over -= 1
        return None
    if _is_anomaly_enabled():
        return None
    nodes: dict[Any, None] = {}
    leaves: list[Tensor] = []
    recvs: list[Any] = []
    for node in stack:
        if node in nodes:
            continue
        nodes[node] = None
        kind = node.__class__
        if kind is _recv_class:
            record: RecvRecord = node.record
            if record.is_spent or record.is_hooked:
                return None
            recvs.append(node)
        elif kind is _leaf_class:
            leaf = node.variable
            if not leaf.requires_grad:
                continue  # it was frozen since, and gets none
            if is_heeded(node, leaf):
                return None
            leaves.append(leaf)
        else:
            for child, _ in node.next_functions:
                if child is not None:
                    stack.append(child)
            if len(nodes) > SHORT_NODES:
                expectation.to_pass_over = _PASSED_OVER
                return None
    made: Survey = _new_tuple(Survey, (nodes, leaves, recvs))
    return made


def are_apart(first: Survey, second: Survey) -> bool:
    """Whether one graph can run before the other: they share nothing but leaves without hooks."""
    shared = first.nodes.keys() & second.nodes
    return all(node.__class__ is _leaf_class and not node.variable._backward_hooks for node in shared)  # noqa: SLF001 - torch has no other way to ask
