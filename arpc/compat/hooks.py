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
