"""The code that all connections share, whichever transport they belong to.

A `Connection` carries frames between two workers. It owns a `wire.protocol.Protocol` that parses its input, gathers
the small frames of one loop turn into one write, and sends large tensors in chunks between them.

If a peer with a CPU of its own had to wait for the last frame of a turn, and this side until the peer has handled all
of them, one of the two CPUs would always be idle. So frames for such a peer are written in *portions*, of half as many
frames as the last read has brought: the peer handles the first portion while this side makes the next. The side with
more work finds more frames in each of its reads, and so writes least often. On one CPU the fewer writes there are the
better.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from math import inf
from time import perf_counter as _clock
from typing import TYPE_CHECKING, Any, Final

from arpc.errors import ConnectionClosedError, HandshakeError, WireError
from arpc.log import get_logger
from arpc.transport.announced_schemas import AnnouncedSchemas
from arpc.transport.bulk import BulkQueue, BulkSend
from arpc.transport.connection_limits import HANDSHAKE_S, ConnectionLimits
from arpc.transport.contract import Receiver
from arpc.transport.write_lock import WriteLock
from arpc.wire.frames import HEADER_BYTES, ONE_OFF, frame, pack_header
from arpc.wire.handshake import Identity
from arpc.wire.messages import Message, MessageType
from arpc.wire.protocol import Protocol, State
from arpc.wire.values.content import Content
from arpc.wire.values.schemas import Schema

if TYPE_CHECKING:
    from arpc.transport.shm import Channel
    from arpc.transport.striping import Lanes

__all__ = ["Connection", "Phase"]

logger = get_logger("arpc.transport")

_DATA: Final = int(MessageType.DATA)
_DROP_DATA: Final = int(MessageType.DROP_DATA)
_LENT: Final = int(MessageType.LENT)
_SCHEMA: Final = int(MessageType.SCHEMA)
_LATE_S: Final = 0.0002
"""A frame that comes this long after another of its turn does not wait for further ones."""
_FEWEST_A_WRITE: Final = 2
_MOST_A_WRITE: Final = 32
_READS_PER_CHECK: Final = 64
"""The reads of several messages between two checks whether the peer is on the same CPU: processes rarely move."""
# How long a side that has sent GOODBYE waits for the peer to close, once no bytes move any more
_LINGER_S: Final = 2.0


class Phase(IntEnum):
    """How far this side has closed a connection. `Protocol.state` decides which messages the peer may still send."""

    SENDING = auto()
    CLOSING = auto()
    """It has sent GOODBYE, or a refusal: earlier output still goes out, and no further frame is sent."""
    ABORTED = auto()
    """Output that has not gone out is lost. `Connection._ended` is about to be called."""
    ENDED = auto()


class Connection(ABC):
    """One connection, independent of how its bytes move. Belongs to the loop it was made on."""

    address = "?"
    """The address of the peer, as shown in messages."""
    send: Callable[[bytes], None]
    """Sends one frame with no large tensors: `_send_now`, `_send_later` or `_refuse`, depending on the state.

    The first frame after a read of one message is written at once: there is little traffic, so to wait for more frames
    would only cost time. All others of a loop turn go out together.
    """
    _write: Callable[[bytes], None]
    """Writes bytes to the operating system, or buffers them until it takes them. Each subclass sets its own."""
    _write_pieces: Callable[[tuple[bytes, memoryview]], None]
    """Writes a header and a piece of a tensor, which must not be copied. Each subclass sets its own."""

    def __init__(self, protocol: Protocol, receiver: Receiver) -> None:
        self.loop = asyncio.get_running_loop()
        self.protocol = protocol
        self.receiver = receiver
        self.owner: Any = None
        """The state that the receiver keeps for this connection."""
        self.shared_memory: Channel | None = None
        """The channel for large tensors in shared memory; None if this connection cannot have one."""
        self.limits: ConnectionLimits | None = None
        """The limits that count this connection, if the peer made it."""
        self.handshake_s = HANDSHAKE_S
        self.is_congested = False
        """Whether the peer takes bytes more slowly than they are sent."""
        self.is_full = False
        """Whether the peer takes bytes of this connection alone, without its lanes, more slowly than they are sent."""
        self.bytes_received = self.bytes_sent = 0
        self.frames_sent = self.writes = 0
        self._schemas = AnnouncedSchemas()
        """The numbers of the schemas announced to the peer. Threads read it, see `frame_in_thread`."""
        self._handshake_ended = asyncio.Event()
        self._closed = asyncio.Event()
        self._out = protocol.output
        """The frames of this turn, fewer than `_MOST_A_WRITE`, those that the protocol itself sends included."""
        self.bulk = BulkQueue()
        self.bulk_left: Callable[[], None] | None = None
        """The callback for when `held_bytes` may have become less: bytes were written, or read by the peer."""
        self._bulk_count = 0
        self._sent_at = inf
        """The time of the last frame of this turn or read that was not written at once; infinite if there is none."""
        self.lanes: Lanes | None = None
        self.is_reading = False
        """Whether the receiver is handling a read of several messages."""
        self._phase = Phase.SENDING
        self._is_greeted = False
        self._messages_received: Callable[[Connection, list[Message]], None] = self._greet
        self.send = self._send_later
        self._send_after_one_message: Callable[[bytes], None] = self._send_now
        """The value of `send` after a read of one message."""
        self._watch: asyncio.TimerHandle | None = None
        self._frames_a_write = _MOST_A_WRITE
        self._is_peer_at_work = False
        self._reads_until_look = 0
        self._error: Exception | None = None

    # -- provided by each kind of connection

    @abstractmethod
    def _unsent_bytes(self) -> int:
        """Return how many written bytes the system, or the other end in this process, has not taken yet."""

    def _unacknowledged_bytes(self) -> int:
        """Return how many bytes that the system has taken have not reached the peer, as far as it reports that."""
        return 0

    @abstractmethod
    def _shut(self) -> None:
        """Close once all written bytes have gone out. Ends in `_ended`."""

    def _end_writing(self) -> None:
        """Close once all written bytes have gone out, but read on until the peer closes too.

        TCP that closes with unread input drops the output that was sent last.
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
        """The bytes that this side still holds because the peer does not take them."""
        unsent = self._unsent_bytes() if self._phase < Phase.ABORTED else 0
        return unsent + self.bulk.unsent_bytes + sum(map(len, self._out))

    @property
    def unsent_small_bytes(self) -> int:
        """`unsent_bytes` without the large tensors of large messages, except for chunks that were written already."""
        return self.unsent_bytes - self.bulk.unsent_bytes + self.bulk.small_bytes

    @property
    def held_bytes(self) -> int:
        """`unsent_bytes`, and the bytes in shared memory that the peer has not read."""
        return self.unsent_bytes + (self.shared_memory.unread_bytes if self.shared_memory is not None else 0)

    @property
    def is_behind(self) -> bool:
        """Whether more large tensors would only wait to be copied. `Receiver.output_drained` is called afterwards."""
        return self.shared_memory is not None and self.shared_memory.is_behind

    def send_message(
        self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content
    ) -> BulkSend | None:
        """Send one message of any kind. Returns the `BulkSend` of its large tensors, None if it has none."""
        schema, number = content.schema, 0
        if schema is not None:
            number = self._schemas.get(schema) or self._announce(schema)
        data = content.framed(type_, flags, id_, arg, timeout_ms, number)
        if content.buffers:
            return self.send_bulk(data, content.buffers)
        self.send(data)
        return None

    def frame_in_thread(self, type_: int, id_: int, content: Content) -> bytes | None:
        """Return the frame of a message for a thread to send; None if only the loop can send it."""
        schema, number = content.schema, 0
        if content.buffers:
            return None
        if schema is not None:
            number = self._schemas.get(schema, ONE_OFF)
            if number == ONE_OFF and self._schemas.accepts(schema):
                return None  # the loop announces it
        return content.framed(type_, 0, id_, 0, 0, number)

    def _announce(self, schema: Schema) -> int:
        """Return the number of a schema, which is announced first if it is used again and again; else `ONE_OFF`."""
        if not self._schemas.accepts(schema) or not self.is_open:
            return ONE_OFF
        # Written at once, before any thread can see the number: threads that send must not overtake it
        self.flush()
        if self._phase is not Phase.SENDING:
            return ONE_OFF
        self._write(frame(_SCHEMA, 0, 0, len(self._schemas) + 1, 0, schema.table))
        return self._schemas.add(schema)

    def _send_now(self, data: bytes) -> None:
        self.send = self._send_later
        self.frames_sent += 1
        self.bytes_sent += len(data)
        self._write(data)

    def _send_later(self, data: bytes) -> None:
        out = self._out
        now = _clock()
        was_sent_at, self._sent_at = self._sent_at, now
        # If code of the user computes between two frames, a peer with a CPU of its own need not wait for its end
        if now - was_sent_at > _LATE_S and self.is_peer_elsewhere:
            out.append(data)
            self._pump()
            return
        if not out and not self.is_reading:
            self.loop.call_soon(self._end_turn)
        out.append(data)
        if len(out) >= self._frames_a_write:
            self.flush()

    def _end_turn(self) -> None:
        self._sent_at = inf
        self.flush()

    def _refuse(self, _: bytes) -> None:
        # The loss of an aborted connection is about to be reported; that is soon enough
        if self._phase is not Phase.ABORTED:
            raise ConnectionClosedError(f"the connection to {self.address} is closed")

    @property
    def is_peer_elsewhere(self) -> bool:
        """Whether the peer can run while this process does. Asks the system; may be called in any thread."""
        return False

    def share_writing(self) -> WriteLock | None:
        """Return the lock with which threads send small frames on this connection; None if they cannot.

        Their frames may overtake frames that the loop sends at the same moment.
        """
        return None

    def send_bulk(self, data: bytes, buffers: Sequence[memoryview]) -> BulkSend:
        """Send one frame and its large tensors, in shared memory or in chunks between which other frames may pass.

        ``buffers`` are flat views of bytes, at least one and none of them empty. They must not change until they are
        out.
        """
        bulk = BulkSend(buffers)
        if self._phase is not Phase.SENDING:
            self.send(data)  # raises, unless the connection was aborted and that was not reported yet
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
            self._write(data)  # the message was parked when `close` was called
        else:
            self.send(data)
        # the peer counts the frames that have buffers too, and so arrives at this number
        bulk.id = self._bulk_count
        self._bulk_count += 1

    # -- for shared memory

    def send_lent(self, data: bytes, bulk: BulkSend, offsets: bytes) -> None:
        """Send a message, and the offsets of its large tensors in shared memory."""
        self._begin_bulk(data + frame(_LENT, 0, self._bulk_count, 0, 0, offsets), bulk)
        bulk.buffers = []  # objects that still refer to the message must not keep their memory
        self.end_if_last()

    def notify_bulk_left(self) -> None:
        """Call `bulk_left`: `held_bytes` may have become less."""
        if self.bulk_left is not None:
            self.bulk_left()

    def drop_bulk(self, bulk: BulkSend) -> bool:
        """Stop sending tensors that are no longer wanted. Returns False if all have gone out, or `close` was called."""
        if self.bulk.unpark(bulk):
            self.notify_bulk_left()
            return True  # nothing of the message was sent yet
        if self._phase is not Phase.SENDING or not self.bulk.remove(bulk):
            return False
        self.notify_bulk_left()
        self.send(frame(_DROP_DATA, 0, bulk.id, 0, 0, b""))
        return True

    def flush(self) -> None:
        """Write the frames that were sent in this turn."""
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
        """Write chunks of the queued messages, in turns, until the connection is full."""
        self.flush()  # the frames that the chunks belong to
        has_written = False
        while self.bulk.has_chunks and not self.is_full and self._phase is not Phase.ENDED:
            has_written = True
            number, chunk = self.bulk.next_chunk()
            self.write_chunk(pack_header(chunk.nbytes, _DATA, 0, 0, number, 0, 0, 0, 0), chunk)
        self.notify_bulk_left()
        if has_written:
            self.end_if_last()

    def end_if_last(self) -> None:
        """End the connection if `close` was called and the last large tensors have gone out."""
        if self._phase is Phase.CLOSING and not self.bulk:
            self._end_writing()

    # -- for lanes

    def write_chunk(self, header: bytes, chunk: memoryview) -> None:
        """Write a piece of a tensor now."""
        self.bytes_sent += chunk.nbytes + HEADER_BYTES
        self.writes += 1
        self._write_pieces((header, chunk))

    def pause_writing(self) -> None:
        """Stop writing chunks: the peer does not take the bytes that were written."""
        self.is_full = self.is_congested = True

    def resume_writing(self) -> None:
        """Write chunks again: the peer has taken enough of the bytes that were written."""
        self.is_full = False
        self._pump()
        if self.lanes is not None:
            self.lanes.pump()
        self.look_for_room()

    def look_for_room(self) -> None:
        """Notify the receiver if the peer takes bytes again."""
        was_congested = self.is_congested
        self.is_congested = self.is_full or (self.lanes is not None and self.lanes.is_full)
        if was_congested and not self.is_congested:
            self.notify_drained()

    def notify_drained(self) -> None:
        """Notify the receiver that `is_congested` or `is_behind` is no longer true."""
        if self._phase is Phase.ENDED:
            return
        try:
            self.receiver.output_drained(self)
        except Exception as error:  # noqa: BLE001 - reported to the receiver
            self._failed(error)

    # -- receiving

    def _received(self, size_bytes: int) -> None:
        """Process bytes that were read into the buffer of ``protocol.get_buffer``.

        Never raises: uvloop would drop the connection silently.
        """
        self.bytes_received += size_bytes
        try:
            messages = self.protocol.receive(size_bytes)
            if len(messages) == 1:
                self._messages_received(self, messages)
                self.send = self._send_after_one_message
            else:
                self._receive_several(messages, size_bytes)
        except Exception as error:  # noqa: BLE001 - reported to the receiver
            self._failed(error)
        finally:
            if self._out:
                self.flush()

    def _receive_several(self, messages: list[Message], size_bytes: int) -> None:
        """Handle a read of no message or of several, whose replies go out together."""
        if not messages:
            if not self._is_greeted:
                self._greet(self, messages)  # its frames are not written at once: WELCOME goes first
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
            self._sent_at = inf

    def _find_portion(self, size_bytes: int) -> None:
        """Set how many frames go out at once until the next read of several messages, after one of this size."""
        if self._reads_until_look:
            self._reads_until_look -= 1
        else:
            self._reads_until_look = _READS_PER_CHECK
            self._is_peer_at_work = self.is_peer_elsewhere
            self._frames_a_write = _MOST_A_WRITE
        if self._is_peer_at_work:
            # as if frames had no body, which holds for the most frequent ones
            half = size_bytes // (2 * HEADER_BYTES)
            self._frames_a_write = half if _FEWEST_A_WRITE <= half < _MOST_A_WRITE else _MOST_A_WRITE

    def _greet(self, _: Connection, messages: list[Message]) -> None:
        """Handle a read while the handshake was not known to be done, which it may be by now."""
        if self.protocol.state in {State.OPEN, State.CLOSING}:
            self._greeted()
        if messages and self.protocol.state is not State.CLOSED:  # else the rest is dropped
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
        self.flush()  # the refusal goes out before the connection closes
        self._stop_sending(Phase.CLOSING)
        self._shut()

    # -- the end

    async def wait_opened(self) -> None:
        """Return when the handshake is done; raises the error that made it fail."""
        await self._handshake_ended.wait()
        if not self._is_greeted:
            raise self._error or ConnectionClosedError("the connection was closed in its handshake")

    async def wait_closed(self) -> None:
        """Return when the connection has ended."""
        await self._closed.wait()

    def start(self) -> None:
        """Send the protocol's first frames, and start the timeout of the handshake."""
        if greeting := self.protocol.take_output():
            self.send(greeting)
            self.flush()
        if self._watch is None:
            self._expect_handshake()

    def close(self, reason: str = "") -> None:
        """Send GOODBYE and all remaining output, and close when the peer does, or when no bytes move any more."""
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
        """Close now; output that has not gone out is lost."""
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
                self._expect_handshake()  # this loop was busy elsewhere: the peer's handshake may wait to be read
            else:
                self.abort(HandshakeError(f"{self.address} did not end its handshake within {seconds:g} s"))

        self._watch = self.loop.call_at(due, overdue)

    def _linger(self, moved_bytes: int) -> None:
        """Wait for the end as long as bytes move, then abort."""
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
        """Finish the connection; each kind of connection calls this when its stream has ended."""
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
        """Pass all messages to another function from now on. The receiver still gets the other callbacks."""
        self._messages_received = messages_received

    def count_sent(self) -> int:
        """Return the bytes sent until now, also by threads, which `bytes_sent` and the other counters leave out."""
        return self.bytes_sent

    def count_delivered(self) -> int:
        """Return how many of the sent bytes have arrived: over TCP on the peer's host, else in the peer's process."""
        return self.count_sent() - (
            self._unsent_bytes() + self._unacknowledged_bytes() if self._phase < Phase.ABORTED else 0
        )

    def statistics(self) -> dict[str, int]:
        """Return the counters of this connection."""
        return {
            "bytes_sent": self.count_sent(),
            "bytes_received": self.bytes_received,
            "frames_sent": self.frames_sent,
            "writes": self.writes,
            "unsent_bytes": 0 if self._phase is Phase.ENDED else self.unsent_bytes,
            **({} if self.lanes is None else self.lanes.statistics()),
        }
