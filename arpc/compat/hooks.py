"""What has to change in torch itself so that its own code takes futures and RRefs of arpc for its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import distributed as data_parallel

from arpc import torchjit
from arpc.compat.futures import wait_all
from arpc.compat.rref import RRef

__all__ = ["install"]


def install() -> None:
    """Make the changes. Done twice, it changes nothing more."""
    torch.futures.wait_all = wait_all
    names: Any = data_parallel  # has looked the class up when torch was imported
    names.RRef = RRef
    if torchjit.IS_AVAILABLE:
        _teach_torchscript()


def _teach_torchscript() -> None:
    """Have TorchScript take arpc's RRefs for those that it knows."""
    import torch._jit_internal as jit_names
    from torch.jit import annotations as jit_annotations

    holders: tuple[Any, ...] = (jit_names, jit_annotations)
    for holder in holders:
        holder.RRef = RRef
        # it asks these of every annotation and object, where there is RPC; a torch without RPC does not have them
        if not hasattr(holder, "is_rref"):
            holder.is_rref = _is_rref
        if not hasattr(holder, "is_rref_instance"):
            holder.is_rref_instance = _is_rref_instance
    holders[0].PyRRef = RRef
    jit_annotations.EvalEnv.env["RRef"] = RRef


def _is_rref(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is RRef


def _is_rref_instance(obj: Any) -> bool:
    return isinstance(obj, RRef)
