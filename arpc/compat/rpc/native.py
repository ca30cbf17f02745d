"""The counterpart of `torch._C._distributed_rpc`: the drop-in's classes and functions under torch's private names.

Libraries import the class of RRefs and the current agent from there, wherever they import the rest from. The entry
points of torch's C++ agent (``_invoke_rpc_builtin`` and its like) have no counterpart: only torch's own Python layer
calls them, and the drop-in replaces that layer.
"""

from __future__ import annotations

from arpc.compat.agents import RpcAgent, TensorPipeAgent
from arpc.compat.current import get_agent as _get_current_rpc_agent
from arpc.compat.current import has_agent as _is_current_rpc_agent_set
from arpc.compat.current import reset_agent as _reset_current_rpc_agent
from arpc.compat.current import set_agent as _set_and_start_rpc_agent
from arpc.compat.profiling import RemoteProfilerManager
from arpc.compat.profiling import set_profiler_node_id as _set_profiler_node_id
from arpc.compat.rpc.api import _delete_all_user_and_unforked_owner_rrefs, _set_rpc_timeout, get_rpc_timeout
from arpc.compat.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from arpc.compat.rpc.debugging import _rref_context_get_debug_info, enable_gil_profiling
from arpc.compat.rpc.options import RpcBackendOptions
from arpc.compat.rpc.options import TensorPipeRpcBackendOptions as _TensorPipeRpcBackendOptionsBase
from arpc.compat.rref import RRef as PyRRef
from arpc.compat.workers import WorkerInfo

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]
