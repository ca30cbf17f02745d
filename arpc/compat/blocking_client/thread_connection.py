"""A connection on which a blocking thread itself sends a request and reads the reply.

A `Connection` belongs to a loop, so a thread that waits for a call would wait for the loop too, twice: for its request
to be written, and for the reply to be passed on. On a `ThreadConnection` the thread does both. It uses the same
protocol and handshake over a blocking socket; timeouts are the socket's own (``SO_RCVTIMEO``), so that waiting takes
one system call and no timer.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from arpc.compat.blocking_client.reply_poll import ReplyPoll
from arpc.errors import ConnectionClosedError, ProtocolError, WireError
from arpc.transport.sockets import connect_socket
from arpc.wire.frames import ONE_OFF, frame
from arpc.wire.messages import Failure, Goodbye, Message, MessageType, Reply
from arpc.wire.protocol import Protocol, State
from arpc.wire.values.content import Content
from arpc.wire.values.schemas import Schema

__all__ = ["NotSentError", "ThreadConnection", "ThreadConnectionClosedError", "open_thread_connection"]

_SCHEMA: Final = int(MessageType.SCHEMA)
_TIMEVAL: Final = struct.Struct("ll")
_LEAST_S: Final = 1e-4  # no time at all would mean no limit
_MOST_S: Final = 1e8
_ANY: Final = 0
_MAX_SCHEMAS: Final = 64
_SURE_S: Final = 1.0
"""Seconds without a call after which the next one first checks whether the peer has closed the connection."""
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Idle time and interval in seconds, and the number of probes."""


class NotSentError(WireError):
    """The peer has not received the whole request, so the function has not run."""


class ThreadConnectionClosedError(ConnectionClosedError):
    """The connection has ended. ``farewell`` is the reason in the peer's goodbye, None if there was no goodbye."""

    def __init__(self, text: str, farewell: str | None) -> None:
        super().__init__(text)
        self.farewell = farewell


