"""Observers of the calls of a worker: profilers, metrics, tracing.

An `Observer` is notified of the calls that this worker makes and of the handlers that it runs. It may send a header of
its own with a request and with the reply, and may wrap every step of a handler, on the loop and in threads.
`Agent.observe` installs one at any time, `Agent.unobserve` removes it. An observer that is passed to the constructor of
the agent is on standby: it is notified of a call only while its `occasions` are true, and of a handler only if the
request brought its header.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from arpc.agent.client.pending_calls import Call, CallSender
from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.scope import current_scope
from arpc.agent.server.functions import Function, Mode, name_of
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.run import Run
from arpc.errors import ProtocolError, RpcTimeoutError
from arpc.ids import WorkerInfo
from arpc.torchstate import AllSteps, Stepped, Steps, call_stepped, current_steps, step_result
from arpc.user_errors import is_a
from arpc.wire.frames import HEADER_BYTES
from arpc.wire.messages import MESSAGE_CLASSES, Failure, Item, Message, MessageType, Reply, RequestFlag
from arpc.wire.values.packing import Slot

__all__ = [
    "Activity",
    "Handling",
    "Kind",
    "ObservedSender",
    "Observer",
    "Observers",
    "Outcome",
    "Outgoing",
    "error_of",
    "kind_of",
]

_now = time.perf_counter_ns
_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(dict[str, Any]).decode
_NOTHING: Final[tuple[()]] = ()
_ANSWERS: Final = (Reply, Item, Failure)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Kind(Enum):
    """The purpose of a request."""

    CALL = "call"
    STREAM = "stream"
    REMOTE = "remote"
    """The creation of an RRef's value."""
    FETCH = "fetch"
    """The copy of an RRef's value."""
    BACKWARD = "backward"
    """Part of a backward pass."""
    CONTROL = "control"
    """Reference counting and the like, which no user requested directly."""


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


class _Observed(msgspec.Struct, eq=False, kw_only=True):
    """The observers' record of a request, in either direction. Times are those of ``time.perf_counter_ns``."""

    peer: WorkerInfo
    function: str
    kind: Kind
    id: int = 0
    """The id, unique among the requests in flight from one worker to another, the same on both. Set once it is sent."""
    began_ns: int = 0
    ended_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    headers: dict[str, Any] = msgspec.field(default_factory=dict)
    """The headers that observers of the caller send, by their `key`. They travel as msgpack."""
    outcome: Outcome | None = None
    error: BaseException | None = None
    observers: tuple[Observer, ...] = ()
    """The observers that are notified of it."""


class Outgoing(_Observed, eq=False, kw_only=True):
    """A request of this worker. While it begins, observers may add to its headers."""

    is_awaited: bool
    """Whether it is made by `rpc_sync`, whose caller waits for it at once."""
    target: Any = None
    """The function itself; for a method of a remote value its name, for a feature's own message its class."""


class Handling(_Observed, eq=False, kw_only=True):
    """A request of a peer. It may wait before its function begins, or never begin: then `began_ns` is 0."""

    accepted_ns: int
    shared: dict[type, Any] = msgspec.field(default_factory=dict)
    """The state that observers of one class share, by class."""
    steps: Any = None
    """The `Steps` that observers put around each of its steps."""
    is_watched: bool = False
    """Whether observers have been notified that it begins."""


class Activity:
    """Work of this worker in several steps that is no handler, such as its part of a backward pass."""

    def __init__(self, name: str, kind: Kind, observers: tuple[Observer, ...]) -> None:
        self.name = name
        self.kind = kind
        self.began_ns = _now()
        self.ended_ns = 0
        self.shared: dict[type, Any] = {}
        self._observers = observers
        self.steps = _all_of(observer.activity_begins(self) for observer in observers)
        """The `Steps` to put around each of its steps."""

    def step(self, function: Callable[[], T]) -> Callable[[], T]:
        """Return a function that runs ``function`` as one step of the activity."""
        return function if self.steps is None else partial(call_stepped, self.steps, function)

    def end(self) -> None:
        """End the activity. Only the first call has an effect."""
        if not self.ended_ns:
            self.ended_ns = _now()
            for observer in self._observers:
                observer.activity_ends(self)


