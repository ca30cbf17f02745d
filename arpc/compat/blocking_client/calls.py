"""Blocking calls that the calling thread itself makes on a `ThreadConnection` to the peer.

This is for plain calls: a function that the peer knows, arguments and a result that are pickles and small tensors, and
a caller with no feature active that adds to requests, such as an autograd context. All other calls go through the loop,
as does any call for which no thread connection is free. The route of a call changes nothing but its duration.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, Final, NoReturn

from arpc import torchstate
from arpc.agent.agent import Agent
from arpc.agent.client.sender import Prepared
from arpc.agent.peers.dialer import only
from arpc.agent.peers.link import THREAD
from arpc.agent.peers.peer import Peer
from arpc.agent.scope import WorkerScope, current_scope
from arpc.agent.server.functions import name_of
from arpc.compat.blocking_client.thread_connection import (
    NotSentError,
    ThreadConnection,
    ThreadConnectionClosedError,
    open_thread_connection,
)
from arpc.compat.blocking_client.thread_connections import MAX_OWED, ThreadConnections
from arpc.errors import ProtocolError, RpcTimeoutError, WireError
from arpc.log import get_logger
from arpc.options import Unset
from arpc.wire.frames import MAX_TIMEOUT_MS, frame
from arpc.wire.handshake import Role
from arpc.wire.messages import Message, MessageType, Reply, RequestFlag
from arpc.wire.values.content import Content

__all__ = ["TAKES_LOOP", "BlockingCalls"]

logger = get_logger("arpc.connections")

_REQUEST: Final = int(MessageType.REQUEST)
_FUNCTION: Final = int(MessageType.FUNCTION)
_CANCEL: Final = int(MessageType.CANCEL)
_MAX_TIMEOUT_S: Final = MAX_TIMEOUT_MS / 1000
_MAX_BYTES: Final = 1 << 16
"""The largest request for a thread connection: a larger one would block its thread while it is sent."""
_OURS: Final = b"arpc."
"""A pickle that names anything of this package may hold objects that belong to the loop, such as an RRef."""
_NUMBERS: Final = (float, int)
_REPORT_S: Final = 0.05
_NOTHING: Final = Content(b"")
_MAX_CONNECTIONS: Final = 32
"""The most connections to one peer. Each takes a socket and 256 KiB on both sides. Without a free one, use the loop."""

TAKES_LOOP: Final = object()
"""Returned if a call cannot be made on a thread connection; nothing of it has been sent."""


class BlockingCalls:
    """The calls that threads of one worker make on thread connections."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._codec = agent.codec
        options = agent.options
        self.is_on = not agent.policy.is_restricted and agent.placement is None and not options.max_calls_in_flight
        """False if every call must take the loop."""
        self._are_told = options.timeouts_travel
        self._shared_from_bytes = options.shared_memory_from_bytes
        self._ids = count(1)
        self._reports: deque[tuple[str, Any, int, BaseException | None]] = deque()
        self._is_report_due = False

    # -- in any thread but the loop's

    def call(  # noqa: PLR0911 - the hot path, which ends where a call turns out not to be plain
        self,
        peer: Peer,
        function: Any,
        packed: Prepared | tuple[()],
        timeout: float | Unset,
        *,
        name: str = "",
        is_metered: bool = False,
    ) -> Any:
        """Make a call. Return its result, or `TAKES_LOOP`; raise its error.

        ``packed`` are its arguments, packed by `Agent.prepare`. ``name`` is `Call.called`.
        """
        agent = self._agent
        pool = _pool_of(peer)
        scope = current_scope.get()
        if (
            not self.is_on
            or (scope is not None and scope.__class__ is not WorkerScope)  # a handler's calls end with it
            or agent.is_closing
            or agent.is_wrapped
            or agent.is_intercepted
        ):
            return TAKES_LOOP
        if pool is None or not pool.free:
            self._ask_for_connection(peer, pool)
            return TAKES_LOOP
        if agent.meter is not None and not is_metered:
            return self._metered(peer, function, packed, timeout, name)
        id_ = next(self._ids)
        if isinstance(timeout, Unset):
            timeout_s = agent.timeouts.default_s
        elif _is_plain(timeout):
            timeout_s = timeout
        else:
            return TAKES_LOOP
        function_id = peer.function_ids.get(function) if not packed or packed.is_named else None
        if function_id is None or function_id in pool.not_for:
            return TAKES_LOOP
        content = _NOTHING
        if packed:
            if len(packed.pickle) > _MAX_BYTES or _OURS in packed.pickle:
                return TAKES_LOOP
            content = self._codec.pack(packed.slots, packed.pickle) if packed.slots else Content(packed.pickle)
            if content.buffers or content.size_bytes() > _MAX_BYTES:
                return TAKES_LOOP
        free = pool.free
        try:
            connection = free.pop()
        except IndexError:
            return TAKES_LOOP  # other threads took the last ones
        data = self._framed(connection, peer, function, function_id, packed, content, id_, timeout_s)
        if data is None:
            _put_back(free, connection)
            return TAKES_LOOP  # another worker has joined under the peer's name
        connection.calling = name or function  # first: a call that is counted must not look finished
        connection.calls_made += 1
        try:
            answer = connection.request(data, id_, timeout_s)
        except NotSentError:
            connection.calling = None
            connection.calls_made -= 1
            self._drop(pool, connection)
            return TAKES_LOOP
        except BaseException as error:  # noqa: BLE001 - `_raise` raises it, translated
            connection.calling = None  # first: a signal may interrupt any later step
            self._raise(peer, pool, connection, id_, name or function, error)
        connection.calling = None
        free.append(connection)
        if connection.is_ended:
            _take_back(free, connection)
        return self._answer(peer, pool, function_id, name or function, answer)

    def _framed(
        self,
        connection: ThreadConnection,
        peer: Peer,
        function: Any,
        function_id: int,
        packed: Prepared | tuple[()],
        content: Content,
        id_: int,
        timeout_s: float,
    ) -> bytes | None:
        """Frame a request, after its function's definition if the peer lacks that; None if the peer has changed."""
        definition = b""
        if function_id not in connection.known:
            known = peer.definition(function)
            if known is None or known[0] != function_id:
                return None
            connection.known.add(function_id)
            definition = frame(_FUNCTION, 0, 0, function_id, 0, known[1])
        timeout_ms = min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS) if self._are_told and timeout_s else 0
        flags = RequestFlag.KWARGS if packed and packed.kwargs else 0
        return definition + connection.framed(_REQUEST, flags, id_, function_id, timeout_ms, content)

    def _raise(
        self,
        peer: Peer,
        pool: ThreadConnections,
        connection: ThreadConnection,
        id_: int,
        function: Any,
        error: BaseException,
    ) -> NoReturn:
        """Raise the error of a call that got no reply. ``connection`` was taken for that call."""
        name = name_of(function)
        if isinstance(error, TimeoutError):
            if self._are_told and not connection.is_ended:
                connection.owed.discard(id_)  # a call that is cancelled before it runs gets no reply
                connection.send(frame(_CANCEL, 0, id_, 0, 0, b""))
            self._give_back(pool, connection)
            raise RpcTimeoutError(
                f"{name} was sent to worker {peer.info.name!r} and did not end within its timeout"
            ) from None
        self._drop(pool, connection)
        if not isinstance(error, OSError):
            raise error  # the thread was interrupted
        if connection.ending is not None:
            raise connection.ending(name) from error
        if isinstance(error, ProtocolError):
            worker = peer.info.name
            logger.warning(
                "a connection of a thread to worker %s was closed: %s", worker, error, extra={"peer": worker}
            )
        farewell = error.farewell if isinstance(error, ThreadConnectionClosedError) else None
        raise peer.lost_with(error, farewell, name) from error

    def _answer(self, peer: Peer, pool: ThreadConnections, function_id: int, function: Any, message: Message) -> Any:
        """Return the result that a reply holds, or raise its error."""
        if sum(buffer.nbytes for buffer in message.buffers) >= self._shared_from_bytes:
            pool.not_for.add(function_id)  # large results are faster through shared memory
        if isinstance(message, Reply) and not (message.body or message.memory):
            return None
        work = partial(self._agent.receiver.answer, peer.info, message, name_of(function))
        if isinstance(message, Reply) and not message.meta and _OURS not in bytes(message.body):
            # unpacking a result does not depend on the torch modes that its caller has switched off
            return torchstate.run_with(torchstate.DEFAULTS, work)
        return self._agent.on_loop(work)

    def _give_back(self, pool: ThreadConnections, connection: ThreadConnection) -> None:
        if connection.is_ended:
            self._drop(pool, connection)
        else:
            _put_back(pool.free if len(connection.owed) < MAX_OWED else pool.aside, connection)

    def _drop(self, pool: ThreadConnections, connection: ThreadConnection) -> None:
        connection.close()
        self._on_loop_soon(pool.forget, connection)

    def _on_loop_soon(self, function: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, and so have its connections
            self._agent.loop.call_soon_threadsafe(function, *args)

    # -- connections

    def _ask_for_connection(self, peer: Peer, pool: ThreadConnections | None) -> None:
        if pool is None:
            self._on_loop_soon(self._open_connection, peer)
        elif not pool.is_asked_for and len(pool.all) < pool.limit:
            pool.is_asked_for = True  # if two threads ask at once, the second has no effect
            self._on_loop_soon(self._open_connection, peer)

    def _open_connection(self, peer: Peer) -> None:
        """Open one more connection to a peer. Runs on the loop."""
        agent = self._agent
        if agent.is_closing or agent.is_wrapped:
            return
        pool = _pool_of(peer)
        if pool is None:
            limit = 0 if peer.info.id == agent.info.id else _MAX_CONNECTIONS
            peer.thread_connections = pool = ThreadConnections(
                peer.info.name, agent.loop, partial(self.connect, peer), limit, agent.options.busy_poll
            )
        pool.open_another(peer.connection)

    async def connect(self, peer: Peer) -> ThreadConnection:
        """Open a further connection to a peer. Raises `OSError` or `WireError`."""
        name, options, dialer = peer.info.name, self._agent.options, self._agent.connector.dialer
        record = await self._agent.resolve(name)
        main = peer.connection
        if main is None or main.peer.incarnation != record.incarnation:
            raise WireError(f"there is no connection to worker {name!r} that one of a thread could belong to")
        # a thread uses a plain socket, without TLS
        schemes = ("unix://", "tcp://") if options.tls is None else ("unix://",)
        usable = [address for address in dialer.usable(record) if address.startswith(schemes)]
        if not usable:
            raise WireError(f"worker {name!r} has no address that a thread can connect to")
        protocol = dialer.protocol(Role.CONNECTOR, only(record), features=(THREAD,))
        async with asyncio.timeout(options.connect_timeout):
            return await open_thread_connection(usable[0], protocol)

    # -- meters

    def _metered(
        self, peer: Peer, function: Any, packed: Prepared | tuple[()], timeout: float | Unset, name: str
    ) -> Any:
        began_ns = perf_counter_ns()
        error: BaseException | None = None
        result: Any = None
        try:
            result = self.call(peer, function, packed, timeout, name=name, is_metered=True)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if result is not TAKES_LOOP:
                self._report(peer.info.name, name or function, perf_counter_ns() - began_ns, error)
            del error  # it refers to this frame
        return result

    def _report(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        """Queue a call for the meter, which belongs to the loop: waking the loop for each call would cost too much."""
        self._reports.append((peer, function, duration_ns, error))
        if not self._is_report_due:
            self._is_report_due = True
            self._on_loop_soon(self._agent.loop.call_later, _REPORT_S, self._report_to_meter)

    def _report_to_meter(self) -> None:
        self._is_report_due = False  # first: a report that arrives meanwhile schedules again
        meter = self._agent.meter
        while self._reports:
            report = self._reports.popleft()
            if meter is not None:
                meter.call_ended(*report)


def _pool_of(peer: Peer) -> ThreadConnections | None:
    return peer.thread_connections  # type: ignore[return-value]  # only this module makes them


def _is_plain(timeout: Any) -> bool:
    """Whether it is a valid number of seconds. Any other value takes the loop, which reports what is wrong with it."""
    return timeout.__class__ in _NUMBERS and 0 <= timeout <= _MAX_TIMEOUT_S


def _put_back(free: list[ThreadConnection], connection: ThreadConnection) -> None:
    """Return a connection that its thread has finished with."""
    free.append(connection)
    if connection.is_ended:
        _take_back(free, connection)


def _take_back(free: list[ThreadConnection], connection: ThreadConnection) -> None:
    """Close a connection that its owner has ended, before or after it was put back, unless the owner has closed it."""
    with suppress(ValueError):
        free.remove(connection)
        connection.close()
