"""The other workers: how to reach one, what is under way to it, and when it counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.pending_calls import SEQUENCE_BITS, Call, PendingCalls
from arpc.agent.codec import Codec
from arpc.agent.server.functions import name_of
from arpc.errors import (
    ArpcError,
    AuthenticationError,
    OverloadedError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    UnknownWorkerError,
    WorkerLostError,
    not_run,
)
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.connection import Connection
from arpc.user_errors import text_of
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from arpc.wire.values.content import Content
from arpc.wire.values.pickler import importable_name

__all__ = ["Peer", "PeerState"]

logger = get_logger("arpc.peers")

_CANCEL: Final = int(MessageType.CANCEL)
_FUNCTION: Final = int(MessageType.FUNCTION)
_MAIN_NAMES: Final = ("__main__", "__mp_main__")
# What is this small may use a second window: it must not queue behind tensors
_SMALL_BYTES: Final = 16 * 1024
_ANSWER_WEIGHT: Final = 0.1
_MARGIN: Final = 1.5


class PeerState(Enum):
    """How a peer stands to this worker."""

    IDLE = auto()
    """Not connected; the next call connects."""
    CONNECTING = auto()
    OPEN = auto()
    GONE = auto()
    """It said goodbye. The next call asks the group whether another has come under its name."""


MakeError = Callable[[str], Exception]
"""The error of a call that was under way when its connection ended, by the name of the function."""


class CountsBytes(Protocol):
    """A connection, as far as it is counted."""

    bytes_received: int

    def count_sent(self) -> int:
        """Bytes sent until now."""


class ThreadConnections(Protocol):
    """The connections that threads of this worker have to a peer for calls of their own.

    The drop-in makes them, see `arpc.compat.blocking_client`. The peer counts their calls among its own.
    """

    @property
    def calls_made(self) -> int:
        """How many calls there have been."""

    def calls(self) -> list[tuple[int, str, float | None]]:
        """The calls under way: id, name of the function, seconds left if these are limited."""

    @property
    def all(self) -> Collection[CountsBytes]: ...

    def lost(self, main: Connection, make_error: MakeError, /) -> None:
        """End all that belong to a connection between both workers, which has ended, and their calls with an error."""

    async def aclose(self, make_error: MakeError, /) -> None:
        """End all of them, for good."""


class Peer:
    """One other worker, or this one itself, as the target of calls."""

    def __init__(
        self,
        info: WorkerInfo,
        *,
        codec: Codec,
        deadlines: Deadlines,
        options: RpcOptions,
        connect: Callable[[Peer], Awaitable[Connection]],
    ) -> None:
        self.info = info
        self.connection: Connection | None = None
        self.incarnation: int | None = None
        """Which start of the worker the group, or its last connection, has told of."""
        self.is_verified = True
        """The group has said which worker has its name, and there is no reason to ask again."""
        self.is_dead = False
        """Nobody listened at an address where it is known to have been: its process has ended."""
        self.hosts = {""}
        """Where it was met, in this start of it, as it or the network calls its host. Empty: this one."""
        self.stager = codec.stager_to(info.name)
        """Takes tensors of calls to it from devices; None if there are none but the CPU."""
        self.main_by_value = True
        self.function_ids: dict[Any, int] = {}
        """Functions the peer knows on this connection, by identity."""
        self.in_flight_bytes = 0
        self.in_flight_calls = 0
        """Counted if calls in flight are limited."""
        self.calls = PendingCalls(deadlines, self._expired)
        self.backlog: OrderedDict[int, Call] = OrderedDict()
        """Calls that wait for a connection, for room in the window, or for the end of the turn, by id."""
        self._is_holding = False
        """Those in the backlog are held, see `hold`."""
        self.connects = 0
        self.thread_connections: ThreadConnections | None = None
        """Of threads of this worker that block; None unless there are such."""
        self.accepted_from_threads: set[Connection] = set()
        """Connections that threads of the peer have made."""
        self._answer_s = 0.0
        """How long the peer takes to answer, if calls in flight are limited: a mean that follows."""
        self._definitions: dict[Any, tuple[int, bytes]] = {}
        self._numbers = count(1)
        self._codec = codec
        self._deadlines = deadlines
        self._window_bytes = options.window_bytes
        self._max_in_flight = options.max_calls_in_flight
        self._clear_bytes = -1 if self._max_in_flight else options.window_bytes
        """A call that keeps the bytes in flight within this has room. -1: none has for sure, calls are counted too."""
        self._max_waiting = options.max_calls_waiting
        self._timeouts_travel = options.timeouts_travel
        self._connect = connect
        self._connecting: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._gone_because = ""

    @property
    def state(self) -> PeerState:
        if self.connection is not None:
            return PeerState.OPEN
        if self._connecting is not None:
            return PeerState.CONNECTING
        return PeerState.GONE if self._gone_because else PeerState.IDLE

    @property
    def must_be_asked_for(self) -> bool:
        """Another worker may have its name by now: what is packed must be packed for that one."""
        return self.connection is None and not self.is_verified

    @property
    def calls_made(self) -> int:
        """How many calls there have been, on whatever connection."""
        threads = self.thread_connections
        return self.calls.made + (0 if threads is None else threads.calls_made)

    @property
    def calls_in_flight(self) -> int:
        return len(self.calls) + len(self.calls_of_threads())

    def calls_of_threads(self) -> list[tuple[int, str, float | None]]:
        """The calls under way on thread connections: id, name of the function, seconds left if these are limited."""
        return [] if self.thread_connections is None else self.thread_connections.calls()

    @property
    def is_at_rest(self) -> bool:
        """There is no connection, none is being made, and nothing waits for one."""
        is_connected = self.connection is not None or self._connecting is not None
        return not (is_connected or self.backlog or self.calls_in_flight or self.connections())

    def connections(self) -> list[CountsBytes]:
        """All that lead to it or come from it."""
        main = () if self.connection is None else (self.connection,)
        threads = () if self.thread_connections is None else self.thread_connections.all
        return [*main, *self.accepted_from_threads, *threads]

    # -- functions

    def definition(self, function: Any) -> tuple[int, bytes] | None:
        """Number and pickle of a function that has been defined. From any thread."""
        return self._definitions.get(function)

    def define(self, function: Any) -> int:
        """The number of a function that the peer can import, 0 for one that must travel by value with each call."""
        try:
            known = self._definitions.get(function)
        except TypeError:
            return 0  # not hashable, so not a function of a module
        if known is None:
            name = importable_name(function)
            if name is None or (name[0] in _MAIN_NAMES and self.main_by_value):
                return 0
            # pickled before it gets a number: a failure must not leave a number nobody knows
            payload, slots = self._codec.pickler.dumps(function)
            if slots:
                return 0
            known = self._definitions[function] = (next(self._numbers), payload)
        if self.connection is not None:
            self.connection.send(frame(_FUNCTION, 0, 0, known[0], 0, known[1]))
            self.function_ids[function] = known[0]
        return known[0]

    # -- calls

    def submit(self, call_id: int, call: Call, content: Content, *, may_pass: bool = False) -> None:
        """Send a call now, or when there is a connection and room; `OverloadedError` if too many wait for that.

        ``may_pass``: it has room, and passes those that wait.
        """
        connection = self.connection
        if connection is None or (
            not may_pass
            and (self.backlog or connection.is_congested or self.in_flight_bytes + call.size_bytes > self._clear_bytes)
        ):
            connection = self._way_past(call)
            if connection is None:
                self._wait(call_id, call, content)
                return
        self.in_flight_bytes += call.size_bytes
        if self._max_in_flight:
            self.in_flight_calls += 1
            call.sent_at = self._deadlines.now()
        call.connection = connection
        call.bulk = connection.send_message(call.type, call.flags, call_id, call.function_id, call.timeout_ms, content)

    def _way_past(self, call: Call) -> Connection | None:
        """The connection for a call that finds something in its way; None if it has to wait."""
        if self._is_holding:
            self.drain()
        size_bytes = call.size_bytes
        # small calls pass those that wait for room
        is_next = not self.backlog or size_bytes <= _SMALL_BYTES
        return self.connection if is_next and self._has_room(size_bytes) else None

    def _wait(self, call_id: int, call: Call, content: Content) -> None:
        """Keep a call until there is a connection, and room; `OverloadedError` if too many wait already."""
        if len(self.backlog) >= self._max_waiting:
            self.calls.pop(call_id)
            text = f"{call.name} was not sent to worker {self.info.name!r}: {len(self.backlog)} calls wait already"
            raise not_run(OverloadedError(text))
        call.content = content
        self.backlog[call_id] = call
        self._wake()

    def hold(self, call_id: int, call: Call, content: Content) -> None:
        """Send a call at the end of this turn of the loop, or before the next call: until then it may be changed."""
        is_behind = bool(self.backlog) and not self._is_holding
        if self.connection is None or is_behind or len(self.backlog) >= self._max_waiting:
            self.submit(call_id, call, content)
            return
        if not self._is_holding:
            self._is_holding = True
            self._deadlines.loop.call_soon(self.drain)
        call.content = content
        self.backlog[call_id] = call

    def held(self, call_id: int) -> Call | None:
        """A call that is held, and has not ended."""
        return self.backlog.get(call_id) if self._is_holding else None

    def _has_room(self, size_bytes: int) -> bool:
        """Whether a call of that size need not wait for others to end."""
        if self._max_in_flight and self.in_flight_calls >= self._max_in_flight:
            return False
        limit = self._window_bytes if size_bytes > _SMALL_BYTES else 2 * self._window_bytes
        if self.in_flight_bytes and self.in_flight_bytes + size_bytes > limit:
            return False
        connection = self.connection
        # of calls that were given up, the bytes may still be here
        return connection is None or not connection.is_congested or connection.unsent_bytes <= limit

    def release(self, call: Call) -> None:
        """A call that was sent has ended: others may be sent in its place."""
        self.in_flight_bytes -= call.size_bytes
        if call.sent_at:
            self.in_flight_calls -= 1
            self._answer_s += _ANSWER_WEIGHT * (self._deadlines.now() - call.sent_at - self._answer_s)
        if self.backlog:
            self.drain()

    def drain(self) -> None:
        """Send what waited or was held, as far as there is room."""
        was_held, self._is_holding = self._is_holding, False
        while self.connection is not None and self.backlog:
            call_id, call = next(iter(self.backlog.items()))
            if not (is_done := call.recipient.done()) and not self._has_room(call.size_bytes):
                return
            del self.backlog[call_id]
            if is_done:  # completed by hand while it waited, or about to be taken out
                self.calls.pop(call_id)
            elif self._max_in_flight and not was_held and self._comes_too_late(call_id):
                self.calls.pop(call_id)
                call.recipient.set_exception(self._too_late(call))
            else:
                content, call.content = call.content, None
                assert content is not None  # it waited
                self.submit(call_id, call, content, may_pass=True)

    def _comes_too_late(self, call_id: int) -> bool:
        """Whether a call that has waited has not enough time left to be answered: the peer would work in vain."""
        tick = call_id >> SEQUENCE_BITS
        return tick != NEVER and self._deadlines.time_of(tick) - self._deadlines.now() < _MARGIN * self._answer_s

    def _too_late(self, call: Call) -> OverloadedError:
        text = (
            f"{call.name} was not sent to worker {self.info.name!r}, which takes {self._answer_s:.3f} s to answer: "
            f"the call has waited too long, and would not be answered within its timeout"
        )
        return not_run(OverloadedError(text))

    def cancel(self, call_id: int) -> None:
        """The caller no longer waits for a call."""
        call = self.calls.pop(call_id)
        if call is not None:
            self._abandon(call_id, call)

    def _abandon(self, call_id: int, call: Call, *, is_told: bool = True) -> None:
        """Give up a call. ``is_told``: the peer hears of it, if it has the call."""
        connection = call.connection
        if connection is None:
            self.backlog.pop(call_id, None)
            return
        if is_told and connection.is_open:
            if call.bulk is not None and connection.drop_bulk(call.bulk):
                logger.debug(
                    "call %d to %s was cancelled while it was sent",
                    call_id,
                    self.info.name,
                    extra={"peer": self.info.name, "call_id": call_id},
                )
            else:
                connection.send(frame(_CANCEL, 0, call_id, 0, 0, b""))
        self.release(call)

    def _expired(self, calls: dict[int, Call]) -> None:
        """The time of calls has come."""
        for call in calls.values():
            if not call.recipient.done():
                was_sent = call.connection is not None
                where = "was sent to" if was_sent else "could not be sent to"
                seconds = f" of {call.timeout_ms / 1000:g} s" if call.timeout_ms else ""
                text = f"{call.name} {where} worker {self.info.name!r} and did not end within its timeout{seconds}"
                error = RpcTimeoutError(text)
                call.recipient.set_exception(error if was_sent else not_run(error))
        # Only now: what one of them gives back must not be used to send another
        for call_id, call in calls.items():
            self._abandon(call_id, call, is_told=self._timeouts_travel)

    # -- the connection

    def _wake(self) -> None:
        """Connect, unless that is done or under way: there is one attempt at a time."""
        if self.connection is None and self._connecting is None:
            connecting = self._run_connect()
            try:
                self._connecting = self._deadlines.loop.create_task(connecting)
            except RuntimeError:  # the loop is closed
                connecting.close()
                raise

    async def reach(self) -> bool:
        """Whether there is a connection, after an attempt to have one."""
        self._wake()
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        return self.connection is not None

    async def wait_connected(self, timeout_s: float) -> Connection | None:
        """Wait for a connection that either side makes; None if there is none after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        return self.connection

    async def _run_connect(self) -> None:
        failure: Exception | None = None
        try:
            await self._connect(self)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, those who wait must hear of it
            failure = error
        finally:
            self._connecting = None
        # Connections from the other side may have come, and gone, meanwhile
        if self.connection is not None:
            return
        if failure is not None:
            self._fail_backlog(partial(self.not_reached, failure))
        elif self.backlog:
            self._wake()

    def not_reached(self, error: Exception) -> Exception:
        """What a call raises that could not be sent, because of an error."""
        if self._gone_because and isinstance(error, WorkerLostError | UnknownWorkerError):
            return WorkerLostError(self._gone_because, self.info.name, may_have_run=False)
        if isinstance(error, AuthenticationError):
            return not_run(AuthenticationError(f"worker {self.info.name!r} cannot be called: {error}"))
        if isinstance(error, ArpcError) and not isinstance(error, ConnectionError):
            return not_run(type(error)(*error.args))
        made = WorkerLostError(
            f"worker {self.info.name!r} cannot be reached: {error}", self.info.name, may_have_run=False
        )
        made.__cause__ = error
        return made

    def refuse_the_dead(self, incarnation: int) -> None:
        """Raise `WorkerLostError` if this is the worker that has left, still listed in the group."""
        if self._gone_because and incarnation == self.incarnation:
            raise WorkerLostError(self._gone_because, self.info.name, may_have_run=False)

    def opened(self, connection: Connection, *, main_by_value: bool) -> None:
        """There is a connection, made by either side."""
        self.connection = connection
        self._connected.set()
        self.incarnation = connection.peer.incarnation
        self.is_dead = False
        self._gone_because = ""
        if main_by_value:
            # It may have run this script in an earlier life, and run another one now
            of_main = [function for function in self._definitions if function.__module__ in _MAIN_NAMES]
            for function in of_main:
                del self._definitions[function]
        self.main_by_value = main_by_value
        self.connects += 1
        for function, (number, payload) in self._definitions.items():
            connection.send(frame(_FUNCTION, 0, 0, number, 0, payload))
            self.function_ids[function] = number
        self.drain()

    def lost(self, connection: Connection, error: Exception | None, *, reason: str | None) -> None:
        """A connection has ended. ``reason`` says why the peer left, if it did."""
        sent = [(call_id, call) for call_id, call in self.calls if call.connection is connection]
        if connection is self.connection:
            self.connection = None
            self._connected.clear()
            self.function_ids.clear()
            if reason is not None:
                self._gone_because = because = f"worker {self.info.name!r} has left: {reason}"
                self._fail_backlog(lambda: WorkerLostError(because, self.info.name, may_have_run=False))
        make_error = partial(self.lost_with, error, reason)
        if self.thread_connections is not None:
            self.thread_connections.lost(connection, make_error)
        for call_id, call in sent:
            if self.calls.pop(call_id) is None:
                continue  # it has ended meanwhile, by what the end of another one set off
            # not `release`: how long these have waited says nothing of how long the peer takes to answer
            self.in_flight_bytes -= call.size_bytes
            if call.sent_at:
                self.in_flight_calls -= 1
            if not call.recipient.done():
                call.recipient.set_exception(make_error(call.name))
        if self.backlog and self.connection is None:
            self._wake()
        elif self.backlog:
            self.drain()  # another connection is open already

    def lost_with(self, error: Exception | None, reason: str | None, function: str) -> WorkerLostError:
        """The error of a call that was under way on a connection when that ended."""
        how = f"was lost: {error or 'it closed the connection'}" if reason is None else f"has left: {reason}"
        failure = WorkerLostError(f"worker {self.info.name!r} {how} ({function} may have run)", self.info.name)
        failure.__cause__ = error
        return failure

    def succeeded_by(self, info: WorkerInfo) -> None:
        """Another worker has come under its name."""
        # What waits was packed for the one before: the RRefs and autograd contexts in it mean nothing to this one
        lost, self.info = self.info.name, info
        self._fail_backlog(
            lambda: WorkerLostError(
                f"worker {lost!r} was started again before the call was sent to it", lost, may_have_run=False
            )
        )
        self.is_dead = False
        self.hosts = {""}
        self._gone_because = ""

    def _fail_backlog(self, make_error: Callable[[], Exception]) -> None:
        """Fail all calls that have not been sent."""
        unsent = self.backlog
        self._clear()
        for call_id, call in unsent.items():
            self.calls.pop(call_id)
            if not call.recipient.done():
                # one each: an exception collects the traceback of all code that raises it
                call.recipient.set_exception(make_error())

    def abandon(self) -> None:
        """The loop is closed, and nothing can end any more."""
        self.calls.clear()
        self._clear()
        self.in_flight_bytes = self.in_flight_calls = 0

    def _clear(self) -> None:
        """Keep no call that has not been sent."""
        self.backlog = OrderedDict()
        self._is_holding = False

    async def aclose(self) -> None:
        """End whatever is left: this worker shuts down."""
        task = self._connecting
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._clear()
        self.in_flight_bytes = self.in_flight_calls = 0
        for call_id, call in self.calls:
            self.calls.pop(call_id)
            if not call.recipient.done():
                error = _shut_down_before(call.name)
                call.recipient.set_exception(error if call.connection is not None else not_run(error))
        if self.thread_connections is not None:
            await self.thread_connections.aclose(_shut_down_before)

    def statistics(self) -> dict[str, int | str]:
        return {
            "state": self.state.name,
            "calls_made": self.calls_made,
            "calls_in_flight": self.calls_in_flight,
            "calls_waiting": len(self.backlog),
            "bytes_in_flight": self.in_flight_bytes,
            "connects": self.connects,
            **({} if self.thread_connections is None else {"thread_connections": len(self.thread_connections.all)}),
            **({} if self.connection is None else self.connection.statistics()),
        }


def _shut_down_before(function: str) -> ShutdownError:
    return ShutdownError(f"this worker was shut down before {function} ended")


def unsendable(function: Any, error: Exception) -> SerializationError:
    """The error for a function that cannot be pickled."""
    return not_run(SerializationError(f"the function {name_of(function)} cannot be sent: {text_of(error)}"))