class Observer:
    """Is notified of calls and handlers. All methods do nothing here: override those that you need. None may raise.

    They are called on the loop unless stated otherwise.
    """

    key = ""
    """The name of its headers; the same on all workers."""

    @property
    def occasions(self) -> Any:
        """While this is false, an observer on standby is not notified of requests. Always the same object."""
        return _NOTHING

    def thread_calls(self, context: Context, peer: str, function: Any) -> None:
        """Called in a thread, not the loop's, that makes a call. The call begins on the loop in ``context``."""

    def request_begins(self, request: Outgoing) -> None:
        """Called in the caller's context, before arguments are pickled."""

    def request_ends(self, request: Outgoing) -> None:
        """Called exactly once for each request that began. It may have failed before it was sent."""

    def reply_came(self, peer: WorkerInfo, header: Any) -> None:
        """Called when a reply has brought a header, see `reply_leaves`. The request ends after that."""

    def handler_accepted(self, handling: Handling) -> None:
        """Called when a request has arrived. It may have to wait for others."""

    def handler_begins(self, handling: Handling) -> Steps | None:
        """Called in the handler's own context, which it may change. Returns `Steps` to put around each of its steps."""

    def reply_leaves(self, handling: Handling) -> Any:
        """Return a header for the reply, None for none. Called in the handler's context if the request brought one."""

    def handler_ends(self, handling: Handling) -> None:
        """Called exactly once for each request that was accepted, unless the observer was removed while it waited.

        The handler may never have begun.
        """

    def activity_begins(self, activity: Activity) -> Steps | None:
        """Called when this worker begins work that is no handler. Returns `Steps` to put around each of its steps."""

    def activity_ends(self, activity: Activity) -> None:
        """Called exactly once for each activity that began."""


