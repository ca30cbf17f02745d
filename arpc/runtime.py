"""One worker, composed of its parts. Only `current` depends on the context: one process can have many workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, overload

import msgspec
import torch
from torch import Tensor

from arpc.agent.agent import Agent
from arpc.agent.client.future import Future
from arpc.agent.client.streams import Stream
from arpc.agent.loop_watch import unwatch_loop
from arpc.agent.membership_watch import MembershipWatch
from arpc.agent.peers.peer import PeerState
from arpc.agent.scope import current_scope, find_scope, is_forked, worker_ended
from arpc.autograd.service import AutogradService
from arpc.callee import Callee
from arpc.errors import (
    NotInitializedError,
    RendezvousError,
    RendezvousTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.garbage import BACKOFF, FREEZER
from arpc.group.membership import WorkerRecord
from arpc.group.rendezvous import Rendezvous
from arpc.group.roster import MemberLost, MemberStream
from arpc.http.address import HttpServing
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.metrics.attach import AttachFile
from arpc.metrics.service import MetricsService
from arpc.options import UNSET, RpcOptions, Unset
from arpc.profiler.service import ProfilerService
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef, create_remote
from arpc.rref.report import (
    RRefRow,
    find_survivors,
    report_leaks,
    report_survivors,
    rref_rows,
    rref_statistics,
)
from arpc.transport.buffer_pool import BufferPool
from arpc.transport.busy_poll import BusyPoll
from arpc.transport.connection_limits import ConnectionLimits
from arpc.transport.contract import Transport
from arpc.transport.shm import Arena, empty_shared, open_arena, shared
from arpc.transport.sockets import Resources, TcpTransport, UnixTransport
from arpc.transport.tls import TlsTransport

__all__ = ["Worker", "current"]

logger = get_logger("arpc.runtime")

R = TypeVar("R")

_RELEASE_S: Final = 10.0
"""How long a graceful shutdown waits for owners to acknowledge that their RRefs are released."""
_LEAVE_S: Final = 5.0
_WARM_BYTES: Final = 256 << 20
"""Unused memory that is kept for the next large tensors."""
_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def current() -> Worker:
    """Return the worker of this context: the one whose handler runs, or that `init_rpc` made.

    In a context without one it is the only worker of the running loop, if there is exactly one: cells of a notebook do
    not share their context. Raises `NotInitializedError` if there is none.
    """
    scope = find_scope()
    if scope is None or scope.worker is None:
        hint = ""
        if is_forked():
            hint = ". The workers of the process that this one was forked from are not its own"
        elif threading.current_thread() is not threading.main_thread():
            hint = ". A thread begins with an empty context: asyncio.to_thread and arpc.to_thread hand theirs on"
        raise NotInitializedError(
            "RPC has not been initialized in this context. Call `await arpc.init_rpc(...)` first, "
            f"or use the methods of a worker that you hold{hint}"
        )
    worker: Worker = scope.worker
    return worker


class Worker:
    """A member of a group. Made by `init_rpc`; its methods are the module-level functions, for this worker."""

    def __init__(self, info: WorkerInfo, options: RpcOptions) -> None:
        self.info = info
        self.options = options
        self.agent: Agent
        self.rendezvous: Rendezvous
        self.membership_watch: MembershipWatch
        self.rref_context: RRefContext
        self.autograd: AutogradService
        self.profiler: ProfilerService
        self.metrics: MetricsService
        self.http: HttpServing | None = None
        """The server of the dashboard; None if this worker does not serve it."""
        self.attach_file: AttachFile | None = None
        """The file by which tools on this host find this worker; None if there is none."""
        self.leaked_rrefs: tuple[RRefRow, ...] = ()
        """After a graceful shutdown: values of this worker that peers still held after all had released their RRefs."""
        self.surviving_rrefs: tuple[RRefRow, ...] = ()
        """After a graceful shutdown: values of this worker that peers still held when no more calls were in flight."""
        self.arena: Arena | None = None
        """The memory that other processes of this host can see; None if there is none."""
        self.receive_memory: BufferPool | None = None
        self.connection_limits: ConnectionLimits | None = None
        self.busy_poll: BusyPoll | None = None
        self._kept: dict[type, Any] = {}
        self._shutdown: asyncio.Task[None] | None = None
        self._lost: WorkerLostError | None = None
        """The loss of a worker that a graceful shutdown was waiting for."""
        self._stop_waiting = asyncio.Event()
        """Set to make a graceful shutdown stop waiting for the group."""

    def __repr__(self) -> str:
        return f"<arpc.Worker {self.info.name} id={self.info.id}>"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def id(self) -> int:
        return self.info.id

    @property
    def http_address(self) -> str | None:
        """The URL of the dashboard that this worker serves, such as ``http://127.0.0.1:27720``; None without one."""
        return None if self.http is None else self.http.url

    # -- calls

    @overload
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Coroutine[Any, Any, R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Future[R]: ...
    @overload
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., asyncio.Future[R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Future[R]: ...
    @overload
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., R],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Future[R]: ...
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> Future[Any]:
        """Start a call now and return its `Future`, see `arpc.rpc_async`."""
        return self.agent.call(to, func, args, kwargs, timeout, depth=3)

    @overload
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Coroutine[Any, Any, R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., asyncio.Future[R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., R],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> Coroutine[Any, Any, R]: ...
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> Coroutine[Any, Any, Any]:
        """Make a call and return its result; ``await`` it. See `arpc.rpc_sync`."""
        return self.agent.call_and_wait(to, func, args, kwargs, timeout)

    @overload
    def stream(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., AsyncIterable[R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
        window: int = ...,
    ) -> Stream[R]: ...
    @overload
    def stream(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Iterable[R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
        window: int = ...,
    ) -> Stream[R]: ...
    def stream(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
        window: int = 16,
    ) -> Stream[Any]:
        """Call a generator and iterate over its items with ``async for``, see `arpc.stream`."""
        return self.agent.stream(to, func, args, kwargs, timeout, window)

    @overload
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Coroutine[Any, Any, R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> RRef[R]: ...
    @overload
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., asyncio.Future[R]],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> RRef[R]: ...
    @overload
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., R],
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | Unset = ...,
    ) -> RRef[R]: ...
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> RRef[Any]:
        """Run a function on another worker and return an `RRef` to its result at once, see `arpc.remote`."""
        return create_remote(self.rref_context, to, func, args, kwargs, timeout)

    def on(self, to: str | int | WorkerInfo, *, timeout: float | Unset = UNSET, window: int = 16) -> Callee:
        """Return a `Callee` for a worker: a type checker can check the arguments of its calls, see `arpc.on`."""
        return Callee(self.agent, self.rref_context, to, timeout, window)

    def rrefs(self) -> list[RRefRow]:
        """Return every RRef that this worker owns and other workers know, or that it uses."""
        return rref_rows(self.rref_context)

    def get_worker_info(self, name: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the name and id of a worker of the group, by default of this one. Raises `UnknownWorkerError`."""
        return self.info if name is None else self.agent.known_peer(name).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers of the group that this one knows, itself included, in the order of their ids.

        In an elastic group, workers that have left are not included.
        """
        is_elastic = self.agent.is_elastic
        there = (peer.info for peer in self.agent.peers if not is_elastic or peer.state is not PeerState.GONE)
        return sorted(there, key=lambda info: info.id)

    def membership(self) -> MemberStream:
        """Return a stream of events: other workers of the group join, leave, are suspected, are lost or return.

        ::

            async for event in worker.membership():
                match event:
                    case arpc.MemberLost(worker=lost, reason=reason):
                        print(f"{lost.name} is gone: {reason}")
                    case arpc.MemberReturned(worker=back, is_new=True):
                        print(f"{back.name} was started again")

        It begins with a `MemberJoined` for each worker that is present, and ends when this worker is shut down. The
        loop may be left or cancelled, and the stream dropped, at any time. A slow reader may miss an event that a newer
        one of the same worker has followed. While the stream is open, this worker keeps a connection to every other
        worker.
        """
        if not self.is_shut_down:
            self.agent.check_loop()
        return self.membership_watch.listen()

    def on_peer_lost(self, callback: Callable[[MemberLost], object]) -> Callable[[], None]:
        """Call a function, or an ``async def``, for each worker that is lost: see `MemberLost`, and `membership`.

        The callback runs on this worker's loop and in its context; an exception is logged. It is not called for a
        worker that left. Call the returned function to remove it::

            stop = worker.on_peer_lost(lambda event: alarm.set())
        """
        if not self.is_shut_down:
            self.agent.check_loop()
        return self.membership_watch.on_lost(callback)

    def keep(self, kind: type[T]) -> T:
        """Return the one object of a class that belongs to this worker, created at the first call.

        Libraries that build on workers keep their state in such an object: a module-level variable would be shared by
        all workers of a process.
        """
        kept: T | None = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = kind()
        return kept

    def statistics(self) -> dict[str, Any]:
        """Return the counters of all parts of this worker."""
        return {
            "worker": self.info.name,
            **self.agent.statistics(),
            "connection_limits": self.connection_limits.statistics() if self.connection_limits is not None else {},
            "busy_poll": self.busy_poll.statistics() if self.busy_poll is not None else {},
            "heartbeat": self.agent.heartbeat.statistics(),
            "rendezvous": self.rendezvous.statistics(),
            "members": self.membership_watch.roster.statistics(),
            "rrefs": rref_statistics(self.rref_context),
            "shared_memory": self.arena.statistics() if self.arena is not None else {},
            "receive_memory": self.receive_memory.statistics() if self.receive_memory is not None else {},
            "autograd": self.autograd.statistics(),
            "profiler": self.profiler.statistics(),
        }

    # -- memory

    def shared(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is sent without further copies, see `arpc.shared`."""
        return shared(self.arena, tensor)

    def empty_shared(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor that is sent without a copy, see `arpc.empty_shared`."""
        return empty_shared(self.arena, size, dtype)

    def open_transports(self) -> dict[str, Transport]:
        """Create the transports to other processes, by scheme, and the memory that they use."""
        self.arena = open_arena(self.options)
        memory = self.receive_memory = BufferPool(_WARM_BYTES)
        options = self.options
        limits = self.connection_limits = ConnectionLimits(
            max_connections=options.max_connections,
            max_strangers=options.max_strangers,
            handshake_s=options.handshake_timeout,
        )
        busy_poll = self.busy_poll = BusyPoll(options.busy_poll) if options.busy_poll else None
        tls = options.tls
        resources = Resources(memory, self.arena, limits, busy_poll)
        return {
            "tcp": TcpTransport(resources) if tls is None else TlsTransport(tls, resources),
            "unix": UnixTransport(resources),
        }

    async def close_transports(self) -> None:
        if self.busy_poll is not None:
            self.busy_poll.close()
        if self.arena is not None:
            await self.arena.aclose()
        if self.receive_memory is not None:
            self.receive_memory.close()

    # -- the end

    @property
    def is_shut_down(self) -> bool:
        return self._shutdown is not None and self._shutdown.done()

    async def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group. Graceful: once no worker has work left, or ``timeout`` seconds have passed.

        Without a timeout, `RpcOptions.shutdown_timeout` applies. Until then this worker keeps serving. In an elastic
        group, where other workers stay, it refuses new calls (`ShutdownError`), except calls that its own unfinished
        work causes. If the shutdown cannot be graceful, because the timeout passed, a worker was lost or the caller was
        cancelled, the worker is shut down all the same, and the error is raised afterwards. A second call waits for the
        first. A second call that is not graceful makes the first stop waiting for the group.
        """
        scope = current_scope.get()
        if graceful and scope is not None and scope.worker is self and scope.caller is not None:
            raise ShutdownError(
                f"a handler of worker {self.info.name!r} cannot wait for all handlers to end, itself among them: "
                f"let the worker's own code shut down (an asyncio.Event can tell it), or pass graceful=False"
            )
        is_first = self._shutdown is None
        if not self.is_shut_down:
            self.agent.check_loop()
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._run_shutdown(graceful, timeout or self.options.shutdown_timeout))
        elif not graceful:
            self._stop_waiting.set()
        shutdown = self._shutdown
        try:
            if not shutdown.done():
                await asyncio.wait([shutdown])
        except asyncio.CancelledError:
            # a caller that is cancelled does not wait for the group any longer
            self._stop_waiting.set()
            await asyncio.wait([shutdown])
            shutdown.exception()
            raise
        error = shutdown.exception()
        if error is not None and (graceful or is_first):
            raise error

    async def _run_shutdown(self, graceful: bool, timeout_s: float) -> None:
        try:
            if graceful:
                await self._quiesce(timeout_s or None)
        finally:
            await self._close_in_any_case(graceful=graceful and not self._stop_waiting.is_set())

    async def _close_in_any_case(self, *, graceful: bool) -> None:
        """Close all parts of the worker. A cancellation is deferred until that is done: it takes only a moment."""
        closing = asyncio.ensure_future(self._close(graceful=graceful))
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self, *, graceful: bool) -> None:
        worker_ended(self, self.agent.loop)
        unwatch_loop(self)
        self.membership_watch.close()
        if self.attach_file is not None:
            self.attach_file.remove()
        if self.http is not None:
            await self.http.aclose()
        self.metrics.close()
        self.rref_context.close()
        self.autograd.close()
        await self.agent.aclose()
        self.profiler.close()
        await self.close_transports()
        with suppress(RendezvousError, OSError):
            # the host of the store waits a moment for the other workers, in a graceful shutdown
            await self.rendezvous.leave(grace_s=_LEAVE_S if graceful else 0)
        BACKOFF.end(self.options.gc_backoff, self.agent.loop)
        if self.options.gc_freeze:
            FREEZER.end(self.agent.loop)
        await self.rendezvous.aclose()

    async def _quiesce(self, timeout_s: float | None) -> None:
        """Return when no work is in progress in the whole group.

        In each round, every worker waits until it has no work itself, and then shares how many calls it has ever made
        and handled. Two rounds with the same numbers mean that no call happened between them, so none can happen any
        more.
        """
        agreement = asyncio.ensure_future(self._agree(timeout_s))
        others = [asyncio.ensure_future(self._fail_if_peer_is_lost()), asyncio.ensure_future(self._fail_when_stopped())]
        try:
            done, _ = await asyncio.wait([agreement, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (agreement, *others):
                task.cancel()
            await asyncio.wait([agreement, *others])
        if self._lost is not None and (agreement not in done or agreement.exception() is not None):
            raise self._lost  # not the error that this worker itself has sent to the group
        for task in [agreement] if agreement in done else done:
            task.result()

    async def _agree(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        before: dict[int, bytes] | None = None
        number = 0
        if self.rendezvous.is_elastic:
            # other workers stay, and could go on calling this worker forever
            self.agent.stop_taking_calls()
        while True:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            if not await self.agent.drain(left):
                raise RendezvousTimeoutError(
                    f"worker {self.info.name!r} was shut down with calls under way "
                    f"that did not end within {timeout_s} s"
                )
            # before any worker releases its RRefs: the last worker to leave `gather` would find none
            survivors = find_survivors(self.rref_context)
            if self.rendezvous.is_elastic:
                break  # there is no fixed set of workers to wait for
            asked, answered = self.metrics.traffic  # monitoring may continue
            counts = _encode((self.agent.calls_made - asked, self.agent.dispatcher.calls_handled - answered))
            left = 0.0 if deadline is None else max(0.001, deadline - loop.time())
            now = await self.rendezvous.gather(f"shutdown/{number}", counts, timeout_s=left)
            if now == before:
                break
            before = now
            number += 1
        report_survivors(self.rref_context, survivors)
        self.surviving_rrefs = tuple(row for row in survivors if row.role == "owner")
        await self._release_rrefs(deadline)

    async def _release_rrefs(self, deadline: float | None) -> None:
        """Release every RRef, and report the values of this worker that peers do not release."""
        context = self.rref_context
        loop = asyncio.get_running_loop()
        left = _RELEASE_S if deadline is None else min(_RELEASE_S, max(0.0, deadline - loop.time()))
        await context.release_all(left)
        if not self.rendezvous.is_elastic:
            # releases by other workers may still be on their way
            left = 0.0 if deadline is None else max(0.001, deadline - loop.time())
            await self.rendezvous.gather("shutdown/rrefs", b"", timeout_s=left)
            self.leaked_rrefs = report_leaks(context)

    async def _fail_when_stopped(self) -> None:
        await self._stop_waiting.wait()
        raise ShutdownError(f"worker {self.info.name!r} was shut down without the group: waiting for it was cancelled")

    async def _fail_if_peer_is_lost(self) -> None:
        """Fail this shutdown, and so that of the whole group, if a worker that it waits for has died."""
        patience_s = max(self.options.heartbeat_timeout, 1.0)
        while True:
            await asyncio.sleep(patience_s / 4)
            for record in await self.rendezvous.awaited(patience_s):
                if record.id != self.info.id and not await self._answers(record, patience_s):
                    text = f"worker {record.name!r} was lost, so the group cannot shut down gracefully"
                    self._lost = WorkerLostError(text, record.name)
                    await self.rendezvous.fail_gather(text)
                    raise self._lost

    async def _answers(self, record: WorkerRecord, patience_s: float) -> bool:
        """Return whether a worker is connected, or answers a probe, within ``patience_s``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while True:
            peer = self.agent.peer(record.name)
            if (peer is not None and peer.connection is not None) or await self.agent.connector.dialer.is_alive(record):
                return True
            if loop.time() >= end:
                return False
            await asyncio.sleep(patience_s / 10)
