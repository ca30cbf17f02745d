"""The part of a pass that is over as soon as it has begun.

Most workers are only called: the one parcel of gradients that reaches them resolves every message that they have sent,
and what comes of it goes back with the answer. Nothing has to be waited for, so nobody else ever sees such a pass, and
it needs none of the state that a `BackwardPass` has.
"""

from __future__ import annotations

from torch import Tensor

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.context import AutogradContext
from arpc.autograd.failure import node_failure
from arpc.autograd.graph import Edge
from arpc.autograd.pace import Pace
from arpc.autograd.protocol import Parcel
from arpc.autograd.survey import Expectation, IsHeeded, survey
from arpc.ids import WorkerInfo

__all__ = ["run_at_once"]


def run_at_once(
    context: AutogradContext,
    pass_id: int,
    sender: int,
    parcel: Parcel,
    *,
    retain_graph: bool,
    worker: WorkerInfo,
    pace: Pace,
    is_heeded: IsHeeded,
    expectation: Expectation,
) -> Parcel | None:
    """Run a pass with the parcel that began it here: what goes back. None, and nothing has happened, if it takes more.

    Raises what a `BackwardPass` would have failed with.
    """
    gradients, is_first, open_here, _ = parcel
    sends = context.sends
    if not is_first or open_here or context.running_thread is not None:
        return None
    for send in sends.values():
        if send.to != sender:
            return None
    edges: list[Edge] = []
    entering: list[Tensor] = []
    for message_id, tensors in gradients:
        if message_id not in sends:
            return None
        for edge, gradient in zip(sends[message_id].source.edges, tensors, strict=True):
            if gradient is not None:
                if not edge[0].next_functions:
                    return None  # a leaf: nothing runs for it
                edges.append(edge)
                entering.append(gradient)
    graph = survey(edges, is_heeded, expectation, retain_graph=retain_graph)
    if graph is None:
        return None
    for record in graph.records:
        if record.sender != sender:
            return None
    leaf_gradients = LeafGradients()
    try:
        if edges and not graph.try_to_run(edges, entering, pace, leaf_gradients):
            return None
    except BaseException as error:
        _end(context, parcel, retain_graph=retain_graph)
        context.roll_back(pass_id)
        if isinstance(error, Exception):  # whatever nodes and hooks of users raise
            raise node_failure(error, worker, context.id, None) from error
        raise
    _end(context, parcel, retain_graph=retain_graph)
    context.commit(pass_id, leaf_gradients.take())
    return Parcel(graph.delivered.get(sender, ()), is_first=True)


def _end(context: AutogradContext, parcel: Parcel, *, retain_graph: bool) -> None:
    context.sends_used += len(parcel.gradients)
    if not retain_graph:  # what was gone through is freed
        for message_id, _ in parcel.gradients:
            context.sends.pop(message_id, None)
