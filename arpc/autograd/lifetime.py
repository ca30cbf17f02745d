"""The end of contexts: on every worker that they reached, and also when their creator is lost.

A release goes from worker to worker: each forgets the context first and then notifies the workers that it knows, so the
release ends even if they know each other in circles. A worker that loses a connection asks the creators of its contexts
whether these still exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, TypeVar

from arpc.agent.agent import Agent
from arpc.agent.scope import current_scope
from arpc.autograd.contexts import AutogradContext, Container
from arpc.errors import ArpcError, AutogradError, CallError, RpcTimeoutError, ShutdownError, UnknownWorkerError
from arpc.ids import LOCAL_BITS, WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.wire.messages import AutogradQuery, AutogradRelease, Message

__all__ = ["Lifetimes"]

logger = get_logger("arpc.autograd")

_T = TypeVar("_T")

_RELEASE_S: Final = 5.0
"""How long the end of a context waits for the workers that it reached. Retries continue after that."""
_ATTEMPT: Final = 10
"""The timeout of one attempt, in units of the backoff."""
_BACKOFF_FACTOR: Final = 1.5


class Lifetimes:
    """Ends the contexts of one worker, and handles the end of those that other workers created."""

    def __init__(self, container: Container, options: RpcOptions, context: Context) -> None:
        self._container = container
        self._options = options
        self._context = context
        self.attempt_s = min(_RELEASE_S, _ATTEMPT * options.control_backoff)
        """The timeout of one attempt to deliver a message, in seconds."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._doubtful: dict[int, asyncio.Task[None]] = {}
        """The tasks of `_resolve_doubt`, by the id of the lost worker: another may have its name by now."""
        self._is_closed = False
        self.agent: Agent

    def request(
        self, message: type[Message], to: int | str, args: tuple[Any, ...], timeout_s: float
    ) -> asyncio.Future[Any]:
        """Send a message of autograd itself: in no context, and within no handler's deadline. Never raises."""
        try:
            future: asyncio.Future[Any] = self.agent.request(message, to, args, timeout_s, is_internal=True)
        except ArpcError as error:
            future = self.agent.loop.create_future()
            future.set_exception(error)
        return future

    def notify(self, message: type[Message], to: int | str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a message whose future need not be awaited: its error counts as retrieved. See `request`."""
        future = self.request(message, to, args, self.attempt_s)
        future.add_done_callback(_look_at)
        return future

    async def repeat(
        self,
        attempt: asyncio.Future[Any],
        message: type[Message],
        to: int,
        args: tuple[Any, ...],
        is_moot: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Retry a message until a worker has acknowledged it, or retries are pointless; return whether that is so.

        ``attempt`` is the future of the latest attempt. ``is_moot`` returns True once the message is not needed.
        """
        backoff_s = self._options.control_backoff
        delays = [backoff_s * _BACKOFF_FACTOR**number for number in range(self._options.control_retries)]
        # a broken connection may be restored at once
        for delay_s in (0.0, *delays):
            await asyncio.wait([attempt])
            if _is_settled(attempt) or is_moot():
                return True
            await asyncio.sleep(delay_s)
            attempt = self.notify(message, to, args)
        await asyncio.wait([attempt])
        return _is_settled(attempt) or is_moot()

    # -- the end of a context

    async def release(self, context_id: int) -> None:
        """Forget a context here and on all workers that know it. Returns once that is done, or after a bounded time.

        If the caller is cancelled meanwhile, the other workers are notified all the same.
        """
        if others := self.end(context_id):
            await self.notify_all(others, context_id)

    def end(self, context_id: int) -> Collection[int]:
        """Forget a context here; return the ids of the other workers that have to, for `notify_all`."""
        context = self.forget(context_id)
        if context is None or not context.known_workers:
            return ()
        return context.known_workers.keys() - {self._container.worker_id}

    def release_nowait(self, context_id: int) -> None:
        """Forget a context here now, and notify the others later. Raises `AutogradError` if it is not known here."""
        self._container.find(context_id)
        if others := self.end(context_id):
            self.own(self.notify_all(others, context_id))

    async def notify_all(self, workers: Iterable[int], context_id: int) -> None:
        """Notify workers of the end of a context. Returns once they have acknowledged, or after a bounded time."""
        releases = {to: self._send_release(to, context_id) for to in workers}
        retries: list[asyncio.Task[None]] = []
        try:
            for future in releases.values():
                with suppress(CallError, OSError, ArpcError):
                    await future
        finally:
            if not self._is_closed:
                retries = [
                    self.own(self._retry_release(future, to, context_id))
                    for to, future in releases.items()
                    if not _is_settled(future)
                ]
        # not for a lost worker, which is notified when it comes back, if ever
        if retries and any(isinstance(future.exception(), RpcTimeoutError) for future in releases.values()):
            await asyncio.wait(retries, timeout=_RELEASE_S)

    def forget(self, context_id: int) -> AutogradContext | None:
        """End a context here, and fail its pass. Returns the context; None if it is not known here."""
        context = self._container.remove(context_id)
        if context is None:
            return None
        if context.active_pass is not None:
            context.active_pass.fail(
                AutogradError(f"autograd context {context_id} was left while a backward pass of it was under way")
            )
        context.clear()
        return context

    def _send_release(self, to: int, context_id: int) -> asyncio.Future[Any]:
        return self.notify(AutogradRelease, to, (context_id, self._container.worker_id))

    async def _retry_release(self, attempt: asyncio.Future[Any], to: int, context_id: int) -> None:
        if not await self.repeat(attempt, AutogradRelease, to, (context_id, self._container.worker_id)):
            logger.info("worker %d has not acknowledged the end of autograd context %d", to, context_id)

    def on_release(self, context_id: int, sender: int) -> Coroutine[Any, Any, None] | None:
        """Handle the release of a context by another worker, and forward it."""
        context = self.forget(context_id)
        if context is None:
            return None
        others = context.known_workers.keys() - {self._container.worker_id, sender}
        if not others:
            return None
        # Not in the handler, which may be cancelled before its first step: only this call still has these workers
        forwarding = self.own(self.notify_all(others, context_id))
        return _wait_for(forwarding)

    def rejoined(self, context: AutogradContext) -> None:
        """Notify the creator of a context that this worker had left, and has entered again on its own."""
        context.known_workers.setdefault(context.creator, 0)
        self.own(self._query_creator(context))

    async def _query_creator(self, context: AutogradContext) -> None:
        while context.id in self._container.contexts:
            try:
                ended = await self.request(AutogradQuery, context.creator, ([context.id],), self.attempt_s)
            except RpcTimeoutError:
                continue  # the creator is alive, but busy
            except (ArpcError, OSError):
                return  # a lost creator is handled by `peer_disconnected`
            if ended:
                await self.release(context.id)
            return

    # -- workers that are lost

    async def on_query(self, context_ids: list[int]) -> list[int]:
        """Return those of these contexts, created by this worker, that do not exist any more."""
        scope = current_scope.get()
        caller = scope.caller if scope is not None else None
        contexts = self._container.contexts
        if caller is not None:
            # the caller may have the context from a lost worker, which could not forward its release
            for context in filter(None, map(contexts.get, context_ids)):
                context.known_workers.setdefault(caller.id, 0)
        return [context_id for context_id in context_ids if context_id not in contexts]

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        if self._is_closed or self.agent.is_closing or peer.id in self._doubtful:
            return
        contexts = self._container.contexts.values()
        if any(self._depends_on(context, peer) or context.has_sends_to(peer.id) for context in contexts):
            doubt = self.own(self._resolve_doubt(peer, 0.0 if has_left else self._options.rref_grace))
            self._doubtful[peer.id] = doubt
            doubt.add_done_callback(lambda _: self._doubtful.pop(peer.id, None))

    def _depends_on(self, context: AutogradContext, peer: WorkerInfo) -> bool:
        """Whether this worker may depend on a peer to be notified of the end of a context."""
        is_mine = context.creator == self._container.worker_id
        return not is_mine and (context.creator == peer.id or peer.id in context.known_workers)

    async def _resolve_doubt(self, peer: WorkerInfo, grace_s: float) -> None:
        """Ask the creators of the contexts that came through a lost peer, once it has had time to come back."""
        await asyncio.sleep(grace_s)
        if not await self._is_there(peer):
            # gradients for messages to it will never arrive
            for context in self._container.contexts.values():
                context.drop_sends_to(peer.id)
        while not await self._ask_creators(peer):  # noqa: ASYNC110 - it asks other workers, which set no event here
            await asyncio.sleep(self.attempt_s)

    async def _is_there(self, peer: WorkerInfo) -> bool:
        try:
            await self.request(AutogradQuery, peer.id, ([],), self.attempt_s)
        except RpcTimeoutError:
            return True  # alive, but busy
        except (ArpcError, OSError):
            return False
        return True

    async def _ask_creators(self, peer: WorkerInfo) -> bool:
        """Drop the ended ones of the contexts that came through a peer; return whether all creators have answered."""
        have_answered = True
        doubtful: dict[int, list[int]] = {}
        for context in self._container.contexts.values():
            if self._depends_on(context, peer):
                doubtful.setdefault(context.creator, []).append(context.id)
        for creator, context_ids in doubtful.items():
            try:
                ended = await self.request(AutogradQuery, creator, (context_ids,), self.attempt_s)
            except RpcTimeoutError:
                have_answered = False  # the creator is alive, but busy
                continue
            except (ArpcError, OSError):
                ended = context_ids
                logger.info("%d autograd contexts of lost worker %d are dropped", len(ended), creator)
            for context_id in ended:
                if context_id >> LOCAL_BITS == creator:
                    await self.release(context_id)
        return have_answered

    # -- tasks

    def own(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task in no autograd context, and within no handler's deadline. `close` cancels it."""
        task = self._context.copy().run(self.agent.loop.create_task, coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Cancel all tasks: no worker is notified from now on."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()


async def _wait_for(task: asyncio.Task[None]) -> None:
    """Wait for a task that goes on if the wait is cancelled."""
    await asyncio.wait([task])


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _is_settled(attempt: asyncio.Future[Any]) -> bool:
    """Whether a retry is pointless: the message was acknowledged or refused, or its receiver is gone."""
    if not attempt.done() or attempt.cancelled():
        return False
    error = attempt.exception()
    return isinstance(error, ShutdownError | UnknownWorkerError) or not isinstance(error, CallError | OSError)
