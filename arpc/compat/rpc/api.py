"""The functions of torch.distributed.rpc. Those that begin with ``_`` are torch's too: programs replace them."""

# ruff: noqa: PLW0603 - programs look the globals up here, and replace them

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch

from arpc.compat import current
from arpc.compat.agents import TensorPipeAgent, _rref_typeof_on_owner
from arpc.compat.calls import arpc_timeout, call, call_async
from arpc.compat.current import get_agent as _get_current_rpc_agent
from arpc.compat.current import has_agent as _is_current_rpc_agent_set
from arpc.compat.current import reset_agent as _reset_current_rpc_agent
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import packing_error
from arpc.compat.futures import wait_all
from arpc.compat.loop_thread import refuse_loop_thread
from arpc.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from arpc.compat.rpc.gathering import AllGatherStates, Gatherings
from arpc.compat.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler
from arpc.compat.rref import RRef
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.rref.handle import create_remote
from arpc.torchjit import ScriptFunction

__all__ = [
    "AllGatherStates",
    "PyRRef",
    "PythonUDF",
    "RPCExecMode",
    "RRef",
    "_build_rpc_profiling_key",
    "_rref_typeof_on_owner",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = get_logger("arpc.compat")

P = ParamSpec("P")
R = TypeVar("R")

_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_ALL_WORKER_NAMES: set[str] = set()
_gatherings = Gatherings()
_NAMES: Final = (str, int, WorkerInfo)
"""The types that identify a worker."""


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Use another pickler for objects that are serialized by hand."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return func(*args, **kwargs)

    return wrapper


def _set_and_start_rpc_agent(agent: Any) -> None:
    current.set_agent(agent)


def _init_rpc_states(agent: Any) -> None:
    """Record the names of the group's workers, and make this the agent of the process unless it has one."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


# -- calls


def _drop_in() -> DropIn:
    try:
        drop_in: DropIn = current.get_agent().drop_in
    except RuntimeError:
        raise RuntimeError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.") from None
    return drop_in


def _check(to: Any, func: Any, args: Sequence[Any] | None) -> None:
    if not callable(func):
        raise TypeError("function should be callable.")
    if not isinstance(to, _NAMES):
        raise ValueError(f"Cannot get WorkerInfo from name {to}")  # noqa: TRY004 - torch's own, which programs catch
    if isinstance(func, ScriptFunction):
        for arg in args or ():
            if isinstance(arg, RRef):
                arg._check_creation()  # before its type is checked  # noqa: SLF001


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Return the result of ``func(*args, **kwargs)`` on worker ``to``. Blocks this thread only.

    ``timeout`` is in seconds, 0 for none; the default is that of the options.
    """
    drop_in = _drop_in()
    _check(to, func, args)
    return call(drop_in, drop_in.peer(to), func, args or (), kwargs, timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Start a call of ``func(*args, **kwargs)`` on worker ``to``; return a future of its result."""
    drop_in = _drop_in()
    _check(to, func, args)
    future = call_async(drop_in, drop_in.peer(to), func, args or (), kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and leave the result there; return an RRef to it at once."""
    refuse_loop_thread("arpc.remote(...)")
    drop_in = _drop_in()
    _check(to, func, args)
    peer = drop_in.peer(to)
    context = drop_in.thread.caller_context()
    rrefs = drop_in.worker.rref_context
    try:
        handle = context.run(create_remote, rrefs, peer.info, func, args or (), kwargs, arpc_timeout(timeout))
    except Exception as error:
        raise packing_error(error, peer.info) from error
    return RRef.of(handle, drop_in)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all calls that were started in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# -- workers


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return the name and id of a worker; of this one if no name is given."""
    agent = _get_current_rpc_agent()
    info: WorkerInfo = agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


@_require_initialized
def get_rpc_timeout() -> float:
    """Return the default timeout of calls, in seconds."""
    timeout_s: float = _get_current_rpc_agent().rpc_timeout
    return timeout_s


@_require_initialized
def _set_rpc_timeout(timeout_s: float) -> None:
    _get_current_rpc_agent().set_rpc_timeout(timeout_s)


# -- collective operations


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Add the object of a worker. Runs on the leader."""
    expected = worker_names or _ALL_WORKER_NAMES
    if worker_name not in expected:
        raise AssertionError(f"{worker_name} is not expected by leader.")
    _gatherings.add(sequence_id, worker_name, obj, set(expected))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Receive the objects of all workers from the leader. Runs on all others."""
    gathering = _gatherings.get(sequence_id)
    if gathering.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    gathering.gathered_objects = objects_map
    gathering.proceed_signal.set()


def _call_here(name: str, *args: Any) -> Any:
    """Call a function of this module by name, looked up at this moment: programs replace these functions."""
    return globals()[name](*args)


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Return the objects of all these workers, by name. Blocks until all of them have called this."""
    names = set(worker_names or _ALL_WORKER_NAMES)
    leader, own = min(names), _get_current_rpc_agent().get_worker_info().name
    sequence_id = _gatherings.next_id(names)
    call_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    signal_timeout = None if timeout in {UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT} else timeout
    if own == leader:
        _gather_to_leader(sequence_id, own, obj, names)
    else:
        rpc_sync(leader, _call_here, args=("_gather_to_leader", sequence_id, own, obj, names), timeout=call_timeout)
    gathering = _gatherings.get(sequence_id)
    gathering.proceed_signal.wait(signal_timeout)
    if own == leader:
        _send_to_followers(sequence_id, gathering.gathered_objects, sorted(names - {leader}), call_timeout)
    return _gatherings.take(sequence_id).gathered_objects


def _send_to_followers(sequence_id: str, objects: dict[str, Any], followers: list[str], timeout_s: float) -> None:
    sent = {
        name: rpc_async(name, _call_here, args=("_broadcast_to_followers", sequence_id, objects), timeout=timeout_s)
        for name in followers
    }
    failed: dict[str, RuntimeError] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except RuntimeError as error:
            failed[name] = error
    if failed:
        first = next(iter(failed.values()))
        raise RuntimeError(
            f"Followers {list(failed)} timed out in _all_gather after {timeout_s:.2f} seconds. "
            f"The first exception is {first}"
        ) from first


@_require_initialized
def _barrier(worker_names: Sequence[str]) -> None:
    """Block until all these workers have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Block until all drop-in workers have called this."""
    try:
        _all_gather(None, getattr(_get_current_rpc_agent(), "blocking_names", None), timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# -- shutdown


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 10.0) -> None:
    """Release all RRefs to values of other workers, and wait until the owners have confirmed it."""
    drop_in = _drop_in()
    drop_in.run(lambda: drop_in.worker.rref_context.release_all(timeout))


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group; if ``graceful``, after all workers have called this and no call is in flight."""
    refuse_loop_thread("await arpc.shutdown()")
    try:
        if graceful:
            agent = _get_current_rpc_agent()
            if agent.is_static_group:
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
            _refuse_leaks(agent)
    finally:
        _finalize_shutdown()


def _refuse_leaks(agent: Any) -> None:
    leaked = agent.leaked_rrefs() if isinstance(agent, TensorPipeAgent) else ()
    if leaked and not _ignore_rref_leak:
        rows = "\n".join(map(str, leaked))
        raise RuntimeError(f"Leaking RRefs: {len(leaked)} values of this worker are still held by others.\n{rows}")


def _finalize_shutdown() -> None:
    try:
        _get_current_rpc_agent().shutdown()
    finally:
        _gatherings.clear()
        _reset_current_rpc_agent()


# -- names that torch has here, and programs import


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Ask the owner of an RRef for the type of its value; without ``blocking``, return a future of it."""
    future = _get_current_rpc_agent().type_of(rref, timeout)
    return future.wait() if blocking else future


PyRRef = RRef
