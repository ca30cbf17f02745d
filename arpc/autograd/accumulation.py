"""Gradients of leaves while a pass sums them up, and as people get them: tensors that nobody else has a hold of."""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor

__all__ = ["LeafGradients", "summed"]


def summed(first: Tensor, second: Tensor) -> Tensor:
    """The sum, as a new tensor, of gradients in whatever layout each is."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


class LeafGradients:
    """What a pass has computed for leaves so far."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor] = {}

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        before = self._gradients.get(leaf)
        # not in place: one gradient may be handed to several leaves, and be memory of a message as well
        self._gradients[leaf] = gradient if before is None else summed(before, gradient)

    def take(self) -> dict[Tensor, Tensor]:
        """The gradients, each in memory of its own and laid out like its leaf."""
        taken, self._gradients = self._gradients, {}
        for leaf in taken:
            if taken[leaf].layout is not torch.strided:
                taken[leaf] = taken[leaf].detach().clone()
            elif (
                _references(taken[leaf]) != _SOLE or taken[leaf].stride() != leaf.stride() or taken[leaf].requires_grad
            ):
                taken[leaf] = torch.empty_like(leaf, requires_grad=False).copy_(taken[leaf].detach())
        return taken


_count_storage_uses: Final = getattr(torch._C, "_storage_Use_Count", None)


def _references(gradient: Tensor) -> tuple[int, int]:
    """How many there are to the object, and to its memory. For one in a dict that nobody else has it is `_SOLE`."""
    if _count_storage_uses is None:
        return 0, 0
    return sys.getrefcount(gradient), _count_storage_uses(gradient.untyped_storage()._cdata)


def _references_of_sole_owner() -> tuple[int, int]:
    if _count_storage_uses is None:
        return -1, -1  # torch does not tell: nobody is
    held = {0: torch.zeros(1)}
    return _references(held[0])


_SOLE: Final = _references_of_sole_owner()