class ThreadConnection:
    """One open connection. Its users ensure that one thread uses it at a time; only `wake` may be called by others."""

    def __init__(self, sock: socket.socket, protocol: Protocol, address: str) -> None:
        """Take a socket that is connected and blocks, with its handshake done."""
        self.address = address
        self.is_ended = False
        """True if no further call may be made on it. Set by its owner on the loop, or after a failed call."""
        self.ending: Callable[[str], Exception] | None = None
        """Set if the owner ended it with an error for its calls: makes that error from the name of a function."""
        self.calling: Any = None
        """The function whose call is in flight, for statistics and debugging; None if there is none."""
        self.call_id = 0
        self.due_at = 0.0
        """The deadline of the last call, in monotonic time; 0 if it has none."""
        self.calls_made = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.known: set[int] = set()
        """The numbers of the functions whose definition was sent on this connection."""
        self.owed: set[int] = set()
        """The ids of calls that were given up and have not been answered."""
        self.used_at = monotonic()
        self.poll: ReplyPoll | None = None
        """Polls for replies before the thread sleeps; None: it sleeps at once."""
        self._socket = sock
        self._protocol = protocol
        self._send = sock.sendall
        self._receive_into = sock.recv_into
        self._get_buffer = protocol.get_buffer
        self._has_input = _poller_of(sock)
        self._schemas: dict[Schema, int] = {}
        """The schemas that were announced to the peer, with their numbers."""
        self._farewell: str | None = None
        self._timeout_s = 0.0
        self._is_closed = False

    def framed(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content) -> bytes:
        """Frame a message without large tensors, after the announcement of its schema if the peer needs it."""
        schema, announcement = content.schema, b""
        if schema is None:
            return content.framed(type_, flags, id_, arg, timeout_ms, 0)
        number = self._schemas.get(schema, ONE_OFF)
        if number == ONE_OFF and schema.uses > 1 and len(self._schemas) < _MAX_SCHEMAS:
            number = self._schemas[schema] = len(self._schemas) + 1
            announcement = frame(_SCHEMA, 0, 0, number, 0, schema.table)
        return announcement + content.framed(type_, flags, id_, arg, timeout_ms, number)

    def request(self, data: bytes, id_: int, timeout_s: float) -> Message:
        """Send a request and wait for the reply, a `Reply` or a `Failure`.

        ``timeout_s`` 0 is no limit. Raises `TimeoutError`, after which the connection is usable unless it `is_ended`;
        or `NotSentError`, `ThreadConnectionClosedError`, `ProtocolError` or another `OSError`, after which it is not.
        """
        now = monotonic()
        if now - self.used_at > _SURE_S and not self.is_sound():
            raise NotSentError(f"{self.address} closed the connection while it was not used")
        self.used_at = now
        self.call_id = id_
        self.due_at = now + timeout_s if timeout_s else 0.0
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        try:
            self._send(data)
        except BlockingIOError:
            self.is_ended = True  # it is unknown how much of it the peer has
            raise TimeoutError from None
        except OSError as error:
            # the peer ignores a frame that is incomplete
            raise NotSentError(str(error)) from error
        self.bytes_sent += len(data)
        if self.poll is not None:
            self.poll.wait(self._has_input)
        while True:
            try:
                size_bytes = self._receive_into(self._get_buffer(_ANY))
            except BlockingIOError:
                self.owed.add(id_)
                raise TimeoutError from None
            except TimeoutError as error:  # ETIMEDOUT: the peer's host does not answer
                raise ThreadConnectionClosedError(f"{self.address} does not answer: {error}", None) from error
            self.bytes_received += size_bytes
            answer = self._take(size_bytes, id_)
            if answer is not None:
                return answer
            if self.due_at:
                # this was not the reply, or not all of it
                left_s = self.due_at - monotonic()
                if left_s <= 0:
                    self.owed.add(id_)
                    raise TimeoutError
                self._set_timeout(left_s)

    def _take(self, size_bytes: int, id_: int) -> Message | None:
        """Handle the bytes that were read. Return the reply to the call, if it is complete by now."""
        protocol = self._protocol
        if not size_bytes and 0 < self.due_at < monotonic():
            self.is_ended = True
            raise TimeoutError  # the timeout is why `wake` was called
        if not size_bytes:
            raise ThreadConnectionClosedError(f"{self.address} closed the connection without a goodbye", self._farewell)
        answer: Message | None = None
        for message in protocol.receive(size_bytes):
            if isinstance(message, Goodbye):
                self._farewell = bytes(message.body).decode(errors="replace") or "it closed the connection"
            elif not isinstance(message, Reply | Failure):
                raise ProtocolError(f"the connection of a thread brought {message.type.name}")
            elif message.id == id_:
                answer = message
            else:
                self.owed.discard(message.id)  # that call was given up before its reply came
        if protocol.output:
            self._send(protocol.take_output())
        return answer

    def count_sent(self) -> int:
        """Return the number of bytes sent."""
        return self.bytes_sent

    def send(self, data: bytes) -> None:
        """Send a message that has no reply. If that fails, no further call is made on the connection."""
        try:
            self._send(data)
        except OSError:
            self.is_ended = True

    def is_sound(self) -> bool:
        """Whether the peer has kept it open. Handles replies to calls that were given up; never blocks."""
        try:
            while True:
                size_bytes = self._socket.recv_into(self._get_buffer(_ANY), 0, socket.MSG_DONTWAIT)
                self._take(size_bytes, -1)
        except BlockingIOError:
            return self._farewell is None
        except (OSError, ProtocolError, ConnectionClosedError):
            return False

    def _set_timeout(self, timeout_s: float) -> None:
        seconds = min(max(timeout_s, _LEAST_S), _MOST_S) if timeout_s else 0.0
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = timeout_s

    # -- closing

    def wake(self) -> None:
        """Shut down the socket, so that a thread that waits on it sees the end, or its own timeout. From any thread."""
        self.is_ended = True
        with suppress(OSError):  # the socket is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, reason: str = "") -> None:
        """Close it, with a goodbye if it can be sent at once. By its user, or by its owner while it is unused."""
        if self._is_closed:
            return
        self._is_closed = self.is_ended = True
        goodbye = self._protocol.say_goodbye(reason)
        with suppress(OSError):  # the peer sees the end of the connection anyway
            self._socket.send(goodbye, socket.MSG_DONTWAIT)
        self.abandon()
        self._protocol.close()

    def abandon(self) -> None:
        """Close the socket without a message to the peer: after a fork, another process still has it."""
        self._is_closed = self.is_ended = True
        self._socket.close()


async def open_thread_connection(address: str, protocol: Protocol) -> ThreadConnection:
    """Connect, and do the handshake. Raises `OSError`, `HandshakeError` or `ProtocolError`."""
    loop = asyncio.get_running_loop()
    sock = await connect_socket(address)
    try:
        while protocol.state is State.HANDSHAKE:
            if protocol.output:
                await loop.sock_sendall(sock, protocol.take_output())
            size_bytes = await loop.sock_recv_into(sock, protocol.get_buffer(_ANY))
            if not size_bytes:
                raise ConnectionClosedError(f"{address} closed the connection in its handshake")
            protocol.receive(size_bytes)
        sock.setblocking(True)
        _keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return ThreadConnection(sock, protocol, address)


def _poller_of(sock: socket.socket) -> Callable[[int], Any]:
    """Return a function that tells whether a socket can be read, within so many milliseconds."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return poller.poll


def _keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive: nothing is sent during a long call, and routers drop connections that are silent.

    Connections of the loop have a heartbeat instead.
    """
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # some systems lack some of these
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
