"""One connection as a state machine: bytes in, messages out.

The transport asks `get_buffer` where to put the next bytes, reads into it, and calls `receive` with their number. So the bytes of a
large tensor land in their final memory, while small frames are gathered in a buffer that is used again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from arpc.errors import ConnectionClosedError, HandshakeError, ProtocolError
from arpc.wire import frames
from arpc.wire.frames import HEADER, HEADER_BYTES, SIZE, Limits, frame
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES, Handshake, Identity, Role
from arpc.wire.messages import MESSAGE_CLASSES, Message, MessageType
from arpc.wire.tensors import allocate as allocate_memory

__all__ = ["Protocol", "State"]

RECEIVE_BYTES: Final = 256 * 1024
_unpack_header = HEADER.unpack_from
_DATA: Final = int(MessageType.DATA)
_DROP_DATA: Final = int(MessageType.DROP_DATA)
_PING: Final = int(MessageType.PING)
_PONG: Final = int(MessageType.PONG)
_GOODBYE: Final = int(MessageType.GOODBYE)
_FIRST_OF_CALLS: Final = int(MessageType.FUNCTION)
_NO_BUFFERS: Final[list[memoryview]] = []
_HANDSHAKE_LIMITS: Final = Limits(MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES)
_CLASSES: Final = MESSAGE_CLASSES


class State(Enum):
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    """A goodbye was said or heard: what is under way still arrives."""
    CLOSED = auto()


_TRANSITIONS: Final = {
    State.HANDSHAKE: {State.OPEN, State.CLOSED},
    State.OPEN: {State.CLOSING, State.CLOSED},
    State.CLOSING: {State.CLOSING, State.CLOSED},
    State.CLOSED: {State.CLOSED},
}


class _Assembly:
    """A message that waits for its large tensors."""

    __slots__ = ("buffers", "index", "message", "position")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.buffers = message.buffers
        self.index = 0
        self.position = 0


class Protocol:
    """The receiving half of a connection, and its handshake.

    Any error leaves it CLOSED; nothing a peer sends can do more than that.
    """

    def __init__(
        self,
        handshake: Handshake,
        limits: Limits,
        allocate: Callable[[int], memoryview] = allocate_memory,
    ) -> None:
        self.state = State.HANDSHAKE
        self._handshake = handshake
        self._open_limits = limits
        self._limits = _HANDSHAKE_LIMITS
        self._allocate = allocate
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        # Where the next bytes go instead of the buffer, and what to do when it is full
        self._target: memoryview | None = None
        self._target_done: Callable[[list[Message]], None] = self._nothing
        self._pending_header: tuple[int, ...] = ()
        self._pending_body = bytearray()
        self._assemblies: dict[int, _Assembly] = {}
        self._assembly_count = 0
        self._output: list[bytes] = []
        if handshake.role is Role.CONNECTOR:
            self._output.append(handshake.start())

    @property
    def peer(self) -> Identity | None:
        """Who is on the other side, once the handshake is done."""
        return self._handshake.peer

    def take_output(self) -> bytes:
        """What the protocol itself wants to send: its part of the handshake, answers to pings."""
        if not self._output:
            return b""
        data = b"".join(self._output)
        self._output.clear()
        return data

    def say_goodbye(self, reason: str) -> bytes:
        """The last message of a connection that is closed on purpose."""
        if self.state is not State.OPEN:
            return b""
        self._set_state(State.CLOSING)
        return frame(_GOODBYE, 0, 0, 0, 0, reason.encode()[:1024])

    def close(self) -> None:
        self._set_state(State.CLOSED)
        self._assemblies.clear()
        self._target = None

    def get_buffer(self) -> memoryview:
        """Where the next bytes of the peer belong. Never empty."""
        if self._target is not None:
            return self._target
        if self._end == RECEIVE_BYTES:
            self._compact()
        return self._view[self._end :]

    def receive(self, size_bytes: int) -> list[Message]:
        """Take bytes that were put where `get_buffer` said. Returns the messages they complete.

        Raises `ProtocolError` or `HandshakeError`; after that the connection is closed (`take_output` may hold a farewell).
        """
        try:
            messages: list[Message] = []
            target = self._target
            if target is not None:
                if size_bytes < target.nbytes:
                    self._target = target[size_bytes:]
                    return messages
                self._target = None
                self._target_done(messages)
                return messages
            self._end += size_bytes
            self._parse(messages)
        except HandshakeError as error:
            self._output.append(Handshake.refusal(error))
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        return messages

    # -- frames

    def _parse(self, messages: list[Message]) -> None:
        buffer = self._buffer
        start = self._start
        end = self._end
        limit = self._limits.body_bytes
        is_open = self.state is not State.HANDSHAKE
        while end - start >= HEADER_BYTES:
            header = _unpack_header(buffer, start)
            length, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, table_size = header
            meta_start = 8 * n_buffers
            meta_end = meta_start + meta_size
            table_end = meta_end + table_size
            if length > limit or table_end > length:
                frames.check(frames.Header(*header), self._limits)
            body_start = start + HEADER_BYTES
            stop = body_start + length
            if type_ == _DATA:
                self._start = body_start
                start = self._receive_data(id_, length, messages)
                if self._target is not None:
                    return
                continue
            cls = _CLASSES.get(type_)
            if cls is None:
                raise ProtocolError(f"a message of the unknown type {type_}")
            if stop > end:
                if HEADER_BYTES + length <= RECEIVE_BYTES:
                    break
                self._begin_large_body(header, body_start)
                return
            body = buffer[body_start:stop]
            start = stop
            message = cls(flags, id_, arg, timeout_ms, meta_end, table_end, meta_start, body, _NO_BUFFERS)
            if is_open and type_ >= _FIRST_OF_CALLS and not n_buffers:
                messages.append(message)
            else:
                self._receive_special(type_, message, n_buffers, messages)
                is_open = self.state is not State.HANDSHAKE
                limit = self._limits.body_bytes
        if start == end:
            self._start = self._end = 0
        else:
            self._start = start
            if RECEIVE_BYTES - start < HEADER_BYTES:
                self._compact()

    def _compact(self) -> None:
        size = self._end - self._start
        self._view[:size] = self._buffer[self._start : self._end]
        self._start = 0
        self._end = size

    def _begin_large_body(self, header: tuple[int, ...], body_start: int) -> None:
        """The body does not fit the buffer: read the rest of it straight into memory of its own."""
        body = bytearray(header[0])
        available = self._end - body_start
        view = memoryview(body)
        view[:available] = self._view[body_start : self._end]
        self._start = self._end = 0
        self._pending_header = header
        self._pending_body = body
        self._target = view[available:]
        self._target_done = self._finish_large_body

    def _finish_large_body(self, messages: list[Message]) -> None:
        _, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, table_size = self._pending_header
        body, self._pending_body = self._pending_body, bytearray()
        meta_start = 8 * n_buffers
        meta_end = meta_start + meta_size
        cls = _CLASSES[type_]
        message = cls(flags, id_, arg, timeout_ms, meta_end, meta_end + table_size, meta_start, body, _NO_BUFFERS)
        self._receive_special(type_, message, n_buffers, messages)

    # -- large tensors

    def _begin_assembly(self, message: Message, n_buffers: int) -> None:
        body = message.body
        sizes = [SIZE.unpack_from(body, 8 * index)[0] for index in range(n_buffers)]
        total = sum(sizes)
        if total > self._limits.message_bytes:
            raise ProtocolError(f"a message of {total} bytes is over the limit of {self._limits.message_bytes}")
        if 0 in sizes:
            raise ProtocolError("an empty buffer was announced")
        message.buffers = [self._allocate(size) for size in sizes]
        self._assemblies[self._assembly_count] = _Assembly(message)
        self._assembly_count += 1

    def _receive_data(self, id_: int, length: int, messages: list[Message]) -> int:
        """Bytes of a large tensor: copy what has come, have the rest read where it belongs. Returns the new start."""
        if self.state is State.HANDSHAKE:
            raise ProtocolError("DATA is out of place in a handshake")
        if not length:
            raise ProtocolError("an empty DATA frame")
        assembly = self._assemblies.get(id_)
        if assembly is None:
            raise ProtocolError(f"DATA for frame {id_}, which waits for none")
        buffer = assembly.buffers[assembly.index]
        stop = assembly.position + length
        if stop > buffer.nbytes:
            raise ProtocolError("more DATA than was announced")
        start = self._start
        available = min(self._end - start, length)
        buffer[assembly.position : assembly.position + available] = self._view[start : start + available]
        start += available

        def done(messages: list[Message]) -> None:
            self._finish_chunk(id_, assembly, stop, messages)

        if available == length:
            done(messages)
        else:
            self._start = self._end = 0
            self._target = buffer[assembly.position + available : stop]
            self._target_done = done
        return start

    def _finish_chunk(self, id_: int, assembly: _Assembly, stop: int, messages: list[Message]) -> None:
        assembly.position = stop
        if stop < assembly.buffers[assembly.index].nbytes:
            return
        assembly.index += 1
        assembly.position = 0
        if assembly.index == len(assembly.buffers):
            del self._assemblies[id_]
            messages.append(assembly.message)

    # -- everything that is not a small message of an open connection

    def _receive_special(self, type_: int, message: Message, n_buffers: int, messages: list[Message]) -> None:
        if self.state is State.HANDSHAKE:
            self._output.append(self._handshake.receive(message))
            if self._handshake.done:
                self._set_state(State.OPEN)
                self._limits = self._open_limits
        elif type_ == _PING:
            self._output.append(frame(_PONG, 0, message.id, 0, 0, b""))
        elif type_ == _PONG:
            pass  # that bytes came is all there is to know
        elif type_ == _DROP_DATA:
            if self._assemblies.pop(message.id, None) is None:
                raise ProtocolError(f"DROP_DATA for frame {message.id}, which waits for none")
        elif type_ == _GOODBYE:
            self._set_state(State.CLOSING)
            messages.append(message)
        elif type_ < _FIRST_OF_CALLS:
            raise ProtocolError(f"{message.type.name} is out of place in an open connection")
        elif n_buffers:
            self._begin_assembly(message, n_buffers)
        else:
            messages.append(message)

    def _nothing(self, messages: list[Message]) -> None:
        """Stands where no target is set."""

    def _set_state(self, state: State) -> None:
        if state not in _TRANSITIONS[self.state]:
            if self.state is State.CLOSED:
                raise ConnectionClosedError("the connection is closed")
            raise ProtocolError(f"a connection cannot go from {self.state.name} to {state.name}")
        self.state = state
