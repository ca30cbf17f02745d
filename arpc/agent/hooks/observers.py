"""Observers of the calls of a worker: profilers, metrics, tracing.

An `Observer` hears of the calls that this worker makes and of the handlers that it runs, may send a header of its own
with a request and with its reply, and may wrap every step of a handler, on the loop and in threads. `Agent.observe`
installs one at any time, `Agent.unobserve` removes it. An observer that is passed to the agent when that is made is on
standby: it hears of a call only if its `occasions` say so, and of a handler only if the request brought its header.
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
    """What a request is for."""

    CALL = "call"
    STREAM = "stream"
    REMOTE = "remote"
    """The creation of an RRef's value."""
    FETCH = "fetch"
    """The copy of an RRef's value."""
    BACKWARD = "backward"
    """Part of a backward pass."""
    CONTROL = "control"
    """Counting references and the like, which no user asked for directly."""


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


class _Observed(msgspec.Struct, eq=False, kw_only=True):
    """What observers are told of a request, in either direction. Times are those of ``time.perf_counter_ns``."""

    peer: WorkerInfo
    function: str
    kind: Kind
    id: int = 0
    """Unique among those of one worker to another that are under way, and the same at both. Set once it is sent."""
    began_ns: int = 0
    ended_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    headers: dict[str, Any] = msgspec.field(default_factory=dict)
    """What observers of the caller send along, by their `key`, as msgpack."""
    outcome: Outcome | None = None
    error: BaseException | None = None
    observers: tuple[Observer, ...] = ()
    """Those that hear of it."""


class Outgoing(_Observed, eq=False, kw_only=True):
    """A request of this worker. While it begins, observers may add to its headers."""

    is_awaited: bool
    """Made by `rpc_sync`, whose caller waits for it at once."""
    target: Any = None
    """The function itself; of a method of a remote value its name, of a feature's own message its class."""


class Handling(_Observed, eq=False, kw_only=True):
    """A request of a peer. It may wait before its function begins, or never begin: then `began_ns` is 0."""

    accepted_ns: int
    shared: dict[type, Any] = msgspec.field(default_factory=dict)
    """What observers of one kind share."""
    steps: Any = None
    """What observers put around each of its steps."""
    is_watched: bool = False
    """Observers have been told that it begins."""


class Activity:
    """Something that this worker does over several steps and that is no handler: its part of a backward pass, say."""

    def __init__(self, name: str, kind: Kind, observers: tuple[Observer, ...]) -> None:
        self.name = name
        self.kind = kind
        self.began_ns = _now()
        self.ended_ns = 0
        self.shared: dict[type, Any] = {}
        self._observers = observers
        self.steps = _all_of(observer.activity_begins(self) for observer in observers)
        """What belongs around each of its steps."""

    def step(self, function: Callable[[], T]) -> Callable[[], T]:
        """A function as one step of it."""
        return function if self.steps is None else partial(call_stepped, self.steps, function)

    def end(self) -> None:
        """It is over. Only the first time counts."""
        if not self.ended_ns:
            self.ended_ns = _now()
            for observer in self._observers:
                observer.activity_ends(self)


class Observer:
    """Hears of calls. All methods do nothing here: define those that you need. None of them may raise.

    They are called on the loop, except where it says otherwise.
    """

    key = ""
    """The name of its headers; the same on all workers."""

    @property
    def occasions(self) -> Any:
        """While this is false, one that stands by does not hear of requests. Always the same object."""
        return _NOTHING

    def thread_calls(self, context: Context, peer: str, function: Any) -> None:
        """A thread that is not the loop's makes a call, which begins on the loop in this context. In that thread."""

    def request_begins(self, request: Outgoing) -> None:
        """In the caller's context, before arguments are packed."""

    def request_ends(self, request: Outgoing) -> None:
        """Exactly once for each that began. It may have failed before it was sent."""

    def reply_came(self, peer: WorkerInfo, header: Any) -> None:
        """A reply has brought a header, see `reply_leaves`. The request ends after that."""

    def handler_accepted(self, handling: Handling) -> None:
        """A request has come. It may have to wait for others."""

    def handler_begins(self, handling: Handling) -> Steps | None:
        """In the handler's own context; what is set there, it sees. Returns what belongs around each of its steps."""

    def reply_leaves(self, handling: Handling) -> Any:
        """In the handler's context: a header for the reply, None for none. Only if the request brought a header."""

    def handler_ends(self, handling: Handling) -> None:
        """Exactly once for each that was accepted, unless the observer was taken away while it waited.

        It may never have begun.
        """

    def activity_begins(self, activity: Activity) -> Steps | None:
        """This worker begins something that is no handler. Returns what belongs around each of its steps."""

    def activity_ends(self, activity: Activity) -> None:
        """Exactly once for each that began."""


