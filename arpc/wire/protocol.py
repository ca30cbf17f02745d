"""One connection as a state machine: bytes in, messages out.

The transport reads the next bytes into the buffer that `Protocol.get_buffer` returns, and calls `Protocol.receive` with
their number. The bytes of a large tensor are read straight into their final memory; small frames share one buffer,
which is reused.
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
SHORT_READ_BYTES: Final = 4096
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
"""By message type: the class, if an open connection passes such messages on unchanged; None for other types."""
_NO_CALLS: Final = (None,) * 256
MAX_SCHEMAS: Final = 1024
"""The most tensor layouts that a peer may announce on one connection."""
MAX_SCHEMA_BYTES: Final = 1 << 22
"""The largest total size of the layouts that a peer may announce on one connection."""
_unpack = HEADER.unpack_from


class State(Enum):
    """The phases of a connection."""

    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    """A GOODBYE was sent or received: messages in flight still arrive."""
    CLOSED = auto()


_CLOSED: Final = State.CLOSED


class Lender(TypingProtocol):
    """The memory that a connection shares with its peer. All methods raise `ProtocolError`."""

    def message_received(self, message: Message) -> None:
        """Handle an ARENA or FREED message."""

    def borrow(self, message: Message, sizes: Sequence[int]) -> list[memoryview]:
        """Return the memory that a LENT message names, one view for each size."""


class Protocol:
    """The receiving half of a connection, and its handshake.

    Any error leaves it CLOSED; nothing that a peer sends can do more than that. Bytes that arrive later are ignored.
    """

    def __init__(
        self,
        handshake: Handshake,
        limits: Limits,
        allocate: Callable[[int], memoryview] = allocate_memory,
        read_layout: Callable[[bytes], Layout] = read_layout,
    ) -> None:
        """``read_layout`` reads and checks a layout of tensors that the peer sends, see `policy.Policy.layout`."""
        self.state = State.HANDSHAKE
        self._handshake = handshake
        self._open_limits = limits
        self._limits = _HANDSHAKE_LIMITS
        self._calls: tuple[type[Message] | None, ...] = _NO_CALLS
        self.allocate = allocate
        """The function that allocates memory for large tensors."""
        self._read_layout = read_layout
        self._layouts: dict[int, Layout] = {}
        self._schema_bytes = 0
        self.lender: Lender | None = None
        # An unauthenticated peer gets a buffer for the handshake only; `_open` enlarges it
        self._set_buffer(bytearray(HEADER_BYTES + MAX_HANDSHAKE_BYTES))
        self._end = 0
        self._must_check_state = False
        """Whether `receive` must check the state first. If not, the next bytes begin a frame at the buffer's start."""
        # The memory that the next bytes are read into instead of the buffer: of a large body, or of a tensor's chunk
        self._target: memoryview | None = None
        self.get_buffer: Callable[[int], memoryview] = partial(getattr, self, "_next")
        """Return the memory for the peer's next bytes, for any size hint. Never empty; valid until the next `receive`.

        A ``getattr`` whose default is the size hint that asyncio passes, so that a call runs no Python code.
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
        """Whether no message is partly received."""
        return not (self._inbox.waiting or self._end or self._target is not None)

    @property
    def role(self) -> Role:
        """The role of this side: whether it made or accepted the connection."""
        return self._handshake.role

    @property
    def peer(self) -> Identity | None:
        """The identity of the peer; None until the handshake is done."""
        return self._handshake.peer

    def certify(self, names: Container[str]) -> None:
        """Record the names in the peer's TLS certificate; see `Handshake.certify`."""
        self._handshake.certify(names)

    def join(self, main: Protocol) -> None:
        """Become a lane of an open connection to the same peer; see `wire.striping`."""
        self._inbox = main._inbox
        self._is_lane = True

    def take_output(self) -> bytes:
        """Remove and return the bytes that the protocol itself has to send: handshake messages and answers to pings."""
        if not self.output:
            return b""
        data = b"".join(self.output)
        self.output.clear()
        return data

    def say_goodbye(self, reason: str) -> bytes:
        """Begin to close an open connection: return its last message. Returns no bytes if it is not open."""
        if self.state is not State.OPEN:
            return b""
        self.state = State.CLOSING
        return frame(_GOODBYE, 0, 0, 0, 0, reason.encode()[:_MAX_GOODBYE_BYTES])

    def close(self) -> None:
        """Close the connection and drop partly received messages. May be called at any time, and again."""
        self.state = _CLOSED
        self._inbox.clear()
        self._target = None
        self._next = self._view
        self._target_filled = None
        self._end = 0
        self._must_check_state = True

    def receive(self, size_bytes: int) -> list[Message]:
        """Parse the bytes that were read into the memory from `get_buffer`; returns the messages that they complete.

        Raises `ProtocolError` or `HandshakeError`; after that the connection is closed, and `take_output` may return a
        refusal to send.
        """
        messages: list[Message] = []
        start, end = 0, size_bytes
        try:
            if self._must_check_state:
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
        if start < end or self._must_check_state:
            self._keep_rest(start, end)
        return messages

    def _receive_rest(self, size_bytes: int, messages: list[Message]) -> int:
        """Take bytes that continue earlier ones; returns the number of unparsed bytes in the buffer."""
        if self.state is _CLOSED:
            return 0
        if self._target is None:
            return self._end + size_bytes
        self._receive_target(size_bytes, messages)
        return 0

    def _keep_rest(self, start: int, end: int) -> None:
        """Move an incomplete frame to the start of the buffer, and choose the memory for the next bytes."""
        self._end = rest = end - start
        if rest and start:
            self._view[:rest] = self._view[start:end]
        self._next = self._elsewhere()
        self._must_check_state = self._next is not self._view or self.state is _CLOSED

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
        """Return the memory for the next bytes, if something may have arrived in part."""
        if self._target is not None:
            return self._target
        if self._end:
            return self._view[self._end :]
        if not self._inbox.waiting:
            return self._view
        # While a large tensor is in flight, the next frame is most likely a chunk of it. A short read takes little more
        # than its header, so that the rest is read straight into the tensor's memory and not copied there
        return self._small_view

    # -- frames

    def _split(self, message: Message, schema: int, meta_size: int, start: int) -> None:
        """Split a body into small tensors, ``start`` bytes with the sizes of large tensors, metadata, and the rest.

        The large tensors themselves follow in DATA frames.
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
        """Handle a frame that is incomplete, or not a small message of an open connection.

        Returns the start of the next frame, the end of the bytes, and False if the rest is not a whole frame.
        """
        self._must_check_state = True  # perhaps: `_keep_rest` decides
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
        """Handle a whole frame of any type but DATA."""
        _, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, schema = header
        message = MESSAGE_CLASSES[type_](flags, id_, arg, timeout_ms, body)
        if schema or meta_size or n_buffers:
            self._split(message, schema, meta_size, 8 * n_buffers)
        self._receive_special(message, n_buffers, messages)

    # -- schemas

    def _split_one_off(self, schema: int, body: bytearray | memoryview) -> tuple[Layout, memoryview]:
        """Return the layout of a message that carries its own table, and the message's body without the table."""
        if self.state is State.HANDSHAKE:
            raise ProtocolError("a message with tensors is out of place in a handshake")
        if schema != ONE_OFF:
            raise ProtocolError(f"a message with tensors of the schema {schema}, which was not announced")
        table, start = frames.split_table(body)
        return self._read_layout(table), memoryview(body)[:start]

    def _receive_schema(self, message: Message) -> None:
        """Register a layout that the peer announces for the tensors of later messages."""
        if message.memory:
            raise ProtocolError("a schema was announced in a message that has tensors or metadata")
        number, table = message.arg, bytes(message.body)
        self._schema_bytes += len(table)
        if not 0 < number <= MAX_SCHEMAS or number in self._layouts or self._schema_bytes > MAX_SCHEMA_BYTES:
            raise ProtocolError(f"schema {number} cannot be announced: it is known, or there are too many")
        self._layouts[number] = self._read_layout(table)

    def _begin_large_body(self, header: Header, body_start: int, end: int) -> None:
        """Have the rest of a body that does not fit the buffer read straight into memory of its own."""
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
        """Copy the bytes of a large tensor that have arrived, have the rest read in place. Returns where they end."""
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
            pass  # its arrival shows that the peer is alive, and it has nothing else to report
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
        # bytes that arrived right after the handshake keep their place
        self._set_buffer(self.buffer.ljust(RECEIVE_BYTES, b"\0"))
        if self._limits.body_bytes >= len(self.buffer):  # then no frame that fits the buffer is over the limit
            self._calls = _CALLS

    def _set_buffer(self, buffer: bytearray) -> None:
        self.buffer = buffer
        self._next = self._view = memoryview(buffer)
        self._small_view = self._view[:SHORT_READ_BYTES]

    def _answer(self, data: bytes) -> None:
        if data:
            self.output.append(data)
