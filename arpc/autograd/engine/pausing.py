"""Runs regions of a graph up to a border: the nodes beyond it wait for gradients that have not arrived.

Each node beyond the border belongs to a region whose send can serve as a *barrier*: it joins the roots, last in the
engine's queue, so that every node it leads to has an unmet dependency. When all other nodes have run, it raises, which
ends the call. Gradients that crossed the border until then were caught by hooks, and enter in a later call.

This uses torch's private `_set_sequence_nr` and the order of its queue. `check_pausing` tries it on a small graph.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arpc.autograd.nodes import (
    ANCHOR,
    SCALAR,
    SEND_NAME,
    LeafNode,
    RecvCollector,
    RecvNode,
    attach_send,
    edge_into,
    run_backward,
)
from arpc.autograd.passes.plan import Edge, Plan, Region, Send
from arpc.autograd.passes.protocol import Run
from arpc.errors import AutogradError
from arpc.private.torch import current_engine_run, sequence_number, set_sequence_number

__all__ = ["Border", "check_pausing", "find_border", "run_up_to"]

_leaf_class: Any = LeafNode
_recv_class: Any = RecvNode


class PauseSignal(BaseException):
    """Raised at a barrier that the engine has reached: the ready nodes have run. It never leaves this module.

    It is a BaseException, so that no hook of a user takes it for an error.
    """

    def __init__(self, run: int) -> None:
        super().__init__(run)
        self.run = run
        """The number of the engine call that it has ended, see `_current_run`."""


def _current_run() -> int:
    """Return the number of the engine call that runs the current node or hook. Other threads may run other calls."""
    run: int = current_engine_run()
    return run


class Border(NamedTuple):
    """What lies between the regions of a run and the nodes that must not run yet."""

    edges: dict[Edge, None]
    """The edges into nodes beyond the border."""
    exits: list[tuple[Any, list[tuple[int, Edge]]]]
    """The nodes that run, with the edges whose gradients must be caught: across the border, and to targets."""
    leaves: list[Any]
    """The nodes that run and are those of leaves with hooks."""


def find_border(run: Run, owners: Mapping[Any, Region]) -> Border:
    """Follow the graph from where gradients enter, as far as it may run, and return the border."""
    running = set(run.regions)
    border = Border({}, [], [])
    seen: set[Any] = set()
    todo = [edge[0] for edge, _ in run.entering]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.__class__
        if kind is _leaf_class:
            border.leaves.append(node)
            continue
        if kind is _recv_class:
            continue
        if sequence_number(node) == 0:
            # The very first node that a thread makes is as low in the engine's queue as a barrier
            set_sequence_number(node, 1)
        caught: list[tuple[int, Edge]] = []
        for place, edge in enumerate(node.next_functions):
            child = edge[0]
            if child is None:
                continue
            owner = owners.get(child)
            if owner in running:
                todo.append(child)
            else:
                caught.append((place, edge))
                if owner is not None:
                    border.edges[edge] = None
        if caught:
            border.exits.append((node, caught))
    return border


def run_up_to(
    border: Border, run: Run, owners: Mapping[Any, Region], *, retain_graph: bool
) -> list[tuple[Edge, Tensor]]:
    """Run regions up to a border; return the gradients that cross it, and those of targets on this side of it."""
    # Nodes and leaves may be shared with other contexts, whose engine calls run these hooks too
    caught: list[tuple[int, Edge, Tensor]] = []
    handles: list[Any] = [node.register_hook(_catcher(edges, caught)) for node, edges in border.exits]
    handles += [node.variable.register_hook(_leaf_catcher(node, caught)) for node in border.leaves]
    barriers: dict[Any, None] = {}
    for node, _ in border.edges:
        send = owners[node].send
        assert send is not None  # no send leads into the region of the roots
        barriers[send.node] = None
    for barrier in barriers:
        set_sequence_number(barrier, 0)  # last in the engine's queue
        handles.append(barrier.register_prehook(_pause))
    at_targets: list[tuple[Edge, Tensor]] = []
    roots: list[Any] = []
    gradients: list[Tensor] = []
    for edge, gradient in run.entering:
        if edge[0] in owners:
            roots.append(edge_into((*edge, None)))
            gradients.append(gradient)
        else:
            at_targets.append((edge, gradient))
    targets = {edge: None for region in run.regions for edge in region.targets}
    inputs = [edge_into((*edge, None)) for edge in (*targets, *border.edges)]
    collector = RecvCollector([node.record for region in run.regions for node in region.recvs])
    try:
        with _without_pause_warnings():
            run_backward(
                (*roots, *[edge_into((barrier, 0, None)) for barrier in barriers]),
                (*gradients, *[SCALAR] * len(barriers)),
                retain_graph,
                False,
                (*inputs, ANCHOR),
                True,
                False,
            )
    except PauseSignal as pause:
        number = pause.run
    else:
        raise AutogradError("torch's engine ran past the end of what was ready: this is a bug of arpc")
    finally:
        collector.close()
        for handle in handles:
            handle.remove()
    captured = collector.captured
    executed = {node for (node, _), _ in captured}
    for caught_in, edge, gradient in caught:
        if caught_in != number or edge[0] in executed:
            continue
        # recv nodes that nodes beyond the border lead to as well were not executed
        is_bare_recv = edge[0].__class__ is _recv_class and edge[0] not in owners
        (at_targets if is_bare_recv else captured).append((edge, gradient))
    return captured + _captured_at(at_targets)


def _captured_at(entering: list[tuple[Edge, Tensor]]) -> list[tuple[Edge, Tensor]]:
    """Let torch capture gradients that enter right at recv nodes, so that `torch.Tensor.retain_grad` takes effect."""
    if not entering:
        return []
    targets = {edge: edge_into((*edge, None)) for edge, _ in entering}
    roots = tuple([targets[edge] for edge, _ in entering])
    found = run_backward(
        roots, tuple([gradient for _, gradient in entering]), True, False, tuple(targets.values()), True, False
    )
    return list(zip(targets, found, strict=True))


def _catcher(edges: Sequence[tuple[int, Edge]], caught: list[tuple[int, Edge, Tensor]]) -> Callable[..., None]:
    """Return a hook that records the gradients that a node passes to some of its edges."""

    def catch(gradients: Sequence[Tensor | None], _: Any) -> None:
        run = _current_run()
        for place, edge in edges:
            gradient = gradients[place]
            if gradient is not None:
                caught.append((run, edge, gradient))

    return catch


def _leaf_catcher(node: Any, caught: list[tuple[int, Edge, Tensor]]) -> Callable[[Tensor], None]:
    """Return a hook that records the gradient of a leaf after all hooks of users."""

    def catch(gradient: Tensor) -> None:
        caught.append((_current_run(), (node, 0), gradient))

    return catch


def _pause(_: Any) -> None:
    raise PauseSignal(_current_run())


@contextmanager
def _without_pause_warnings() -> Iterator[None]:
    """Suppress the warning of anomaly mode, which takes a pause for an error of the send node."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"Error detected in (torch::autograd::Error|{SEND_NAME})")
        yield


