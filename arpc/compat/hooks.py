"""What has to change in torch itself so that its own code takes futures and RRefs of arpc for its own."""

from __future__ import annotations

from typing import Any

import torch
import torch._jit_internal as jit_names
from torch.jit import annotations as jit_annotations
from torch.nn.parallel import distributed as data_parallel

from arpc.compat.futures import wait_all
from arpc.compat.rref import RRef

__all__ = ["install"]


def install() -> None:
    """Make the changes. Done twice, it changes nothing more."""
    torch.futures.wait_all = wait_all
    # those who have looked the class up when torch was imported
    holders: tuple[Any, ...] = (jit_names, jit_annotations, data_parallel)
    for holder in holders:
        holder.RRef = RRef
    names: Any = jit_names
    names.PyRRef = RRef
    jit_annotations.EvalEnv.env["RRef"] = RRef
    # TorchScript asks these of every annotation and object, where there is RPC; a torch without it does not have them
    for holder in (jit_names, jit_annotations):
        if not hasattr(holder, "is_rref"):
            holder.is_rref = _is_rref  # type: ignore[attr-defined]
        if not hasattr(holder, "is_rref_instance"):
            holder.is_rref_instance = _is_rref_instance  # type: ignore[attr-defined]


def _is_rref(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is RRef


def _is_rref_instance(obj: Any) -> bool:
    return isinstance(obj, RRef)
