"""A worker as others see it: it makes calls, answers them, and knows who can be reached.

The agent knows no feature. What rides on calls (autograd, profiling) comes in as interceptors, what travels in pickles
(RRefs) as reducers, and what is neither call nor reply as entries of the handler table.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeVar

from arpc import torchstate
from arpc.agent.calls import LAST_NUMBER, SEQUENCE_BITS, Call
from arpc.agent.codec import Codec, Interceptor
from arpc.agent.connector import Connector, Link, PeerWatcher
from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.executor import Executor, Service
from arpc.agent.failures import rebuild_failure
from arpc.agent.functions import Preparation, name_of
from arpc.agent.future import Future
from arpc.agent.guard import Guard, GuardedCodec
from arpc.agent.heartbeat import Heartbeat
from arpc.agent.membership import WorkerRecord
from arpc.agent.metering import Meter, Metering
from arpc.agent.observers import Observer, Observers, kind_of
from arpc.agent.peers import Peer, unsendable
from arpc.agent.placement import LateBuffers, Placement
from arpc.agent.scope import WorkerScope, current_scope
from arpc.agent.streams import ItemOrder, Stream
from arpc.errors import (
    ArpcError,
    NotAllowedError,
    OverloadedError,
    ProtocolError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    UnknownWorkerError,
    WireError,
)
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import UNSET, RpcOptions, Unset
from arpc.transport.base import Connection, Transport
from arpc.wire.frames import BRIEF_HEADER, HEADER_BYTES, MAX_TIMEOUT_MS, brief_kind, frame
from arpc.wire.handshake import Identity
from arpc.wire.messages import (
    MESSAGE_CLASSES,
    WINDOW,
    Cancel,
    Credit,
    Failure,
    Function,
    Goodbye,
    Inspect,
    Item,
    ItemFlag,
    Message,
    MessageType,
    Reply,
    Request,
    RequestFlag,
)
from arpc.wire.pickling import ONE_TENSOR, Reducer
from arpc.wire.protocol import Direct
from arpc.wire.tensors import Slot

__all__ = ["Agent", "Prepared", "as_arguments"]

logger = get_logger("arpc.agent")

_REQUEST: Final = int(MessageType.REQUEST)
_CREDIT: Final = int(MessageType.CREDIT)
_MAX_TIMEOUT_S: Final = MAX_TIMEOUT_MS / 1000  # seven weeks: as good as none
_pack_brief = BRIEF_HEADER.pack
_BRIEF_REQUEST: Final = brief_kind(_REQUEST)
_BRIEF_REPLY: Final = brief_kind(int(MessageType.REPLY))
_is_pristine = torchstate.is_pristine
_set_result = asyncio.Future.set_result
_NO_ARGS: Final = ()
_NO_SLOTS: Final[list[Slot]] = []
_NO_BUFFERS: Final[list[memoryview]] = []

_OF_ONLOOKERS: Final = (Inspect, Cancel, Goodbye)

_Handler = Callable[[Link, Message], None]

T = TypeVar("T")


class Prepared(NamedTuple):
    """The arguments of a call that have been pickled for one peer, see `Agent.prepare`."""

    payload: bytes
    slots: list[Slot]
    is_named: bool
    """The function goes by its number, and not with the arguments."""
    function: Any
    """What is called: not the function that was given, if that is no function of Python's own."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None


