"""The network side of a worker: it makes calls, answers the calls of peers, and tracks which peers can be reached.

The agent consists of a `Caller` with its `sender`, a `Receiver`, a `Dispatcher`, a `PeerDirectory` and a `Connector`.
It depends on no feature. Features that take part in calls (autograd, profiling) are passed in as interceptors, objects
that travel in pickles (RRefs) as reducers, and messages that are neither calls nor replies as entries of the handler
table.
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
from arpc.transport.connection import Connection
from arpc.transport.contract import Transport
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
    """The calls, the dispatch and the connections of one worker. It belongs to the loop on which it was created."""

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
        """``handlers`` serve features' messages that name no function, ``creations`` those that name one."""
        self.loop = asyncio.get_running_loop()
        self.options = options
        self.resolve = resolve
        self.placement = placement
        """Moves tensors to and from devices; None if neither this worker nor a peer has any but the CPU."""
        self.policy = policy
        """Decides what peers may do on this worker. Everything that they send is read through it."""
        self.messages_received: Callable[[Connection, list[Message]], None] = (
            self.dispatch if placement is None else partial(placement.messages_received, self.dispatch)
        )
        """Handles the messages of a connection, once their tensors are on the devices where they belong."""
        self.is_closing = False
        self.is_serving = False
        self._tasks_are_isolated = torchstate.isolates_all_tasks(self.loop)
        self.observers = Observers(observers)
        """The observers. Those passed to the constructor are on standby; `observe` installs others."""
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
        """Calls a function at a time of the loop's clock. For timers that are always set."""
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
        """The sender with all wrappers around it, see `wrap_sender`."""
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
        # the methods of these parts that features and the runtime use
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
            # A feature's own message is a call, too: of the function that serves its class
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
        """Return a handler that checks the caller's role before it reads the message."""

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
        """Whether the group is elastic: unknown workers may join at any time."""
        return self.peers.is_elastic

    def serve(self) -> None:
        """Accept connections from now on, since the worker knows its group. Workers that were refused before retry."""
        self.is_serving = True

    def identify(self, worker_id: int) -> None:
        """Set the id that the group has given to this worker."""
        self.peers.me = WorkerInfo(self.info.name, worker_id)
        self.connector.identify(worker_id)

    # -- peers

    def make_peer(self, info: WorkerInfo) -> Peer:
        """Return a new peer, which is not in the directory yet."""
        return Peer(
            info,
            codec=self.codec,
            deadlines=self.deadlines,
            options=self.options,
            connect=self.connector.connect,
        )

    def forget(self, worker: WorkerInfo) -> bool:
        """Forget a worker that is gone; False if it must be remembered, see `PeerDirectory.forget`."""
        if not self.peers.forget(worker):
            return False
        if self.peers.get(worker.name) is None:
            self.connector.forget(worker)
            self.policy.forget(worker.name)
        return True

    # -- wrappers and observers

    @property
    def is_wrapped(self) -> bool:
        """Whether a wrapper sees every request, see `wrap_sender`."""
        return self._wrapped is not self._sender

    @property
    def is_intercepted(self) -> bool:
        """Whether a feature may take part in calls at the moment."""
        return any(self._occasions)

    @property
    def sender(self) -> CallSender:
        """The sender of all requests."""
        return self.caller.sender

    @property
    def unobserved_sender(self) -> CallSender:
        """The sender without wrappers and observers. For measurements."""
        return self._sender

    def wrap_sender(self, wrapper: Callable[[CallSender], CallSender]) -> None:
        """Put a wrapper around the sender, so that it sees every request of this worker. It cannot be removed."""
        self._wrapped = wrapper(self._wrapped)
        self._wrap_sender()

    def _wrap_sender(self) -> None:
        sender = ObservedSender(self._wrapped, self.observers)
        self.caller.sender = sender if self.meter is None else TimedSender(sender, self.meter)

    def set_meter(self, meter: Meter | None) -> None:
        """Report the durations of calls and handlers to a meter from now on; None turns this off."""
        self.meter = self.dispatcher.replies.meter = meter
        self._watchers_changed()
        self._wrap_sender()

    def observe(self, observer: Observer) -> None:
        """Notify an observer of every call and every handler that begins from now on."""
        if observer not in self.observers.installed:
            self.observers.installed.append(observer)
            self._watchers_changed()

    def unobserve(self, observer: Observer) -> None:
        """Remove an observer. It is still notified of the end of calls and handlers that have begun."""
        if observer in self.observers.installed:
            self.observers.installed.remove(observer)
            self._watchers_changed()
            if not self.observers.installed:
                self.observers.forget_waiting()

    def _watchers_changed(self) -> None:
        self.dispatcher.is_watched = self.meter is not None or bool(self.observers.installed)

    # -- messages

    def dispatch(self, connection: Connection, messages: list[Message]) -> None:
        """Pass each message to its handler."""
        if not self._tasks_are_isolated and not _is_pristine():
            # a suspended task, in a no_grad() block, say, has left its torch state on this thread
            torchstate.run_with(torchstate.DEFAULTS, self.dispatch, connection, messages)
            return
        link: Link = connection.owner
        if self.observers.installed:
            self.observers.answered(link.peer, messages)
        for message in messages:
            self._handlers[message.__class__](link, message)

    def inspection_received(self, connection: Connection, messages: list[Message]) -> None:
        """Handle messages of an onlooker. Raises `ProtocolError` for a kind that onlookers may not send."""
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
                # refused, because messages of features are never queued
                error = OverloadedError(f"{link.limit} questions of this onlooker are not answered yet")
                self.dispatcher.reject(link, message, error)

    def thread_calls_received(self, connection: Connection, messages: list[Message]) -> None:
        """Handle messages on a peer's thread connection. Raises `ProtocolError` for anything but calls."""
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
        """Resume the calls, streams and requests that waited for the peer, which reads again."""
        link: Link | None = connection.owner
        if link is None:
            return
        link.peer.drain()
        link.output_drained()
        self.dispatcher.readmit(link)

    # -- the end

    def stop_taking_calls(self) -> None:
        """Refuse calls from now on, except for those that work under way may have caused, see `leaving`.

        The callers get a `ShutdownError` with ``may_have_run`` False. Messages of features are still handled.
        """
        earlier = EarlierWork(self.connector.links, self.peers)
        for message_class in self._calls_of_functions:
            handle = self._handlers[message_class]
            self._handlers[message_class] = partial(self._take_if_caused, earlier, handle)

    def _take_if_caused(self, earlier: EarlierWork, handle: _Handler, link: Link, message: Message) -> None:
        (handle if earlier.may_cause_calls(self.peers) else self.dispatcher.refuse)(link, message)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no call is under way in either direction; False if ``timeout_s`` passes first."""
        deadline = None if timeout_s is None else self.loop.time() + timeout_s
        pause = 0.0005
        while not self.is_quiet():
            if deadline is not None and self.loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return True

    def is_quiet(self) -> bool:
        """Return whether no call is under way in either direction."""
        is_called = any(peer.calls_in_flight for peer in self.peers)
        return not (self.caller.deferred or is_called or self.connector.busy_links())

    @property
    def calls_made(self) -> int:
        return sum(peer.calls_made for peer in self.peers)

    async def aclose(self, reason: str = "it was shut down") -> None:
        """Refuse further calls, end those under way, say goodbye to the peers and close every connection."""
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
        """Return the counters of all parts of this agent."""
        return {
            "executor": self.dispatcher.statistics(),
            "deadlines": self.deadlines.statistics(),
            "connector": self.connector.statistics(),
            "peers": {peer.info.name: peer.statistics() for peer in self.peers},
            **({} if self.placement is None else {"devices": self.placement.statistics()}),
        }
