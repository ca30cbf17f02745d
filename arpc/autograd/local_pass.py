"""What all passes have in common that may be in a thread: how they wait for it, how they fail, and how they end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from arpc import torchstate
from arpc.autograd.context import AutogradContext
from arpc.autograd.failure import node_failure
from arpc.autograd.pace import Pace
from arpc.autograd.protocol import PackedParcel, Parcel
from arpc.errors import AutogradError, RpcTimeoutError
from arpc.ids import WorkerInfo

__all__ = ["LocalHost", "LocalPass", "Threads"]


class Threads(Protocol):
    """Where nodes run that do not run on the loop."""

    def call(self, function: Callable[..., Any], /) -> asyncio.Future[Any]:
        """A future of the loop for a function run in some thread."""


class LocalHost(Protocol):
    """What a pass needs of its worker."""

    info: WorkerInfo
    pace: Pace

    @property
    def threads(self) -> Threads: ...

    def abort(self, context: AutogradContext, pass_id: int, but: int | None = None) -> asyncio.Future[Any] | None:
        """Tell all who know the context that a pass has failed; the future is done when they have heard."""


class LocalPass(ABC):
    """One pass on one worker. Who makes one says to its context that it is the active one."""

    failure: BaseException | None = None
    answer: Parcel | None = None
    """What the answer to the parent carries."""
    is_over = False
    abort_told: asyncio.Future[Any] | None = None
    """Done when all workers have heard of the failure."""
    _parent: int | None = None
    """The worker whose parcel engaged this one; None on the one that began the pass."""
    _is_busy = False
    _timer: asyncio.TimerHandle | None = None
    _over: asyncio.Future[None] | None = None

    def __init__(
        self,
        host: LocalHost,
        context: AutogradContext,
        pass_id: int,
        retain_graph: bool,
        deadline: float | None,
        threads: Threads | None,
    ) -> None:
        self.id = pass_id
        self.context = context
        self.retain_graph = retain_graph
        self.deadline = deadline
        """In the loop's time."""
        self._host = host
        self._threads = threads or host.threads

    # -- what happens to it

    @abstractmethod
    def receive(self, sender: int, parcel: Parcel, *, is_engaging: bool) -> Parcel | None:
        """A parcel has come; what goes back with the answer, unless this is the parcel that began the pass here.

        That one is answered when the pass is over here, with `answer`.
        """

    @property
    def unanswered(self) -> Sequence[asyncio.Future[PackedParcel | None]]:
        """The parcels that others have not answered."""
        return ()

    async def wait(self) -> None:
        """Until it is over here. Raises why it failed."""
        if not self.is_over:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise why it failed, if it has. Only once: who began the pass here is told, by whichever way it ends."""
        if self.failure is not None:
            # given away: its traceback leads to frames that have this pass, and so the whole graph would be in a cycle
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure

    def fail(self, error: BaseException, *, told_by: int | None = None) -> None:
        """End it here with an error, and take back what it computed.

        Those that this worker told of the pass hear of it by the cancellation of their handlers, and the parent by the
        answer. So it reaches the worker that began the pass, which tells all others: some may have finished their part.
        ``told_by`` is who told this one, if it was told like that.
        """
        if self.is_over:
            return
        self.failure = error
        self._end()
        self.context.roll_back(self.id, self._parent)
        for future in self.unanswered:
            future.cancel()
        if self._parent is None or told_by is not None:
            self.abort_told = self._host.abort(self.context, self.id, told_by)

    def cancel(self) -> None:
        """Whoever began it is cancelled. They hear of no success, so it is taken back even if it just ended well."""
        if self.is_over and self.failure is None:
            self.context.roll_back(self.id)
            self.abort_told = self._host.abort(self.context, self.id)
        else:
            self.fail(AutogradError(f"backward pass {self.id} was cancelled"))

    # -- threads

    def _run_in_thread(self, job: Callable[[], None]) -> None:
        future = self.context.running_thread = self._threads.call(job)
        self._wait_for_thread(future, self._thread_returned)

    def _wait_for_thread(self, future: asyncio.Future[None], then: Callable[[asyncio.Future[None]], None]) -> None:
        self._is_busy = True
        future.add_done_callback(then)
        if self.deadline is not None:
            # Later, since a thread is often back before the loop has a turn, and a timer costs more than a look at that
            future.get_loop().call_soon(self._set_timer, future)

    def _set_timer(self, future: asyncio.Future[None]) -> None:
        # a parcel that waits for its answer has a deadline of its own; a thread has none
        if self.deadline is not None and not future.done() and not self.is_over:
            self._timer = future.get_loop().call_at(self.deadline, self._expire)

    def _expire(self) -> None:
        self.fail(RpcTimeoutError(f"the backward pass of autograd context {self.context.id} did not end in time"))

    def _waited_for_thread(self) -> None:
        self._is_busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _thread_returned(self, future: asyncio.Future[None]) -> None:
        self.context.running_thread = None
        self._waited_for_thread()
        error = None if future.cancelled() else future.exception()
        if self.is_over:
            return
        if error is not None:
            self.fail(self._described(error))
        else:
            self._call_pristine(self._go_on)

    @abstractmethod
    def _go_on(self) -> None:
        """What a thread was to do has been done. Must not raise."""

    def _call_pristine(self, call: Callable[[], object]) -> None:
        # A callback of the loop may run between two steps of a task that has switched something off for itself
        outer = None if torchstate.is_pristine() else torchstate.save_and_reset()
        try:
            call()
        finally:
            if outer is not None:
                torchstate.restore(outer)

    # -- the end

    def _end(self) -> None:
        self.is_over = True
        self._let_go()
        if self._timer is not None:
            self._timer.cancel()
        self.context.active_pass = None
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    @abstractmethod
    def _let_go(self) -> None:
        """Forget the graph: an error's traceback leads here, and may be kept for long."""

    def _described(self, error: BaseException) -> BaseException:
        return node_failure(error, self._host.info, self.context.id, self._node_last_begun())

    def _node_last_begun(self) -> Any:
        """The node that ran last, if that is known."""
        return None
