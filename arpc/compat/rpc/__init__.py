"""torch.distributed.rpc, on arpc. See `arpc.compat`."""

from __future__ import annotations

import numbers
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from arpc.compat import autograd as dist_autograd
from arpc.compat.rpc import api, backend_registry, constants, functions, internal, options, rref_proxy
from arpc.compat.rpc.api import (
    AllGatherStates,
    RRef,
    _require_initialized,
    _set_rpc_timeout,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from arpc.compat.rpc.backend_registry import BackendType
from arpc.compat.rpc.debugging import _get_debug_info
from arpc.compat.rpc.native import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
    PyRRef,
    RemoteProfilerManager,
    RpcAgent,
    TensorPipeAgent,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_profiler_node_id,
    _TensorPipeRpcBackendOptionsBase,
    enable_gil_profiling,
)
from arpc.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from arpc.compat.rpc.server_process_global_profiler import _server_process_global_profile
from arpc.compat.workers import WorkerInfo
from arpc.log import get_logger
from arpc.private.torch import create_store

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "AllGatherStates",
    "BackendType",
    "PyRRef",
    "RRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "api",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "shutdown",
]

logger = get_logger("arpc.compat")

_rendezvous: list[Any] = []
"""The rendezvous of the group, kept because the store ends with it."""


def is_available() -> bool:
    """Return True: arpc always has it."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join a group of workers under a name; from then on this process makes and answers calls."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    store = _open_store(rpc_backend_options, rank, world_size)
    dist_autograd._init(rank)  # noqa: SLF001 - torch's name, which tests replace
    _set_profiler_node_id(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_of(chosen: Any) -> Any:
    """Return the backend that these options belong to."""
    if chosen is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        if isinstance(chosen, type(backend_registry.construct_rpc_backend_options(candidate))):
            if candidate.name != "TENSORPIPE":
                logger.warning("the options are those of %r, so that backend is used", candidate)
            return candidate
    raise TypeError(f"Could not infer backend for options {chosen}")


def _open_store(chosen: RpcBackendOptions, rank: int, world_size: int | None) -> Any:
    if not world_size:
        store = create_store(chosen, rank)
    else:
        meeting = dist.rendezvous(chosen.init_method, rank=rank, world_size=world_size)  # type: ignore[attr-defined]
        _rendezvous[:] = [meeting]
        store, _, _ = next(meeting)
    store.set_timeout(timedelta(seconds=chosen.rpc_timeout))
    return store


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend_registry.BackendType.TENSORPIPE if backend is None else backend
    for given, kind in (
        (backend, backend_registry.BackendType),
        (store, dist.Store),  # type: ignore[attr-defined]
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(given, kind):
            raise RuntimeError(  # noqa: TRY004 - torch's own, which programs catch
                f"Argument {given} must be of type {kind} but got type {type(given)}"
            )
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)  # noqa: SLF001 - torch's name
    if isinstance(agent, TensorPipeAgent):
        agent.start_in_order()
