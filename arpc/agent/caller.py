"""The calling side of an agent: from a call to a request on its way, with its deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import Any, Final, TypeVar

from torch import Tensor

from arpc import torchstate
from arpc.agent.arguments import ArgumentPacking, Prepared, as_arguments
from arpc.agent.calls import Call, Calls
from arpc.agent.connector import Connector
from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.executor import Executor
from arpc.agent.functions import name_of
from arpc.agent.future import Future
from arpc.agent.labelled import MAX_UNCOUNTED_BYTES, LabelledCalls
from arpc.agent.membership import GroupNotAskedError, WorkerRecord
from arpc.agent.noted_calls import NotedCalls
from arpc.agent.observers import kind_of
from arpc.agent.peers import Peer
from arpc.agent.placement import LateBuffers
from arpc.agent.scope import WorkerScope, current_scope
from arpc.agent.streams import ItemOrder, Stream
from arpc.errors import (
    ArpcError,
    ConnectionClosedError,
    OverloadedError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    not_run,
    set_may_have_run,
)
from arpc.ids import WorkerInfo
from arpc.options import UNSET, RpcOptions, Unset
from arpc.transport.base import Connection
from arpc.wire.frames import (
    BARE_HEADER,
    BRIEF_HEADER,
    HEADER_BYTES,
    HEADER_WITH_TERMS,
    MAX_TIMEOUT_MS,
    NO_TERMS,
    TERMS,
    bare_lead,
    brief_kind,
    frame,
)
from arpc.wire.handful import ARGUMENTS
from arpc.wire.messages import (
    Message,
    MessageType,
    RequestFlag,
)
from arpc.wire.pickling import ONE_TENSOR
from arpc.wire.tensors import Slot

__all__ = ["Caller"]

_REQUEST: Final = int(MessageType.REQUEST)
_CREDIT: Final = int(MessageType.CREDIT)
_MAX_TIMEOUT_S: Final = MAX_TIMEOUT_MS / 1000  # seven weeks: as good as none
_pack_brief = BRIEF_HEADER.pack
_pack_bare = BARE_HEADER.pack
_pack_with_terms = HEADER_WITH_TERMS.pack
_BRIEF_REQUEST: Final = brief_kind(_REQUEST)
_REQUEST_LEAD: Final = bare_lead(_BRIEF_REQUEST)
_NO_ARGS: Final = ()
_FEW_TIMEOUTS: Final = 16
_NO_SLOTS: Final[list[Slot]] = []
_ONLY_TENSORS: Final = {Tensor}
_NO_BUFFERS: Final[list[memoryview]] = []


T = TypeVar("T")


class Caller(LabelledCalls, NotedCalls, ArgumentPacking):
    """The part of an agent that makes calls; the rest is in the class that inherits."""

    add_peer: Callable[[WorkerRecord], Peer]
    connector: Connector
    deadlines: Deadlines
    default_timeout: float
    executor: Executor
    is_closing: bool
    is_interposed: bool
    loop: asyncio.AbstractEventLoop
    options: RpcOptions
    peer: Callable[[str | int | WorkerInfo], Peer | None]
    resolve: Callable[[str | int], Awaitable[WorkerRecord]]
    _create_future: Callable[[], asyncio.Future[Any]]
    _default_tick: int
    _default_tick_until: float
    _default_timeout_ms: int
    _deferred: set[asyncio.Task[None]]
    _least_bytes: int
    _nameless: frozenset[int]
    _name_of: Callable[[Any], str]
    _occasions: tuple[Sized, ...]
    _peers: dict[Any, Peer]
    _shortest_thread: int
    _tasks_are_isolated: bool
    _thread: int
    _time: Callable[[], float]
    _unknown: Callable[[Any], Exception]
    _usual_ticks: dict[float, tuple[int, int, float]]

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
    ) -> Future[Any]:
        """Start a call; its future can be awaited, chained, cancelled, and waited for by other threads."""
        if future is None:
            future = Future(loop=self.loop)
        future.made_at(depth)
        if get_ident() != self._thread:
            self._call_from_thread(future, to, function, args, kwargs, timeout)
            return future
        peer = self.peer(to)
        if peer is None or peer.must_be_asked_for:
            begun = future
            self._defer(begun, to, lambda peer: self.begin(peer, begun, function, args, kwargs, timeout))
            return future
        try:
            future.call_id = self.begin(peer, future, function, args, kwargs, timeout)
        except RuntimeError:
            self.check_loop()
            raise
        future.callee = peer
        return future

    async def call_and_wait(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> Any:
        """The result of a call. Cheaper than `call`, because nobody else can see its future."""
        try:
            peer = self._peers[to]
            terms = peer.terms[function]
        except (KeyError, TypeError):
            known = self.peer(to)
            if known is None or known.must_be_asked_for:
                return await self._call_unknown(to, function, args, kwargs, timeout)
            peer = known
            terms = NO_TERMS
        future = self._create_future()
        call_id = 0
        try:
            connection = peer.connection
            if (
                terms is NO_TERMS
                or connection is None  # never, if there are terms
                or kwargs
                or timeout is not UNSET
                or current_scope.get().__class__ is not WorkerScope
                or (connection.is_congested and not peer.has_room(0))
                or peer.backlog
                or get_ident() != self._shortest_thread
            ):
                call_id = self.begin(peer, future, function, args, kwargs, timeout)
                if terms is NO_TERMS:
                    self._learn_terms(peer, function)
            elif any(self._occasions):
                call_id = self._begin_noted(peer, connection, future, function, args, terms)
            elif args is _NO_ARGS:  # whatever else counts as false is for `begin` to judge
                # what `begin` comes down to, if there is nothing special about a call
                calls = peer.calls
                if self._time() >= calls.until:
                    self._turn_to_default(calls)
                try:
                    call_id = calls.next_id()
                except StopIteration:
                    call_id = calls.take_id(self._default_tick)
                calls.bucket[call_id] = Call(future, function, 0, connection, True)
                data = _pack_bare(_REQUEST_LEAD, call_id, terms, 0)
                left = connection.direct_left
                if left:
                    # `Connection.send_brief`, written out
                    connection.direct_left = left - 1
                    connection.brief_sent += 1
                    connection._write(data)  # noqa: SLF001
                else:
                    connection.send_brief(data)
            else:
                call_id = self._begin_simple(peer, connection, future, function, args, terms)
            return await future
        except asyncio.CancelledError:
            peer.cancel(call_id)
            raise
        except RuntimeError:
            self.check_loop()
            raise
        finally:
            del future  # whose exception refers to this frame, and so to the arguments

    def _learn_terms(self, peer: Peer, function: Callable[..., Any]) -> None:
        """Keep what the next call of a function says of it, if it is the default timeout that it has."""
        try:
            function_id = peer.function_ids.get(function)
        except TypeError:
            return
        if function_id:
            if self._time() >= self._default_tick_until:
                self._next_default_tick()
            peer.terms[function] = TERMS.pack(function_id, self._default_timeout_ms)

    def _turn_to_default(self, calls: Calls) -> None:
        """Let the bucket be that of calls which are made now and have the default timeout."""
        if self._time() >= self._default_tick_until:
            self._next_default_tick()
        if calls.tick != self._default_tick:
            calls.turn(self._default_tick)
        calls.until = self._default_tick_until

    def _begin_simple(
        self,
        peer: Peer,
        connection: Connection,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        args: Any,
        terms: bytes,
    ) -> int:
        """What `begin` comes down to if all that is special about a call is its arguments, a few small tensors."""
        codec = self.codec
        if (
            args.__class__ is not tuple
            or set(map(type, args)) != _ONLY_TENSORS
            or (codec.has_placement and codec.moves_host_memory(peer.info.name))
            or (payload := codec.handful(ARGUMENTS, args)) is None
        ):
            return self.begin(peer, future, function, args, None, UNSET)
        return self._send_simple(peer, connection, future, function, terms, payload) or self.begin(
            peer, future, function, args, None, UNSET
        )

    def _begin_recorded(
        self,
        peer: Peer,
        connection: Connection,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        args: Any,
        terms: bytes,
    ) -> int:
        """The same if something may ride on it that is more than a note."""
        codec = self.codec
        if (
            args.__class__ is not tuple
            or set(map(type, args)) != _ONLY_TENSORS
            or len(set(map(id, args))) != len(args)
            or (codec.has_placement and codec.moves_host_memory(peer.info.name))
            or self.observers.concerned()
        ):
            return self.begin(peer, future, function, args, None, UNSET)
        slots = list(args)
        # `_meta`, written out: observers have nothing to say
        meta: dict[str, Any] = {}
        for interceptor, occasions in zip(self._interceptors, self._occasions, strict=False):
            if occasions and (added := interceptor.request_sent(peer.info, function, slots)) is not None:
                meta[interceptor.key] = added
        payload = codec.handful_of_tensors(slots, meta)
        if payload is not None:
            call_id = self._send_simple(peer, connection, future, function, terms, payload)
            if call_id:
                return call_id
        return self.begin(peer, future, function, tuple(slots), None, UNSET, riders=False, meta=meta)

    def _send_simple(
        self,
        peer: Peer,
        connection: Connection,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        terms: bytes,
        payload: bytes,
    ) -> int:
        """Send a call that is packed; 0, and nothing has happened, if it has to wait."""
        if connection.is_congested:
            return 0
        size_bytes = 0
        if len(payload) > MAX_UNCOUNTED_BYTES or self._least_bytes:
            size_bytes = HEADER_BYTES + len(payload)
            if not peer.take_room(size_bytes):
                return 0
        calls = peer.calls
        if self._time() >= calls.until:
            self._turn_to_default(calls)
        try:
            call_id = calls.next_id()
        except StopIteration:
            call_id = calls.take_id(self._default_tick)
        calls.bucket[call_id] = Call(future, function, size_bytes, connection, True)
        connection.send(_pack_with_terms(len(payload), _BRIEF_REQUEST, call_id, terms, 0) + payload)
        return call_id

    async def _call_unknown(self, to: Any, function: Any, *arguments: Any) -> Any:
        """The peer or the function is of an unusual kind, or not known yet."""
        peer = self.peer(to)
        if peer is None and not isinstance(to, str | int | WorkerInfo):
            raise self._unknown(to)
        return await self.call(to, function, *arguments, depth=3)

    def request(
        self,
        message: type[Message],
        to: str | int | WorkerInfo,
        args: Sequence[Any] | None = (),
        timeout: float | Unset = UNSET,
        *,
        future: Future[Any] | None = None,
        function: Callable[..., Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        label: bytes = b"",
    ) -> Future[Any]:
        """Send a feature's own message; the future is for what its handler returns there. Called on the loop.

        ``function`` and ``kwargs``: for a message that names a function, as a call does. ``label``: see `begin`.
        """
        if future is None:
            future = Future(loop=self.loop)
        begun = future
        named = message if function is None else function
        type_ = int(message.type)

        def begin(peer: Peer) -> int:
            return self.begin(peer, begun, named, args, kwargs, timeout, 0, type_, label=label)

        peer = self.peer(to)
        if peer is None or peer.must_be_asked_for:
            self._defer(begun, to, begin)
            return begun
        try:
            begun.on_cancel = partial(peer.cancel, begin(peer))
        except RuntimeError:
            self.check_loop()
            raise
        return begun

    def request_packed(
        self, message: type[Message], peer: Peer, payload: bytes, slots: list[Slot], timeout_s: float | Unset
    ) -> Future[Any]:
        """`request` for what has been pickled already. It belongs to no caller, and interceptors do not see it.

        So it is not for a worker that has a `placement`, nor for one whose requests somebody sees, see
        `Agent.interpose`.
        """
        if self.is_closing or get_ident() != self._thread:
            raise self._refusal(message)
        if len(payload) > self._max_payload_bytes:
            raise self._too_large(message, payload)
        future: Future[Any] = Future(loop=self.loop)
        send = partial(self._send_packed, message, peer, payload, slots, timeout_s, future)
        if any(self._occasions) and (observers := self.observers.concerned()):
            kind = kind_of(int(message.type), 0)
            call_id = self.observers.begin(observers, peer, message, (), future, kind, is_awaited=False, send=send)
        else:
            call_id = send()
        future.on_cancel = partial(peer.cancel, call_id)
        return future

    def request_plain(
        self,
        message: type[Message],
        peer: Peer,
        payload: bytes,
        timeout_s: float,
        future: asyncio.Future[Any],
        is_private: bool = False,
    ) -> int:
        """The same on the shortest way, for a small payload and a timeout that is asked for again and again.

        ``is_private`` is that of a `Call`. Returns its number, 0 if it has to go the other way: then nothing has
        happened.
        """
        connection = peer.connection
        if (
            connection is None
            or connection.is_congested
            or peer.backlog
            or self._least_bytes
            or self.is_closing
            or self.is_interposed
            or get_ident() != self._thread
            or (any(self._occasions) and self.observers.concerned())
        ):
            return 0
        now = self._time()
        usual = self._usual_ticks.get(timeout_s)
        if usual is None or now >= usual[2]:
            usual = self._next_usual_tick(now, timeout_s)
        tick, timeout_ms, _ = usual
        call_id = peer.calls.add(tick, Call(future, message, 0, connection, is_private))
        try:
            connection.send(_pack_brief(len(payload), int(message.type), call_id, 1, timeout_ms, 0) + payload)
        except ConnectionClosedError:  # of which nobody has heard yet
            peer.calls.pop(call_id)
            return 0
        return call_id

    def _next_usual_tick(self, now: float, timeout_s: float) -> tuple[int, int, float]:
        """The tick of such a timeout, what the peer is told of it, and until when that holds."""
        if len(self._usual_ticks) > _FEW_TIMEOUTS:
            self._usual_ticks.clear()
        usual = NEVER, 0, float("inf")
        if timeout_s:
            tick = self.deadlines.tick(now, timeout_s)
            timeout_ms = max(1, int(timeout_s * 1000)) if self.options.timeouts_travel else 0
            usual = tick, timeout_ms, self.deadlines.time_of(tick) - timeout_s
        self._usual_ticks[timeout_s] = usual
        return usual

    def _send_packed(
        self,
        message: type[Message],
        peer: Peer,
        payload: bytes,
        slots: list[Slot],
        timeout_s: float | Unset,
        future: Future[Any],
    ) -> int:
        tick, timeout_ms = self._deadline(timeout_s, None, message)
        call = Call(future, message, 0)
        call_id = peer.calls.add(tick, call)
        try:
            data, buffers = self.codec.frame(int(message.type), 0, call_id, 1, timeout_ms, payload, slots)
        except BaseException:
            peer.calls.pop(call_id)
            raise
        call.size_bytes = len(data)
        for buffer in buffers:
            call.size_bytes += buffer.nbytes
        peer.submit(call_id, call, data, buffers)
        return call_id

    def stream(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        window: int,
        future: Future[Any] | None = None,
    ) -> Stream[Any]:
        """Start a call of a generator; its items come as they are made. ``future`` hears of its end."""
        if self.is_closing or get_ident() != self._thread:
            raise self._refusal(function)
        ending = Future(loop=self.loop) if future is None else future
        sent: list[tuple[Call, int]] = []

        def give_credit(items: int) -> None:
            ((call, call_id),) = sent
            if call.connection is not None and call.connection.is_open:
                call.connection.send(frame(_CREDIT, 0, call_id, items, 0, b""))

        stream: Stream[Any] = Stream(self.loop, window, give_credit, lambda: self._ignore(ending.cancel()))
        # The pending call must not keep the stream alive: dropping the stream is how people leave an `async for`
        reference = weakref.ref(stream)

        def item_received(item: Any) -> None:
            if (alive := reference()) is not None:
                alive.item_received(item)

        def ended(future: asyncio.Future[Any]) -> None:
            # An error leads to the frames that iterate, so to the stream and back here. The garbage collector does not
            # look into a `Call`, and would never find the cycle.
            sent.clear()
            if (alive := reference()) is not None:
                alive.end_received(future)
            elif not future.cancelled():
                future.exception()

        def begin(peer: Peer) -> int:
            call_id = self.begin(peer, ending, function, args, kwargs, timeout, RequestFlag.STREAM, window=window)
            call = peer.calls.get(call_id)
            assert call is not None  # nothing was awaited: it cannot have ended yet
            call.items = ItemOrder(item_received)
            sent.append((call, call_id))
            return call_id

        peer = self.peer(to)
        if peer is None or peer.must_be_asked_for:
            self._defer(ending, to, begin)
        else:
            try:
                call_id = begin(peer)
            except RuntimeError:
                self.check_loop()
                raise
            ending.on_cancel = lambda: peer.cancel(call_id)
        ending.add_done_callback(ended)
        return stream

    def begin(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 - the hot path: one long function instead of many calls
        self,
        peer: Peer,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | Unset,
        flags: int = 0,
        type_: int = _REQUEST,
        window: int = 0,
        riders: bool | None = None,
        label: bytes = b"",
        meta: dict[str, Any] | None = None,
    ) -> int:
        """Send one request; its reply completes the future. Raises before anything was sent if it cannot be.

        ``type_`` is another message than REQUEST for a feature's own; ``function`` is its class if it names none.
        ``label`` is what such a message has before its payload. ``meta`` is what rides on it, if ``riders`` is False.
        """
        if self.is_closing or get_ident() != self._thread:
            raise self._refusal(function)
        if riders is None and (riders := any(self._occasions)) and (observers := self.observers.concerned()):
            arguments = (peer, future, function, args, kwargs, timeout, flags, type_, window)
            return self.observers.begin(
                observers,
                peer,
                function,
                args,
                future,
                kind_of(type_, flags),
                is_awaited=not isinstance(future, Future),
                send=lambda: self.begin(*arguments, riders=True, label=label),
            )
        # the deadline
        scope = current_scope.get()
        if scope.__class__ is WorkerScope:
            scope = None  # of code that runs for no caller, so without a deadline
        if timeout is UNSET and (scope is None or scope.deadline is None):
            if self._time() >= self._default_tick_until:
                self._next_default_tick()
            tick = self._default_tick
            timeout_ms = self._default_timeout_ms
        else:
            tick, timeout_ms = self._deadline(timeout, scope.deadline if scope is not None else None, function)
        # the content
        try:
            function_id = peer.function_ids.get(function)
        except TypeError:
            function_id = 0  # not hashable, so not a function of a module
        if function_id is None:
            function_id = 1 if type_ in self._nameless else peer.define(function)
            if (
                not function_id
                and args.__class__ is not Prepared
                and (prepare := self._preparations.get(type(function))) is not None
            ):
                function, args = self._prepared(prepare, function, args, kwargs, future)
                kwargs = None
        slots = _NO_SLOTS
        if args or kwargs or not function_id:
            if args.__class__ is tuple:
                payload, slots = self._pickle(peer, function, function_id, args, kwargs)
            else:
                payload, slots = self._pickle_other(peer, function, function_id, args, kwargs)
            size_bytes = HEADER_BYTES + len(payload)
            if kwargs:
                flags |= RequestFlag.KWARGS
        else:
            if args != ():
                as_arguments(args)
            payload = b""
            size_bytes = self._least_bytes  # not worth counting, nor is what the peer keeps of it
        if window or riders:
            meta = self._meta(peer, function, slots, window)
        if (
            (slots or meta)
            and not (label and (meta or payload is not ONE_TENSOR))
            and not (meta and (window or self.observers.key in meta))  # such a handler is begun in another way
            and (handful := self.codec.handful_of_arguments(payload, slots, meta, peer.info.name)) is not None
        ):
            payload, slots, meta = handful, _NO_SLOTS, None
            size_bytes = HEADER_BYTES + len(handful)
        if label:
            payload = label + payload
            size_bytes = HEADER_BYTES + len(payload)
        # the message
        if scope is not None:
            scope.call_begun(future)
        connection = peer.connection
        if slots or meta:
            call = Call(future, function, size_bytes)
            call_id = peer.calls.add(tick, call)
            try:
                data, buffers = self.codec.frame(
                    type_,
                    flags,
                    call_id,
                    function_id,
                    timeout_ms,
                    payload,
                    list(slots),
                    meta,
                    self.codec.stager_to(peer.info.name),
                )
            except BaseException:
                peer.calls.pop(call_id)
                raise
            call.size_bytes = len(data) + sum([buffer.nbytes for buffer in buffers])
            if buffers.__class__ is LateBuffers:
                buffers.when_filled(partial(self._submit_filled, peer, call_id, call, data))
            else:
                peer.submit(call_id, call, data, buffers)
            return call_id
        calls = peer.calls
        call_id = calls.take_id(tick)
        data = _pack_brief(len(payload), type_ | flags << 8, call_id, function_id, timeout_ms, 0) + payload
        if size_bytes or connection is None or connection.is_congested or peer.backlog:
            call = calls.bucket[call_id] = Call(future, function, size_bytes)
            peer.submit(call_id, call, data, _NO_BUFFERS)
        else:
            calls.bucket[call_id] = Call(future, function, 0, connection)
            connection.send(data)
        return call_id

    def check_loop(self) -> None:
        """Raise `ShutdownError` if the loop is closed, and forget all calls: none of them can end any more."""
        if not self.loop.is_closed():
            return
        self.is_closing = True
        self._shortest_thread = 0
        for peer in self._peers.values():
            peer.abandon()
        raise not_run(self._closed_loop()) from None

    def _closed_loop(self) -> ShutdownError:
        return ShutdownError(
            f"the event loop of worker {self.info.name!r} is closed, so the worker can make no calls: use it before "
            f"its loop ends, as in `async with arpc.init_rpc(...)`, or start another worker on the loop that runs now"
        )

    def _refusal(self, function: Any) -> Exception:
        if self.loop.is_closed():
            return not_run(self._closed_loop())
        if self.is_closing:
            return not_run(ShutdownError(f"worker {self.info.name!r} is shutting down"))
        return RuntimeError(
            f"{name_of(function)} was called from a thread that is not worker {self.info.name!r}'s own: "
            f"use rpc_async(...).wait() there"
        )

    def prepare(
        self,
        peer: Peer,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Prepared | tuple[()]:
        """Pickle the arguments of a call, to be given to `begin` with the function and kwargs in it. From any thread.

        Raises what cannot travel at once, where the call is made, and leaves the loop to others meanwhile.
        """
        arguments = args if args.__class__ is tuple else as_arguments(args)
        assert isinstance(arguments, tuple)
        try:
            function_id = peer.function_ids.get(function)
        except TypeError:
            function_id = 0
        if function_id is None:
            function_id = self.on_loop(lambda: peer.define(function))
            if not function_id and (prepare := self._preparations.get(type(function))) is not None:
                function, arguments = prepare(function, arguments, kwargs)
                kwargs = None
        if function_id and not arguments and not kwargs:
            return ()
        payload, slots = self._pickle(peer, function, function_id, arguments, kwargs)
        return Prepared(payload, slots, bool(function_id), function, arguments, kwargs)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Do something on the loop, from whatever thread this is, in the context of the caller."""
        if get_ident() == self._thread:
            return work()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asked
                done.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(run, context=copy_context())
        except RuntimeError:
            raise not_run(self._closed_loop()) from None
        return done.result()

    def set_default_timeout(self, timeout_s: float) -> None:
        """Seconds for calls that do not say, from now on; 0 for none. Called on the loop."""
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout_s!r}")
        self.default_timeout = timeout_s
        self._default_tick_until = 0.0
        for peer in self._peers.values():
            peer.calls.until = 0.0
            peer.terms.clear()

    def _submit_filled(
        self,
        peer: Peer,
        call_id: int,
        call: Call,
        data: bytes,
        buffers: list[memoryview],
        failure: SerializationError | None,
    ) -> None:
        """The buffers of a call have been filled from devices. It may have ended meanwhile."""
        if call.future.done():
            peer.calls.pop(call_id)
        elif failure is not None:
            peer.calls.pop(call_id)
            call.future.set_exception(failure)
        else:
            try:
                peer.submit(call_id, call, data, buffers)
            except OverloadedError as error:
                call.future.set_exception(error)

    def _next_default_tick(self) -> None:
        timeout_s = min(self.default_timeout, _MAX_TIMEOUT_S)
        if not timeout_s:
            self._default_tick, self._default_timeout_ms, self._default_tick_until = NEVER, 0, float("inf")
            return
        self._default_tick = tick = self.deadlines.tick(self._time(), timeout_s)
        self._default_timeout_ms = max(1, int(timeout_s * 1000)) if self.options.timeouts_travel else 0
        self._default_tick_until = self.deadlines.time_of(tick) - timeout_s

    def _deadline(self, timeout: float | Unset, inherited: float | None, function: Any) -> tuple[int, int]:
        now = self._time()
        if isinstance(timeout, Unset):
            timeout_s = self.default_timeout
        elif isinstance(timeout, int | float):
            timeout_s = float(timeout)
        else:
            raise TypeError(f"a timeout is a number of seconds, 0 for none, not {timeout!r}")
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout!r}")
        if inherited is not None:
            left = inherited - now
            if left <= 0:
                text = f"no time is left to call {name_of(function)}: the caller's own deadline has passed"
                raise not_run(RpcTimeoutError(text))
            timeout_s = min(timeout_s, left) if timeout_s else left
        if not timeout_s:
            return NEVER, 0
        timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
        tick = self.deadlines.tick(now, timeout_s)
        return tick, max(1, int(timeout_s * 1000)) if self.options.timeouts_travel else 0

    def _call_from_thread(self, future: Future[Any], *arguments: Any) -> None:
        context = copy_context()
        state = torchstate.capture()
        if (scope := current_scope.get()) is not None:
            scope.call_comes()
        if any(self._occasions):
            to, function, *_ = arguments
            self.observers.thread_calls(context, self._name_of(to), function)

        def start() -> None:
            if future.done():
                return
            to, function, args, kwargs, timeout = arguments
            peer = self.peer(to)
            try:
                if peer is None or peer.must_be_asked_for:
                    self._defer(future, to, lambda peer: self.begin(peer, future, function, args, kwargs, timeout))
                    return
                call_id = self.begin(peer, future, function, args, kwargs, timeout)
            except Exception as error:  # noqa: BLE001 - the thread finds it in the future
                future.set_exception(error)
            else:
                future.on_cancel = lambda: peer.cancel(call_id)

        # whether the thread wants gradients is for those to know who look at its arguments
        try:
            self.loop.call_soon_threadsafe(torchstate.run_with, state, start, context=context)
        except RuntimeError:
            raise not_run(self._closed_loop()) from None

    def _defer(self, future: Future[Any], to: Any, begin: Callable[[Peer], int]) -> None:
        """Ask the group about a worker that is not known yet, or may be another one by now, then call it."""
        if self.is_closing or self.loop.is_closed():
            raise self._refusal(to)
        if not isinstance(to, str | int) and self.peer(to) is None:
            raise self._unknown(to)

        async def resolve_and_call() -> None:
            try:
                peer = await self._find_out(to)
                if not future.done():
                    call_id = begin(peer)
                    future.on_cancel = lambda: peer.cancel(call_id)
            except Exception as error:  # noqa: BLE001 - the thread finds it in the future
                set_may_have_run(error, may_have_run=False)
                if not future.done():
                    future.set_exception(error)
            except asyncio.CancelledError:
                # by `aclose`, or with the loop: nobody else will end the call
                if not future.done():
                    text = f"worker {self.info.name!r} was shut down before the call was sent"
                    future.set_exception(not_run(ShutdownError(text)))
                raise

        task = self.loop.create_task(resolve_and_call())
        self._deferred.add(task)
        task.add_done_callback(self._deferred.discard)
        future.on_cancel = lambda: None if task.done() else self._ignore(task.cancel())

    async def _find_out(self, to: str | int | WorkerInfo) -> Peer:
        """The peer that has a name, an id or both now, as the group says."""
        try:
            record = await self.resolve(to.name if isinstance(to, WorkerInfo) else to)
        except GroupNotAskedError as error:
            record = error.known
        except ArpcError as error:
            known = self.peer(to)
            raise (error if known is None else known.not_reached(error)) from error
        peer = self.add_peer(record)
        peer.is_verified = True
        if isinstance(to, WorkerInfo) and to != record.info:
            raise self._unknown(to)
        return peer

    @staticmethod
    def _ignore(_: object) -> None:
        """For callbacks whose result means nothing."""
