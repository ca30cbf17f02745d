"""The contract of a transport, and what all connections have in common.

A `Connection` carries frames between two workers. It owns a `wire.protocol.Protocol` for what comes in, gathers small frames so that
all of one loop turn go out in one write, and sends large tensors in chunks between them.

Errors. `Transport.connect` raises `OSError` (no such address, refused), `ConfigurationError` (an address that cannot be), `HandshakeError`
or `ProtocolError` (the peer is not one of ours), `TimeoutError` is left to the caller. `Connection.send` raises
`ConnectionClosedError` once the connection is closed; nothing else. How a connection ended is told once, to `Receiver.connection_lost`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from typing import Protocol as TypingProtocol

from arpc.errors import ConnectionClosedError, HandshakeError, WireError
from arpc.wire.frames import CHUNK_BYTES, HEADER, frame
from arpc.wire.handshake import Identity
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol, State

__all__ = ["BulkSend", "Connection", "Listener", "Receiver", "Transport"]

logger = logging.getLogger("arpc.transport")

_pack_header = HEADER.pack
_DATA: Final = int(MessageType.DATA)
_DROP_DATA: Final = int(MessageType.DROP_DATA)


class Receiver(TypingProtocol):
    """Who hears of what happens on a connection. Called on the loop; must not raise."""

    def connection_opened(self, connection: Connection) -> None:
        """The handshake is done: ``connection.peer`` is who it says."""

    def messages_received(self, connection: Connection, messages: list[Message]) -> None: ...

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        """The last thing heard of a connection, exactly once, whether it was ever open or not. None: closed on purpose."""

    def output_drained(self, connection: Connection) -> None:
        """The peer takes bytes again, after `Connection.is_congested` was true."""


class BulkSend:
    """A message whose large tensors are on their way."""

    __slots__ = ("buffers", "id", "index", "position", "size_bytes", "started")

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers
        self.id = -1
        self.index = 0
        self.position = 0
        self.size_bytes = sum(buffer.nbytes for buffer in buffers)
        self.started = False


class Connection(ABC):
    """One connection, not tied to how bytes move. Belongs to the loop it was made on."""

    def __init__(self, protocol: Protocol, receiver: Receiver) -> None:
        self.loop = asyncio.get_running_loop()
        self.protocol = protocol
        self.receiver = receiver
        self.owner: Any = None
        """For whoever receives: what it keeps about this connection."""
        self.is_congested = False
        self.heard_from = True
        """Set whenever bytes arrive; whoever watches for silence clears it."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.frames_sent = 0
        self.writes = 0
        self._opened: asyncio.Future[None] = self.loop.create_future()
        # nobody may be waiting when a handshake fails; the error is told to the receiver as well
        self._opened.add_done_callback(_retrieve)
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._out: list[bytes] = []
        self._bulk: deque[BulkSend] = deque()
        self._bulk_bytes = 0
        self._bulk_count = 0
        self._is_reading = False
        self._is_closed = False
        self._error: Exception | None = None

    # -- what a kind of connection provides

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Hand bytes to the operating system, or keep them until it takes them."""

    @abstractmethod
    def _write_chunk(self, header: bytes, chunk: memoryview) -> None:
        """The same for a piece of a tensor, which must not be copied."""

    @abstractmethod
    def _unsent_bytes(self) -> int:
        """Bytes that were written and not yet taken."""

    @abstractmethod
    def _shut(self) -> None:
        """Close once what was written has gone out. Ends in `_ended`."""

    @abstractmethod
    def _abort(self) -> None:
        """Close now. Ends in `_ended`."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the peer is, for people to read."""

    # -- sending

    @property
    def peer(self) -> Identity:
        peer = self.protocol.peer
        if peer is None:
            raise ConnectionClosedError("the handshake is not done")
        return peer

    @property
    def is_open(self) -> bool:
        return self.protocol.state is State.OPEN and not self._is_closed

    @property
    def unsent_bytes(self) -> int:
        """Bytes this side still holds because the peer does not take them."""
        return self._unsent_bytes() + self._bulk_bytes + sum(map(len, self._out))

    def send(self, data: bytes) -> None:
        """Send one frame with no large tensors. It goes out at the end of this loop turn."""
        out = self._out
        out.append(data)
        if len(out) == 1 and not self._is_reading:
            if self._is_closed:
                out.clear()
                raise ConnectionClosedError(f"the connection to {self.address} is closed")
            self.loop.call_soon(self.flush)

    def send_bulk(self, data: bytes, buffers: list[memoryview]) -> BulkSend:
        """Send one frame, then its large tensors in chunks, between which other frames may pass."""
        self.send(data)
        bulk = BulkSend(buffers)
        # the peer counts frames that have buffers, so this number is theirs too
        bulk.id = self._bulk_count
        self._bulk_count += 1
        self._bulk.append(bulk)
        self._bulk_bytes += bulk.size_bytes
        return bulk

    def drop_bulk(self, bulk: BulkSend) -> bool:
        """Stop sending tensors nobody wants any more. False if all of them have gone out already."""
        if bulk not in self._bulk:
            return False
        self._bulk.remove(bulk)
        rest = sum(buffer.nbytes for buffer in bulk.buffers[bulk.index :]) - bulk.position
        self._bulk_bytes -= rest
        self.send(frame(_DROP_DATA, 0, bulk.id, 0, 0, b""))
        return True

    def flush(self) -> None:
        """Write what was sent in this turn."""
        out = self._out
        if self._is_closed:
            out.clear()
            return
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            self.frames_sent += len(out)
            self.writes += 1
            self.bytes_sent += len(data)
            out.clear()
            self._write(data)
        if self._bulk and not self.is_congested:
            self._pump()

    def _pump(self) -> None:
        """Write chunks of the messages under way, in turns, until the peer is full."""
        while self._bulk and not self.is_congested and not self._is_closed:
            bulk = self._bulk.popleft()
            buffer = bulk.buffers[bulk.index]
            chunk = buffer[bulk.position : bulk.position + CHUNK_BYTES]
            size = chunk.nbytes
            bulk.position += size
            if bulk.position == buffer.nbytes:
                bulk.index += 1
                bulk.position = 0
            if bulk.index < len(bulk.buffers):
                self._bulk.append(bulk)
            self._bulk_bytes -= size
            self.bytes_sent += size
            self.writes += 1
            self._write_chunk(_pack_header(size, _DATA, 0, 0, bulk.id, 0, 0, 0, 0), chunk)

    def _congested(self) -> None:
        self.is_congested = True

    def _drained(self) -> None:
        self.is_congested = False
        self.flush()
        if not self.is_congested and not self._is_closed:
            self.receiver.output_drained(self)

    # -- receiving

    def _received(self, size_bytes: int) -> None:
        """Bytes were put where ``protocol.get_buffer`` said. Never raises: uvloop would drop the connection without a word."""
        self.heard_from = True
        self.bytes_received += size_bytes
        protocol = self.protocol
        was_open = protocol.state is not State.HANDSHAKE
        self._is_reading = True
        try:
            messages = protocol.receive(size_bytes)
            if not was_open and protocol.state is not State.HANDSHAKE:
                self._greeted()
            if messages:
                self.receiver.messages_received(self, messages)
        except (WireError, OSError) as error:
            self._failed(error)
        except Exception as error:
            logger.exception("an internal error on the connection to %s closes it", self.address)
            self._failed(error)
        finally:
            self._is_reading = False
            if protocol._output:
                self._out.append(protocol.take_output())
            if self._out:
                self.flush()

    def _greeted(self) -> None:
        if not self._opened.done():
            # say WELCOME before anything the receiver sends
            self._out.append(self.protocol.take_output())
            self._opened.set_result(None)
            self.receiver.connection_opened(self)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, HandshakeError):
            self.abort(error)
            return
        # a refusal is worth a farewell
        farewell = self.protocol.take_output()
        if farewell and not self._is_closed:
            self._write(farewell)
        self._error = self._error or error
        self._shut()

    # -- the end

    async def wait_opened(self) -> None:
        """Return when the handshake is done; raises what made it fail."""
        await asyncio.shield(self._opened)

    async def wait_closed(self) -> None:
        """Return when the connection has ended."""
        await asyncio.shield(self._closed)

    def start(self) -> None:
        """Say what the protocol says first."""
        data = self.protocol.take_output()
        if data:
            self._write(data)

    def close(self, reason: str = "") -> None:
        """Say goodbye, and close once all that was sent has gone out."""
        if self._is_closed or self.protocol.state is State.CLOSED:
            return
        goodbye = self.protocol.say_goodbye(reason)
        if goodbye:
            self._out.append(goodbye)
            self.flush()
        self._shut()

    def abort(self, error: Exception | None = None) -> None:
        """Close now; what has not gone out is lost."""
        if not self._is_closed:
            self._error = self._error or error
            self._abort()

    def _ended(self, error: Exception | None) -> None:
        """The kind of connection tells that it is over."""
        if self._is_closed:
            return
        self._is_closed = True
        self.protocol.close()
        self._out.clear()
        self._bulk.clear()
        self._bulk_bytes = 0
        error = self._error or error
        if not self._opened.done():
            self._opened.set_exception(error or ConnectionClosedError("the connection was closed in its handshake"))
        if not self._closed.done():
            self._closed.set_result(None)
        self.receiver.connection_lost(self, error)

    def statistics(self) -> dict[str, int]:
        """Counters of this connection."""
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "frames_sent": self.frames_sent,
            "writes": self.writes,
            "unsent_bytes": 0 if self._is_closed else self.unsent_bytes,
        }


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


class Listener(ABC):
    """Something others can connect to."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where to connect, with the port or path that was really taken."""

    @abstractmethod
    async def aclose(self) -> None:
        """Accept no more. Connections that exist are not touched."""


Accept = Callable[[], tuple[Protocol, Receiver]]
"""Called for each connection that comes in: what it shall speak, and who shall hear of it."""


class Transport(ABC):
    """A way to reach others, named by the scheme of its addresses."""

    @abstractmethod
    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        """A connection whose handshake has begun; `Connection.wait_opened` tells how it went."""

    @abstractmethod
    async def listen(self, address: str, accept: Accept) -> Listener:
        """Listen there. An address may leave the choice of port or path to us."""
