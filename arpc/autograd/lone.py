"""A pass over a graph of this worker alone, which is too large for a `BriefPass`.

Nothing was sent from here in its context, so no gradients come but those of the roots, and none leave. All of it runs
in one call of torch's engine. There are no regions then, nobody to be told, and nothing to wait for but a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.engine import call_engine
from arpc.autograd.graph import Plan
from arpc.autograd.local_pass import LocalPass
from arpc.autograd.nodes import edge_into
from arpc.autograd.protocol import NOTHING_LIVE, Parcel
from arpc.errors import AutogradError

__all__ = ["LonePass", "is_lone"]


def is_lone(plan: Plan) -> bool:
    """Whether a graph with one source concerns nobody else, nor hooks that are to run when all else is over."""
    return not plan.heeded_leaves and not plan.regions[1].recvs


class LonePass(LocalPass):
    """One that nobody else has a part in. To others it is a `BackwardPass`."""

    _leaves: Sequence[Tensor] = ()
    _found: Sequence[Tensor | None] = ()
    """Their gradients."""

    def start(self, roots: Sequence[Tensor], plan: Plan) -> None:
        """Begin, given what the roots lead to. To be followed by `wait` at once."""
        self.context.active_pass = self
        leaves = self._leaves = [*plan.leaves.values(), *plan.hooked_leaves.values()]
        elements = len(roots)
        for leaf in leaves:
            elements += leaf.numel()
        pace = self._host.pace
        try:
            # Before a thread comes to it, people may do something to the roots, and to the list of them
            edges = [edge_into((root.grad_fn, root.output_nr, None)) for root in roots]
            run = partial(self._run, edges, list(map(torch.ones_like, roots)), leaves)
            if leaves and not pace.is_short(plan, elements):
                self._run_in_thread(partial(pace.run, run, plan, elements))
                return
            if leaves:  # if all were frozen since, the engine would be asked for nothing, and write to `.grad`
                pace.run(run, plan, elements)
            self._finish()
        except BaseException as error:  # noqa: BLE001 - whatever nodes and hooks of users raise
            self.fail(self._described(error))

    def receive(self, sender: int, parcel: Parcel, *, is_engaging: bool) -> Parcel | None:
        """A parcel has come, though nobody was told of this pass."""
        if not parcel.gradients:
            return NOTHING_LIVE
        self.fail(
            AutogradError(
                f"worker {sender} has gradients for autograd context {self.context.id}, of which worker "
                f"{self._host.info.name!r} has no graph"
            )
        )
        return None

    def _run(self, edges: Sequence[GradientEdge], entering: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        if self.is_over:
            return  # it was ended before a thread came to it
        found = call_engine(edges, entering, leaves, self.retain_graph)
        if not self.is_over:
            self._found = found

    def _go_on(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # noqa: BLE001 - whatever leaves of users raise when they are copied
            self.fail(self._described(error))

    def _finish(self) -> None:
        gradients = self._gathered().take()
        self.context.commit(self.id, gradients)  # first, as in a `BackwardPass`
        self._end()

    def _gathered(self) -> LeafGradients:
        # A function of its own: when it is over nobody else has a gradient, which then is not copied
        found, self._found = self._found, ()
        gathered = LeafGradients()
        for leaf, gradient in zip(self._leaves, found, strict=True):
            if gradient is not None:
                gathered.add(leaf, gradient)
        return gathered

    def _let_go(self) -> None:
        self._leaves = self._found = ()
