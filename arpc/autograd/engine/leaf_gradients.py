"""Gradients of leaves while a pass sums them up, and as people get them: tensors that nobody else has a hold of."""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["LeafGradients", "summed"]

_strided: Final = torch.strided


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

    def __len__(self) -> int:
        return len(self._gradients)

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
            if not leaf.requires_grad:
                continue  # it was frozen since
            if gradient.layout is not _strided:
                is_own = getrefcount(gradient) == _SOLE_OBJECT and _is_plain_sparse(gradient)
                taken[leaf] = gradient if is_own else gradient.detach().clone()
            elif gradient.requires_grad:
                taken[leaf] = torch.empty_like(leaf, requires_grad=False).copy_(gradient.detach())
            elif (
                gradient.stride() != leaf.stride()
                or getrefcount(gradient) != _SOLE_OBJECT
                or _count_storage_uses(gradient.untyped_storage()._cdata) != _SOLE_MEMORY
            ):
                taken[leaf] = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
            else:
                taken[leaf] = gradient
        self._gradients = {}
        return taken


def _is_plain_sparse(gradient: Tensor) -> bool:
    """Whether it can be kept as it is, if nobody else has it. Its parts have no owner but it."""
    return (
        gradient.layout is torch.sparse_coo
        and not gradient.requires_grad
        and gradient._indices().is_contiguous()  # indices() is for coalesced ones alone
        and gradient._values().is_contiguous()
    )


def _unknown(_: Any) -> int:
    return 0


_count_storage_uses: Final[Callable[[Any], int]] = getattr(torch._C, "_storage_Use_Count", _unknown)


def _references_of_sole_owner() -> tuple[int, int]:
    """How many there are to the object, and to its memory, when `take` looks at one that nobody else has."""
    found = 0, 0
    for _, gradient, _ in {0: (None, torch.zeros(1), None)}.values():
        found = getrefcount(gradient), _count_storage_uses(gradient.untyped_storage()._cdata)
    return found if _count_storage_uses is not _unknown else (found[0], -1)  # nobody is


_SOLE_OBJECT, _SOLE_MEMORY = _references_of_sole_owner()
