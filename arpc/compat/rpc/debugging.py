"""The debug information of torch's agent."""

from __future__ import annotations

from arpc.compat import autograd as dist_autograd
from arpc.compat.current import get_agent
from arpc.compat.rpc.api import _require_initialized

__all__ = ["enable_gil_profiling"]


@_require_initialized
def enable_gil_profiling(flag: bool) -> None:
    """Include in the debug information how long a thread waits for the GIL."""
    get_agent().is_gil_profiled = flag


@_require_initialized
def _rref_context_get_debug_info() -> dict[str, str]:
    found: dict[str, str] = get_agent().get_rref_debug_info()
    return found


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    return {
        **_rref_context_get_debug_info(),
        **get_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),  # noqa: SLF001 - torch's name
    }
