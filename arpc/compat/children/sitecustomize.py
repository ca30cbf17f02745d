"""Puts arpc in the place of torch's RPC in every Python process that a program under ``python -m arpc.compat`` starts.

Python imports a module of this name at its start. `arpc.compat.inheritance` puts this folder first on ``PYTHONPATH``,
so that children find it, whichever way they are started. It imports nothing large: a child that never imports torch
pays nothing. Another sitecustomize on the path is executed as if this one were not there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parent)


class _Watcher(MetaPathFinder):
    """Installs the drop-in right after torch is imported, before any module can import names from torch's RPC.

    If arpc is imported first, and imports torch itself, the installation waits for the end of arpc's own import.
    """

    def __init__(self) -> None:
        self.awaited = {"arpc", "torch"}
        self.importing: set[str] = set()
        self._is_asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in self.awaited or self._is_asked:
            return None
        self._is_asked = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self)
        return spec


class _WatchedLoader(Loader):
    def __init__(self, loader: Loader, watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        importing = self._watcher.importing
        importing.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            importing.discard(module.__name__)
        if not importing:
            self._watcher.awaited.clear()
            _install()


def _install() -> None:
    try:
        from arpc.compat.modules import install  # slow: imports torch
    except ImportError as error:  # another environment than that of the parent process
        sys.stderr.write(f"arpc.compat: torch.distributed.rpc is torch's own in this process: {error}\n")
    else:
        install()


def _run_next() -> None:
    """Execute the sitecustomize that Python would have found without this one."""
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Watcher())
_run_next()
