"""Encodes the message of a peer, has arpc read it, and uses the result.

Raises `UnsoundError` for a tensor that reaches beyond the memory of its message, and any error that is not allowed.
"""

from __future__ import annotations

import asyncio
import gc
import io
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch._utils import _rebuild_nested_tensor, _rebuild_qtensor

from arpc.errors import ProtocolError, SerializationError
from arpc.transport.shm.borrowing import BorrowedArena
from arpc.transport.shm.mapping import ArenaFile, ArenaOffer, MappedArena, UnmappableError
from arpc.wire import frames
from arpc.wire.frames import HEADER, Limits, frame
from arpc.wire.messages import Data, Message, MessageType
from arpc.wire.protocol import Protocol
from arpc.wire.striping import Inbox
from arpc.wire.values.layouts import read_layout
from arpc.wire.values.raw_memory import address_of
from arpc.wire.values.sharing import extent
from arpc.wire.values.table import Code, Kind
from scripts.metadata.valid import ARENA_BYTES, Input

__all__ = ["Trial", "UnsoundError"]

_LOADED: Final = frozenset(("nested", "quantized", "archive"))
_SMALL: Final = 1 << 12
_LARGEST: Final = 1 << 24
_WIDTHS: Final = (32, 8, 8, 16, 64, 32, 32, 32, 32)
_Memory = bytes | bytearray | memoryview
_Read = Callable[[], None]


class UnsoundError(AssertionError):
    """arpc has built a value that does not match the message."""


