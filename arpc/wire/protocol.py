"""One connection as a state machine: bytes in, messages out.

The transport asks `Protocol.get_buffer` where to put the next bytes, reads into it, and calls `Protocol.receive` with
their number. So the bytes of a large tensor land in their final memory, while small frames are gathered in a buffer
that is used again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final
from typing import Protocol as TypingProtocol

from arpc.errors import HandshakeError, ProtocolError
from arpc.wire import frames
from arpc.wire.frames import HEADER, HEADER_BYTES, ONE_OFF, Header, Limits, frame
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, Handshake, Identity, Role
from arpc.wire.messages import MESSAGE_CLASSES, Message, MessageType
from arpc.wire.striping import Chunk, Inbox
from arpc.wire.values.layouts import Layout, read_layout
from arpc.wire.values.raw_memory import allocate as allocate_memory

__all__ = ["MAX_SCHEMAS", "MAX_SCHEMA_BYTES", "Lender", "Protocol", "State"]

RECEIVE_BYTES: Final = 256 * 1024
BETWEEN_CHUNKS_BYTES: Final = 4096
_HANDSHAKE_LIMITS: Final = Limits(MAX_HANDSHAKE_BYTES, 0)
_MAX_GOODBYE_BYTES: Final = 1024
_DATA: Final = int(MessageType.DATA)
_DROP_DATA: Final = int(MessageType.DROP_DATA)
_PING: Final = int(MessageType.PING)
_PONG: Final = int(MessageType.PONG)
_GOODBYE: Final = int(MessageType.GOODBYE)
_ARENA: Final = int(MessageType.ARENA)
_LENT: Final = int(MessageType.LENT)
_FIRST_OF_CALLS: Final = int(MessageType.FUNCTION)
_SCHEMA: Final = int(MessageType.SCHEMA)
_CALLS: Final = tuple(
    MESSAGE_CLASSES.get(type_) if type_ >= _FIRST_OF_CALLS and type_ != _SCHEMA else None for type_ in range(256)
)
"""By type: the messages of an open connection that are handed on as they are."""
_NO_CALLS: Final = (None,) * 256
MAX_SCHEMAS: Final = 1024
"""How many layouts of tensors a peer may announce on one connection."""
MAX_SCHEMA_BYTES: Final = 1 << 22
"""How much may be announced of all of them."""
_unpack = HEADER.unpack_from


class State(Enum):
    """Where a connection is in its life."""

    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    """A goodbye was said or heard: what is under way still arrives."""
    CLOSED = auto()


_CLOSED: Final = State.CLOSED


class Lender(TypingProtocol):
    """Knows about memory that is shared with the peer. Its methods raise `ProtocolError`."""

    def message_received(self, message: Message) -> None:
        """An ARENA or FREED message."""

    def borrow(self, message: Message, sizes: Sequence[int]) -> list[memoryview]:
        """The memory that a LENT message speaks of."""


class Protocol:
    """The receiving half of a connection, and its handshake.

    Any error leaves it CLOSED; nothing a peer sends can do more than that. What comes after the end is ignored.
    """

    def __init__(
        self,
        handshake: Handshake,
        limits: Limits,
        allocate: Callable[[int], memoryview] = allocate_memory,
        read_layout: Callable[[bytes], Layout] = read_layout,
    ) -> None:
        """``read_layout`` checks what a peer announces of the layout of tensors, see `policy.Policy.layout`."""
        self.state = State.HANDSHAKE
        self._handshake = handshake
        self._open_limits = limits
        self._limits = _HANDSHAKE_LIMITS
        self._calls: tuple[type[Message] | None, ...] = _NO_CALLS
        self.allocate = allocate
        """Where memory for large tensors comes from."""
        self._read_layout = read_layout
        self._layouts: dict[int, Layout] = {}
        self._schema_bytes = 0
        self.lender: Lender | None = None
        # A stranger is worth just the memory of a handshake; see `_open`
        self._set_buffer(bytearray(HEADER_BYTES + MAX_HANDSHAKE_BYTES))
        self._end = 0
        self._has_rest = False
        """The next bytes are not the beginning of a frame at the beginning of the buffer, or come after the end."""
        # Where the next bytes go instead of the buffer: the rest of a large body, or of a chunk for a tensor
        self._target: memoryview | None = None
        self.get_buffer: Callable[[int], memoryview] = partial(getattr, self, "_next")
        """Where the next bytes of the peer belong, given any number. Never empty; good until the next `receive`.

        A getattr whose default is the size hint that asyncio passes: no line of Python runs for it.
        """
        self._target_filled: Callable[[list[Message]], None] | None = None
        self._inbox = Inbox(self._allocate)
        """Shared by a main connection and its lanes."""
        self._is_lane = False
        self.output: list[bytes] = []
        if handshake.role is Role.CONNECTOR:
            self.output.append(handshake.start())

    @property
    def is_between_frames(self) -> bool:
        """Whether nothing has arrived in part."""
        return not (self._inbox.waiting or self._end or self._target is not None)

    @property
    def role(self) -> Role:
        """Whether this side made the connection."""
        return self._handshake.role

    @property
    def peer(self) -> Identity | None:
        """Who is on the other side, once the handshake is done."""
        return self._handshake.peer

    def certify(self, names: Container[str]) -> None:
        """The peer has shown a certificate for these names; see `Handshake.certify`."""
        self._handshake.certify(names)

    def join(self, main: Protocol) -> None:
        """Become a lane of an open connection to the same peer; see `wire.striping`."""
        self._inbox = main._inbox
        self._is_lane = True

    def take_output(self) -> bytes:
        """What the protocol itself wants to send: its part of the handshake, answers to pings."""
        if not self.output:
            return b""
        data = b"".join(self.output)
        self.output.clear()
        return data

    def say_goodbye(self, reason: str) -> bytes:
        """The last message of a connection that is closed on purpose; nothing if it is not open."""
        if self.state is not State.OPEN:
            return b""
        self.state = State.CLOSING
        return frame(_GOODBYE, 0, 0, 0, 0, reason.encode()[:_MAX_GOODBYE_BYTES])

    def close(self) -> None:
        """Forget what has not arrived in full. May be called at any time, and again."""
        self.state = _CLOSED
        self._inbox.clear()
        self._target = None
        self._next = self._view
        self._target_filled = None
        self._end = 0
        self._has_rest = True

    def receive(self, size_bytes: int) -> list[Message]:
        """Take bytes that were put where `get_buffer` said; returns the messages they complete.

        Raises `ProtocolError` or `HandshakeError`; after that the connection is closed (`take_output` may hold a
        farewell).
        """
        messages: list[Message] = []
        start, end = 0, size_bytes
        try:
            if self._has_rest:
                end = self._receive_rest(size_bytes, messages)
            while (body_start := start + HEADER_BYTES) <= end:
                length, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, schema = _unpack(self.buffer, start)
                cls = self._calls[type_]
                stop = body_start + length
                if cls is None or n_buffers or stop > end:
                    start, end, is_whole = self._parse_special(start, end, messages)
                    if not is_whole:
                        break
                    continue
                message = cls(flags, id_, arg, timeout_ms, self.buffer[body_start:stop])
                if schema or meta_size:
                    self._split(message, schema, meta_size, 0)
                messages.append(message)
                start = stop
        except HandshakeError as error:
            self._answer(self._handshake.farewell(error))
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        if start < end or self._has_rest:
            self._keep_rest(start, end)
        return messages

    def _receive_rest(self, size_bytes: int, messages: list[Message]) -> int:
        """Take bytes that continue what came before; returns how many there are in the buffer now."""
        if self.state is _CLOSED:
            return 0
        if self._target is None:
            return self._end + size_bytes
        self._receive_target(size_bytes, messages)
        return 0

    def _keep_rest(self, start: int, end: int) -> None:
        """Keep what is not a whole frame yet, and say where the next bytes go."""
        self._end = rest = end - start
        if rest and start:
            self._view[:rest] = self._view[start:end]
        self._next = self._elsewhere()
        self._has_rest = self._next is not self._view or self.state is _CLOSED

    def _receive_target(self, size_bytes: int, messages: list[Message]) -> None:
        target, filled = self._target, self._target_filled
        assert target is not None
        assert filled is not None
        if size_bytes < target.nbytes:
            self._target = target[size_bytes:]
        else:
            self._target = self._target_filled = None
            filled(messages)

    def _elsewhere(self) -> memoryview:
        """Where the next bytes go, if something may have arrived in part."""
        if self._target is not None:
            return self._target
        if self._end:
            return self._view[self._end :]
        if not self._inbox.waiting:
            return self._view
        # While a large tensor is under way, what comes next is most likely a chunk for it: with little more than its
        # header read here, the rest is read where it belongs, and not copied there
        return self._small_view

    # -- frames

    def _split(self, message: Message, schema: int, meta_size: int, start: int) -> None:
        """Split a body that has more than one part. Memory for large tensors comes later, their sizes end at ``start``.

        These come after the small tensors.
        """
        memory = message.body
        if schema:
            layout = self._layouts.get(schema)
            if layout is None:
                layout, memory = self._split_one_off(schema, memory)
            message.layout = layout
            start += layout.inline_bytes
        end = start + meta_size
        if end > len(memory) or meta_size > self._limits.header_bytes:
            raise ProtocolError("the parts of a frame are longer than the frame, or than the limit")
        message.memory = view = memoryview(memory)
        message.body = view[end:]
        if meta_size:
            message.meta = view[start:end]

    def _parse_special(self, start: int, end: int, messages: list[Message]) -> tuple[int, int, bool]:
        """Take a frame that is no small message of an open connection, or is not complete.

        Returns where the next one begins, where the bytes end, and False if what is left is not a whole frame.
        """
        self._has_rest = True  # perhaps: `_keep_rest` finds out
        header = Header._make(_unpack(self.buffer, start))
        if header.length > self._limits.body_bytes:
            raise ProtocolError(f"a frame of {header.length} bytes is over the limit of {self._limits.body_bytes}")
        body_start = start + HEADER_BYTES
        stop = body_start + header.length
        if header.type == _DATA:
            start = self._receive_data(header, body_start, end, messages)
            return (start, end, True) if self._target is None else (0, 0, False)
        if header.type not in MESSAGE_CLASSES:
            raise ProtocolError(f"a message of the unknown type {header.type}")
        if stop > end:
            if stop - start <= self._view.nbytes:
                return start, end, False
            self._begin_large_body(header, body_start, end)
            return 0, 0, False
        self._receive_frame(header, self.buffer[body_start:stop], messages)
        return stop, end, True

    def _receive_frame(self, header: Header, body: bytearray, messages: list[Message]) -> None:
        """Take a whole frame of any type but DATA."""
        _, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, schema = header
        message = MESSAGE_CLASSES[type_](flags, id_, arg, timeout_ms, body)
        if schema or meta_size or n_buffers:
            self._split(message, schema, meta_size, 8 * n_buffers)
        self._receive_special(message, n_buffers, messages)

    # -- schemas

    def _split_one_off(self, schema: int, body: bytearray | memoryview) -> tuple[Layout, memoryview]:
        """How the tensors of a message are laid out that brings its own table, and its body without that."""
        if self.state is State.HANDSHAKE:
            raise ProtocolError("a message with tensors is out of place in a handshake")
        if schema != ONE_OFF:
            raise ProtocolError(f"a message with tensors of the schema {schema}, which was not announced")
        table, start = frames.split_table(body)
        return self._read_layout(table), memoryview(body)[:start]

    def _receive_schema(self, message: Message) -> None:
        """The peer announces how the tensors of later messages are laid out."""
        if message.memory:
            raise ProtocolError("a schema was announced in a message that has tensors or metadata")
        number, table = message.arg, bytes(message.body)
        self._schema_bytes += len(table)
        if not 0 < number <= MAX_SCHEMAS or number in self._layouts or self._schema_bytes > MAX_SCHEMA_BYTES:
            raise ProtocolError(f"schema {number} cannot be announced: it is known, or there are too many")
        self._layouts[number] = self._read_layout(table)

    def _begin_large_body(self, header: Header, body_start: int, end: int) -> None:
        """The body does not fit the buffer: read the rest of it straight into memory of its own."""
        try:
            body = bytearray(header.length)
        except MemoryError:
            raise ProtocolError(f"no memory for a frame of {header.length} bytes") from None
        view = memoryview(body)
        available = end - body_start
        view[:available] = self._view[body_start:end]
        self._target = view[available:]
        self._target_filled = partial(self._receive_frame, header, body)

    # -- large tensors

    def _begin_assembly(self, message: Message, n_buffers: int, messages: list[Message]) -> None:
        start = 0 if message.layout is None else message.layout.inline_bytes
        sizes = frames.buffer_sizes_of(message.memory, start, n_buffers, self._limits)
        if (complete := self._inbox.begin(message, sizes)) is not None:
            messages.append(complete)

    def _receive_data(self, header: Header, start: int, end: int, messages: list[Message]) -> int:
        """Bytes of a large tensor: copy what has come, have the rest read where it belongs. Returns where they end."""
        length = header.length
        if self.state is State.HANDSHAKE:
            raise ProtocolError("DATA is out of place in a handshake")
        if not length:
            raise ProtocolError("an empty DATA frame")
        if self._is_lane:
            chunk = self._inbox.stripe(header.id, header.arg, header.timeout_ms, length)
        else:
            chunk = self._inbox.chunk(header.id, length)
        available = min(end - start, length)
        chunk.memory[:available] = self._view[start : start + available]
        if available == length:
            self._finish_chunk(chunk, messages)
        else:
            self._target, self._target_filled = chunk.memory[available:], partial(self._finish_chunk, chunk)
        return start + available

    def _finish_chunk(self, chunk: Chunk, messages: list[Message]) -> None:
        if (message := self._inbox.arrived(chunk)) is not None:
            messages.append(message)

    def _allocate(self, size_bytes: int) -> memoryview:
        try:
            return self.allocate(size_bytes)
        except MemoryError:
            raise ProtocolError(f"no memory for a tensor of {size_bytes} bytes") from None

    # -- everything that is not a small message of an open connection

    def _receive_special(self, message: Message, n_buffers: int, messages: list[Message]) -> None:
        type_ = message.type
        if self.state is State.HANDSHAKE:
            self._answer(self._handshake.receive(message))
            if self._handshake.done:
                self._open()
        elif type_ == _PING:
            self._answer(frame(_PONG, 0, message.id, 0, 0, b""))
        elif type_ == _PONG:
            pass  # that bytes came is all there is to know
        elif type_ == _DROP_DATA:
            if self._inbox.waiting.pop(message.id, None) is None:
                raise ProtocolError(f"DROP_DATA for frame {message.id}, which waits for none")
        elif type_ == _GOODBYE:
            self.state = State.CLOSING
            messages.append(message)
        elif type_ == _SCHEMA:
            self._receive_schema(message)
        elif type_ < _FIRST_OF_CALLS:
            self._receive_about_memory(message, messages)
        elif n_buffers:
            self._begin_assembly(message, n_buffers, messages)
        else:
            messages.append(message)

    def _receive_about_memory(self, message: Message, messages: list[Message]) -> None:
        type_ = message.type
        if type_ < _ARENA or self.lender is None or message.memory:
            raise ProtocolError(f"{type_.name} is out of place in an open connection")
        if type_ != _LENT:
            self.lender.message_received(message)
            return
        assembly = self._inbox.waiting.pop(message.id, None)
        if assembly is None or assembly.buffers:
            raise ProtocolError(f"memory was lent for frame {message.id}, which waits for none")
        assembly.message.buffers = self.lender.borrow(message, assembly.sizes)
        messages.append(assembly.message)

    def _open(self) -> None:
        self.state = State.OPEN
        self._limits = self._open_limits
        # what came right behind the handshake stays where it is
        self._set_buffer(self.buffer.ljust(RECEIVE_BYTES, b"\0"))
        if self._limits.body_bytes >= len(self.buffer):  # then a frame that is in the buffer is not over the limit
            self._calls = _CALLS

    def _set_buffer(self, buffer: bytearray) -> None:
        self.buffer = buffer
        self._next = self._view = memoryview(buffer)
        self._small_view = self._view[:BETWEEN_CHUNKS_BYTES]

    def _answer(self, data: bytes) -> None:
        if data:
            self.output.append(data)
