"""Children that multiprocessing starts: they must find arpc before they import the script."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from arpc.compat.modules import install

__all__ = ["install_in_children"]


class _Installed:
    """Unpickled by a child before it does anything else: that installs arpc.compat in it, and in its own children."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _install_here, ()


def _install_here() -> None:
    install()
    install_in_children()


class _Preparation:
    """`multiprocessing.spawn.get_preparation_data`, with one more thing in what it makes."""

    def __init__(self, prepare: Callable[[str], dict[str, Any]]) -> None:
        self._prepare = prepare

    def __call__(self, name: str) -> dict[str, Any]:
        return {"arpc.compat": _Installed(), **self._prepare(name)}


def install_in_children() -> None:
    """Have processes that this one spawns, or has a fork server start, run on arpc, too."""
    if not isinstance(spawn.get_preparation_data, _Preparation):
        spawn.get_preparation_data = _Preparation(spawn.get_preparation_data)
