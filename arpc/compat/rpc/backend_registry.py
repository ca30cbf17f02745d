"""The registry of backends by name, as in torch. The built-in backends run on arpc."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from arpc.compat import current
from arpc.compat.agents import TensorPipeAgent
from arpc.compat.drop_in import DropIn
from arpc.compat.goodbye import Goodbye
from arpc.compat.rpc import api
from arpc.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from arpc.compat.rpc.options import TensorPipeRpcBackendOptions
from arpc.compat.rref import HANDLE_CLASS
from arpc.compat.start_order import StartOrder
from arpc.errors import ConfigurationError, NameTakenError

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions of a backend: one makes its options, the other one starts it."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


_backends: dict[str, BackendValue] = {}
_enum_of: Callable[..., Any] = enum.Enum


def _name_backend(backend: Any) -> str:
    return f"BackendType.{backend.name}"


def _make_backend_type() -> Any:
    made: Any = _enum_of("BackendType", _backends)
    made.__repr__ = _name_backend
    made.__doc__ = "The backends that there are."
    return made


BackendType: Any = _make_backend_type()


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in _backends


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend. `BackendType` is another class from then on, as in torch."""
    global BackendType  # noqa: PLW0603 - programs look it up in this module
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    _backends[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_backend_type()
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return the options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend, and return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def start_agent(
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    backend_options: TensorPipeRpcBackendOptions,
    kind: type[TensorPipeAgent],
) -> TensorPipeAgent:
    """Start a worker of arpc, and make it the agent of this process."""
    options = backend_options.as_arpc()
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    # A graceful shutdown waits for the other drop-ins; not all workers of the group need to be one
    names = _Names(store)
    names.add(name)
    with current.starting():
        try:
            drop_in = DropIn.start(
                name,
                store=store,
                rank=rank if rank >= 0 else None,
                world_size=world_size or None,
                options=options,
                handle_class=HANDLE_CLASS,
            )
        except NameTakenError as error:
            raise RuntimeError(f"RPC worker name {name} is not unique: {error}") from error
        except ConfigurationError as error:
            raise RuntimeError(str(error)) from error
        agent = kind(drop_in, store, is_static_group=bool(world_size))
        agent.backend_options = backend_options
        agent.blocking_names = names.among([info.name for info in drop_in.infos()])
        api._init_rpc_states(agent)  # noqa: SLF001 - torch's name
    if world_size:
        agent.goodbye = Goodbye(store, rank, len(agent.blocking_names))
        first = next(record for record in drop_in.members() if record.id == 0)
        if first.name in agent.blocking_names:
            agent.start_order = StartOrder(store, first)
        # as in torch: from here on all workers can be called, and the first calls find open connections
        api._all_gather(None, agent.blocking_names, timeout=options.rpc_timeout)  # noqa: SLF001
    return agent


class _Names:
    """The names of the workers of a group that are drop-ins, kept in its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def _key(name: str) -> str:
        return f"arpc.compat/{name}"

    def add(self, name: str) -> None:
        self._store.set(self._key(name), "1")

    def among(self, names: list[str]) -> set[str]:
        if self._store.check([self._key(name) for name in names]):
            return set(names)
        return {name for name in names if self._store.check([self._key(name)])}


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **_: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    return start_agent(store, name, rank, world_size, rpc_backend_options, TensorPipeAgent)


register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
