"""The other workers: how to reach one, the calls in flight to it, and when it counts as lost."""

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
# Calls up to this size may use a second window, because they must not queue behind tensors
_SMALL_BYTES: Final = 16 * 1024
_ANSWER_WEIGHT: Final = 0.1
_MARGIN: Final = 1.5


class PeerState(Enum):
    """The state of the connection to a peer."""

    IDLE = auto()
    """Not connected; the next call connects."""
    CONNECTING = auto()
    OPEN = auto()
    GONE = auto()
    """The peer said goodbye. The next call asks the group whether another worker has taken its name."""


MakeError = Callable[[str], Exception]
"""Makes the error of a call that was in flight when its connection ended, from the name of the function."""


class CountsBytes(Protocol):
    """The byte counters of a connection."""

    bytes_received: int

    def count_sent(self) -> int:
        """Return the number of bytes sent so far."""


class ThreadConnections(Protocol):
    """The thread connections of this worker to a peer, on which its threads make their calls.

    The drop-in makes them, see `arpc.compat.blocking_client`. The peer counts their calls among its own.
    """

    @property
    def calls_made(self) -> int:
        """The number of calls so far."""

    def calls(self) -> list[tuple[int, str, float | None]]:
        """Return the calls in flight: id, name of the function, seconds left if these are limited."""

    @property
    def all(self) -> Collection[CountsBytes]: ...

    def lost(self, main: Connection, make_error: MakeError, /) -> None:
        """End the connections that belong to a main connection, which has ended, and fail their calls."""

    async def aclose(self, make_error: MakeError, /) -> None:
        """End all of these connections, for good, and fail their calls."""


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
        """The start of the worker, as reported by the group or by its last connection; None if none is known."""
        self.is_verified = True
        """Whether the group has confirmed which worker has its name, and need not be asked again."""
        self.is_dead = False
        """Whether nothing listened at an address where it is known to have been: its process has ended."""
        self.hosts = {""}
        """The hosts where this incarnation was reached, by name or number. The empty one is this host."""
        self.stager = codec.stager_to(info.name)
        """Copies tensors of calls from devices; None if there are no devices but the CPU."""
        self.main_by_value = True
        self.function_ids: dict[Any, int] = {}
        """The numbers of the functions that the peer knows on this connection."""
        self.in_flight_bytes = 0
        self.in_flight_calls = 0
        """The number of calls in flight; counted only if that is limited."""
        self.calls = PendingCalls(deadlines, self._expired)
        self.backlog: OrderedDict[int, Call] = OrderedDict()
        """Calls that wait for a connection, for room in the window, or for the end of the turn, by id."""
        self._is_holding = False
        """Whether the calls in the backlog are held, see `hold`."""
        self.connects = 0
        self.thread_connections: ThreadConnections | None = None
        """The connections of this worker's threads that make blocking calls; None if there are none."""
        self.accepted_from_threads: set[Connection] = set()
        """The connections that threads of the peer have made."""
        self._answer_s = 0.0
        """A moving average of the peer's time to answer, if calls in flight are limited."""
        self._definitions: dict[Any, tuple[int, bytes]] = {}
        self._numbers = count(1)
        self._codec = codec
        self._deadlines = deadlines
        self._window_bytes = options.window_bytes
        self._max_in_flight = options.max_calls_in_flight
        self._clear_bytes = -1 if self._max_in_flight else options.window_bytes
        """A call that keeps the bytes in flight within this has room. -1 (never surely) if calls are counted, too."""
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
    def must_ask_group(self) -> bool:
        """Whether to ask the group first: another worker may have its name, and calls are pickled for one worker."""
        return self.connection is None and not self.is_verified

    @property
    def calls_made(self) -> int:
        """The number of calls so far, on all connections."""
        threads = self.thread_connections
        return self.calls.made + (0 if threads is None else threads.calls_made)

    @property
    def calls_in_flight(self) -> int:
        return len(self.calls) + len(self.calls_of_threads())

    def calls_of_threads(self) -> list[tuple[int, str, float | None]]:
        """Return the calls in flight on thread connections: id, function name, seconds left if these are limited."""
        return [] if self.thread_connections is None else self.thread_connections.calls()

    @property
    def is_at_rest(self) -> bool:
        """Whether there is no connection, none is being made, and no call waits or is in flight."""
        is_connected = self.connection is not None or self._connecting is not None
        return not (is_connected or self.backlog or self.calls_in_flight or self.connections())

    def connections(self) -> list[CountsBytes]:
        """Return all connections to and from the peer."""
        main = () if self.connection is None else (self.connection,)
        threads = () if self.thread_connections is None else self.thread_connections.all
        return [*main, *self.accepted_from_threads, *threads]

    # -- functions

    def definition(self, function: Any) -> tuple[int, bytes] | None:
        """Return the number and the pickle of a function that has been defined, else None. Called in any thread."""
        return self._definitions.get(function)

    def define(self, function: Any) -> int:
        """Return the number of a function that the peer can import, 0 for one that travels by value with each call."""
        try:
            known = self._definitions.get(function)
        except TypeError:
            return 0  # not hashable, so not a function of a module
        if known is None:
            name = importable_name(function)
            if name is None or (name[0] in _MAIN_NAMES and self.main_by_value):
                return 0
            # pickled before it gets a number: a failure must not leave a number that the peer does not know
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
        """Send a call now, or when there is a connection and room. Raises `OverloadedError` if too many wait already.

        ``may_pass``: there is room for it, and it overtakes calls that wait.
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
        """Return the connection for a call that may not have room, or finds others waiting; None if it has to wait."""
        if self._is_holding:
            self.drain()
        size_bytes = call.size_bytes
        # small calls overtake those that wait for room
        is_next = not self.backlog or size_bytes <= _SMALL_BYTES
        return self.connection if is_next and self._has_room(size_bytes) else None

    def _wait(self, call_id: int, call: Call, content: Content) -> None:
        """Queue a call until there is a connection, and room. Raises `OverloadedError` if too many wait already."""
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
        """Return a call that is held and has not ended, else None."""
        return self.backlog.get(call_id) if self._is_holding else None

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether a call of that size need not wait for others to end."""
        if self._max_in_flight and self.in_flight_calls >= self._max_in_flight:
            return False
        limit = self._window_bytes if size_bytes > _SMALL_BYTES else 2 * self._window_bytes
        if self.in_flight_bytes and self.in_flight_bytes + size_bytes > limit:
            return False
        connection = self.connection
        # bytes of calls that were given up may still be unsent
        return connection is None or not connection.is_congested or connection.unsent_bytes <= limit

    def release(self, call: Call) -> None:
        """Give back the window of a sent call that has ended, and send others in its place."""
        self.in_flight_bytes -= call.size_bytes
        if call.sent_at:
            self.in_flight_calls -= 1
            self._answer_s += _ANSWER_WEIGHT * (self._deadlines.now() - call.sent_at - self._answer_s)
        if self.backlog:
            self.drain()

    def drain(self) -> None:
        """Send calls that waited or were held, as far as there is room."""
        was_held, self._is_holding = self._is_holding, False
        while self.connection is not None and self.backlog:
            call_id, call = next(iter(self.backlog.items()))
            if not (is_done := call.recipient.done()) and not self._has_room(call.size_bytes):
                return
            del self.backlog[call_id]
            if is_done:  # completed by other code while it waited, or about to be removed
                self.calls.pop(call_id)
            elif self._max_in_flight and not was_held and self._comes_too_late(call_id):
                self.calls.pop(call_id)
                call.recipient.set_exception(self._too_late(call))
            else:
                content, call.content = call.content, None
                assert content is not None  # kept while the call waited
                self.submit(call_id, call, content, may_pass=True)

    def _comes_too_late(self, call_id: int) -> bool:
        """Return whether a call that waited has too little time left to be answered: its result would not be used."""
        tick = call_id >> SEQUENCE_BITS
        return tick != NEVER and self._deadlines.time_of(tick) - self._deadlines.now() < _MARGIN * self._answer_s

    def _too_late(self, call: Call) -> OverloadedError:
        text = (
            f"{call.name} was not sent to worker {self.info.name!r}, which takes {self._answer_s:.3f} s to answer: "
            f"the call has waited too long, and would not be answered within its timeout"
        )
        return not_run(OverloadedError(text))

    def cancel(self, call_id: int) -> None:
        """Cancel a call, because the caller no longer waits for it."""
        call = self.calls.pop(call_id)
        if call is not None:
            self._abandon(call_id, call)

    def _abandon(self, call_id: int, call: Call, *, notify_peer: bool = True) -> None:
        """Give up a call. ``notify_peer``: the peer is notified, if it has the call."""
        connection = call.connection
        if connection is None:
            # calls behind a large one that waited for room may fit now; held calls leave at the end of the turn
            if self.backlog.pop(call_id, None) is not None and self.backlog and not self._is_holding:
                self.drain()
            return
        if notify_peer and connection.is_open:
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
        """Fail calls whose deadline has passed."""
        for call in calls.values():
            if not call.recipient.done():
                was_sent = call.connection is not None
                where = "was sent to" if was_sent else "could not be sent to"
                seconds = f" of {call.timeout_ms / 1000:g} s" if call.timeout_ms else ""
                text = f"{call.name} {where} worker {self.info.name!r} and did not end within its timeout{seconds}"
                error = RpcTimeoutError(text)
                call.recipient.set_exception(error if was_sent else not_run(error))
        # Only now: the window that one of them gives back must not be used to send another
        for call_id, call in calls.items():
            self._abandon(call_id, call, notify_peer=self._timeouts_travel)

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
        """Try once to connect, if need be; returns whether there is a connection."""
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
        except Exception as error:  # noqa: BLE001 - calls that wait fail with it, whatever it is
            failure = error
        finally:
            self._connecting = None
        # Connections from the peer may have come, and gone, meanwhile
        if self.connection is not None:
            return
        if failure is not None:
            self._fail_backlog(partial(self.not_reached, failure))
        elif self.backlog:
            self._wake()

    def not_reached(self, error: Exception) -> Exception:
        """Return the error of a call that could not be sent because of ``error``."""
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
        """Raise `WorkerLostError` if this incarnation is the one that has left, still listed in the group."""
        if self._gone_because and incarnation == self.incarnation:
            raise WorkerLostError(self._gone_because, self.info.name, may_have_run=False)

    def opened(self, connection: Connection, *, main_by_value: bool) -> None:
        """Use a connection that has opened, made by either side."""
        self.connection = connection
        self._connected.set()
        self.incarnation = connection.peer.incarnation
        self.is_dead = False
        self._gone_because = ""
        if main_by_value:
            # An earlier incarnation may have run this script, and the present one another
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
        """Fail the calls of a connection that has ended. ``reason``: why the peer has left; None if it has not."""
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
                continue  # it has ended meanwhile, as a consequence of the end of another one
            # not `release`: the time that these have waited is no measure of the peer's time to answer
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
        """Return the error of a call that was in flight on a connection when that ended."""
        how = f"was lost: {error or 'it closed the connection'}" if reason is None else f"has left: {reason}"
        failure = WorkerLostError(f"worker {self.info.name!r} {how} ({function} may have run)", self.info.name)
        failure.__cause__ = error
        return failure

    def succeeded_by(self, info: WorkerInfo) -> None:
        """Let this peer stand for another worker, which has taken the name."""
        # Waiting calls were pickled for the worker before: their RRefs and autograd contexts mean nothing to this one
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
        """Drop all calls, because the loop is closed and none of them can end any more."""
        self.calls.clear()
        self._clear()
        self.in_flight_bytes = self.in_flight_calls = 0

    def _clear(self) -> None:
        """Drop the calls that have not been sent."""
        self.backlog = OrderedDict()
        self._is_holding = False

    async def aclose(self) -> None:
        """Fail all calls that are left, because this worker shuts down."""
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
    """Return the error for a function that cannot be pickled."""
    return not_run(SerializationError(f"the function {name_of(function)} cannot be sent: {text_of(error)}"))
