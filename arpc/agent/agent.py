"""A worker as others see it: it makes calls, answers them, and knows which peers can be reached.

The agent is made of parts: a `Caller` with its `sender`, a `Receiver`, a `Dispatcher`, a `PeerDirectory` and a
`Connector`. It knows no feature. What takes part in calls (autograd, profiling) comes in as interceptors, what travels
in pickles (RRefs) as reducers, and what is neither call nor reply as entries of the handler table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final

from arpc import torchstate
from arpc.agent.client.caller import Caller
from arpc.agent.client.deadlines import Deadlines, Timeouts
from arpc.agent.client.pending_calls import CallSender
from arpc.agent.client.receiver import Receiver
from arpc.agent.client.sender import Sender
from arpc.agent.codec import Codec
from arpc.agent.hooks.device_placement import Placement
from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.hooks.observers import ObservedSender, Observer, Observers
from arpc.agent.hooks.timing import Meter, TimedSender
from arpc.agent.leaving import EarlierWork
from arpc.agent.peers.connector import Connector
from arpc.agent.peers.directory import PeerDirectory
from arpc.agent.peers.heartbeat import Heartbeat
from arpc.agent.peers.link import Link, PeerWatcher
from arpc.agent.peers.peer import Peer
from arpc.agent.scope import WorkerScope
from arpc.agent.server.dispatcher import CreationService, Dispatcher
from arpc.agent.server.functions import Preparation
from arpc.agent.server.request_reader import define
from arpc.errors import NotAllowedError, OverloadedError, ProtocolError, WireError
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.transport.connection import Connection, Transport
from arpc.transport.timerfd import CallAt, alarms_of
from arpc.wire.handshake import Identity
from arpc.wire.messages import (
    Cancel,
    Credit,
    Failure,
    Function,
    Goodbye,
    Inspect,
    Item,
    Message,
    Reply,
    Request,
)
from arpc.wire.values.pickler import Reducer
from arpc.wire.values.policy import Policy

__all__ = ["Agent"]

_OF_ONLOOKERS: Final = (Inspect, Cancel, Goodbye)
_OF_THREADS: Final = (Request, Function, Cancel, Goodbye)

_Handler = Callable[[Link, Message], None]
_is_pristine = torchstate.is_pristine


class Agent:
    """Calls, dispatch and connections of one worker. Everything here belongs to the loop it was made on."""

    def __init__(  # noqa: PLR0913 - one agent is made in one place, out of many parts
        self,
        *,
        worker: Any,
        identity: Identity,
        options: RpcOptions,
        context: Context,
        transports: Mapping[str, Transport],
        resolve: Callable[[str | int], Awaitable[WorkerRecord]],
        handlers: Mapping[type[Message], Callable[..., Any]],
        creations: Mapping[type[Message], CreationService],
        reducers: Mapping[type, Reducer],
        families: Mapping[type, Reducer],
        preparations: Mapping[type, Preparation],
        interceptors: Sequence[Interceptor],
        observers: Sequence[Observer],
        watchers: Sequence[PeerWatcher],
        is_elastic: bool,
        placement: Placement | None,
        policy: Policy,
    ) -> None:
        """``handlers`` serve messages that name no function, ``creations`` those that do."""
        self.loop = asyncio.get_running_loop()
        self.options = options
        self.resolve = resolve
        self.placement = placement
        """None if there are no devices but the CPU, here or on a peer."""
        self.policy = policy
        """What peers may do here; all that they send is read through it."""
        self.messages_received: Callable[[Connection, list[Message]], None] = (
            self.dispatch if placement is None else partial(placement.messages_received, self.dispatch)
        )
        """Takes what a connection brings, once what belongs on devices is there."""
        self.is_closing = False
        self.is_serving = False
        self._tasks_are_isolated = torchstate.isolates_all_tasks(self.loop)
        self.observers = Observers(observers)
        """Those that were passed stand by; see `observe`."""
        self.codec = Codec(
            reducers,
            (*interceptors, self.observers),
            options.inline_tensor_bytes,
            placement,
            families,
            options.max_body_bytes,
            policy,
        )
        self._occasions = (
            *(interceptor.occasions for interceptor in self.codec.interceptors),
            *(observer.occasions for observer in self.observers.standing),
        )
        self._alarms = alarms_of(self.loop)
        self.call_at: CallAt = self.loop.call_at if self._alarms is None else self._alarms.call_at
        """For timers that are always set: calls a function at a time of the loop's clock."""
        self.deadlines = Deadlines(self.loop, self.call_at)
        self.timeouts = Timeouts(self.deadlines, options.rpc_timeout, are_sent=options.timeouts_travel)
        self.connector = Connector(self, identity, transports, context, watchers)
        self.peers = PeerDirectory(
            WorkerInfo(identity.name, identity.id),
            self.make_peer,
            is_elastic=is_elastic,
            same_main=self.connector.same_main,
            replaced=self.connector.replaced,
        )
        sender = Sender(
            name=identity.name,
            loop=self.loop,
            codec=self.codec,
            timeouts=self.timeouts,
            preparations=preparations,
        )
        self.caller = Caller(
            loop=self.loop,
            peers=self.peers,
            sender=sender,
            timeouts=self.timeouts,
            observers=self.observers,
            resolve=resolve,
        )
        self._sender = sender
        self._wrapped: CallSender = sender
        """With the wrappers around it."""
        self.meter: Meter | None = None
        """Receives the durations of calls and handlers; see `set_meter`."""
        self._wrap_sender()
        self.receiver = Receiver(identity.name, self.codec, WorkerScope(worker))
        self.dispatcher = Dispatcher(
            loop=self.loop,
            worker=worker,
            name=identity.name,
            context=context,
            codec=self.codec,
            options=options,
            observers=self.observers,
        )
        # peers and verbs, as features and the runtime use them
        self.peer, self.known_peer, self.add_peer = self.peers.get, self.peers.known, self.peers.add
        self.call = self.caller.call
        self.call_and_wait = self.caller.call_and_wait
        self.request = self.caller.request
        self.create = self.caller.begin
        self.stream = self.caller.stream
        self.on_loop = self.caller.on_loop
        self.prepare = partial(sender.prepare, self.on_loop)
        self.check_loop = self.caller.check_loop
        self.heartbeat = Heartbeat(self.loop, options, self.connector, self.call_at)
        self._handlers = self._handler_table(handlers, creations)
        self._requests: tuple[type[Message], ...] = (Request, *handlers, *creations)
        self._calls_of_functions: tuple[type[Message], ...] = (Request, *creations)

    def _handler_table(
        self,
        handlers: Mapping[type[Message], Callable[..., Any]],
        creations: Mapping[type[Message], CreationService],
    ) -> dict[type[Message], _Handler]:
        receiver, dispatcher = self.receiver, self.dispatcher
        services: dict[type[Message], _Handler] = {}
        for message_class, function in handlers.items():
            # A feature's own messages are calls too, of the one function that serves them
            services[message_class] = dispatcher.serve(message_class, function)
        for message_class, service in creations.items():
            services[message_class] = dispatcher.serve_creations(service)
        if self.policy.is_restricted:
            services = {
                message_class: self._checked(message_class, handle) for message_class, handle in services.items()
            }
        return {
            Request: dispatcher.request_received,
            Reply: receiver.on_reply,
            Failure: receiver.on_failure,
            Item: receiver.on_item,
            Cancel: self._on_cancel,
            Function: partial(define, dispatcher),
            Credit: lambda link, message: link.add_credit(message.id, message.arg),
            Goodbye: self._on_goodbye,
            **services,
        }

    def _checked(self, message_class: type[Message], handle: _Handler) -> _Handler:
        """A handler that looks at the caller's role before it looks at the message."""

        def handle_if_permitted(link: Link, message: Message) -> None:
            try:
                self.policy.check_message(link.caller, message_class)
            except NotAllowedError as error:
                self.dispatcher.reject(link, message, error)
            else:
                handle(link, message)

        return handle_if_permitted

    @property
    def info(self) -> WorkerInfo:
        """Name and id of this worker."""
        return self.peers.me

    @property
    def is_elastic(self) -> bool:
        """Workers this one has never heard of may come."""
        return self.peers.is_elastic

    def serve(self) -> None:
        """The worker knows its group: others may connect from now on. Workers that tried before try again."""
        self.is_serving = True

    def identify(self, worker_id: int) -> None:
        """The group has given this worker its id."""
        self.peers.me = WorkerInfo(self.info.name, worker_id)
        self.connector.identify(worker_id)

    # -- peers

    def make_peer(self, info: WorkerInfo) -> Peer:
        """A peer that is not in the directory yet."""
        return Peer(
            info,
            codec=self.codec,
            deadlines=self.deadlines,
            options=self.options,
            connect=self.connector.connect,
        )

    def forget(self, worker: WorkerInfo) -> bool:
        """Let go of what is kept of a worker that is gone; False if that must stay, see `PeerDirectory.forget`."""
        if not self.peers.forget(worker):
            return False
        if self.peers.get(worker.name) is None:
            self.connector.forget(worker)
            self.policy.forget(worker.name)
        return True

    # -- wrappers and observers

    @property
    def is_wrapped(self) -> bool:
        """A wrapper sees every request, see `wrap_sender`."""
        return self._wrapped is not self._sender

    @property
    def is_intercepted(self) -> bool:
        """Some feature may take part in calls at the moment."""
        return any(self._occasions)

    @property
    def sender(self) -> CallSender:
        """Sends all requests."""
        return self.caller.sender

    @property
    def unobserved_sender(self) -> CallSender:
        """The sender without wrappers and observers. For measurements."""
        return self._sender

    def wrap_sender(self, wrapper: Callable[[CallSender], CallSender]) -> None:
        """Let a wrapper see every request of this worker, for good."""
        self._wrapped = wrapper(self._wrapped)
        self._wrap_sender()

    def _wrap_sender(self) -> None:
        sender = ObservedSender(self._wrapped, self.observers)
        self.caller.sender = sender if self.meter is None else TimedSender(sender, self.meter)

    def set_meter(self, meter: Meter | None) -> None:
        """Give the durations of calls and handlers to a meter from now on; None: to none."""
        self.meter = self.dispatcher.replies.meter = meter
        self._watchers_changed()
        self._wrap_sender()

    def observe(self, observer: Observer) -> None:
        """Tell an observer of every call and every handler that begins from now on."""
        if observer not in self.observers.installed:
            self.observers.installed.append(observer)
            self._watchers_changed()

    def unobserve(self, observer: Observer) -> None:
        """Tell it of nothing that begins from now on; it still hears how what has begun ends."""
        if observer in self.observers.installed:
            self.observers.installed.remove(observer)
            self._watchers_changed()
            if not self.observers.installed:
                self.observers.forget_waiting()

    def _watchers_changed(self) -> None:
        self.dispatcher.is_watched = self.meter is not None or bool(self.observers.installed)

    # -- messages

    def dispatch(self, connection: Connection, messages: list[Message]) -> None:
        """Give each message to its handler."""
        if not self._tasks_are_isolated and not _is_pristine():
            # the loop is between two steps of a task that has switched something off for itself
            torchstate.run_with(torchstate.DEFAULTS, self.dispatch, connection, messages)
            return
        link: Link = connection.owner
        if self.observers.installed:
            self.observers.answered(link.peer, messages)
        for message in messages:
            self._handlers[message.__class__](link, message)

    def inspection_received(self, connection: Connection, messages: list[Message]) -> None:
        """Messages of an onlooker, which may send nothing else."""
        for message in messages:
            if not isinstance(message, _OF_ONLOOKERS):
                raise ProtocolError(f"an onlooker sent {message.type.name}, and may only ask")
        link: Link = connection.owner
        for message in messages:
            is_question = isinstance(message, Inspect)
            if is_question and connection.unsent_bytes > self.options.window_bytes:
                connection.abort(WireError("an onlooker asks on and on, and reads no answers"))
                return
            if not is_question or not link.is_full:
                self.messages_received(connection, [message])
            else:
                # messages of features never wait for room
                error = OverloadedError(f"{link.limit} questions of this onlooker are not answered yet")
                self.dispatcher.reject(link, message, error)

    def thread_calls_received(self, connection: Connection, messages: list[Message]) -> None:
        """Messages on a connection of a thread of a peer, which makes calls and does nothing else."""
        for message in messages:
            if not isinstance(message, _OF_THREADS):
                raise ProtocolError(f"the connection of a thread brought {message.type.name}, and may only bring calls")
        self.messages_received(connection, messages)

    def _on_cancel(self, link: Link, message: Message) -> None:
        self.observers.dropped(link, message.id)
        link.cancel(message.id)

    def _on_goodbye(self, link: Link, message: Message) -> None:
        link.goodbye = bytes(message.body).decode(errors="replace") or "it closed the connection"

    def output_drained(self, connection: Connection) -> None:
        """The peer takes bytes again."""
        link: Link | None = connection.owner
        if link is None:
            return
        link.peer.drain()
        link.output_drained()
        self.dispatcher.readmit(link)

    # -- the end

    def stop_taking_calls(self) -> None:
        """Refuse calls from now on, except for those that work under way may have caused, see `leaving`.

        Their callers get a `ShutdownError` that says that the function did not run. Messages of features are taken.
        """
        earlier = EarlierWork(self.connector.links, self.peers)
        for message_class in self._calls_of_functions:
            handle = self._handlers[message_class]
            self._handlers[message_class] = partial(self._take_if_caused, earlier, handle)

    def _take_if_caused(self, earlier: EarlierWork, handle: _Handler, link: Link, message: Message) -> None:
        (handle if earlier.may_cause_calls(self.peers) else self.dispatcher.refuse)(link, message)

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
        """Whether no call is under way in either direction."""
        is_called = any(peer.calls_in_flight for peer in self.peers)
        return not (self.caller.deferred or is_called or self.connector.busy_links())

    @property
    def calls_made(self) -> int:
        return sum(peer.calls_made for peer in self.peers)

    async def aclose(self, reason: str = "it was shut down") -> None:
        """Take no more calls, end what is under way, say goodbye and close every connection."""
        self.is_closing = True
        self._sender.close()
        for message_class in self._requests:
            self._handlers[message_class] = self.dispatcher.refuse
        self.heartbeat.close()
        await self.connector.retry.aclose()
        await self.caller.aclose()
        for peer in self.peers:
            await peer.aclose()
        await self.dispatcher.aclose()
        await self.connector.aclose(reason)
        if self.placement is not None:
            self.placement.close()
        self.deadlines.close()
        if self._alarms is not None:
            self._alarms.close()

    def statistics(self) -> dict[str, Any]:
        """Counters of everything this agent keeps."""
        return {
            "executor": self.dispatcher.statistics(),
            "deadlines": self.deadlines.statistics(),
            "connector": self.connector.statistics(),
            "peers": {peer.info.name: peer.statistics() for peer in self.peers},
            **({} if self.placement is None else {"devices": self.placement.statistics()}),
        }
