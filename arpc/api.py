"""The public functions. Each uses the worker of its context, see `runtime.current`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor

from arpc.agent.agent import Agent
from arpc.agent.client.future import Future
from arpc.agent.client.streams import Stream
from arpc.agent.scope import current_scope, find_scope
from arpc.callee import Callee
from arpc.errors import ConfigurationError, NotInitializedError
from arpc.group.launch_env import default_name
from arpc.ids import WorkerInfo
from arpc.options import UNSET, RpcOptions, Unset
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef, create_remote
from arpc.runtime import Worker, current
from arpc.startup import start_worker

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "empty_shared",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "on",
    "remaining_time",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shared",
    "shutdown",
    "stream",
]

R = TypeVar("R")


class WorkerStart:
    """A worker that is about to start.

    ``await`` it, or enter it with ``async with`` to have it shut down at the end.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Worker]]) -> None:
        self._start = start
        self._worker: Worker | None = None

    def __await__(self) -> Generator[Any, None, Worker]:
        return self._start().__await__()

    if not TYPE_CHECKING:  # a type checker reports these mistakes itself

        def __enter__(self) -> NoReturn:
            raise TypeError("a worker starts on the event loop: use `async with arpc.init_rpc(...)`")

        def __exit__(self, *_: object) -> None:
            pass  # Python looks it up before it calls __enter__

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"the worker has not started, and has no {name!r} yet: write `worker = await arpc.init_rpc(...)`, or "
                f"`async with arpc.init_rpc(...) as worker:`"
            )

    async def __aenter__(self) -> Worker:
        self._worker = await self
        return self._worker

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._worker is not None
        try:
            # After an error, do not wait for the other workers: they may be waiting for this one
            await self._worker.shutdown(graceful=error is None)
        finally:
            _leave_scope(self._worker)


def init_rpc(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | Unset | None = UNSET,
    init_method: str = "env://",
    store: Store | None = None,
    options: RpcOptions | None = None,
) -> WorkerStart:
    """Join a group of workers under a name.

    ::

        async with arpc.init_rpc("trainer0", rank=0, world_size=3) as worker:
            await arpc.rpc_sync("ps", torch.add, args=(torch.ones(2), 1))

    The name defaults to the variable ARPC_NAME, which ``arpc launch`` sets, or else to ``worker<rank>``. ``rank`` and
    ``world_size`` default to RANK and WORLD_SIZE, which the launcher and torchrun set, or to Slurm's variables for
    them. ``world_size=None`` makes an elastic group, which workers can join and leave at any time. The group meets at
    ``init_method`` (``env://`` with MASTER_ADDR and MASTER_PORT, ``tcp://host:port``, ``file:///path``) or in an
    existing ``store``.

    ``async with`` shuts down gracefully at the end of the block, and at once on an exception.
    """
    chosen = options if options is not None else RpcOptions()
    if not isinstance(chosen, RpcOptions):
        raise ConfigurationError(f"options must be arpc.RpcOptions(...), not {type(chosen).__qualname__}")
    return WorkerStart(
        lambda: start_worker(
            default_name(rank) if name is None else name,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            store=store,
            options=chosen,
        )
    )


def _leave_scope(worker: Worker) -> None:
    scope = current_scope.get()
    if scope is not None and scope.worker is worker:
        current_scope.set(None)


@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Future[R]: ...
@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., asyncio.Future[R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Future[R]: ...
@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., R],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Future[R]: ...
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | Unset = UNSET,
) -> Future[Any]:
    """Start a call of ``func(*args, **kwargs)`` on worker ``to`` now, and return its `Future`.

    An ``async def`` runs as a task on that worker, a plain ``def`` in a thread. ``timeout`` is in seconds, 0 for no
    limit; the default is `RpcOptions.rpc_timeout`. A call made inside a handler ends at the handler's own deadline at
    the latest.
    """
    scope = current_scope.get()
    # `current`, inlined
    agent: Agent = (scope.worker if scope is not None else current()).agent
    return agent.call(to, func, args, kwargs, timeout, depth=3)


@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Coroutine[Any, Any, R]: ...
@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., asyncio.Future[R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Coroutine[Any, Any, R]: ...
@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., R],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> Coroutine[Any, Any, R]: ...
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | Unset = UNSET,
) -> Coroutine[Any, Any, Any]:
    """Call ``func(*args, **kwargs)`` on worker ``to`` and return its result; ``await`` it.

    Raises the exception that the function raised, with its own type; its ``__cause__`` is the remote traceback. A type
    checker infers the type of the result from the function; with `on` it checks the arguments too.
    """
    scope = current_scope.get()
    # `current`, inlined; without a worker it raises an error that says what is missing
    agent: Agent = (scope.worker if scope is not None else current()).agent
    return agent.call_and_wait(to, func, args, kwargs, timeout)