class Observers(Interceptor):
    """The observers of one worker, and the interceptor that carries their headers, which `begin` adds to requests."""

    key = "observe"

    def __init__(self, standing: Sequence[Observer] = ()) -> None:
        self.occasions = self.installed = list[Observer]()
        self.standing = tuple(standing)
        self._waiting: WeakKeyDictionary[Inbound, dict[int, Handling]] = WeakKeyDictionary()
        """The records of requests that have been accepted and have not begun."""

    def begin_activity(self, name: str, kind: Kind) -> Activity | None:
        """Begin an activity, and notify observers of it; None if there are no observers."""
        return Activity(name, kind, tuple(self.installed)) if self.installed else None

    # -- requests of this worker

    def concerned(self) -> Sequence[Observer]:
        """Return the observers that are notified of a request that begins now."""
        standing = [observer for observer in self.standing if observer.occasions]
        return [*self.installed, *standing] if standing else self.installed

    def thread_calls(self, context: Context, peer: str, function: Any) -> None:
        for observer in self.concerned():
            observer.thread_calls(context, peer, function)

    def begin(self, call: Call, send: Callable[[Call], int]) -> int:
        """Send a request by ``send``, and notify observers of it; returns its id."""
        target = call.called or call.function
        request = call.observed = Outgoing(
            peer=call.peer.info,
            function=name_of(target),
            kind=kind_of(call.type, call.flags),
            is_awaited=call.is_awaited,
            target=target,
            began_ns=_now(),
            observers=tuple(self.concerned()),
        )
        for observer in request.observers:
            observer.request_begins(request)
        if request.headers:
            call.metadata = {**(call.metadata or {}), self.key: _encode_headers(request.headers)}
        try:
            request.id = call_id = send(call)
        except BaseException as error:
            _end(request, Outcome.ERROR, error)
            raise
        request.sent_bytes = max(HEADER_BYTES, call.size_bytes)
        call.recipient.add_done_callback(partial(_call_ended, request))
        return call_id

    def answered(self, peer: Any, messages: Iterable[Message]) -> None:
        """Record the arrival and the size of those messages that are answers to requests."""
        for message in messages:
            call: Call | None = peer.calls.get(message.id) if isinstance(message, _ANSWERS) else None
            if call is not None and call.observed is not None:
                call.observed.ended_ns = _now()
                call.observed.received_bytes += HEADER_BYTES + message.size_bytes

    # -- headers, as an interceptor

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        run = current_scope.get()
        if not isinstance(run, Run):
            return
        headers = _headers(meta)
        observers = tuple(observer for observer in self.standing if observer.key in headers)
        if run.handling is not None:
            run.handling.headers = headers
            run.handling.observers += observers
        elif observers:
            run.handling = _accept(
                peer=peer, function=run.name, kind=Kind.CALL, id=run.id, headers=headers, observers=observers
            )
            run.arrived_ns = run.arrived_ns or run.handling.accepted_ns

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        run = current_scope.get()
        handling = run.handling if isinstance(run, Run) else None
        if handling is None:
            return None
        headers = {}
        for observer in handling.observers:
            if observer.key in handling.headers and (header := observer.reply_leaves(handling)) is not None:
                headers[observer.key] = header
        return _encode_headers(headers) if headers else None

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        headers = _headers(meta)
        for observer in (*self.installed, *self.standing):
            if observer.key in headers:
                observer.reply_came(peer, headers[observer.key])

    # -- requests of peers

    def _accept(self, inbound: Inbound, message: Message) -> Handling:
        function = inbound.function_of(message)
        return _accept(
            peer=inbound.caller,
            function=MESSAGE_CLASSES[message.type].__name__ if function.mode is Mode.UNKNOWN else function.name,
            kind=kind_of(message.type, message.flags),
            id=message.id,
            received_bytes=HEADER_BYTES + message.size_bytes,
            observers=tuple(self.installed),
        )

    def accepted(self, inbound: Inbound, message: Message) -> None:
        """Notify observers of a request that has arrived, and may run now or have to wait."""
        self._waiting.setdefault(inbound, {})[message.id] = self._accept(inbound, message)

    def watch(self, run: Run, message: Message) -> None:
        """Attach the observers' record to a request that is about to run."""
        waiting = self._waiting.get(run.inbound)
        handling = waiting.pop(message.id, None) if waiting else None
        run.handling = handling or self._accept(run.inbound, message)
        run.handling.function = run.name
        if not (message.body or message.memory):
            # without content, `request_reader.prepare` does not do this
            run.function = run.context.run(self.begin_handler, run, message)

    def forget_waiting(self) -> None:
        """Do not notify observers any more of requests that have not begun."""
        self._waiting.clear()

    def dropped(self, inbound: Inbound, message_id: int | None = None, error: Exception | None = None) -> None:
        """Notify observers that a waiting request, or all of a connection, will not run: cancelled if without error."""
        waiting = self._waiting.get(inbound)
        if not waiting:
            return
        ids = list(waiting) if message_id is None else [message_id]
        for id_ in ids:
            if (handling := waiting.pop(id_, None)) is not None:
                _end(handling, Outcome.CANCELLED if error is None else Outcome.ERROR, error)

    def begin_handler(self, run: Run, message: Message) -> Function:
        """Return the function of an unpickled request, with the observers' `Steps` around it. Called in its context."""
        handling = run.handling
        assert handling is not None
        function = run.function
        if handling.is_watched:
            return function  # it has begun already
        handling.is_watched = True
        handling.kind = kind_of(message.type, message.flags)
        handling.function = run.name
        handling.received_bytes = HEADER_BYTES + message.size_bytes
        handling.steps = _all_of(observer.handler_begins(handling) for observer in handling.observers)
        if handling.steps is not None:
            current_steps.set(handling.steps)
        return _watched(function, handling, handling.steps)

    @staticmethod
    def run_instead(run: Run, function: Function) -> Function:
        """Return the function that runs instead of another one, with the observers' `Steps` around it."""
        run.handling.function = run.name
        return _watched(function, run.handling, run.handling.steps)

    def ended(self, run: Run, sent_bytes: int, error: BaseException | None) -> None:
        """Notify observers that a request is answered."""
        handling = run.handling
        assert handling is not None
        run.handling = None
        handling.sent_bytes = sent_bytes
        _end(handling, Outcome.TIMED_OUT if run.expired and _is_cancelled(error) else _outcome_of(error), error)


