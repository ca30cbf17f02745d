"""The part of a pass that is over as soon as it has begun.

Most workers are only called: the one parcel of gradients that reaches them resolves every message that they have sent,
and what comes of it goes back with the answer. Nothing has to be waited for, so nobody else ever sees such a pass, and
it needs none of the state that a `BackwardPass` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.context import NO_GRADIENTS, AutogradContext
from arpc.autograd.failure import node_failure
from arpc.autograd.nodes import edge_into
from arpc.autograd.passes import Host
from arpc.autograd.protocol import Parcel
from arpc.autograd.survey import Expectation, survey

__all__ = ["run_at_once"]


def run_at_once(
    host: Host,
    context: AutogradContext,
    pass_id: int,
    sender: int,
    parcel: Parcel,
    expectation: Expectation,
    retain_graph: bool,
) -> tuple[Sequence[tuple[int, Sequence[Tensor | None]]], bool] | None:
    """Run a pass with the parcel that began it here. None, and nothing has happened, if it takes more.

    Otherwise the gradients that go back, which are all that there are, and whether this worker has left the context.
    Raises what a `BackwardPass` would have failed with.
    """
    gradients, is_first, open_here, _, may_leave = parcel
    sends = context.sends
    if not is_first or open_here or context.running_thread is not None:
        return None
    for send in sends.values():
        if send.to != sender:
            return None
    roots: list[GradientEdge] = []
    entering: list[Tensor] = []
    nodes: list[Any] = []
    for message_id, tensors in gradients:
        if message_id not in sends:
            return None
        for (node, place), gradient in zip(sends[message_id].edges, tensors, strict=True):
            if gradient is not None:
                roots.append(edge_into((node, place, None)))
                entering.append(gradient)
                nodes.append(node)
    graph = survey(nodes, host.is_heeded, expectation)
    if graph is None:
        return None
    for recv in graph.recvs:
        if recv.record.sender != sender:
            return None
    leaf_gradients = LeafGradients()
    try:
        delivered = graph.try_to_run(roots, entering, retain_graph, host.pace, leaf_gradients)
        if delivered is None:
            return None
    except BaseException as error:
        _end(context, gradients, retain_graph)
        context.roll_back(pass_id, sender)
        # whatever nodes and hooks of users raise
        raise node_failure(error, host.info, context.id, None) from error
    _end(context, gradients, retain_graph)
    going_back = delivered.get(sender, ())
    if may_leave and not graph.leaves and host.container.try_to_leave(context, pass_id, sender):
        return going_back, True
    context.commit(pass_id, leaf_gradients.take() if graph.leaves else NO_GRADIENTS, (sender,))
    return going_back, False


def _end(context: AutogradContext, gradients: Sequence[tuple[int, Any]], retain_graph: bool) -> None:
    context.sends_used += len(gradients)
    if not retain_graph:  # what was gone through is freed
        for message_id, _ in gradients:
            context.sends.pop(message_id, None)
