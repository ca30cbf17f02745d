"""The contract of a transport, and what all connections have in common.

A `Connection` carries frames between two workers. It owns a `wire.protocol.Protocol` for what comes in, gathers small
frames so that all of one loop turn go out in one write, and sends large tensors in chunks between them.

If a peer with a CPU of its own had to wait until the last frame of a turn is made, and this side until the peer has
dealt with all of them, one of two CPUs would always be idle. So what goes out then is written in *portions*, of half
as many frames as the last read has brought: the peer is at work on the first while the next is made. The side that has
more to do finds more in each of its reads, and so writes least often. On one CPU the fewer writes there are the better.

Errors. `Transport.connect` raises `OSError` (no such address, refused), `ConfigurationError` (an address that cannot
be), `HandshakeError` or `ProtocolError` (the peer is not one of ours), `TimeoutError` is left to the caller.
`Connection.send` raises `ConnectionClosedError` once the connection is closed; nothing else. `Transport.listen` raises
`OSError` (taken, not ours to use) and `ConfigurationError`. How a connection ended is told once, to
`Receiver.connection_lost`; of an attempt for which `connect` raises, the receiver may hear nothing at all.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, Final, TypeVar
from typing import Protocol as TypingProtocol

from arpc.errors import ConnectionClosedError, HandshakeError, WireError
from arpc.log import get_logger
from arpc.transport.bulk import SMALL_MESSAGE_BYTES, BulkQueue, BulkSend
from arpc.transport.connection_limits import HANDSHAKE_S, ConnectionLimits
from arpc.transport.write_lock import WriteLock
from arpc.wire.frames import HEADER_BYTES, ONE_OFF, frame, pack_header
from arpc.wire.handshake import Identity
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import MAX_SCHEMA_BYTES, MAX_SCHEMAS, Protocol, State
from arpc.wire.values.content import Content
from arpc.wire.values.schemas import Schema

if TYPE_CHECKING:
    from arpc.transport.shm import Channel
    from arpc.transport.striping import Lanes

__all__ = ["SMALL_MESSAGE_BYTES", "BulkSend", "Connection", "Listener", "Receiver", "Transport"]

logger = get_logger("arpc.transport")

_DATA: Final = int(MessageType.DATA)
_DROP_DATA: Final = int(MessageType.DROP_DATA)
_LENT: Final = int(MessageType.LENT)
_SCHEMA: Final = int(MessageType.SCHEMA)
_USES_TO_ANNOUNCE: Final = 2
_FEWEST_A_WRITE: Final = 2
_MOST_A_WRITE: Final = 32
_READS_A_LOOK: Final = 64
"""Between two looks whether the peer is on the same CPU: processes are moved seldom."""
# How long a side that has said goodbye waits for the other to close, once nothing moves any more
_LINGER_S: Final = 2.0


class Receiver(TypingProtocol):
    """Who hears of what happens on a connection.

    Called on the loop; what it raises is logged and ends the connection.
    """

    def connection_opened(self, connection: Connection) -> None:
        """The handshake is done: ``connection.peer`` is who it says."""

    def messages_received(self, connection: Connection, messages: list[Message]) -> None: ...

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        """The last thing heard of a connection, exactly once, whether it was ever open or not.

        None: closed on purpose, by this side or by a goodbye of the other.
        """

    def output_drained(self, connection: Connection) -> None:
        """There is room again, after `Connection.is_congested` or `Connection.is_behind` was true."""


class Phase(IntEnum):
    """How far this side is on the way to the end of a connection. `Protocol.state` says what the peer may still say."""

    SENDING = auto()
    CLOSING = auto()
    """It has said goodbye, or why it refuses the peer: what was sent before goes out, and no frame is sent any more."""
    ABORTED = auto()
    """What has not gone out is lost. `Connection._ended` is about to be called."""
    ENDED = auto()


class Connection(ABC):
    """One connection, not tied to how bytes move. Belongs to the loop it was made on."""

    address = "?"
    """Where the peer is, for people to read."""
    send: Callable[[bytes], None]
    """Sends one frame with no large tensors: `_send_now`, `_send_later` or `_refuse`, as things are.

    The first frame after a read of one message is written at once: little is going on, so waiting for more to join
    would only cost time. All others of a loop turn go out together.
    """
    _write: Callable[[bytes], None]
    """Hands bytes to the operating system, or keeps them until it takes them. Each kind of connection has its own."""
    _write_pieces: Callable[[tuple[bytes, memoryview]], None]
    """Hands on a header and a piece of a tensor, which must not be copied. Each kind of connection has its own."""

    def __init__(self, protocol: Protocol, receiver: Receiver) -> None:
        self.loop = asyncio.get_running_loop()
        self.protocol = protocol
        self.receiver = receiver
        self.owner: Any = None
        """For whoever receives: what it keeps about this connection."""
        self.shared_memory: Channel | None = None
        """For large tensors, if both sides can share memory."""
        self.limits: ConnectionLimits | None = None
        """Where it came in, if others made it."""
        self.handshake_s = HANDSHAKE_S
        self.is_congested = False
        """The peer does not take bytes as fast as they are sent."""
        self.is_full = False
        """The peer does not take bytes of this connection alone, without its lanes, as fast as they are sent."""
        self.bytes_received = self.bytes_sent = 0
        self.frames_sent = self.writes = 0
        self._schemas: dict[Schema, int] = {}
        """The numbers of what has been announced to the peer. Threads read it, see `frame_in_thread`."""
        self._schema_bytes = 0
        self._handshake_ended = asyncio.Event()
        self._closed = asyncio.Event()
        self._out = protocol.output
        """Frames of this turn, fewer than `_MOST_A_WRITE` of them, among them what the protocol itself has to say."""
        self.bulk = BulkQueue()
        self.bulk_left: Callable[[], None] | None = None
        """Called whenever `held_bytes` may have become less: something was written, or read by the peer."""
        self._bulk_count = 0
        self.lanes: Lanes | None = None
        self.is_reading = False
        """What comes now is one of several messages of a read."""
        self._phase = Phase.SENDING
        self._is_greeted = False
        self._messages_received: Callable[[Connection, list[Message]], None] = self._greet
        self.send = self._send_later
        self._send_after_one_message: Callable[[bytes], None] = self._send_now
        """What `send` becomes after a read of one message."""
        self._watch: asyncio.TimerHandle | None = None
        self._frames_a_write = _MOST_A_WRITE
        self._is_peer_at_work = False
        self._reads_until_look = 0
        self._error: Exception | None = None

    # -- what a kind of connection provides

    @abstractmethod
    def _unsent_bytes(self) -> int:
        """Bytes that were written and not yet taken."""

    def _unacknowledged_bytes(self) -> int:
        """Bytes that the system has taken and that have not arrived at the peer, as far as the system tells."""
        return 0

    @abstractmethod
    def _shut(self) -> None:
        """Close once what was written has gone out. Ends in `_ended`."""

    def _end_writing(self) -> None:
        """Close once what was written has gone out, but read on until the other side closes too.

        TCP that closes with bytes unread drops what it sent last.
        """
        self._shut()

    @abstractmethod
    def _abort(self) -> None:
        """Close now. Ends in `_ended`."""

    # -- sending

    @property
    def peer(self) -> Identity:
        peer = self.protocol.peer
        if peer is None:
            raise ConnectionClosedError("the handshake is not done")
        return peer

    @property
    def is_open(self) -> bool:
        return self.protocol.state is State.OPEN

    @property
    def unsent_bytes(self) -> int:
        """Bytes this side still holds because the peer does not take them."""
        unsent = self._unsent_bytes() if self._phase < Phase.ABORTED else 0
        return unsent + self.bulk.unsent_bytes + sum(map(len, self._out))

    @property
    def unsent_small_bytes(self) -> int:
        """Bytes of `unsent_bytes` that are not of messages with large tensors, but for a chunk of those."""
        return self.unsent_bytes - self.bulk.unsent_bytes + self.bulk.small_bytes

    @property
    def held_bytes(self) -> int:
        """`unsent_bytes`, and what lies in shared memory for a peer that does not read."""
        return self.unsent_bytes + (self.shared_memory.unread_bytes if self.shared_memory is not None else 0)

    @property
    def is_behind(self) -> bool:
        """More large tensors would only pile up before they are copied. `Receiver.output_drained` comes."""
        return self.shared_memory is not None and self.shared_memory.is_behind

    def send_message(
        self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content
    ) -> BulkSend | None:
        """Send one message of any kind. Of large tensors that go on to be sent, returns the `BulkSend`."""
        schema, number = content.schema, 0
        if schema is not None:
            number = self._schemas.get(schema) or self._number(schema)
        data = content.framed(type_, flags, id_, arg, timeout_ms, number)
        if content.buffers:
            return self.send_bulk(data, content.buffers)
        self.send(data)
        return None

    def frame_in_thread(self, type_: int, id_: int, content: Content) -> bytes | None:
        """The frame of a message, for a thread to send; None if it takes the loop to send it."""
        schema, number = content.schema, 0
        if content.buffers:
            return None
        if schema is not None:
            number = self._schemas.get(schema, ONE_OFF)
            if number == ONE_OFF and self._is_worth_announcing(schema):
                return None  # the loop announces it
        return content.framed(type_, 0, id_, 0, 0, number)

    def _number(self, schema: Schema) -> int:
        """The number of a schema, which is announced if it is used again and again."""
        if not self._is_worth_announcing(schema) or not self.is_open:
            return ONE_OFF
        # Written at once, before the number is known to anybody: threads that send must not overtake it
        self.flush()
        if self._phase is not Phase.SENDING:
            return ONE_OFF
        number = len(self._schemas) + 1
        self._write(frame(_SCHEMA, 0, 0, number, 0, schema.table))
        self._schema_bytes += len(schema.table)
        self._schemas[schema] = number
        return number

    def _is_worth_announcing(self, schema: Schema) -> bool:
        """Whether a schema comes again, and the peer takes one more."""
        return (
            schema.uses >= _USES_TO_ANNOUNCE
            and len(self._schemas) < MAX_SCHEMAS
            and self._schema_bytes + len(schema.table) <= MAX_SCHEMA_BYTES
        )

    def _send_now(self, data: bytes) -> None:
        self.send = self._send_later
        self.frames_sent += 1
        self.bytes_sent += len(data)
        self._write(data)

    def _send_later(self, data: bytes) -> None:
        out = self._out
        if not out and not self.is_reading:
            self.loop.call_soon(self.flush)
        out.append(data)
        if len(out) >= self._frames_a_write:
            self.flush()

    def _refuse(self, _: bytes) -> None:
        # Of one that was aborted everybody is about to hear that it is lost; that is soon enough
        if self._phase is not Phase.ABORTED:
            raise ConnectionClosedError(f"the connection to {self.address} is closed")

    @property
    def is_peer_elsewhere(self) -> bool:
        """The peer can be at work while this process is. Asks the system, in any thread."""
        return False

    def share_writing(self) -> WriteLock | None:
        """How threads send small frames on this connection; None if they cannot.

        What they send may overtake what the loop sends in the same moment.
        """
        return None

    def send_bulk(self, data: bytes, buffers: Sequence[memoryview]) -> BulkSend:
        """Send one frame, then its large tensors in chunks, between which other frames may pass.

        ``buffers`` are flat views of bytes, at least one and none of them empty. They must not change until they are
        out.
        """
        bulk = BulkSend(buffers)
        if self._phase is not Phase.SENDING:
            self.send(data)  # raises, unless it was aborted and nobody has heard of it yet
        elif self.shared_memory is None or not self.shared_memory.carry(data, bulk):
            self.send_in_chunks(data, bulk)
        return bulk

    def send_in_chunks(self, data: bytes, bulk: BulkSend) -> None:
        """Send a message and its large tensors as bytes, without shared memory."""
        self._begin_bulk(data, bulk)
        if self.lanes is not None and self.lanes.take(bulk):
            return
        if not self.bulk.has_chunks:
            self.loop.call_soon(self._pump)
        self.bulk.append(bulk)

    def _begin_bulk(self, data: bytes, bulk: BulkSend) -> None:
        if self._phase is Phase.CLOSING:
            self._write(data)  # it was parked when `close` was called
        else:
            self.send(data)
        # the peer counts frames that have buffers, so this number is theirs too
        bulk.id = self._bulk_count
        self._bulk_count += 1

    # -- for shared memory

    def send_lent(self, data: bytes, bulk: BulkSend, offsets: bytes) -> None:
        """Send a message, and where in shared memory its large tensors are."""
        self._begin_bulk(data + frame(_LENT, 0, self._bulk_count, 0, 0, offsets), bulk)
        bulk.buffers = []  # whoever remembers the message need not keep their memory
        self.end_if_last()

    def tell_bulk_left(self) -> None:
        """`held_bytes` may have become less."""
        if self.bulk_left is not None:
            self.bulk_left()

    def drop_bulk(self, bulk: BulkSend) -> bool:
        """Stop sending tensors nobody wants any more. False if all of them have gone out already."""
        if self.bulk.unpark(bulk):
            self.tell_bulk_left()
            return True  # nobody has heard of it
        if self._phase is not Phase.SENDING or not self.bulk.remove(bulk):
            return False
        self.tell_bulk_left()
        self.send(frame(_DROP_DATA, 0, bulk.id, 0, 0, b""))
        return True

    def flush(self) -> None:
        """Write what was sent in this turn."""
        out = self._out
        if out:
            data = b"".join(out)
            if self._phase is Phase.SENDING:
                self.frames_sent += len(out)
                self.writes += 1
                self.bytes_sent += len(data)
                out.clear()
                self._write(data)
            else:
                out.clear()
            if self.bulk_left is not None:
                self.bulk_left()

    def _pump(self) -> None:
        """Write chunks of the messages under way, in turns, until the peer is full."""
        self.flush()  # the frames that the chunks belong to
        has_written = False
        while self.bulk.has_chunks and not self.is_full and self._phase is not Phase.ENDED:
            has_written = True
            number, chunk = self.bulk.next_chunk()
            self.write_chunk(pack_header(chunk.nbytes, _DATA, 0, 0, number, 0, 0, 0, 0), chunk)
        self.tell_bulk_left()
        if has_written:
            self.end_if_last()

    def end_if_last(self) -> None:
        """Large tensors have gone out: end if `close` was called, and they were the last."""
        if self._phase is Phase.CLOSING and not self.bulk:
            self._end_writing()

    # -- for lanes

    def write_chunk(self, header: bytes, chunk: memoryview) -> None:
        """Write a piece of a tensor now."""
        self.bytes_sent += chunk.nbytes + HEADER_BYTES
        self.writes += 1
        self._write_pieces((header, chunk))

    def pause_writing(self) -> None:
        """The peer does not take what was written."""
        self.is_full = self.is_congested = True

    def resume_writing(self) -> None:
        """The peer has taken enough of it."""
        self.is_full = False
        self._pump()
        if self.lanes is not None:
            self.lanes.pump()
        self.look_for_room()

    def look_for_room(self) -> None:
        """Tell the receiver if the peer takes bytes again."""
        was_congested = self.is_congested
        self.is_congested = self.is_full or (self.lanes is not None and self.lanes.is_full)
        if was_congested and not self.is_congested:
            self.tell_drained()

    def tell_drained(self) -> None:
        """`is_congested` or `is_behind` was true and is no longer."""
        if self._phase is Phase.ENDED:
            return
        try:
            self.receiver.output_drained(self)
        except Exception as error:  # noqa: BLE001 - told to the receiver
            self._failed(error)

    # -- receiving

    def _received(self, size_bytes: int) -> None:
        """Bytes were put where ``protocol.get_buffer`` said.

        Never raises: uvloop would drop the connection without a word.
        """
        self.bytes_received += size_bytes
        try:
            messages = self.protocol.receive(size_bytes)
            if len(messages) == 1:
                self._messages_received(self, messages)
                self.send = self._send_after_one_message
            else:
                self._receive_several(messages, size_bytes)
        except Exception as error:  # noqa: BLE001 - told to the receiver
            self._failed(error)
        finally:
            if self._out:
                self.flush()

    def _receive_several(self, messages: list[Message], size_bytes: int) -> None:
        """Hand over what a read has brought, if not one message; what is sent in answer goes out together."""
        if not messages:
            if not self._is_greeted:
                self._greet(self, messages)  # meanwhile the receiver sends nothing at once: WELCOME goes first
            if self._is_greeted:
                self.send = self._send_after_one_message
            return
        self.is_reading = True
        if self._phase is Phase.SENDING:
            self.send = self._send_later
        self._find_portion(size_bytes)
        try:
            self._messages_received(self, messages)
        finally:
            self.is_reading = False

    def _find_portion(self, size_bytes: int) -> None:
        """How many frames go out at once until the next read of several messages, after one of that size."""
        if self._reads_until_look:
            self._reads_until_look -= 1
        else:
            self._reads_until_look = _READS_A_LOOK
            self._is_peer_at_work = self.is_peer_elsewhere
            self._frames_a_write = _MOST_A_WRITE
        if self._is_peer_at_work:
            # as if they had no body, which holds for those that there are most of
            half = size_bytes // (2 * HEADER_BYTES)
            self._frames_a_write = half if _FEWEST_A_WRITE <= half < _MOST_A_WRITE else _MOST_A_WRITE

    def _greet(self, _: Connection, messages: list[Message]) -> None:
        """Take what a read has brought before the handshake was known to be done, which it may be by now."""
        if self.protocol.state in {State.OPEN, State.CLOSING}:
            self._greeted()
        if messages and self.protocol.state is not State.CLOSED:  # else what still comes is for nobody
            self._messages_received(self, messages)

    def _greeted(self) -> None:
        self._is_greeted = True
        self._messages_received = self.receiver.messages_received
        self._handshake_ended.set()
        self._stop_watching()
        if self.limits is not None:
            self.limits.opened(self)
        if self.shared_memory is not None:
            self.shared_memory.opened()
        self.receiver.connection_opened(self)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, WireError | OSError):
            logger.error("an internal error on the connection to %s closes it", self.address, exc_info=error)
        if not isinstance(error, HandshakeError):
            self.abort(error)
            return
        self._error = self._error or error
        self.flush()  # a refusal is worth a farewell
        self._stop_sending(Phase.CLOSING)
        self._shut()

    # -- the end

    async def wait_opened(self) -> None:
        """Return when the handshake is done; raises what made it fail."""
        await self._handshake_ended.wait()
        if not self._is_greeted:
            raise self._error or ConnectionClosedError("the connection was closed in its handshake")

    async def wait_closed(self) -> None:
        """Return when the connection has ended."""
        await self._closed.wait()

    def start(self) -> None:
        """Say what the protocol says first, and expect the handshake to end some day."""
        if greeting := self.protocol.take_output():
            self.send(greeting)
            self.flush()
        if self._watch is None:
            self._expect_handshake()

    def close(self, reason: str = "") -> None:
        """Say goodbye, send what is still to be sent, and close when the other side does, or does nothing any more."""
        if self._phase is not Phase.SENDING or self.protocol.state is State.CLOSED:
            return
        if self.shared_memory is not None:
            self.shared_memory.closing()
        was_open = self.protocol.state is not State.HANDSHAKE
        goodbye = self.protocol.say_goodbye(reason)
        if goodbye:
            self._out.append(goodbye)
        if was_open:
            self._pump()
        self._stop_sending(Phase.CLOSING)
        if not was_open:
            self._shut()
            return
        self.end_if_last()
        self._linger(-1)

    def abort(self, error: Exception | None = None) -> None:
        """Close now; what has not gone out is lost."""
        if self._phase is not Phase.ENDED:
            self._error = self._error or error
            self._stop_sending(Phase.ABORTED)
            self._forget_output()
            self.protocol.close()
            self._abort()

    def _forget_output(self) -> None:
        self.bulk.clear()
        self.bulk_left = None

    def _stop_sending(self, phase: Phase) -> None:
        self._phase = max(self._phase, phase)
        self._out.clear()
        self.send = self._send_after_one_message = self._refuse

    def _expect_handshake(self) -> None:
        seconds = self.handshake_s
        due = self.loop.time() + seconds

        def overdue() -> None:
            if self.loop.time() > due + seconds / 10:
                self._expect_handshake()  # this loop was busy elsewhere: the peer may have said all there is to say
            else:
                self.abort(HandshakeError(f"{self.address} did not end its handshake within {seconds:g} s"))

        self._watch = self.loop.call_at(due, overdue)

    def _linger(self, moved_bytes: int) -> None:
        """Wait for the end as long as bytes move."""
        moved = self.bytes_received + self.bytes_sent - self.unsent_bytes
        if moved == moved_bytes:
            self.abort()
        else:
            self._watch = self.loop.call_later(_LINGER_S, self._linger, moved)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _ended(self, error: Exception | None) -> None:
        """The kind of connection tells that it is over."""
        if self._phase is Phase.ENDED:
            return
        is_on_purpose = self._phase is not Phase.SENDING or self.protocol.state is State.CLOSING
        self._stop_watching()
        self._stop_sending(Phase.ENDED)
        self.protocol.close()
        self._forget_output()
        if self.shared_memory is not None:
            self.shared_memory.closed()
        if self.limits is not None:
            self.limits.left(self)
        error = self._error = self._error or (None if is_on_purpose else error or self._without_goodbye())
        if self.lanes is not None:
            self.lanes.close(on_purpose=error is None)
        self._handshake_ended.set()
        self._closed.set()
        try:
            self.receiver.connection_lost(self, error)
        except Exception:
            logger.exception("an internal error at the end of the connection to %s", self.address)

    def _without_goodbye(self) -> ConnectionClosedError:
        when = "in its handshake" if self.protocol.peer is None else "without a goodbye"
        return ConnectionClosedError(f"{self.address} closed the connection {when}")

    def redirect(self, messages_received: Callable[[Connection, list[Message]], None]) -> None:
        """Let another take the messages from now on. What else happens the receiver still hears."""
        self._messages_received = messages_received

    def count_sent(self) -> int:
        """Bytes sent until now, those of threads included, which `bytes_sent` and the others may not know of yet."""
        return self.bytes_sent

    def count_delivered(self) -> int:
        """Bytes of those sent that have arrived: over TCP on the peer's host, elsewhere in the peer's process."""
        return self.count_sent() - (
            self._unsent_bytes() + self._unacknowledged_bytes() if self._phase < Phase.ABORTED else 0
        )

    def statistics(self) -> dict[str, int]:
        """Counters of this connection."""
        return {
            "bytes_sent": self.count_sent(),
            "bytes_received": self.bytes_received,
            "frames_sent": self.frames_sent,
            "writes": self.writes,
            "unsent_bytes": 0 if self._phase is Phase.ENDED else self.unsent_bytes,
            **({} if self.lanes is None else self.lanes.statistics()),
        }


Accept = Callable[[], tuple[Protocol, Receiver]]
"""Called for each connection that comes in: what it shall speak, and who shall hear of it."""

C = TypeVar("C", bound=Connection)


class Listener(ABC):
    """Something others can connect to."""

    address: str
    """Where to connect, with the port or path that was really taken."""

    def __init__(self, accept: Accept, limits: ConnectionLimits | None = None) -> None:
        self._accept = accept
        self._limits = limits
        self._accepted: weakref.WeakSet[Connection] = weakref.WeakSet()

    @abstractmethod
    async def aclose(self) -> None:
        """Accept no more, and end the connections that are not open yet. The open ones have owners of their own."""

    # -- for kinds of listeners

    def _track(self, connection: C) -> C:
        """Remember a connection that came in."""
        self._accepted.add(connection)
        if self._limits is not None:
            connection.limits = self._limits
            self._limits.accepted(connection)
        return connection

    def _abort_handshakes(self) -> None:
        for connection in [each for each in self._accepted if each.protocol.state is State.HANDSHAKE]:
            connection.abort(ConnectionClosedError(f"nobody listens on {self.address} any more"))


class Transport(ABC):
    """A way to reach others, named by the scheme of its addresses."""

    @abstractmethod
    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        """A connection whose handshake has begun; `Connection.wait_opened` tells how it went."""

    @abstractmethod
    async def listen(self, address: str, accept: Accept) -> Listener:
        """Listen there. An address may leave the choice of port or path to us."""
