"""The protocol by which the two ends of a connection share their arenas.

::

    lender                                      borrower
        ARENA offer: pid, fd, size, token  ->       maps it, checks the token
                                           <-   ARENA mapped: pid, loans still held (or: refused)
        a message with buffers, LENT       ->       builds tensors there
                                           <-   FREED: how many LENT were read, which loans have ended

Nothing is offered before the first message that is large enough, unless the peer has loans of an earlier connection.
Both ends can be lenders; the two directions are independent.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final

import msgspec

from arpc.errors import ConnectionClosedError, ProtocolError
from arpc.log import get_logger
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.transport.shm.arena import Arena, ArenaPlacement
from arpc.transport.shm.borrowing import BorrowedArena
from arpc.transport.shm.mapping import ArenaOffer, UnmappableError
from arpc.wire.frames import frame
from arpc.wire.messages import ArenaFlag, Message, MessageType

__all__ = ["FEATURE", "Channel"]

logger = get_logger("arpc.transport")

FEATURE: Final = "shm"
"""The feature that a worker announces in its handshake if it can share memory."""
_ARENA: Final = int(MessageType.ARENA)
_FREED: Final = int(MessageType.FREED)
_MAX_REASON_BYTES: Final = 200
_FEW_COPIES: Final = 4
"""This many messages keep the copying threads busy. More would only keep their tensors from being freed."""
_COPIES_PER_WINDOW: Final = 4
_encode = msgspec.msgpack.Encoder().encode


class _Mapped(msgspec.Struct, array_like=True):
    pid: int
    held: list[int]


_decode_offer = msgspec.msgpack.Decoder(ArenaOffer).decode
_decode_mapped = msgspec.msgpack.Decoder(_Mapped).decode


class _State(Enum):
    """The state of this worker's offer."""

    CLOSED = auto()
    """The handshake is not done, or the connection has ended, or the peer does not share memory."""
    IDLE = auto()
    """Nothing was offered yet."""
    OFFERED = auto()
    READY = auto()
    """The peer has mapped the arena."""
    GIVEN_UP = auto()
    """This worker closes the connection: an answer that still comes is ignored."""


