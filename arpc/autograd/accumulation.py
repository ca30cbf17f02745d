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

    __slots__ = ("_gradients",)

    def __init__(self) -> None:
        # By identity: a tensor's hash is one too, only slower. And whether the gradient is a sum, hence nobody else's
        self._gradients: dict[int, tuple[Tensor, Tensor, bool]] = {}

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        before = self._gradients.get(id(leaf))
        if before is None:
            self._gradients[id(leaf)] = leaf, gradient, False
        elif before[2] and gradient.layout is torch.strided:
            before[1].add_(gradient)
        else:
            # not in place: one gradient may be handed to several leaves, and be memory of a message as well
            total = summed(before[1], gradient)
            self._gradients[id(leaf)] = leaf, total, total.layout is torch.strided

    def __contains__(self, leaf: Tensor) -> bool:
        return id(leaf) in self._gradients

    def pop(self, leaf: Tensor) -> Tensor:
        return self._gradients.pop(id(leaf))[1]

    def put(self, leaf: Tensor, gradient: Tensor) -> None:
        self._gradients[id(leaf)] = leaf, gradient, False

    def take(self) -> dict[Tensor, Tensor]:
        """The gradients, each in memory of its own and laid out like its leaf."""
        taken: dict[Tensor, Tensor] = {}
        for leaf, gradient, _ in self._gradients.values():
            if gradient.layout is not torch.strided:
                is_own = _object_references(gradient) == _SOLE[0] and _is_plain_sparse(gradient)
                taken[leaf] = gradient if is_own else gradient.detach().clone()
            elif gradient.requires_grad:
                taken[leaf] = torch.empty_like(leaf, requires_grad=False).copy_(gradient.detach())
            elif gradient.stride() != leaf.stride() or _references(gradient) != _SOLE:
                taken[leaf] = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
            else:
                taken[leaf] = gradient
        self._gradients = {}
        return taken


_count_storage_uses: Final = getattr(torch._C, "_storage_Use_Count", None)


def _references(gradient: Tensor) -> tuple[int, int]:
    """How many there are to the object, and to its memory. In `take`, for one that nobody else has, it is `_SOLE`."""
    if _count_storage_uses is None:
        return 0, 0
    return sys.getrefcount(gradient), _count_storage_uses(gradient.untyped_storage()._cdata)


def _object_references(gradient: Tensor) -> int:
    """The first of `_references`, for tensors whose memory is in parts."""
    return sys.getrefcount(gradient)


def _is_plain_sparse(gradient: Tensor) -> bool:
    """Whether it can be kept as it is, if nobody else has it. Its parts have no owner but it."""
    return (
        gradient.layout is torch.sparse_coo
        and not gradient.requires_grad
        and gradient._indices().is_contiguous()  # indices() is for coalesced ones alone
        and gradient._values().is_contiguous()
    )


def _references_of_sole_owner() -> tuple[int, int]:
    if _count_storage_uses is None:
        return -1, -1  # torch does not tell: nobody is
    found = 0, 0
    for _, gradient, _ in {0: (None, torch.zeros(1), None)}.values():
        found = _references(gradient)
    return found


_SOLE: Final = _references_of_sole_owner()
