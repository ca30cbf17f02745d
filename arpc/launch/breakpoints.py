"""The handler of ``breakpoint()`` in workers that the launcher started: they have no terminal."""

from __future__ import annotations

import os
import pdb  # noqa: T100 - for a worker that has a terminal
import sys
from typing import Any

__all__ = ["HOOK", "explain"]

HOOK = "arpc.launch.breakpoints.explain"
"""The value of PYTHONBREAKPOINT for workers."""


def explain(*args: Any, **kwargs: Any) -> None:
    """Start the debugger if there is a terminal; otherwise raise a RuntimeError that lists the alternatives."""
    if sys.stdin is not None and sys.stdin.isatty():
        pdb.Pdb(*args, **kwargs).set_trace(sys._getframe(1))  # noqa: SLF001 - where breakpoint() was called
        return
    name = os.environ.get("ARPC_NAME", "?")
    raise RuntimeError(
        f"breakpoint() was called in worker {name!r}, which `arpc launch` started without a terminal. Either debug the "
        f"group in one process, with `async with arpc.testing.cluster(...)`, where breakpoint() works as usual; or "
        f"install remote-pdb, run `PYTHONBREAKPOINT=remote_pdb.set_trace arpc launch ...` and connect to the port that "
        f"the worker prints; or use `arpc stack` to see what all workers are doing. PYTHONBREAKPOINT=0 ignores "
        f"breakpoints"
    )
