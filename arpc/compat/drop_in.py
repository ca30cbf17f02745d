"""The worker of a program that was written for torch.distributed.rpc: one at a time, with its loop thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context
from multiprocessing.util import Finalize
from typing import Any, Final, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from arpc.agent.peers.peer import Peer
from arpc.agent.scope import WorkerScope
from arpc.autograd.engine.accumulate_hooks import has_node_hooks
from arpc.autograd.engine.run_policy import ThreadsOnly
from arpc.compat.blocking_client.calls import BlockingCalls
from arpc.compat.completions import Completions
from arpc.compat.loop_thread import LoopThread
from arpc.errors import ShutdownError, UnknownWorkerError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.rref.context import HandleClass
from arpc.runtime import Worker
from arpc.startup import start_worker
from arpc.user_errors import is_a, repr_of, stack_of

__all__ = ["DropIn"]

T = TypeVar("T")

_LINGER_S: Final = 2.0
"""Seconds that a process which exits without a shutdown waits for its last replies to be sent."""
_PAUSE_S: Final = 0.001


class DropIn:
    """An `arpc.Worker` for code that blocks. Used from any thread but that of its loop."""

    def __init__(self, thread: LoopThread, worker: Worker) -> None:
        self.thread = thread
        self.worker = worker
        self.agent = worker.agent
        self.blocking = BlockingCalls(worker.agent)
        self.completions: Completions = thread.call(lambda: Completions(thread.loop, worker.name))
        thread.scope = WorkerScope(worker)
        thread.call(self._set_up)
        worker.autograd.run_policy = ThreadsOnly()
        worker.autograd.has_accumulate_hooks = has_node_hooks
        worker.autograd.container.leaves_unused = False  # as in torch, a called worker keeps a context to its end
        self._process = os.getpid()
        atexit.register(self._leave)
        # a process that multiprocessing has forked does not run atexit handlers
        self._finalizer = Finalize(None, self._leave, exitpriority=0)

    @classmethod
    def start(
        cls,
        name: str,
        *,
        store: Store,
        rank: int | None,
        world_size: int | None,
        options: RpcOptions,
        handle_class: HandleClass,
    ) -> DropIn:
        """Join the group that meets in a store."""
        thread = LoopThread(name)
        try:
            worker = thread.run(
                lambda: start_worker(
                    name,
                    rank=rank,
                    world_size=world_size,
                    init_method="env://",
                    store=store,
                    options=options,
                    handle_class=handle_class,
                ),
                context=Context(),
            )
            return cls(thread, worker)
        except BaseException:
            thread.stop()
            raise

    def _set_up(self) -> None:
        self.agent.dispatcher.replies.on_failure = self._show_failure
        # in torch, Kineto profiles have no events of calls, and they might mislead scripts that look for names
        self.worker.profiler.remote.includes_kineto = False

    def _show_failure(self, function: str, error: BaseException) -> None:
        """Print the error of a handler here too: its caller may be a process that this user does not watch."""
        if is_a(error, Exception):
            sys.stderr.write(f"On {self.info!r}:\n{repr_of(error)}\n{stack_of(error)}\n")

    @property
    def info(self) -> WorkerInfo:
        return self.worker.info

    @property
    def is_elastic(self) -> bool:
        return self.worker.rendezvous.is_elastic

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop on behalf of this thread, and return its result."""
        return self.thread.run(make)

    # -- workers

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """Return the peer of that name, id or info. Raises RuntimeError with torch's text if there is none."""
        peer = self.agent.peer(to)
        if peer is None and self.is_elastic:
            peer = self._resolved(to)
        if peer is None:
            kind = "name" if isinstance(to, str) else "id"
            where = f"name:{self.info.name},rank:{self.info.id}"
            raise RuntimeError(f"{where} could not find destination {kind} {to}")
        return peer

    def _resolved(self, to: str | int | WorkerInfo) -> Peer | None:
        """Look up a worker that has joined since; None if there is none."""
        asked = to.name if isinstance(to, WorkerInfo) else to

        async def resolve() -> Peer:
            return self.agent.add_peer(await self.agent.resolve(asked))

        try:
            return self.run(resolve)
        except UnknownWorkerError:
            return None

    def infos(self) -> list[WorkerInfo]:
        """Return all workers of the group, by id."""
        return sorted({self.info, *(record.info for record in self.members())}, key=lambda info: info.id)

    def members(self) -> tuple[WorkerRecord, ...]:
        """Return the record of each worker from the group's store."""
        return self.run(self.worker.rendezvous.members)

    # -- shutdown

    def shutdown(self, *, graceful: bool, timeout_s: float) -> None:
        """Leave the group, then end the loop. An error that prevented a graceful shutdown is raised after that."""
        try:
            self.thread.run(lambda: self.worker.shutdown(graceful, timeout_s), context=Context())
        finally:
            self.thread.call(self.completions.close)
            self._stop()

    def _leave(self) -> None:
        """End a worker that was not shut down, when its process exits: requests are answered first, if that is quick.

        A script may exit because of a call from another worker, which must still receive the reply.
        """
        if os.getpid() != self._process:
            return  # a forked child, which has no loop thread
        with contextlib.suppress(ShutdownError):
            self.thread.run(self._let_answers_leave, context=Context())
        self._stop()

    async def _let_answers_leave(self) -> None:
        connector = self.agent.connector
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (  # noqa: ASYNC110 - there is no event for either condition
                    connector.busy_links() or any(link.connection.held_bytes for link in connector.links)
                ):
                    await asyncio.sleep(_PAUSE_S)

    def _stop(self) -> None:
        atexit.unregister(self._leave)
        self._finalizer.cancel()
        self.thread.stop()