class Trial:
    """Reads inputs, one after the other."""

    def __init__(self, open_protocol: Callable[[Limits], Protocol]) -> None:
        self._open_protocol = open_protocol
        self._arena = ArenaFile(ARENA_BYTES)
        self._loop = asyncio.new_event_loop()
        self._borrowed = BorrowedArena(self._arena.offer, self._loop)
        self.built = 0
        """The number of inputs that were not refused."""
        self._operators: Sequence[Callable[[Tensor], Any]] = _OPERATORS

    def close(self) -> None:
        self._borrowed.watch.close()
        self._arena.close()
        self._loop.close()

    def run(self, given: Input, *, is_thorough: bool = True) -> None:
        """Read one input. Returns normally if arpc refuses it with one of the errors that it may raise.

        ``is_thorough``: use the result in many ways, which takes long.
        """
        self._operators = _OPERATORS if is_thorough else _OPERATORS[:2]
        try:
            read = self._WAYS[given.way](self, *given.content)
        except Exception:  # noqa: BLE001 - it cannot be encoded, so no peer can send it
            return
        try:
            read()
            self.built += 1
        except (ProtocolError, SerializationError):
            pass
        if given.way in _LOADED:
            gc.collect()  # an error of torch.load keeps its tensors until then, and they may take all addresses

    # -- ways in: each method encodes the message of a peer, and returns a function that reads it

    def _table(
        self, table: Any, inline: bytes, after: bytes, buffers: Sequence[bytes], placed: int, strict: int
    ) -> _Read:
        encoded = msgspec.msgpack.encode(_in_64_bits(table))
        bodies = [bytearray(inline + after) for _ in range(2)]  # a layout is read once, and used for many messages
        memories = [np.frombuffer(buffer, np.uint8).copy().data for buffer in buffers if len(buffer)]
        given: list[Any] = [torch.frombuffer(memory, dtype=torch.uint8) if placed else memory for memory in memories]

        def read() -> None:
            layout = read_layout(encoded, is_restricted=bool(strict))
            for body in bodies:
                for slot in layout.build(body, given):
                    self._use(slot, (body, *memories))

        return read

    def _message(
        self,
        announced: Sequence[Any],
        header: Sequence[int],
        body: bytes,
        one_off: Sequence[Any],
        buffers: Sequence[bytes],
    ) -> _Read:
        data = b""
        if announced:
            number, table = announced
            encoded = msgspec.msgpack.encode(_in_64_bits(table))
            data += frame(int(MessageType.SCHEMA), 0, 0, number % (1 << 32), 0, encoded)
        fields = [value % (1 << width) for value, width in zip(header, _WIDTHS, strict=True)]
        data += HEADER.pack(*fields) + body
        if one_off:
            table, size = one_off
            data += msgspec.msgpack.encode(_in_64_bits(table)) + struct.pack("<I", size % (1 << 32))
        for buffer in buffers:
            data += frame(int(MessageType.DATA), 0, 0, 0, 0, buffer)

        def read() -> None:
            for message in self._received(data):
                if message.layout is not None:
                    for slot in message.layout.build(message.memory, message.buffers):
                        self._use(slot, (message.memory, *message.buffers))

        return read

    def _lent(self, offsets: Sequence[int], sizes: Sequence[int]) -> _Read:
        # as many as announced, see `Channel.borrow`, and no more than a message may have
        places = struct.unpack(f"<{len(sizes)}Q", struct.pack(f"<{len(sizes)}Q", *offsets))
        body = bytearray(struct.pack(f"<{len(sizes)}Q", *sizes))

        def read() -> None:
            announced = frames.buffer_sizes_of(body, 0, len(sizes), Limits(1 << 30, 1 << 63))
            for view in self._borrowed.borrow(places, announced):
                start = address_of(view) - self._borrowed.mapping.address
                if start < 0 or start + view.nbytes > ARENA_BYTES:
                    raise UnsoundError(f"{view.nbytes} bytes at {start} of the arena")
                bytes(view)
            self._borrowed.take_ended()

        return read

    def _offer(self, pid: int, fd: int, size_bytes: int, token: bytes) -> _Read:
        true = self._arena.offer
        said = true.pid + pid, true.fd + fd, true.size_bytes + size_bytes, token or true.token
        encoded = msgspec.msgpack.encode(said)

        def read() -> None:
            try:
                mapped = MappedArena(msgspec.msgpack.decode(encoded, type=ArenaOffer))
            except (UnmappableError, msgspec.MsgspecError) as error:
                raise ProtocolError("not mapped") from error
            if mapped.token != true.token:
                raise UnsoundError("an arena was mapped without its token")

        return read

    def _lanes(self, sizes: Sequence[int], stripes: Sequence[Sequence[int]]) -> _Read:
        body = bytearray(struct.pack(f"<{len(sizes)}Q", *sizes))
        widths = (64, 32, 32, 32)
        packed = [
            struct.pack("<QIII", *[value % (1 << width) for value, width in zip(stripe, widths, strict=True)])
            for stripe in stripes
        ]
        chunks = [struct.unpack("<QIII", data) for data in packed]

        def read() -> None:
            announced = frames.buffer_sizes_of(body, 0, len(sizes), Limits(1 << 30, _LARGEST))
            inbox = Inbox(lambda size_bytes: memoryview(bytearray(size_bytes)))
            for number, fields in enumerate(chunks):
                if number == 1:  # the first stripe has overtaken its frame
                    inbox.begin(Data(0, 0, 0, 0, body), announced)
                chunk = inbox.stripe(*fields)
                chunk.memory[:] = bytes(fields[3])
                made = inbox.arrived(chunk)
                if made is not None and [buffer.nbytes for buffer in made.buffers] != list(announced):
                    raise UnsoundError("buffers that are not what was announced")

        return read

    def _frame(self, header: Sequence[int], body: bytes) -> _Read:
        fields = [value % (1 << width) for value, width in zip(header, _WIDTHS, strict=True)]
        data = HEADER.pack(*fields) + body

        def read() -> None:
            for message in self._received(data):
                _ = message.meta, message.body, message.size_bytes

        return read

    def _received(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that a connection finds in bytes."""
        protocol = self._open_protocol(Limits(1 << 16, 1 << 20, 1 << 14))
        while data:
            target = protocol.get_buffer(-1)
            size = min(len(data), target.nbytes)
            target[:size] = data[:size]
            data = data[size:]
            yield from protocol.receive(size)
        protocol.close()

    def _nested(self, memory: Sequence[float], sizes: Any, strides: Any, offsets: Any) -> _Read:
        parts = torch.tensor(memory), torch.tensor(sizes), torch.tensor(strides), torch.tensor(offsets)
        return self._loaded(_Reduced(_rebuild_nested_tensor, *parts))

    def _quantized(
        self, memory: Sequence[int], size: Any, stride: Any, offset: int, parameters: Sequence[Any]
    ) -> _Read:
        storage = torch.tensor(memory, dtype=torch.uint8).untyped_storage()
        typed_storage: Any = torch.storage.TypedStorage  # which has no types
        typed = typed_storage(wrap_storage=storage, dtype=torch.quint8, _internal=True)
        said: tuple[Any, ...] = (torch.per_tensor_affine, *parameters)
        if isinstance(parameters[0], list):
            scales, zero_points, axis = parameters
            said = torch.per_channel_affine, torch.tensor(scales), torch.tensor(zero_points), axis
        hooks: OrderedDict[str, Any] = OrderedDict()
        return self._loaded(_Reduced(_rebuild_qtensor, typed, offset, tuple(size), tuple(stride), said, False, hooks))

    def _loaded(self, value: _Reduced) -> _Read:
        file = io.BytesIO()
        torch.save(value, file)
        return self._archive(file.getvalue())

    def _archive(self, data: bytes) -> _Read:
        entry = [int(Kind.SAVED), 0, 0, -1, [], [], 0, len(data), "", []]
        table = msgspec.msgpack.encode([0, bytes([Code.ENTRY]), [0], [[]], [entry]])
        memory = memoryview(bytearray(data))

        def read() -> None:
            (tensor,) = read_layout(table).build(bytearray(8), [memory])
            if tensor.is_nested:
                for part in tensor.unbind():
                    self._use(part, ())
                tensor.clone()
            elif tensor.is_quantized and tensor.numel() < _SMALL:
                with suppress(RuntimeError):  # scales may be any numbers
                    tensor.dequantize()

        return read

    _WAYS: Final[dict[str, Callable[..., _Read]]] = {
        "table": _table,
        "message": _message,
        "lent": _lent,
        "offer": _offer,
        "lanes": _lanes,
        "frame": _frame,
        "nested": _nested,
        "quantized": _quantized,
        "archive": _archive,
    }

    # -- use

    def _use(self, slot: Any, memories: Sequence[_Memory]) -> None:
        """Check that a tensor lies in the memory of the message, and use it."""
        if isinstance(slot, memoryview):
            _require_within(address_of(slot) if slot.nbytes else 0, slot.nbytes, memories)
            bytes(slot)
            return
        plain = slot.detach()
        if plain.is_quantized or plain.is_nested:
            return
        _require_sound(plain, memories)
        if plain.numel() > _SMALL or plain.is_meta:
            return
        # not every operator exists for every dtype and layout
        for operator in self._operators:
            with suppress(RuntimeError, NotImplementedError, TypeError, IndexError):
                operator(plain)


class _Reduced:
    """An object that torch.save writes as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


_OPERATORS: Final[tuple[Callable[[Tensor], Any], ...]] = (
    lambda tensor: tensor.to_dense() if tensor.layout is not torch.strided else tensor.clone(),
    lambda tensor: tensor.sum(),
    lambda tensor: tensor.coalesce(),
    # only floating point: torch compiles products of integers, and crashes where the limit of addresses is reached
    lambda tensor: tensor @ torch.ones(tensor.shape[-1], 1, dtype=tensor.dtype if tensor.is_floating_point() else None),
    lambda tensor: tensor[(-1,) * tensor.dim()],
    lambda tensor: tensor.reshape(-1)[-1].item(),
    lambda tensor: tensor.to(torch.float64),
    lambda tensor: tensor.nonzero(),
    repr,
)


def _require_sound(tensor: Tensor, memories: Sequence[_Memory]) -> None:
    torch.numel(tensor)
    if tensor.layout is torch.strided:
        if not tensor.is_meta and tensor.numel():
            start, end = extent(tensor)
            _require_within(tensor.data_ptr(), end - start, memories)
            if tensor.data_ptr() % tensor.element_size():
                raise UnsoundError("a tensor that is not aligned")
        return
    if tensor.is_meta:
        return
    if tensor.layout is torch.sparse_coo:
        indices, values = tensor._indices(), tensor._values()
        if indices.numel():
            for size, row in zip(tensor.shape, indices.tolist(), strict=False):
                if min(row) < 0 or max(row) >= size:
                    raise UnsoundError("an index outside of a sparse tensor")
    else:
        values = tensor.values()
        is_by_row = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
        plain = tensor.col_indices() if is_by_row else tensor.row_indices()
        if plain.numel() and (int(plain.min()) < 0 or int(plain.max()) >= max(tensor.shape)):
            raise UnsoundError("an index outside of a sparse tensor")
    _require_sound(values.detach(), memories)


def _require_within(address: int, size_bytes: int, memories: Sequence[_Memory]) -> None:
    if not size_bytes or not memories:
        return
    for memory in memories:
        start = address_of(memoryview(memory)) if len(memory) else 0
        if start <= address and address + size_bytes <= start + len(memory):
            return
    raise UnsoundError(f"{size_bytes} bytes that are not of the message")


def _in_64_bits(value: Any) -> Any:
    """Limit integers to the range of msgpack."""
    if isinstance(value, list):
        return [_in_64_bits(item) for item in value]
    return max(-(1 << 63), min(value, (1 << 64) - 1)) if type(value) is int else value
