"""The check of the tensors that a backward pass starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from arpc.errors import AutogradError

__all__ = ["check_roots"]


def check_roots(roots: Any) -> None:
    """Raise `AutogradError` if a pass cannot begin at these roots, TypeError if they are no list of tensors."""
    if roots.__class__ is not list and (isinstance(roots, Tensor) or not isinstance(roots, Sequence)):
        raise TypeError(f"the roots of a backward pass are a list of tensors, not {type(roots).__qualname__}")
    if not roots:
        raise AutogradError("No tensors provided for gradient computation: pass at least one root, such as the loss.")
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(f"the roots of a backward pass are tensors, not {type(root).__qualname__}")
        if not root.requires_grad:
            raise AutogradError(
                "requires_grad not set on root: it depends on nothing that requires grad, or was made under no_grad"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: sum it up, say"
            )
        if root.grad_fn is None:
            raise AutogradError("a root that is a leaf does not have a valid gradient function: nothing leads to it")