class Channel:
    """One connection's use of shared memory: lends blocks to the peer, and borrows blocks of the peer's arena."""

    def __init__(self, connection: Connection, arena: Arena) -> None:
        self._connection = connection
        self._arena = arena
        self._state = _State.CLOSED
        self._borrower = 0
        self._waiting: deque[tuple[bytes, BulkSend]] = deque()
        """Messages that wait for the answer to the offer."""
        self._unread: deque[int] = deque()
        """Sizes of the lent messages that the peer has not read yet."""
        self.unread_bytes = 0
        """The sum of `_unread`."""
        self._copying = self._copying_bytes = 0
        """The messages, and their bytes, that threads copy: they are parked meanwhile, and count as unsent."""
        self._borrowed: BorrowedArena | None = None
        self._read_count = 0

    def opened(self) -> None:
        """Start after the handshake; offers the arena at once if the peer has loans of an earlier connection."""
        peer = self._connection.peer
        if FEATURE in peer.features:
            self._state = _State.IDLE
            self._borrower = peer.incarnation
            if self._arena.has_loans(self._borrower):
                self._offer()

    def closing(self) -> None:
        """Stop waiting for an answer: this worker sends GOODBYE. If the peer does so too, it cannot answer any more."""
        if self._state is _State.OFFERED:
            self._state = _State.GIVEN_UP
            self._answered()

    def closed(self) -> None:
        """Clean up after the connection has ended. It has dropped the messages that wait here already."""
        self._waiting.clear()
        if self._state is _State.READY:
            self._arena.borrower_disconnected(self._borrower, self)
        self._state = _State.CLOSED
        if self._borrowed is not None and self._is_current:
            self._arena.borrowings.release(self._connection.peer.incarnation, self._borrowed)
        self._borrowed = None

    # -- sending

    def carry(self, data: bytes, bulk: BulkSend) -> bool:
        """Send a message through shared memory, now or later; False if it must go through the connection."""
        if self._state in {_State.CLOSED, _State.GIVEN_UP} or not self._arena.wants(bulk.buffers, bulk.size_bytes):
            return False
        if self._state is _State.READY:
            return self._arena.serves(self._borrower, self) and self._lend(data, bulk)
        if self._state is _State.IDLE:
            self._offer()
        self._connection.bulk.park(bulk)
        self._waiting.append((data, bulk))
        return True

    def _offer(self) -> None:
        self._state = _State.OFFERED
        self._connection.send(frame(_ARENA, ArenaFlag.OFFER, 0, 0, 0, _encode(self._arena.file.offer)))

    def _answered(self) -> None:
        """Send the messages that wait for the answer to the offer: through shared memory if READY, else in chunks."""
        waiting, self._waiting = self._waiting, deque()
        for data, bulk in waiting:
            # a message that was dropped meanwhile is not parked any more
            if self._connection.bulk.unpark(bulk) and not (self._state is _State.READY and self._lend(data, bulk)):
                self._connection.send_in_chunks(data, bulk)

    def _lend(self, data: bytes, bulk: BulkSend) -> bool:
        # A peer that does not read must not fill the arena: the socket provides backpressure
        waiting_bytes = self.unread_bytes + self._copying_bytes
        if waiting_bytes and waiting_bytes + bulk.size_bytes > self._arena.window_bytes:
            return False
        placement = self._arena.place(bulk.buffers)
        if placement is None:
            return False
        if placement.is_quick:
            self._copied(data, bulk, placement, _try(placement))
        else:
            self._connection.bulk.park(bulk)
            self._copying += 1
            self._copying_bytes += bulk.size_bytes
            self._arena.threads.run(placement.copy, lambda error: self._copied_in_thread(data, bulk, placement, error))
        return True

    def _copied_in_thread(
        self, data: bytes, bulk: BulkSend, placement: ArenaPlacement, error: BaseException | None
    ) -> None:
        was_behind = self.is_behind
        self._copying -= 1
        self._copying_bytes -= bulk.size_bytes
        # Meanwhile the message may have been dropped, or the connection may have ended
        if self._connection.bulk.unpark(bulk):
            self._copied(data, bulk, placement, error)
        else:
            self._arena.drop(placement, is_broken=error is not None)
        if was_behind and not self.is_behind:
            self._connection.notify_drained()

    def _copied(self, data: bytes, bulk: BulkSend, placement: ArenaPlacement, error: BaseException | None) -> None:
        if error is not None or not self._arena.serves(self._borrower, self):
            if error is not None:
                logger.warning("no shared memory for %d bytes: %s", bulk.size_bytes, error)
            self._arena.drop(placement, is_broken=error is not None)
            self._connection.send_in_chunks(data, bulk)
            return
        self._arena.lend(self._borrower, placement)
        self._unread.append(bulk.size_bytes)
        self.unread_bytes += bulk.size_bytes
        offsets = struct.pack(f"<{len(placement.offsets)}Q", *placement.offsets)
        self._connection.send_lent(data, bulk, offsets)

    # -- receiving

    def message_received(self, message: Message) -> None:
        """Handle an ARENA or FREED message. Raises `ProtocolError`."""
        if message.type == MessageType.FREED:
            self._on_freed(message)
        elif message.flags == ArenaFlag.OFFER:
            self._on_offer(message)
        elif self._state is _State.GIVEN_UP:
            pass
        elif self._state is not _State.OFFERED:
            raise ProtocolError("an answer to an offer of shared memory that was not made")
        elif message.flags == ArenaFlag.MAPPED:
            self._on_mapped(message)
        else:
            reason = bytes(message.body[:_MAX_REASON_BYTES]).decode(errors="replace")
            logger.info("worker %s does not share memory: %s", self._connection.peer.name, reason)
            self._state = _State.CLOSED
            self._answered()

    def _on_mapped(self, message: Message) -> None:
        peer = self._connection.peer
        try:
            mapped = _decode_mapped(message.body)
            self._arena.borrower_connected(self._borrower, peer.name, mapped.pid, mapped.held, self)
        except (msgspec.MsgspecError, KeyError) as error:
            raise ProtocolError(f"worker {peer.name} holds memory that it was not lent: {error}") from error
        self._state = _State.READY
        self._answered()

    def _on_freed(self, message: Message) -> None:
        body = message.body
        if self._state is not _State.READY or len(body) % 8 or message.arg > len(self._unread):
            raise ProtocolError("shared memory was given back that was not lent")
        for _ in range(message.arg):
            self.unread_bytes -= self._unread.popleft()
        if message.arg:
            self._connection.notify_bulk_left()
        if not self._arena.serves(self._borrower, self):
            return  # a newer connection has reported what is still held, and the rest was taken back then
        try:
            self._arena.take_back(self._borrower, struct.unpack(f"<{len(body) // 8}Q", body))
        except KeyError as error:
            raise ProtocolError(f"shared memory was given back that was not lent: {error}") from error

    def _on_offer(self, message: Message) -> None:
        connection = self._connection
        if self._borrowed is not None:
            raise ProtocolError("a second offer of shared memory")
        try:
            offer = _decode_offer(message.body)
            borrowed = self._arena.borrowings.map(connection.peer.incarnation, offer)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a malformed offer of shared memory: {error}") from error
        except UnmappableError as error:
            logger.info("the shared memory of worker %s cannot be used: %s", connection.peer.name, error)
            self._answer(ArenaFlag.REFUSED, str(error).encode()[:_MAX_REASON_BYTES])
            return
        answer = _encode(_Mapped(os.getpid(), borrowed.held()))
        self._borrowed = borrowed
        borrowed.on_ended = self._tell
        self._answer(ArenaFlag.MAPPED, answer)

    def _answer(self, flag: int, body: bytes) -> None:
        with suppress(ConnectionClosedError):  # this side has closed it: nothing more will be lent on it
            self._connection.send(frame(_ARENA, flag, 0, 0, 0, body))

    def borrow(self, message: Message, sizes: Sequence[int]) -> list[memoryview]:
        """Return views of the memory that a LENT message names. Raises `ProtocolError`."""
        if self._borrowed is None or len(message.body) != 8 * len(sizes):
            raise ProtocolError("shared memory was lent that was not offered")
        if not self._is_current:
            # the lender takes back the loans that were in flight when a newer connection reported what is held here
            raise ProtocolError("shared memory was lent over a connection that another one has replaced")
        self._read_count += 1
        return self._borrowed.borrow(struct.unpack(f"<{len(sizes)}Q", message.body), sizes)

    @property
    def _is_current(self) -> bool:
        """Whether no newer connection, made before this one's end was noticed, has taken over the borrowed arena."""
        return self._borrowed is not None and self._borrowed.on_ended == self._tell

    @property
    def is_behind(self) -> bool:
        """Whether enough messages wait to be copied. Each takes memory twice, or soon will; only the copy is needed."""
        return self._copying >= _FEW_COPIES and self._copying_bytes * _COPIES_PER_WINDOW > self._arena.window_bytes

    def _tell(self) -> None:
        """Report to the lender how many messages were read, and which loans have ended."""
        assert self._borrowed is not None
        ended = self._borrowed.take_ended()
        count, self._read_count = self._read_count, 0
        with suppress(ConnectionClosedError):  # the next connection reports what is still held
            self._connection.send(frame(_FREED, 0, 0, count, 0, struct.pack(f"<{len(ended)}Q", *ended)))


def _try(placement: ArenaPlacement) -> OSError | None:
    try:
        placement.copy()
    except OSError as error:
        return error
    return None