@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> RRef[R]: ...
@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., asyncio.Future[R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> RRef[R]: ...
@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., R],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
) -> RRef[R]: ...
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | Unset = UNSET,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and leave the result there; return an `RRef` to it at once.

    If ``func`` is a class, the result is an instance on that worker; if it is a generator, a stream that is held on
    that worker. ``timeout`` applies to the function. If it passes, or if it is unknown for another reason whether the
    value exists, every use of the RRef raises `RRefCreationError`.
    """
    scope = current_scope.get()
    # `current`, inlined
    rrefs: RRefContext = (scope.worker if scope is not None else current()).rref_context
    return create_remote(rrefs, to, func, args, kwargs, timeout)


@overload
def stream(
    to: str | int | WorkerInfo,
    func: Callable[..., AsyncIterable[R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
    window: int = ...,
) -> Stream[R]: ...
@overload
def stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Iterable[R]],
    args: Sequence[Any] | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float | Unset = ...,
    window: int = ...,
) -> Stream[R]: ...
def stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | Unset = UNSET,
    window: int = 16,
) -> Stream[Any]:
    """Call a generator on worker ``to``; ``async for item in arpc.stream(...)`` receives its items as they are made.

    At most ``window`` items are in flight or wait to be consumed. Leaving the loop early stops the generator.
    """
    return current().agent.stream(to, func, args, kwargs, timeout, window)


def on(to: str | int | WorkerInfo, *, timeout: float | Unset = UNSET, window: int = 16) -> Callee:
    """Return a `Callee` for worker ``to``: arguments follow the function, so that a type checker can check them.

    ::

        total = await arpc.on("ps").rpc_sync(add, 1, step=2)  # arpc.rpc_sync("ps", add, args=(1,), kwargs={"step": 2})
        counter = arpc.on("ps", timeout=5).remote(Counter, start=3)

    Both forms make the same call. Use this one where functions have type annotations: a type checker then reports a
    wrong argument before anything runs. Use `rpc_sync`, `rpc_async`, `remote` and `stream` where the arguments are
    already a tuple and a dict, or where the code should look like code for torch.distributed.rpc. ``timeout`` and
    ``window`` (of streams) apply to all calls through the returned object, which may be kept and reused.
    """
    return current().on(to, timeout=timeout, window=window)


def shared(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in memory that the current worker shares with the other processes of its host.

    Sending such a tensor, or a contiguous part of it, to a worker of this host copies nothing: **both see the same
    memory**. Each process sees the other's writes at any time; only calls order their accesses. The memory is freed
    when neither process has the tensor any more.

    ::

        weights = arpc.shared(model.weight)
        await arpc.rpc_sync("worker1", train, args=(weights,))  # changes `weights` here

    A worker that cannot see the memory (on another host, or connected by TCP) receives a copy, as of any tensor. All
    workers receive copies if `RpcOptions.shared_memory_bytes` leaves no room for the tensor, or if it is not larger
    than `RpcOptions.inline_tensor_bytes`. The returned tensor is contiguous, on the CPU, and has no autograd history.
    """
    return current().shared(tensor)


def empty_shared(*size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor, like `torch.empty`, in shared memory: see `shared`.

    ::

        batch = arpc.empty_shared(64, 1024)
        batch.normal_()
        await arpc.rpc_sync("worker1", train, args=(batch,))
    """
    return current().empty_shared(*size, dtype=dtype)


def get_worker_info(name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the name and id of a worker of the group, by default of the current one. Raises `UnknownWorkerError`."""
    return current().get_worker_info(name)


def get_worker_infos() -> list[WorkerInfo]:
    """Return all workers of the group that the current one knows, itself included, in the order of their ids."""
    return current().get_worker_infos()


def remaining_time() -> float | None:
    """Return the seconds until the deadline of the call this handler runs for; None if it has none. Never below 0."""
    scope = current_scope.get()
    if scope is None or scope.deadline is None:
        return None
    worker: Worker = scope.worker
    return max(0.0, scope.deadline - worker.agent.loop.time())


async def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Shut down the current worker, see `Worker.shutdown`. Raises `NotInitializedError` if there is none."""
    scope = find_scope()
    if scope is None or scope.worker is None:
        raise NotInitializedError("there is no worker to shut down in this context")
    worker: Worker = scope.worker
    try:
        await worker.shutdown(graceful, timeout)
    finally:
        _leave_scope(worker)