class ObservedSender:
    """Notifies observers of every request of a worker."""

    def __init__(self, inner: CallSender, observers: Observers) -> None:
        self._send = inner.send
        self._observers = observers
        self._occasions = (observers.installed, *(observer.occasions for observer in observers.standing))

    def send(self, call: Call) -> int:
        """Send a request."""
        return self._observers.begin(call, self._send) if any(self._occasions) else self._send(call)


def error_of(recipient: Any) -> BaseException | None:
    """Return the error of a call that has ended. The error of a future does not count as retrieved by that."""
    if recipient.cancelled():
        return asyncio.CancelledError()
    if isinstance(recipient, asyncio.Future):
        return getattr(recipient, "_exception", None)
    error: BaseException | None = recipient.exception()
    return error


def _all_of(found: Iterable[Steps | None]) -> Steps | None:
    """Combine the `Steps` of several observers into one; None if there are none."""
    parts = [steps for steps in found if steps is not None]
    return AllSteps(parts) if len(parts) > 1 else parts[0] if parts else None


def _headers(meta: bytes) -> dict[str, Any]:
    try:
        return _decode_headers(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed headers of observers: {error}") from error


def _watched(function: Function, handling: Handling, steps: Steps | None) -> Function:
    """Return a function for one request, with the observers' `Steps` around each of its steps."""
    inner, is_coroutine = function.call, function.mode is Mode.COROUTINE

    def call(*args: Any, **kwargs: Any) -> Any:
        handling.began_ns = handling.began_ns or _now()
        if steps is None:
            return inner(*args, **kwargs)
        result = call_stepped(steps, inner, *args, **kwargs)
        return Stepped(result, steps) if is_coroutine else step_result(steps, result)

    return function.like(call)


_KINDS: Final = {
    MessageType.REQUEST: Kind.CALL,
    MessageType.RREF_CREATE: Kind.REMOTE,
    MessageType.RREF_FETCH: Kind.FETCH,
    MessageType.AUTOGRAD_GRADIENTS: Kind.BACKWARD,
    MessageType.AUTOGRAD_BACKWARD: Kind.BACKWARD,
}


def kind_of(type_: int, flags: int) -> Kind:
    """Return the purpose of a request of this type."""
    if type_ == MessageType.REQUEST and flags & RequestFlag.STREAM:
        return Kind.STREAM
    return _KINDS.get(MessageType(type_), Kind.CONTROL)


def _accept(**known: Any) -> Handling:
    """Create the observers' record of a request that has arrived, from these fields, and notify them."""
    handling = Handling(accepted_ns=_now(), **known)
    for observer in handling.observers:
        observer.handler_accepted(handling)
    return handling


def _call_ended(request: Outgoing, recipient: Any) -> None:
    error = error_of(recipient)
    outcome = _outcome_of(error)
    _end(request, outcome, None if outcome is Outcome.CANCELLED else error)


def _end(request: Outgoing | Handling, outcome: Outcome, error: BaseException | None) -> None:
    request.ended_ns = request.ended_ns or _now()
    request.outcome = outcome
    request.error = error
    for observer in request.observers:
        if isinstance(request, Outgoing):
            observer.request_ends(request)
        else:
            observer.handler_ends(request)
    request.error = None  # it refers to frames, and they to the objects in them


def _is_cancelled(error: BaseException | None) -> bool:
    return error is not None and is_a(error, asyncio.CancelledError)


def _outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome.OK
    if _is_cancelled(error):
        return Outcome.CANCELLED
    return Outcome.TIMED_OUT if is_a(error, RpcTimeoutError) else Outcome.ERROR
