"""The ways to make a call: awaited, with a future, as a stream, or as a message of a feature.

They differ in the object that receives the result. All of them end in `CallSender.send`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from threading import get_ident
from typing import Any, Final, TypeVar

from arpc import torchstate
from arpc.agent.client.deadlines import Timeouts
from arpc.agent.client.future import Future
from arpc.agent.client.pending_calls import Call, CallSender, Cancellable
from arpc.agent.client.sender import Sender
from arpc.agent.client.streams import Stream
from arpc.agent.hooks.observers import Observers
from arpc.agent.peers.directory import PeerDirectory
from arpc.agent.peers.peer import Peer
from arpc.agent.scope import current_scope
from arpc.errors import ArpcError, ShutdownError, not_run, set_may_have_run
from arpc.group.membership import StaleRecordError, WorkerRecord
from arpc.ids import WorkerInfo
from arpc.options import UNSET, Unset
from arpc.wire.messages import Message, RequestFlag
from arpc.wire.metadata import WINDOW, pack_window

__all__ = ["Caller"]

_NAMELESS: Final = 1
"""Stands for the number of a function in messages that name no function."""

T = TypeVar("T")


class Caller:
    """Makes the calls of one worker."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        peers: PeerDirectory,
        sender: Sender,
        timeouts: Timeouts,
        observers: Observers,
        resolve: Callable[[str | int], Awaitable[WorkerRecord]],
    ) -> None:
        self.sender: CallSender = sender
        """The sender of all requests. A wrapper that sees or changes requests replaces it."""
        self.timeouts = timeouts
        self.deferred: set[asyncio.Task[None]] = set()
        """The tasks of calls for which the group is asked about the worker first."""
        self._innermost = sender
        self._loop = loop
        self._thread = get_ident()
        self._peers = peers
        self._known_peers = peers.by_key
        self._observers = observers
        self._resolve = resolve
        self.make_waiter: Callable[[], asyncio.Future[Any]] = loop.create_future
        """Makes the future that a coroutine awaits until its call has ended."""

    # -- ways to call

    async def call_and_wait(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> Any:
        """Make a call and return its result. Raises the error of the call."""
        try:
            peer = self._known_peers.get(to)
        except TypeError:
            peer = None  # not hashable, so it names no worker
        if peer is None or (peer.connection is None and peer.must_ask_group):
            return await self.call(to, function, args, kwargs, timeout, depth=2)
        waiter = self.make_waiter()
        call_id = 0
        try:
            call_id = self.sender.send(Call(peer, waiter, function, args, kwargs, timeout, is_awaited=True))
            return await waiter
        except (asyncio.CancelledError, GeneratorExit):
            waiter.cancel()  # a coroutine that is closed has not cancelled the future that it awaits
            peer.cancel(call_id)
            raise
        except RuntimeError:
            self.check_loop()
            raise
        finally:
            del waiter  # its exception refers to this frame, and so to the arguments

    def call(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
        *,
        depth: int = 2,
        future: Future[Any] | None = None,
        name: str = "",
    ) -> Future[Any]:
        """Start a call; its future can be awaited, chained, cancelled, and waited for by other threads.

        ``name`` is the name shown to users, see `Call.called`.
        """
        if future is None:
            future = Future(loop=self._loop)
        future.made_at(depth)
        call = Call(None, future, function, args, kwargs, timeout, called=name)
        if get_ident() != self._thread:
            self._call_from_thread(to, call)
        else:
            self.begin(to, call)
        return future

    def request(
        self,
        message: type[Message],
        to: str | int | WorkerInfo,
        args: Sequence[Any] | None = (),
        timeout: float | Unset = UNSET,
        *,
        future: Any = None,
        is_internal: bool = False,
    ) -> Any:
        """Send a feature's own message; returns a future for the result of the peer's handler. Called on the loop.

        ``future``, a `Cancellable`, replaces the new `Future`. ``is_internal``: made for no caller, see `Call`.
        """
        if future is None:
            future = Future(loop=self._loop)
        call = Call(
            None,
            future,
            message,
            args,
            None,
            timeout,
            int(message.type),
            is_internal=is_internal,
            function_id=_NAMELESS,
        )
        self.begin(to, call)
        return future

    def stream(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        window: int,
        future: Future[Any] | None = None,
        name: str = "",
    ) -> Stream[Any]:
        """Start a call of a generator, whose items arrive as they are made. ``future`` completes when the call ends.

        ``name`` is the name shown to users, see `Call.called`.
        """
        if self._innermost.is_closed or get_ident() != self._thread:
            self._innermost.refuse(function)  # before observers of calls are notified in the wrong thread
        call = Call(
            None,
            Future(loop=self._loop) if future is None else future,
            function,
            args,
            kwargs,
            timeout,
            flags=RequestFlag.STREAM,
            called=name,
        )
        stream: Stream[Any] = Stream(call, window)
        call.metadata = {WINDOW: pack_window(window)}
        self.begin(to, call)
        return stream

    # -- starting calls

    def begin(self, to: str | int | WorkerInfo, call: Call) -> None:
        """Send a call, once ``to`` is resolved to a peer. Its recipient is a `Cancellable`. Called on the loop.

        Features use it for their own messages that, like a call, name a function.
        """
        try:
            peer = self._known_peers.get(to)
        except TypeError:
            peer = None
        if peer is None or (peer.connection is None and peer.must_ask_group):
            self._defer(to, call)
            return
        recipient: Cancellable = call.recipient
        call.peer = peer
        try:
            recipient.call_id = self.sender.send(call)
        except RuntimeError:
            self.check_loop()
            raise
        recipient.callee = peer

    def _defer(self, to: str | int | WorkerInfo, call: Call) -> None:
        """Ask the group about a worker that is not known yet, or may have been replaced, then call it."""
        if self._innermost.is_closed or self._loop.is_closed() or get_ident() != self._thread:
            self._innermost.refuse(call.function)
        if not isinstance(to, str | int) and self._peers.get(to) is None:
            raise self._peers.unknown(to)
        future: Cancellable = call.recipient

        async def resolve_and_call() -> None:
            try:
                peer = await self._find_out(to)
                if not future.done():
                    future.on_cancel = None
                    self.begin(peer.info, call)  # the peer is known now
            except Exception as error:  # noqa: BLE001 - the caller gets it from the future
                set_may_have_run(error, may_have_run=False)
                if not future.done():
                    future.set_exception(error)
            except asyncio.CancelledError:
                # by `aclose`, or at the end of the loop: no other code will end the call
                if not future.done():
                    text = f"worker {self._peers.me.name!r} was shut down before the call was sent"
                    future.set_exception(not_run(ShutdownError(text)))
                raise

        task = self._loop.create_task(resolve_and_call())
        self.deferred.add(task)
        task.add_done_callback(self.deferred.discard)
        future.on_cancel = task.cancel

    async def _find_out(self, to: str | int | WorkerInfo) -> Peer:
        """Return the peer that has a name, an id or both now, according to the group."""
        try:
            record = await self._resolve(to.name if isinstance(to, WorkerInfo) else to)
        except StaleRecordError as error:
            record = error.known
        except ArpcError as error:
            known = self._peers.get(to)
            raise (error if known is None else known.not_reached(error)) from error
        peer = self._peers.add(record)
        peer.is_verified = True
        if isinstance(to, WorkerInfo) and to != record.info:
            raise self._peers.unknown(to)
        return peer

    # -- threads

    def _call_from_thread(self, to: str | int | WorkerInfo, call: Call) -> None:
        context = copy_context()
        state = torchstate.capture()
        if (scope := current_scope.get()) is not None:
            scope.thread_call_begun()
        self._observers.thread_calls(context, self._peers.name_of(to), call.called or call.function)
        future: Future[Any] = call.recipient

        def start() -> None:
            if future.done():
                return
            try:
                self.begin(to, call)
            except Exception as error:  # noqa: BLE001 - the thread gets it from the future
                future.set_exception(error)

        # in the torch state of the thread, because interceptors look at its grad mode
        self._soon(partial(torchstate.run_with, state, start), context)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the loop in the caller's context, and return its result. Called in any thread."""
        if get_ident() == self._thread:
            return work()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised in the calling thread
                done.set_exception(error)

        self._soon(run, copy_context())
        return done.result()

    def _soon(self, function: Callable[[], object], context: Context) -> None:
        try:
            self._loop.call_soon_threadsafe(function, context=context)
        except RuntimeError:
            raise not_run(self._innermost.closed_loop()) from None

    # -- the end

    def check_loop(self) -> None:
        """Raise `ShutdownError` if the loop is closed, and drop all calls, because none of them can end any more."""
        if not self._loop.is_closed():
            return
        self._innermost.close()
        for peer in self._peers:
            peer.abandon()
        raise not_run(self._innermost.closed_loop()) from None

    async def aclose(self) -> None:
        """Refuse further calls, and cancel those for which the group is being asked."""
        self._innermost.close()
        for task in list(self.deferred):
            task.cancel()
        if self.deferred:
            await asyncio.wait(self.deferred)


# The name that Python shows if a coroutine is never awaited: users know it
Caller.call_and_wait.__qualname__ = "arpc.rpc_sync"