class Observers(Interceptor):
    """The observers of one worker, and the interceptor that carries their headers, which `begin` adds to requests."""

    key = "observe"

    def __init__(self, standing: Sequence[Observer] = ()) -> None:
        self.occasions = self.installed = list[Observer]()
        self.standing = tuple(standing)
        self._waiting: WeakKeyDictionary[Inbound, dict[int, Handling]] = WeakKeyDictionary()
        """Requests that have been accepted and have not begun."""

    def begin_activity(self, name: str, kind: Kind) -> Activity | None:
        """Tell observers of something that is no handler; None if there are none."""
        return Activity(name, kind, tuple(self.installed)) if self.installed else None

    # -- requests of this worker

    def concerned(self) -> Sequence[Observer]:
        """The observers that hear of a request that begins now."""
        standing = [observer for observer in self.standing if observer.occasions]
        return [*self.installed, *standing] if standing else self.installed

    def thread_calls(self, context: Context, peer: str, function: Any) -> None:
        for observer in self.concerned():
            observer.thread_calls(context, peer, function)

    def begin(self, call: Call, send: Callable[[Call], int]) -> int:
        """Make a request by ``send``, and tell observers of it."""
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
        """Messages have come: of those that are answers, note when they came and how large they are."""
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
        """A request has come, which may run now or have to wait."""
        self._waiting.setdefault(inbound, {})[message.id] = self._accept(inbound, message)

    def watch(self, run: Run, message: Message) -> None:
        """A request is about to run."""
        waiting = self._waiting.get(run.inbound)
        handling = waiting.pop(message.id, None) if waiting else None
        run.handling = handling or self._accept(run.inbound, message)
        run.handling.function = run.name
        if not (message.body or message.memory):
            # it will not be unpacked
            run.function = run.context.run(self.begin_handler, run, message)

    def forget_waiting(self) -> None:
        """Tell observers no more of requests that have not begun."""
        self._waiting.clear()

    def dropped(self, inbound: Inbound, message_id: int | None = None, error: Exception | None = None) -> None:
        """A request that waited will not run, or none of those of a connection: given up, unless there is an error."""
        waiting = self._waiting.get(inbound)
        if not waiting:
            return
        ids = list(waiting) if message_id is None else [message_id]
        for id_ in ids:
            if (handling := waiting.pop(id_, None)) is not None:
                _end(handling, Outcome.CANCELLED if error is None else Outcome.ERROR, error)

    def begin_handler(self, run: Run, message: Message) -> Function:
        """The function of a request whose arguments are there, with what observers put around it. In its context."""
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
    def handed_over(run: Run, function: Function) -> Function:
        """The function that runs in the place of another, with what observers put around it."""
        run.handling.function = run.name
        return _watched(function, run.handling, run.handling.steps)

    def ended(self, run: Run, sent_bytes: int, error: BaseException | None) -> None:
        """A request is answered."""
        handling = run.handling
        assert handling is not None
        run.handling = None
        handling.sent_bytes = sent_bytes
        _end(handling, Outcome.TIMED_OUT if run.expired and _is_cancelled(error) else _outcome_of(error), error)


class ObservedSender:
    """Tells observers of every request of a worker."""

    def __init__(self, inner: CallSender, observers: Observers) -> None:
        self._send = inner.send
        self._observers = observers
        self._occasions = (observers.installed, *(observer.occasions for observer in observers.standing))

    def send(self, call: Call) -> int:
        """Send a request."""
        return self._observers.begin(call, self._send) if any(self._occasions) else self._send(call)


def error_of(recipient: Any) -> BaseException | None:
    """The error of a call that has ended. Of a future, that does not count as looked at."""
    if recipient.cancelled():
        return asyncio.CancelledError()
    if isinstance(recipient, asyncio.Future):
        return getattr(recipient, "_exception", None)
    error: BaseException | None = recipient.exception()
    return error


def _all_of(found: Iterable[Steps | None]) -> Steps | None:
    """What several observers put around a step, as one; None if none of them puts anything there."""
    parts = [steps for steps in found if steps is not None]
    return AllSteps(parts) if len(parts) > 1 else parts[0] if parts else None


def _headers(meta: bytes) -> dict[str, Any]:
    try:
        return _decode_headers(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed headers of observers: {error}") from error


def _watched(function: Function, handling: Handling, steps: Steps | None) -> Function:
    """A function for one request, with what observers put around each of its steps."""
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
    """What a request of this type is for."""
    if type_ == MessageType.REQUEST and flags & RequestFlag.STREAM:
        return Kind.STREAM
    return _KINDS.get(MessageType(type_), Kind.CONTROL)


def _accept(**known: Any) -> Handling:
    """Tell observers of a request that has come, of which so much is known."""
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
    request.error = None  # it refers to frames, and they to what they hold


def _is_cancelled(error: BaseException | None) -> bool:
    return error is not None and is_a(error, asyncio.CancelledError)


def _outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome.OK
    if _is_cancelled(error):
        return Outcome.CANCELLED
    return Outcome.TIMED_OUT if is_a(error, RpcTimeoutError) else Outcome.ERROR
