"""Sums of the gradients of leaves and recv nodes in a pass, and the gradients of leaves as users get them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import is_not
from sys import getrefcount
from typing import Any, Final

import torch
from torch import Tensor

from arpc.autograd.passes.plan import Edge

__all__ = ["GradientSums", "own", "summed"]

_strided: Final = torch.strided
_is_tensor: Final = partial(is_not, None)


def summed(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two gradients, each in any layout, as a new tensor."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


class GradientSums(dict[Edge, Tensor]):
    """The gradients that a pass has computed so far, by the edges to leaves and recv nodes."""

    __slots__ = ("_made_here",)

    _made_here: set[Edge]
    """The edges of sums that were made here: nothing else refers to them, so they may be changed in place."""

    def add(self, edge: Edge, gradient: Tensor) -> None:
        before = self.get(edge)
        if before is None:
            self[edge] = gradient
            return
        try:
            made_here = self._made_here
        except AttributeError:
            made_here = self._made_here = set()
        if edge in made_here and gradient.layout is _strided:
            before.add_(gradient)
            return
        # not in place: several leaves may get one gradient, and it may be memory of a message as well
        total = self[edge] = summed(before, gradient)
        if total.layout is _strided:
            made_here.add(edge)
        else:
            made_here.discard(edge)

    def take_recv(self, node: Any, count: int) -> list[Tensor | None] | None:
        """Take out the gradients of the tensors of a recv node; None if there are none."""
        gradients = [*map(self.pop, zip(repeat(node), range(count)), repeat(None))]
        return gradients if any(map(_is_tensor, gradients)) else None

    def take_leaves(self) -> dict[Tensor, Tensor]:
        """Take out the gradients of leaves, by leaf, each in memory of its own and laid out like its leaf."""
        if not self:
            return {}
        # a leaf may have been frozen since the plan was made
        taken = {leaf: own(leaf, self[edge]) for edge in self if (leaf := edge[0].variable).requires_grad}
        self.clear()
        return taken


def own(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in memory of its own, laid out like its leaf: itself if nothing else refers to it, else a copy.

    The caller has one reference to it, in a dict. So two leaves with one gradient get two copies.
    """
    if gradient.layout is not _strided:
        is_own = getrefcount(gradient) == _SOLE_OBJECT and _is_plain_sparse(gradient)
        return gradient if is_own else gradient.detach().clone()
    if gradient.requires_grad:
        return torch.empty_like(leaf, requires_grad=False).copy_(gradient.detach())
    if (
        gradient.stride() != leaf.stride()
        or getrefcount(gradient) != _SOLE_OBJECT
        or _count_storage_uses(gradient.untyped_storage()._cdata) != _SOLE_MEMORY
    ):
        return torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    return gradient


def _is_plain_sparse(gradient: Tensor) -> bool:
    """Whether a gradient that is not strided can be kept as it is, if nothing else refers to it: it owns its parts."""
    return (
        gradient.layout is torch.sparse_coo
        and not gradient.requires_grad
        and gradient._indices().is_contiguous()  # indices() is for coalesced tensors only
        and gradient._values().is_contiguous()
    )


def _unknown(_: Any) -> int:
    return 0


_count_storage_uses: Final[Callable[[Any], int]] = getattr(torch._C, "_storage_Use_Count", _unknown)


def _count_references(_: None, gradient: Tensor) -> tuple[int, int]:
    """Return the reference counts of an object and its memory that `own` sees if nothing else refers to them."""
    memory = _count_storage_uses(gradient.untyped_storage()._cdata)
    return getrefcount(gradient), memory if _count_storage_uses is not _unknown else -1  # a count that never occurs


_sample: Final = {0: torch.zeros(1)}
_SOLE_OBJECT, _SOLE_MEMORY = _count_references(None, _sample[0])
