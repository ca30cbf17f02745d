"""Changes to torch itself, so that its own code accepts arpc's futures and RRefs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import distributed as data_parallel

from arpc import torchjit
from arpc.compat.futures import wait_all
from arpc.compat.rref import RRef

__all__ = ["install"]


def install() -> None:
    """Make the changes. A second call changes nothing more."""
    torch.futures.wait_all = wait_all
    names: Any = data_parallel  # it imported the class together with torch
    names.RRef = RRef
    if torchjit.IS_AVAILABLE:
        _teach_torchscript()


def _teach_torchscript() -> None:
    """Make TorchScript accept arpc's RRefs as the RRefs that it knows."""
    import torch._jit_internal as jit_names
    from torch.jit import annotations as jit_annotations

    holders: tuple[Any, ...] = (jit_names, jit_annotations)
    for holder in holders:
        holder.RRef = RRef
        # TorchScript calls these for every annotation and object; a torch that was built without RPC lacks them
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