class Agent:
    """Calls, dispatch and connections of one worker. Everything here belongs to the loop it was made on."""

    def __init__(  # noqa: PLR0913, PLR0915 - one agent is made in one place, out of many parts
        self,
        *,
        worker: Any,
        identity: Identity,
        options: RpcOptions,
        context: Context,
        transports: Mapping[str, Transport],
        resolve: Callable[[str | int], Awaitable[WorkerRecord]],
        handlers: Mapping[type[Message], Callable[..., Any]] | None = None,
        wrappers: Mapping[type[Message], Callable[..., Any]] | None = None,
        shortcuts: Mapping[type[Message], Callable[..., Any]] | None = None,
        reducers: Mapping[type, Reducer] | None = None,
        families: Mapping[type, Reducer] | None = None,
        preparations: Mapping[type, Preparation] | None = None,
        interceptors: Sequence[Interceptor] = (),
        observers: Sequence[Observer] = (),
        watchers: Sequence[PeerWatcher] = (),
        is_elastic: bool = False,
        placement: Placement | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.is_elastic = is_elastic
        """Workers this one has never heard of may come."""
        self.loop = asyncio.get_running_loop()
        self.info = WorkerInfo(identity.name, identity.id)
        self.options = options
        self.placement = placement
        """None if there are no devices but the CPU, here or on a peer."""
        self.observers = Observers(observers)
        """Those that were passed stand by; see `observe`."""
        interceptors = (*interceptors, self.observers)
        self._preparations = dict(preparations or {})
        self.guard = guard
        """None unless in allow-list mode."""
        self.codec = (
            Codec(reducers or {}, interceptors, options.inline_tensor_bytes, placement, families)
            if guard is None
            else GuardedCodec(guard, reducers or {}, interceptors, options, placement, families)
        )
        if placement is not None:
            # before connections are told whom to call
            self.messages_received = partial(  # type: ignore[method-assign]
                placement.messages_received, self.messages_received
            )
        self.deadlines = Deadlines(self.loop)
        self.executor = Executor(
            loop=self.loop,
            worker=worker,
            name=identity.name,
            context=context,
            codec=self.codec,
            threads=options.num_worker_threads,
            max_requests_waiting=options.max_requests_waiting,
            window_bytes=options.window_bytes,
            observers=self.observers,
        )
        self.default_timeout = options.rpc_timeout
        self.is_closing = False
        self.is_serving = False
        self._thread = get_ident()
        # Where calls in flight are counted, none takes the shortest way, which counts nothing
        self._shortest_thread = self._thread if not options.max_calls_in_flight else 0
        self._least_bytes = HEADER_BYTES if options.max_calls_in_flight else 0
        # what else is in the body of a message has room beside it
        self._max_payload_bytes = options.max_body_bytes * 7 // 8
        self._time = self.loop.time
        self._tasks_are_isolated = torchstate.isolates_all_tasks(self.loop)
        self._create_future = self.loop.create_future
        self._scope = WorkerScope(worker)
        self.resolve = resolve
        self._peers: dict[Any, Peer] = {}
        self._deferred: set[asyncio.Task[None]] = set()
        self._pickler = self.codec.pickler
        self._interceptors = self.codec.interceptors
        self._occasions = (
            *(interceptor.occasions for interceptor in self._interceptors),
            *(observer.occasions for observer in observers),
        )
        # The tick of the default timeout changes every half second or so
        self._default_tick = 0
        self._default_tick_until = 0.0
        self._default_timeout_ms = 0
        self.connector = Connector(self, identity, options, transports, context, watchers)
        self.heartbeat = Heartbeat(self.loop, options, self.connector)
        self._handlers: dict[type[Message], _Handler] = {
            Request: self.executor.request_received,
            Reply: self._on_reply,
            Failure: self._on_failure,
            Cancel: self._on_cancel,
            Function: self._on_function,
            Item: self._on_item,
            Credit: self._on_credit,
            Goodbye: self._on_goodbye,
        }
        self._requests: tuple[type[Message], ...] = (Request, *(handlers or {}), *(wrappers or {}))
        self._services: dict[type[Message], Service] = {}
        # those that name no function
        self._nameless = frozenset(int(message_class.type) for message_class in handlers or {})
        for message_class, function in (handlers or {}).items():
            # A feature's own messages are calls too, of the one function that serves them
            shortcut = (shortcuts or {}).get(message_class)
            self._services[message_class] = self.executor.serve(message_class, function, shortcut)
        for message_class, function in (wrappers or {}).items():
            # and so are those that name a function, which is run in its own way by another
            self._services[message_class] = self.executor.serve_wrapped(message_class, function)
        # of those, how many arguments come before the function's own
        self._leading = {int(message_class.type): message_class.leading for message_class in wrappers or {}}
        for message_class, service in self._services.items():
            handle = service.handle
            self._handlers[message_class] = handle if guard is None else self._guarded(guard, message_class, handle)

        self._takers_of_requests = {message_class: self._handlers[message_class] for message_class in self._requests}
        self._metering: Metering | None = None

    def _guarded(self, guard: Guard, message_class: type[Message], handle: _Handler) -> _Handler:
        """A handler that looks at the caller's role before it looks at the message."""

        def handle_if_permitted(link: Link, message: Message) -> None:
            try:
                guard.permit_message(link.inbound.caller.name, message_class)
            except NotAllowedError as error:
                self.executor.reject(link, message, error)
            else:
                handle(link, message)

        return handle_if_permitted

    def serve(self) -> None:
        """The worker knows its group: others may connect from now on. Those who tried before try again."""
        self.is_serving = True

    def identify(self, worker_id: int) -> None:
        """The group has given this worker its id, which nobody could know before."""
        self.info = WorkerInfo(self.info.name, worker_id)
        self.connector.identify(worker_id)

    # -- peers

    def add_peer(self, record: WorkerRecord) -> Peer:
        """Make a worker known, so that calls can name it."""
        peer = self._peers.get(record.name)
        if peer is None:
            peer = self.make_peer(record.info)
            peer.is_verified = not self.is_elastic or record.id == self.info.id
        if peer.incarnation is not None and peer.incarnation != record.incarnation:
            # it came back under its name, as another one
            self.connector.replaced(peer)
            for old in (peer.info.id, peer.info):
                self._peers.pop(old, None)
            peer.succeeded_by(record.info)
        peer.incarnation = record.incarnation
        peer.main_by_value = not self.connector.same_main(record.main)
        for key in (record.name, record.id, record.info):
            self._peers[key] = peer
        return peer

    def make_peer(self, info: WorkerInfo) -> Peer:
        """A peer that is not in the books yet."""
        return Peer(
            info,
            codec=self.codec,
            deadlines=self.deadlines,
            options=self.options,
            connect=self.connector.connect,
        )

    def peer(self, to: str | int | WorkerInfo) -> Peer | None:
        """The peer of that name, id or info, if it is known here."""
        try:
            return self._peers.get(to)
        except TypeError:
            return None

    def known_peer(self, to: str | int | WorkerInfo) -> Peer:
        """The same, or `UnknownWorkerError`."""
        peer = self.peer(to)
        if peer is None:
            raise self._unknown(to)
        return peer

    def _name_of(self, to: Any) -> str:
        peer = self.peer(to)
        return peer.info.name if peer is not None else str(to)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(dict.fromkeys(self._peers.values()))

    def _unknown(self, to: Any) -> Exception:
        if not isinstance(to, str | int | WorkerInfo):
            return TypeError(f"a worker is given by name, id or WorkerInfo, not {type(to).__qualname__}")
        known = ", ".join(sorted(peer.info.name for peer in self.peers))
        return UnknownWorkerError(f"worker {self.info.name!r} knows no worker {to!r}; it knows {known}")

    # -- observers

    def observe(self, observer: Observer) -> None:
        """Tell an observer of every call and every handler that begins from now on."""
        if observer in self.observers.installed:
            return
        self.observers.installed.append(observer)
        if len(self.observers.installed) == 1:
            self._set_observed(True)

    def unobserve(self, observer: Observer) -> None:
        """Tell it of nothing that begins from now on; it still hears how what has begun ends."""
        if observer not in self.observers.installed:
            return
        self.observers.installed.remove(observer)
        if not self.observers.installed:
            self._set_observed(False)
            self.observers.forget_waiting()

    def _set_observed(self, is_observed: bool) -> None:
        self.executor.set_observed(is_observed)
        answers: dict[type[Message], _Handler] = {
            Reply: self._on_reply,
            Failure: self._on_failure,
            Item: self._on_item,
        }
        for message_class, handle in answers.items():
            self._handlers[message_class] = partial(self.observers.answered, handle) if is_observed else handle
        for link in self.connector.links:
            link.connection.protocol.direct = self.direct(link)

    def set_meter(self, meter: Meter | None) -> None:
        """Let somebody hear how long each call and each handler takes, from now on; None: nobody."""
        if self._metering is not None:
            del self.call_and_wait, self.begin  # what is in the class comes to light again
        self._metering = metering = (
            None if meter is None else Metering(meter, self._peers, self.begin, self._call_unknown)
        )
        self.executor.failed = None if metering is None else metering.failed
        self.executor.waited = None if metering is None else metering.waited
        if metering is not None:
            self.call_and_wait = metering.call_and_wait  # type: ignore[method-assign]
            self.begin = metering.begin  # type: ignore[method-assign]
        if not self.is_closing:
            for message_class, handle in self._takers_of_requests.items():
                self._handlers[message_class] = handle if metering is None else partial(metering.handle, handle)
        for link in self.connector.links:
            link.inbound.ended = None
            link.inbound.began_ns.clear()
            link.connection.protocol.direct = self.direct(link)

    @property
    def has_riders(self) -> bool:
        """Whether something may ride on calls at the moment."""
        return any(self._occasions)

    # -- calls

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
        call_id = self.begin(peer, future, function, args, kwargs, timeout)
        future.on_cancel = lambda: peer.cancel(call_id)
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
            function_id = peer.function_ids.get(function)
        except (KeyError, TypeError):
            return await self._call_unknown(to, function, args, kwargs, timeout)
        connection = peer.connection
        if connection is None and peer.must_be_asked_for:
            return await self._call_unknown(to, function, args, kwargs, timeout)
        future = self._create_future()
        if (
            function_id is None
            or connection is None
            or args is not _NO_ARGS  # whatever else counts as false is for `begin` to judge
            or kwargs
            or timeout is not UNSET
            or current_scope.get().__class__ is not WorkerScope
            or connection.is_congested
            or peer.backlog
            or any(self._occasions)
            or self.is_closing
            or get_ident() != self._shortest_thread
        ):
            call_id = self.begin(peer, future, function, args, kwargs, timeout)
        else:
            # what `begin` comes down to, if there is nothing special about a call
            if self._time() >= self._default_tick_until:
                self._next_default_tick()
            calls = peer.calls
            if self._default_tick != calls.tick or calls.number == LAST_NUMBER:
                calls.turn(self._default_tick)
            calls.number = number = calls.number + 1
            call_id = calls.base + number
            calls.bucket[call_id] = Call(future, function, 0, connection)
            connection.send(_pack_brief(0, _BRIEF_REQUEST, call_id, function_id, self._default_timeout_ms, 0))
        try:
            return await future
        except asyncio.CancelledError:
            peer.cancel(call_id)
            raise
        finally:
            del future  # whose exception refers to this frame, and so to the arguments

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
    ) -> Future[Any]:
        """Send a feature's own message; the future is for what its handler returns there. Called on the loop.

        ``function`` and ``kwargs``: for a message that names a function, as a call does.
        """
        if future is None:
            future = Future(loop=self.loop)
        begun = future
        named = message if function is None else function
        type_ = int(message.type)
        peer = self.peer(to)
        if peer is None or peer.must_be_asked_for:
            self._defer(begun, to, lambda peer: self.begin(peer, begun, named, args, kwargs, timeout, 0, type_))
        else:
            begun.on_cancel = partial(peer.cancel, self.begin(peer, begun, named, args, kwargs, timeout, 0, type_))
        return begun

    def request_packed(
        self, message: type[Message], peer: Peer, payload: bytes, slots: list[Slot], timeout_s: float | Unset
    ) -> Future[Any]:
        """`request` for what has been pickled already. It belongs to no caller, and interceptors do not see it.

        So it is not for a worker that has a `placement`.
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
    ) -> Stream[Any]:
        """Start a call of a generator; its items come as they are made."""
        future: Future[Any] = Future(loop=self.loop)
        sent: list[tuple[Call, int]] = []

        def give_credit(items: int) -> None:
            call, call_id = sent[0]
            if call.connection is not None and call.connection.is_open:
                call.connection.send(frame(_CREDIT, 0, call_id, items, 0, b""))

        stream: Stream[Any] = Stream(window, give_credit, lambda: self._ignore(future.cancel()))
        # The pending call must not keep the stream alive: dropping the stream is how people leave an `async for`
        reference = weakref.ref(stream)

        def item_received(item: Any) -> None:
            if (alive := reference()) is not None:
                alive.item_received(item)

        def ended(future: asyncio.Future[Any]) -> None:
            if (alive := reference()) is not None:
                alive.end_received(future)
            elif not future.cancelled():
                future.exception()

        def begin(peer: Peer) -> int:
            call_id = self.begin(peer, future, function, args, kwargs, timeout, RequestFlag.STREAM, window=window)
            call = peer.calls.get(call_id)
            assert call is not None  # nothing was awaited: it cannot have ended yet
            call.items = ItemOrder(item_received)
            sent.append((call, call_id))
            return call_id

        peer = self.peer(to)
        if peer is None or peer.must_be_asked_for:
            self._defer(future, to, begin)
        else:
            call_id = begin(peer)
            future.on_cancel = lambda: peer.cancel(call_id)
        future.add_done_callback(ended)
        return stream

    def begin(  # noqa: C901, PLR0912, PLR0915 - the hot path: one long function instead of many calls
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
    ) -> int:
        """Send one request; its reply completes the future. Raises before anything was sent if it cannot be.

        ``type_`` is another message than REQUEST for a feature's own; ``function`` is its class if it names none.
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
                send=lambda: self.begin(*arguments, riders=True),
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
                function, args = self._prepared(prepare, function, args, kwargs, self._leading.get(type_, 0), future)
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
        meta = self._meta(peer, function, slots, window) if window or riders else None
        if payload is ONE_TENSOR and not meta and (lone := self.codec.lone_argument(slots, peer.info.name)) is not None:
            payload, slots = lone, _NO_SLOTS
            size_bytes = HEADER_BYTES + len(lone)
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
        if tick != calls.tick or calls.number == LAST_NUMBER:
            calls.turn(tick)
        calls.number = number = calls.number + 1
        call_id = calls.base + number
        data = _pack_brief(len(payload), type_ | flags << 8, call_id, function_id, timeout_ms, 0) + payload
        if size_bytes or connection is None or connection.is_congested or peer.backlog:
            call = calls.bucket[call_id] = Call(future, function, size_bytes)
            peer.submit(call_id, call, data, _NO_BUFFERS)
        else:
            calls.bucket[call_id] = Call(future, function, 0, connection)
            connection.send(data)
        return call_id

    @staticmethod
    def _prepared(
        prepare: Preparation,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        leading: int,
        future: asyncio.Future[Any],
    ) -> tuple[Any, tuple[Any, ...]]:
        arguments = as_arguments(args)
        function, own = prepare(function, arguments[leading:], kwargs)
        if isinstance(future, Future):
            future.script_type = getattr(function, "returns", None)
        return function, (*arguments[:leading], *own)

    def _refusal(self, function: Any) -> Exception:
        if self.is_closing:
            return ShutdownError(f"worker {self.info.name!r} is shutting down")
        return RuntimeError(
            f"{name_of(function)} was called from a thread that is not worker {self.info.name!r}'s own: "
            f"use rpc_async(...).wait() there"
        )

    def _pickle(
        self,
        peer: Peer,
        function: Any,
        function_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[bytes, list[Slot]]:
        if function_id == 0:
            payload, slots = self._pickle_with_function(peer, function, args, kwargs)
        else:
            payload, slots = self._pickler.dumps_call(
                function, args, dict(kwargs) if kwargs else None, main_by_value=peer.main_by_value, to=peer.info
            )
        if len(payload) > self._max_payload_bytes:
            raise self._too_large(function, payload)
        return payload, slots

    def _pickle_other(
        self, peer: Peer, function: Any, function_id: int, args: Any, kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        """The same for arguments that are no tuple: a list, nothing, or what has been pickled already."""
        if args.__class__ is not Prepared:
            return self._pickle(peer, function, function_id, as_arguments(args), kwargs)
        if bool(function_id) is not args.is_named:
            # since then the peer has come back as another, to which functions travel in another way
            return self._pickle(peer, function, function_id, args.args, kwargs)
        return args.payload, args.slots

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
            raise ShutdownError(f"the event loop of worker {self.info.name!r} is closed") from None
        return done.result()

    def set_default_timeout(self, timeout_s: float) -> None:
        """Seconds for calls that do not say, from now on; 0 for none. Called on the loop."""
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout_s!r}")
        self.default_timeout = timeout_s
        self._default_tick_until = 0.0

    def _too_large(self, function: Any, payload: bytes) -> SerializationError:
        return SerializationError(
            f"the arguments of {name_of(function)} make a pickle of {len(payload)} bytes, and at most "
            f"{self._max_payload_bytes} are taken: pass large data as tensors, or raise RpcOptions.max_body_bytes"
        )

    def _meta(self, peer: Peer, function: Any, slots: list[Slot], window: int) -> dict[str, Any]:
        """What rides on a call."""
        meta: dict[str, Any] = {WINDOW: window} if window else {}
        for interceptor in self._interceptors:
            has_say = interceptor.occasions or interceptor is self.observers  # some of whom stand by
            added = interceptor.request_sent(peer.info, function, slots) if has_say else None
            if added is not None:
                meta[interceptor.key] = added
        return meta

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

    def _pickle_with_function(
        self, peer: Peer, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        if not callable(function):
            hint = ": pass the function itself, not its call" if asyncio.iscoroutine(function) else ""
            raise TypeError(f"function should be callable, and {type(function).__qualname__} is not{hint}")
        by_value = peer.main_by_value
        payload = (args, dict(kwargs)) if kwargs else args
        try:
            return self._pickler.dumps((function, payload), main_by_value=by_value, to=peer.info)
        except Exception as error:
            # say which part of it was at fault
            self._pickler.dumps_call(
                function, args, dict(kwargs) if kwargs else None, main_by_value=by_value, to=peer.info
            )
            raise unsendable(function, error) from error

    def explained(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        to: str | int | WorkerInfo,
        error: Exception,
    ) -> SerializationError:
        """Why a call cannot be sent, for a feature whose messages have more in them than the caller's arguments."""
        peer = self.known_peer(to)
        return self._pickler.explained(
            function, args, dict(kwargs or {}), error, main_by_value=peer.main_by_value, to=peer.info
        )

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
                raise RpcTimeoutError(
                    f"no time is left to call {name_of(function)}: the caller's own deadline has passed"
                )
            timeout_s = min(timeout_s, left) if timeout_s else left
        if not timeout_s:
            return NEVER, 0
        timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
        tick = self.deadlines.tick(now, timeout_s)
        return tick, max(1, int(timeout_s * 1000)) if self.options.timeouts_travel else 0

    def _call_from_thread(self, future: Future[Any], *arguments: Any) -> None:
        context = copy_context()
        state = torchstate.capture()
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
        self.loop.call_soon_threadsafe(torchstate.run_with, state, start, context=context)

    def _defer(self, future: Future[Any], to: Any, begin: Callable[[Peer], int]) -> None:
        """Ask the group about a worker that is not known yet, or may be another one by now, then call it."""
        if self.is_closing:
            raise ShutdownError(f"worker {self.info.name!r} is shutting down")
        if not isinstance(to, str | int) and self.peer(to) is None:
            raise self._unknown(to)

        async def resolve_and_call() -> None:
            try:
                peer = await self._find_out(to)
                if not future.done():
                    call_id = begin(peer)
                    future.on_cancel = lambda: peer.cancel(call_id)
            except Exception as error:  # noqa: BLE001 - the thread finds it in the future
                if not future.done():
                    future.set_exception(error)
            except asyncio.CancelledError:
                # by `aclose`, or with the loop: nobody else will end the call
                if not future.done():
                    text = f"worker {self.info.name!r} was shut down before the call was sent"
                    future.set_exception(ShutdownError(text))
                raise

        task = self.loop.create_task(resolve_and_call())
        self._deferred.add(task)
        task.add_done_callback(self._deferred.discard)
        future.on_cancel = lambda: None if task.done() else self._ignore(task.cancel())

    async def _find_out(self, to: str | int | WorkerInfo) -> Peer:
        """The peer that has a name, an id or both now, as the group says."""
        try:
            record = await self.resolve(to.name if isinstance(to, WorkerInfo) else to)
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

    # -- messages

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        link: Link = connection.owner
        handlers = self._handlers
        # The loop may be between two steps of a task that has switched something off for itself, unless tasks are
        # isolated
        outer = None if self._tasks_are_isolated or _is_pristine() else torchstate.save_and_reset()
        try:
            for message in messages:
                handlers[message.__class__](link, message)
        finally:
            if outer is not None:
                torchstate.restore(outer)

    def link_lost(self, link: Link) -> None:
        """A connection has ended: what it asked for and waits will not run."""
        self.observers.dropped(link.inbound)

    def inspection_received(self, connection: Connection, messages: list[Message]) -> None:
        """Messages of somebody who only looks, and so may say nothing else."""
        for message in messages:
            if not isinstance(message, _OF_ONLOOKERS):
                raise ProtocolError(f"an onlooker sent {message.type.name}, and may only ask")
        link: Link = connection.owner
        for message in messages:
            is_question = isinstance(message, Inspect)
            if is_question and connection.unsent_bytes > self.options.window_bytes:
                connection.abort(WireError("an onlooker asks on and on, and reads no answers"))
                return
            if not is_question or not link.inbound.is_full:
                self.messages_received(connection, [message])
            else:
                # messages of features never wait for room
                error = OverloadedError(f"{link.inbound.limit} questions of this onlooker are not answered yet")
                self.executor.reject(link, message, error)

    def _on_function(self, link: Link, message: Message) -> None:
        self.executor.define(link.inbound, message)

    def _on_cancel(self, link: Link, message: Message) -> None:
        self.observers.dropped(link.inbound, message.id)
        link.inbound.cancel(message.id)

    def _on_credit(self, link: Link, message: Message) -> None:
        link.inbound.add_credit(message.id, message.arg)

    def direct(self, link: Link) -> Mapping[int, Direct]:
        """Who takes the plainest messages of a connection."""
        if self._metering is not None:
            self._metering.watch(link.inbound)
        if self.is_closing or self.observers.installed or link.is_onlooker:
            return {}
        takers: dict[int, Direct] = {}
        if self.guard is None:
            # the short ways unpickle whatever comes
            takers[_BRIEF_REQUEST] = partial(self.executor.take, link.inbound)
            for service in self._services.values():
                takers |= service.direct(link)
        if self._metering is not None:
            metered = partial(self._metering.take, link.inbound)
            takers = {kind: metered(MESSAGE_CLASSES[kind & 0xFF], take) for kind, take in takers.items()}
        takers[_BRIEF_REPLY] = partial(self._take_reply, link)
        if self._tasks_are_isolated:
            return takers
        return {kind: partial(_take_with_pristine_state, take) for kind, take in takers.items()}

    def _take_reply(self, link: Link, id_: int, _arg: int, _timeout_ms: int, payload: bytes | bytearray) -> None:
        if payload:
            self._on_reply(link, Reply(0, id_, 0, 0, 0, 0, 0, bytearray(payload), ()))
            return
        peer = link.peer
        try:
            call = peer.calls.buckets[id_ >> SEQUENCE_BITS].pop(id_)
        except KeyError:
            return  # it was cancelled, or timed out, and the two crossed on their way
        if call.size_bytes:
            peer.release(call)
        future = call.future
        if not future.done():
            _set_result(future, None)

    def _on_reply(self, link: Link, message: Message) -> None:
        call = link.peer.pop(message.id)
        if call is None or call.future.done():
            return  # it was cancelled, or timed out, and the two crossed on their way
        if not message.body:
            _set_result(call.future, None)
            return
        try:
            value = self._result(link, message)
        except ProtocolError:
            call.future.set_exception(SerializationError(f"the result of {call.name} is malformed"))
            raise
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            call.future.set_exception(self._unreadable(call, error))
        else:
            _set_result(call.future, value)

    def _on_item(self, link: Link, message: Message) -> None:
        call = link.peer.calls.get(message.id)
        if call is None or call.items is None or call.future.done():
            return
        if message.flags & ItemFlag.LAST:
            call.items.end_arrived(message.arg, lambda: self._on_reply(link, message))
            return
        try:
            value = self._result(link, message) if message.body else None
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code
            link.peer.cancel(message.id)
            call.future.set_exception(self._unreadable(call, error))
        else:
            call.items.item_arrived(message.arg, value)

    def _result(self, link: Link, message: Message) -> Any:
        # Objects that belong to a worker must find this one, whoever's context this callback happens to run in
        token = current_scope.set(self._scope)
        try:
            return self._unpack(link, message)
        finally:
            current_scope.reset(token)

    def _unpack(self, link: Link, message: Message) -> Any:
        codec = self.codec
        if message.meta_end == message.meta_start:
            return codec.content(message)
        slots = codec.slots(message)
        codec.receive_reply(link.peer.info, codec.meta(message), slots)
        return codec.payload(message, slots)

    def _unreadable(self, call: Call, error: BaseException) -> SerializationError:
        made = SerializationError(
            f"the result of {call.name} cannot be unpacked on worker {self.info.name!r}: "
            f"{type(error).__name__}: {error}"
        )
        made.__cause__ = error
        return made

    def _on_failure(self, link: Link, message: Message) -> None:
        call = link.peer.calls.get(message.id)
        if call is not None and call.items is not None:
            call.items.end_arrived(message.arg, lambda: self._fail(link, message))
        else:
            self._fail(link, message)

    def _fail(self, link: Link, message: Message) -> None:
        call = link.peer.pop(message.id)
        if call is None or call.future.done():
            return
        codec = self.codec
        token = current_scope.set(self._scope)
        try:
            slots = codec.slots(message) if message.table_end else []
            payload = memoryview(message.body)[message.table_end :]
            error = rebuild_failure(message.flags, payload, slots, link.peer.info.name, call.name, codec.loads)
        except Exception as reason:
            call.future.set_exception(SerializationError(f"the failure of {call.name} is malformed"))
            raise ProtocolError(f"a malformed failure: {reason}") from reason
        finally:
            current_scope.reset(token)
        call.future.set_exception(error)

    def _on_goodbye(self, link: Link, message: Message) -> None:
        link.goodbye = bytes(message.body).decode(errors="replace") or "it closed the connection"

    def output_drained(self, connection: Connection) -> None:
        link: Link | None = connection.owner
        if link is None:
            return
        link.peer.drain()
        link.inbound.output_drained()
        if link.inbound.waiting:
            self.executor.readmit(link.inbound)

    # -- the end

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no call is under way in either direction; False if that did not happen in time."""
        deadline = None if timeout_s is None else self.loop.time() + timeout_s
        pause = 0.0005
        while not self.is_quiet():
            if deadline is not None and self.loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return True

    def is_quiet(self) -> bool:
        return not (self._deferred or any(len(peer.calls) for peer in self.peers) or self.connector.busy_links())

    @property
    def calls_made(self) -> int:
        return sum(peer.calls.made for peer in self.peers)

    async def aclose(self, reason: str = "it was shut down") -> None:
        """Take no more calls, end what is under way, say goodbye and close every connection."""
        self.is_closing = True
        for message_class in self._requests:
            self._handlers[message_class] = self.executor.refuse
        for link in self.connector.links:
            link.connection.protocol.direct = {}
        self.heartbeat.close()
        await self.connector.stop_seeking()
        for task in list(self._deferred):
            task.cancel()
        if self._deferred:
            await asyncio.wait(self._deferred)
        for peer in self.peers:
            await peer.aclose()
        await self.executor.aclose()
        await self.connector.aclose(reason)
        if self.placement is not None:
            self.placement.close()
        self.deadlines.close()

    def statistics(self) -> dict[str, Any]:
        """Counters of everything this agent keeps."""
        return {
            "executor": self.executor.statistics(),
            "deadlines": self.deadlines.statistics(),
            "connector": self.connector.statistics(),
            "peers": {peer.info.name: peer.statistics() for peer in self.peers},
            **({} if self.placement is None else {"devices": self.placement.statistics()}),
        }


def _take_with_pristine_state(take: Direct, id_: int, arg: int, timeout_ms: int, payload: bytes | bytearray) -> None:
    # The loop is between two steps of any task, which may have switched something off for itself
    outer = None if _is_pristine() else torchstate.save_and_reset()
    try:
        take(id_, arg, timeout_ms, payload)
    finally:
        if outer is not None:
            torchstate.restore(outer)


def as_arguments(args: Any) -> tuple[Any, ...]:
    """The positional arguments as a tuple. What is no list of arguments is refused: it would be taken apart."""
    if args is None:
        return ()
    if isinstance(args, tuple | list):
        return tuple(args)
    raise TypeError(f"args must be a tuple of arguments, not {type(args).__qualname__}: write args=(value,)")