@functools.cache
def check_pausing() -> None:
    """Test on a small graph whether torch's engine can be paused. Raises `AutogradError` if it cannot."""
    with torch.enable_grad():
        weight = torch.full((2,), 3.0, requires_grad=True)
        shared = weight * 2
        early, late = (shared * 5).sum(), shared * 7
        runs: list[None] = []
        shared.grad_fn.register_hook(lambda *_: runs.append(None))  # type: ignore[union-attr]
        node = attach_send([late])
    plan = Plan({1: Send(node.next_functions[1:], node, 0, 1)}, [(early.grad_fn, 0)])
    plan.walk(100)
    run = Run([plan.regions[-1]], [((early.grad_fn, 0), torch.ones(()))], may_cross=True)
    try:
        border = find_border(run, plan.owners)
        (((node, _), gradient),) = run_up_to(border, run, plan.owners, retain_graph=False)
        is_right = not runs and node is shared.grad_fn and gradient.tolist() == [5.0, 5.0]
    except Exception as error:
        raise AutogradError(f"torch {torch.__version__} does not let its engine be paused: {error}") from error
    if not is_right:
        raise AutogradError(
            f"torch {torch.__version__} does not let its engine be paused, which this backward pass needs: two "
            "messages of this worker depend on the same node"
        )
