"""Functions of torch's RPC that torch's profiler and profiling scripts use."""

from __future__ import annotations

from typing import Any

from arpc.compat import current

__all__ = ["RemoteProfilerManager", "set_profiler_node_id"]

try:
    from torch._C._distributed_rpc import _set_profiler_node_id as set_profiler_node_id
except ImportError:  # a torch that was built without its own RPC

    def set_profiler_node_id(default_node_id: int) -> Any:
        """Do nothing: events of such a torch do not have the worker on which they happened."""


class RemoteProfilerManager:
    """Sets the name of the next call in profiles; see `arpc.profiler.RemoteProfilerManager`."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Set the name of this thread's next call."""
        current.get_agent().drop_in.worker.profiler.remote.manager.set_current_key(key)
