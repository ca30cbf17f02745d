"""Puts arpc.compat in the place of torch's own modules, so that a script's imports find it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

from arpc.compat import hooks

__all__ = ["REPLACED", "install", "is_installed"]

REPLACED: Final = {
    "torch.distributed.rpc": "arpc.compat.rpc",
    "torch.distributed.rpc.api": "arpc.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "arpc.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "arpc.compat.rpc.constants",
    "torch.distributed.rpc.functions": "arpc.compat.rpc.functions",
    "torch.distributed.rpc.internal": "arpc.compat.rpc.internal",
    "torch.distributed.rpc.options": "arpc.compat.rpc.options",
    "torch.distributed.rpc.server_process_global_profiler": "arpc.compat.rpc.server_process_global_profiler",
    "torch.distributed.autograd": "arpc.compat.autograd",
    "torch.distributed.optim.optimizer": "arpc.compat.optim",
    "torch.distributed.nn.api.remote_module": "arpc.compat.remote_module",
}
"""torch's modules, and what stands in for each."""

_NAMES: Final = {
    "torch.distributed.optim": ("arpc.compat.optim", ("DistributedOptimizer",)),
    "torch.distributed.nn": ("arpc.compat.remote_module", ("RemoteModule",)),
}
"""Packages of torch that offer names of such modules themselves."""

_STALE: Final = ("torch.distributed.rpc", "torch.distributed.nn.jit", "_remote_module_non_scriptable")
"""What was made of torch's own, and must not be found again."""


def is_installed() -> bool:
    """Whether ``import torch.distributed.rpc`` finds arpc in this process."""
    found = sys.modules.get("torch.distributed.rpc")
    return found is not None and found.__name__ == "arpc.compat.rpc"


def install() -> None:
    """Let imports of torch's RPC find arpc in this process from now on. What was imported before stays as it is."""
    if is_installed():
        return
    importlib.import_module("torch.distributed.rpc")  # so that importing another part of torch does not bring it back
    parents = {name: importlib.import_module(name) for name in _NAMES}
    stand_ins = {name: importlib.import_module(stand_in) for name, stand_in in REPLACED.items()}
    for name in list(sys.modules):
        if any(name == stale or name.startswith(f"{stale}.") for stale in _STALE):
            del sys.modules[name]
    for name, module in stand_ins.items():
        _bind(name, module)
    for name, (source, offered) in _NAMES.items():
        for each in offered:
            setattr(parents[name], each, getattr(importlib.import_module(source), each))
    hooks.install()


def _bind(name: str, module: ModuleType) -> None:
    """Let a name mean a module: to imports, and to whoever looks it up in its package."""
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    setattr(importlib.import_module(package), leaf, module)
