"""A connection for a thread that blocks: it sends a request and reads the reply to it by itself.

A `Connection` belongs to a loop, so a thread that waits for a call would wait for the loop too, twice: to have its
request written, and to be told of the reply. On a `ThreadConnection` the thread does both. It speaks the same protocol,
with the same handshake, over a socket that blocks; deadlines are the socket's own (``SO_RCVTIMEO``), so that waiting
takes one system call and no timer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

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
"""After so long without a call, the next one first looks whether the peer has closed the connection."""
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""In seconds, and how often."""


class NotSentError(WireError):
    """The peer has not got the whole request, so it has not run."""


class ThreadConnectionClosedError(ConnectionClosedError):
    """The connection has ended. ``farewell`` is what the peer said of it, None if it said nothing."""

    def __init__(self, text: str, farewell: str | None) -> None:
        super().__init__(text)
        self.farewell = farewell


class ThreadConnection:
    """One open connection. Used by one thread at a time, which keeps to that; only `wake` may be called by others."""

    def __init__(self, sock: socket.socket, protocol: Protocol, address: str) -> None:
        """The socket is connected and blocks, and the handshake is done."""
        self.address = address
        self.is_ended = False
        """No call is to be made on it any more. Set by its owner, on the loop."""
        self.ending: Callable[[str], Exception] | None = None
        """Why, if the owner has a reason that calls shall raise: makes the error for the name of a function."""
        self.calling: Any = None
        """The function whose call is under way, for those who look."""
        self.call_id = 0
        self.due_at = 0.0
        """When the time of the last call is up, 0 if it has no limit."""
        self.calls_made = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.known: set[int] = set()
        """Functions that the peer has been told of on this connection, by their numbers."""
        self.owed: set[int] = set()
        """Calls that nobody waits for any more, and that have not been answered."""
        self.used_at = monotonic()
        self._socket = sock
        self._protocol = protocol
        self._send = sock.sendall
        self._receive_into = sock.recv_into
        self._get_buffer = protocol.get_buffer
        self._schemas: dict[Schema, int] = {}
        """What has been announced to the peer."""
        self._farewell: str | None = None
        self._timeout_s = 0.0
        self._is_closed = False

    def framed(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content) -> bytes:
        """A message without large tensors, with what has to be announced before it."""
        schema, announcement = content.schema, b""
        if schema is None:
            return content.framed(type_, flags, id_, arg, timeout_ms, 0)
        number = self._schemas.get(schema, ONE_OFF)
        if number == ONE_OFF and schema.uses > 1 and len(self._schemas) < _MAX_SCHEMAS:
            number = self._schemas[schema] = len(self._schemas) + 1
            announcement = frame(_SCHEMA, 0, 0, number, 0, schema.table)
        return announcement + content.framed(type_, flags, id_, arg, timeout_ms, number)

    def request(self, data: bytes, id_: int, timeout_s: float) -> Message:
        """Send a request and wait for the answer, a `Reply` or a `Failure`.

        ``timeout_s`` 0 is no limit. Raises `TimeoutError`, after which the connection goes on unless it `is_ended`; or
        `NotSentError`, `ThreadConnectionClosedError`, `ProtocolError` or another `OSError`, after which it is unusable.
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
            self.is_ended = True  # nobody knows how much of it the peer has
            raise TimeoutError from None
        except OSError as error:
            # a frame that did not leave as a whole is none
            raise NotSentError(str(error)) from error
        self.bytes_sent += len(data)
        while True:
            try:
                size_bytes = self._receive_into(self._get_buffer(_ANY))
            except BlockingIOError:
                self.owed.add(id_)
                raise TimeoutError from None
            except TimeoutError as error:  # of the system's: the peer's host does not answer
                raise ThreadConnectionClosedError(f"{self.address} does not answer: {error}", None) from error
            self.bytes_received += size_bytes
            answer = self._take(size_bytes, id_)
            if answer is not None:
                return answer
            if self.due_at:
                # what has come was not the answer, or not all of it
                left_s = self.due_at - monotonic()
                if left_s <= 0:
                    self.owed.add(id_)
                    raise TimeoutError
                self._set_timeout(left_s)

    def _take(self, size_bytes: int, id_: int) -> Message | None:
        """What a read has brought; the answer to a call, if that is complete by now."""
        protocol = self._protocol
        if not size_bytes and 0 < self.due_at < monotonic():
            self.is_ended = True
            raise TimeoutError  # it was woken because of that
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
                self.owed.discard(message.id)  # it was given up, and the two crossed on their way
        if protocol.output:
            self._send(protocol.take_output())
        return answer

    def count_sent(self) -> int:
        """Bytes sent."""
        return self.bytes_sent

    def tell(self, data: bytes) -> None:
        """Send something that is not answered. If it cannot be sent, the next call will find out."""
        try:
            self._send(data)
        except OSError:
            self.is_ended = True

    def is_sound(self) -> bool:
        """Whether it is as it was left. Takes what was owed meanwhile; never blocks."""
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

    # -- the end

    def wake(self) -> None:
        """Let the thread that waits on it find that the connection, or its own time, has ended. From any thread."""
        self.is_ended = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, reason: str = "") -> None:
        """End it, with a goodbye if nothing is under way. By its user, or by its owner while nobody uses it."""
        if self._is_closed:
            return
        self._is_closed = self.is_ended = True
        goodbye = self._protocol.say_goodbye(reason)
        with suppress(OSError):  # the peer sees the end of it all the same
            self._socket.send(goodbye, socket.MSG_DONTWAIT)
        self.abandon()
        self._protocol.close()

    def abandon(self) -> None:
        """Forget the socket without a word to the peer: a fork has it too."""
        self._is_closed = self.is_ended = True
        self._socket.close()


async def open_thread_connection(address: str, protocol: Protocol) -> ThreadConnection:
    """Connect, and go through the handshake. Raises `OSError`, `HandshakeError` or `ProtocolError`."""
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


def _keep_alive(sock: socket.socket) -> None:
    """Have the system look whether the peer's host is there: a long call is silent, and routers forget what is silent.

    A connection of the loop has a heartbeat.
    """
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # not all of them everywhere
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
