"""What torch's profiler and scripts that profile take from torch's RPC."""

from __future__ import annotations

from typing import Any

from arpc.compat import current

__all__ = ["RemoteProfilerManager", "set_profiler_node_id"]

try:
    from torch._C._distributed_rpc import _set_profiler_node_id as set_profiler_node_id
except ImportError:  # a torch that was built without its own RPC

    def set_profiler_node_id(default_node_id: int) -> Any:
        """Do nothing: events of such a torch do not say on which worker they happened."""


class RemoteProfilerManager:
    """Names the call that is made next in profiles; see `arpc.profiler.RemoteProfilerManager`."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Let the next call of this thread have that name."""
        current.get_agent().drop_in.worker.profiler.remote.manager.set_current_key(key)
