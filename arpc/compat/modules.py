"""Puts arpc.compat in the place of torch's own modules, so that a script's imports find it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from arpc.compat import hooks

__all__ = ["REPLACED", "install", "is_installed"]

REPLACED: Final = {
    "torch._C._distributed_autograd": "arpc.compat.autograd",
    "torch._C._distributed_rpc": "arpc.compat.rpc.native",
    "torch.distributed.rpc": "arpc.compat.rpc",
    "torch.distributed.rpc.api": "arpc.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "arpc.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "arpc.compat.rpc.constants",
    "torch.distributed.rpc.functions": "arpc.compat.rpc.functions",
    "torch.distributed.rpc.internal": "arpc.compat.rpc.internal",
    "torch.distributed.rpc.options": "arpc.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "arpc.compat.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": "arpc.compat.rpc.server_process_global_profiler",
    "torch.distributed.autograd": "arpc.compat.autograd",
    "torch.distributed.optim.optimizer": "arpc.compat.optim",
    "torch.distributed.nn.api.remote_module": "arpc.compat.remote_module",
}
"""Modules of torch, and the module that replaces each. A package comes before its submodules."""

_NAMES: Final = {
    "torch.distributed.optim": ("arpc.compat.optim", ("DistributedOptimizer",)),
    "torch.distributed.nn": ("arpc.compat.remote_module", ("RemoteModule",)),
}
"""Packages of torch that export names of such modules themselves."""

_STALE: Final = ("torch.distributed.rpc", "torch.distributed.nn.jit", "_remote_module_non_scriptable")
"""Modules that were made from torch's own RPC, and must not be found again."""


def is_installed() -> bool:
    """Whether ``import torch.distributed.rpc`` finds arpc in this process."""
    found = sys.modules.get("torch.distributed.rpc")
    return found is not None and found.__name__ == "arpc.compat.rpc"


def install() -> None:
    """Make imports of torch's RPC find arpc in this process from now on. Names imported before stay as they are."""
    if is_installed():
        return
    # now, so that no other part of torch imports it later; torch may have been built without it
    with suppress(ImportError):
        importlib.import_module("torch.distributed.rpc")
    replacements = {name: importlib.import_module(replacement) for name, replacement in REPLACED.items()}
    for name in list(sys.modules):
        if any(name == stale or name.startswith(f"{stale}.") for stale in _STALE):
            del sys.modules[name]
    hooks.install()  # before the import of torch's packages that find RPC from now on
    for name, module in replacements.items():
        _bind(name, module)
    sys.meta_path.insert(0, _Submodules("torch.distributed.rpc", "arpc.compat.rpc"))
    for name, (source, offered) in _NAMES.items():
        package = importlib.import_module(name)
        for each in offered:
            setattr(package, each, getattr(importlib.import_module(source), each))


class _Submodules(MetaPathFinder, Loader):
    """Finds the modules of one package under the name of another, without a copy, which would have its own state."""

    def __init__(self, package: str, replacement: str) -> None:
        self._prefix = f"{package}."
        self._replacement = replacement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return a spec for a submodule of the package, if the replacement has one of that name."""
        if not fullname.startswith(self._prefix):
            return None
        name = f"{self._replacement}.{fullname.removeprefix(self._prefix)}"
        found = importlib.util.find_spec(name)
        if found is None:
            return None
        return ModuleSpec(fullname, self, loader_state=name, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, under its own name. The import system then takes it for a new one."""
        return importlib.import_module(spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which is executed already, its own spec back."""
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, module.__loader__)


def _bind(name: str, module: ModuleType) -> None:
    """Make a name refer to a module, in imports and as an attribute of its package."""
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    setattr(importlib.import_module(package), leaf, module)
