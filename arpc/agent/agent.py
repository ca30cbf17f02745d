"""A worker as others see it: it makes calls, answers them, and knows who can be reached.

The agent knows no feature. What rides on calls (autograd, profiling) comes in as interceptors, what travels in pickles
(RRefs) as reducers, and what is neither call nor reply as entries of the handler table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from threading import get_ident
from typing import Any, Final

from arpc import torchstate
from arpc.agent.answers import Answers
from arpc.agent.caller import Caller
from arpc.agent.codec import Codec, Interceptor
from arpc.agent.connector import Connector
from arpc.agent.deadlines import Deadlines
from arpc.agent.executor import Executor, Service, Wrapper
from arpc.agent.functions import Preparation
from arpc.agent.heartbeat import Heartbeat
from arpc.agent.labelled import never_shortly
from arpc.agent.leaving import EarlierWork
from arpc.agent.links import Link, PeerWatcher
from arpc.agent.membership import WorkerRecord
from arpc.agent.metering import Meter, Metering
from arpc.agent.observers import Observer, Observers
from arpc.agent.peers import Peer
from arpc.agent.placement import Placement
from arpc.agent.scope import WorkerScope
from arpc.errors import (
    NotAllowedError,
    OverloadedError,
    ProtocolError,
    UnknownWorkerError,
    WireError,
    not_run,
)
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.alarms import CallAt, alarms_of
from arpc.transport.base import Connection, Transport
from arpc.wire.frames import HEADER_BYTES, bare_lead, brief_kind
from arpc.wire.handshake import Identity
from arpc.wire.messages import (
    MESSAGE_CLASSES,
    Cancel,
    Credit,
    Failure,
    Function,
    Goodbye,
    Inspect,
    Item,
    Message,
    MessageType,
    Reply,
    ReplyFlag,
    Request,
)
from arpc.wire.pickling import Reducer
from arpc.wire.policy import UNRESTRICTED, Policy
from arpc.wire.protocol import Bare, Direct

__all__ = ["Agent"]

logger = get_logger("arpc.agent")

_REQUEST: Final = int(MessageType.REQUEST)
_BRIEF_REQUEST: Final = brief_kind(_REQUEST)
_REQUEST_LEAD: Final = bare_lead(_BRIEF_REQUEST)
_BRIEF_REPLY: Final = brief_kind(int(MessageType.REPLY))
_REPLY_LEAD: Final = bare_lead(_BRIEF_REPLY)
_BRIEF_TUPLE: Final = brief_kind(int(MessageType.REPLY), ReplyFlag.TUPLE)
_is_pristine = torchstate.is_pristine

_OF_ONLOOKERS: Final = (Inspect, Cancel, Goodbye)
_OF_LINES: Final = (Request, Function, Cancel, Goodbye)

_Handler = Callable[[Link, Message], None]


class Agent(Caller, Answers):
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
        wrappers: Mapping[type[Message], Wrapper] | None = None,
        shortcuts: Mapping[type[Message], Callable[..., Any]] | None = None,
        reducers: Mapping[type, Reducer] | None = None,
        families: Mapping[type, Reducer] | None = None,
        preparations: Mapping[type, Preparation] | None = None,
        interceptors: Sequence[Interceptor] = (),
        observers: Sequence[Observer] = (),
        watchers: Sequence[PeerWatcher] = (),
        is_elastic: bool = False,
        placement: Placement | None = None,
        policy: Policy = UNRESTRICTED,
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
        self.policy = policy
        """What peers may do here; all that they send is read through it."""
        self.codec = Codec(
            reducers or {},
            interceptors,
            options.inline_tensor_bytes,
            placement,
            families,
            options.max_body_bytes,
            policy,
        )
        if placement is not None:
            # before connections are told whom to call
            self.messages_received = partial(  # type: ignore[method-assign]
                placement.messages_received, self.messages_received
            )
        self._alarms = alarms_of(self.loop)
        self.call_at: CallAt = self.loop.call_at if self._alarms is None else self._alarms.call_at
        """For timers that are always set: calls a function at a time of the loop's clock."""
        self.deadlines = Deadlines(self.loop, self.call_at)
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
        # Whose calls may take the shortest way. It counts nothing: where calls in flight are counted, none does
        self._shortest_thread = self._thread if not options.max_calls_in_flight else 0
        self._least_bytes = HEADER_BYTES if options.max_calls_in_flight else 0
        # what else is in the body of a message has room beside it
        self._max_payload_bytes = self.codec.max_payload_bytes
        self._time = self.loop.time
        self._tasks_are_isolated = torchstate.isolates_all_tasks(self.loop)
        self._create_future = self.loop.create_future
        self._scope = WorkerScope(worker)
        self.resolve = resolve
        self._peers: dict[Any, Peer] = {}
        self._deferred: set[asyncio.Task[None]] = set()
        self._pickler = self.codec.pickler
        self._interceptors = self.codec.interceptors
        self.occasions = self._occasions = (
            *(interceptor.occasions for interceptor in self._interceptors),
            *(observer.occasions for observer in observers),
        )
        """While any of these is not empty, something may ride on calls."""
        # The tick of the default timeout changes every half second or so
        self._default_tick = 0
        self._default_tick_until = 0.0
        self._default_timeout_ms = 0
        self._usual_ticks: dict[float, tuple[int, int, float]] = {}
        self.connector = Connector(self, identity, options, transports, context, watchers)
        self.heartbeat = Heartbeat(self.loop, options, self.connector, self.call_at)
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
        self._calls_of_functions: tuple[type[Message], ...] = (Request, *(wrappers or {}))
        self._earlier: EarlierWork | None = None
        self._services: dict[type[Message], Service] = {}
        # those that name no function
        self._nameless = frozenset(int(message_class.type) for message_class in handlers or {})
        for message_class, function in (handlers or {}).items():
            # A feature's own messages are calls too, of the one function that serves them
            shortcut = (shortcuts or {}).get(message_class)
            self._services[message_class] = self.executor.serve(message_class, function, shortcut)
        for message_class, wrapper in (wrappers or {}).items():
            # and so are those that name a function, which is run in its own way by another
            self._services[message_class] = self.executor.serve_wrapped(wrapper)
        for message_class, service in self._services.items():
            handle = service.handle
            self._handlers[message_class] = self._checked(message_class, handle) if policy.is_restricted else handle

        self._takers_of_requests = {message_class: self._handlers[message_class] for message_class in self._requests}
        self.meter: Meter | None = None
        """Who hears how long calls and handlers take; see `set_meter`."""
        self._metering: Metering | None = None
        self._interposed: Callable[..., int] | None = None
        self.is_interposed = False
        """Every request has to be made by `begin`, see `interpose`."""

    def _checked(self, message_class: type[Message], handle: _Handler) -> _Handler:
        """A handler that looks at the caller's role before it looks at the message."""

        def handle_if_permitted(link: Link, message: Message) -> None:
            try:
                self.policy.check_message(link.inbound.caller, message_class)
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

    def forget(self, worker: WorkerInfo) -> bool:
        """Let go of what is kept of a worker that is gone; False if that must stay.

        A group of fixed size has no others. In an elastic one the group is asked should anybody name it again.
        """
        if not self.is_elastic:
            return False
        peer = self._peers.get(worker.name)
        if peer is not None and peer.info != worker:
            return True  # another has its name, and all that is kept by name is of that one
        if peer is not None and not peer.is_at_rest:
            return False
        for key in (worker.name, worker.id, worker):
            self._peers.pop(key, None)
        self.connector.forget(worker)
        self.policy.forget(worker.name)
        return True

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
        return not_run(UnknownWorkerError(f"worker {self.info.name!r} knows no worker {to!r}; it knows {known}"))

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
            self.take_directly(link)

    def set_meter(self, meter: Meter | None) -> None:
        """Let somebody hear how long each call and each handler takes, from now on; None: nobody."""
        self.meter = meter
        if self._metering is not None:
            # what is in the class comes to light again
            del self.call_and_wait, self.begin, self.begin_shortly, self.request_packed, self.request_plain
            if self._interposed is not None:
                self.begin = self._interposed  # type: ignore[method-assign]
        ways = self.begin, self._call_unknown, self.request_packed, self.request_plain, self.check_loop
        self._metering = metering = None if meter is None else Metering(meter, self._peers, *ways, self._nameless)
        self.executor.failed = None if metering is None else metering.failed
        self.executor.waited = None if metering is None else metering.waited
        if metering is not None:
            self.call_and_wait = metering.call_and_wait  # type: ignore[method-assign]
            self.begin = metering.begin  # type: ignore[method-assign]
            self.begin_shortly = never_shortly  # type: ignore[method-assign]
            self.request_packed = metering.request_packed  # type: ignore[method-assign]
            self.request_plain = metering.request_plain  # type: ignore[method-assign]
        if not self.is_closing:
            for message_class, handle in self._takers_of_requests.items():
                self._handlers[message_class] = handle if metering is None else partial(metering.handle, handle)
            self._guard_calls()
        for link in self.connector.links:
            link.inbound.ended = None
            link.inbound.began_ns.clear()
            self.take_directly(link)

    def interpose(self, around: Callable[[Callable[..., int]], Callable[..., int]]) -> None:
        """Let a function see every request of this agent, for good: ``around(begin)`` takes the place of `begin`.

        All shorter ways are closed, so that no request goes past it. Call this before the first request is made.
        """
        self._interposed = self.begin = around(self.begin)  # type: ignore[method-assign]
        self.is_interposed = True
        self._shortest_thread = 0

    @property
    def has_riders(self) -> bool:
        """Whether something may ride on calls at the moment."""
        return any(self._occasions)

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

    def line_received(self, connection: Connection, messages: list[Message]) -> None:
        """Messages of a thread of a peer, which makes calls and does nothing else."""
        for message in messages:
            if not isinstance(message, _OF_LINES):
                raise ProtocolError(f"a line brought {message.type.name}, and may only bring calls")
        self.messages_received(connection, messages)

    def _on_function(self, link: Link, message: Message) -> None:
        self.executor.define(link.inbound, message)

    def _on_cancel(self, link: Link, message: Message) -> None:
        self.observers.dropped(link.inbound, message.id)
        link.inbound.cancel(message.id)

    def _on_credit(self, link: Link, message: Message) -> None:
        link.inbound.add_credit(message.id, message.arg)

    def take_directly(self, link: Link) -> None:
        """Tell a connection who takes its plainest messages."""
        protocol = link.connection.protocol
        protocol.direct = self.direct(link)
        protocol.bare = self._bare(link)

    def _bare(self, link: Link) -> Mapping[bytes, Bare]:
        """Who takes those that have no body. Whoever wants to see more of messages sees them go the other way."""
        if (
            self.is_closing
            or self.is_leaving
            or self.observers.installed
            or self._metering is not None
            or not self._tasks_are_isolated
            or link.is_onlooker
        ):
            return {}
        takers: dict[bytes, Bare] = {}
        if not self.policy.is_restricted:
            takers[_REQUEST_LEAD] = self.executor.bare_taker(link.inbound)
        if not link.is_line:
            takers[_REPLY_LEAD] = self._bare_reply_taker(link)
        return takers

    def direct(self, link: Link) -> Mapping[int, Direct]:
        """Who takes the plainest messages of a connection."""
        if self._metering is not None:
            self._metering.watch(link.inbound)
        if self.is_closing or self.is_leaving or self.observers.installed or link.is_onlooker:
            return {}
        takers: dict[int, Direct] = {}
        if not self.policy.is_restricted:
            # the short ways do not look at roles
            takers[_BRIEF_REQUEST] = self.executor.taker(link.inbound)
            for service in () if link.is_line else self._services.values():
                takers |= service.direct(link)
        if self._metering is not None:
            metered = partial(self._metering.take, link.inbound)
            takers = {kind: metered(MESSAGE_CLASSES[kind & 0xFF], take) for kind, take in takers.items()}
        if not link.is_line:
            takers[_BRIEF_REPLY] = partial(self._take_reply, link)
            takers[_BRIEF_TUPLE] = partial(self._take_tuple, link)
        if self._tasks_are_isolated:
            return takers
        return {kind: partial(_take_with_pristine_state, take) for kind, take in takers.items()}

    def _on_goodbye(self, link: Link, message: Message) -> None:
        link.goodbye = bytes(message.body).decode(errors="replace") or "it closed the connection"

    def output_drained(self, connection: Connection) -> None:
        link: Link | None = connection.owner
        if link is None:
            return
        link.peer.drain()
        link.inbound.output_drained()
        if link.inbound.is_full or link.inbound.is_waited_for:
            self.executor.readmit(link.inbound)

    # -- the end

    def stop_taking_calls(self) -> None:
        """Refuse calls from now on, except for those that work under way may have caused, see `leaving`.

        Their callers get a `ShutdownError` that says that the function did not run. Messages of features are taken.
        """
        self._earlier = EarlierWork([link.inbound for link in self.connector.links], self.peers)
        self._guard_calls()
        for link in self.connector.links:
            self.take_directly(link)

    @property
    def is_leaving(self) -> bool:
        """This worker takes no new calls any more."""
        return self._earlier is not None

    def _guard_calls(self) -> None:
        """Let no call of a function be taken without a look while this worker leaves."""
        if self._earlier is not None:
            for message_class in self._calls_of_functions:
                take = partial(self._take_if_caused, self._earlier, self._handlers[message_class])
                self._handlers[message_class] = take

    def _take_if_caused(self, earlier: EarlierWork, handle: _Handler, link: Link, message: Message) -> None:
        (handle if earlier.may_cause_calls(self.peers) else self.executor.refuse)(link, message)

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
        return not (self._deferred or any(peer.calls_in_flight for peer in self.peers) or self.connector.busy_links())

    @property
    def calls_made(self) -> int:
        return sum(peer.calls_made for peer in self.peers)

    async def aclose(self, reason: str = "it was shut down") -> None:
        """Take no more calls, end what is under way, say goodbye and close every connection."""
        self.is_closing = True
        self._shortest_thread = 0  # so that the shortest way, too, comes to hear of it
        for message_class in self._requests:
            self._handlers[message_class] = self.executor.refuse
        for link in self.connector.links:
            link.connection.protocol.direct = {}
            link.connection.protocol.bare = {}
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
        if self._alarms is not None:
            self._alarms.close()

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
