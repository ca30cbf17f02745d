"""Messages with tensors of real workers, taken apart into plain values that can be changed one by one.

An `Input` names a way in, and has the content that a peer sends there as lists of integers, bytes and strings.
`scripts.metadata.trial` encodes it again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.wire.frames import CHUNK_BYTES, ONE_OFF
from arpc.wire.messages import MessageType
from arpc.wire.values.device_staging import Staged
from arpc.wire.values.schemas import Packer
from arpc.wire.values.table import Kind

__all__ = ["ARENA_BYTES", "Input", "valid_inputs"]

ARENA_BYTES: Final = HEADER_BYTES + (1 << 16)


class Input(NamedTuple):
    """One message of a peer."""

    way: str
    """The way in; see `scripts.metadata.trial`."""
    content: list[Any]


class _ToCpu:
    """A stager that marks all tensors as belonging on a device, and the device is the CPU."""

    moves_host_memory = True

    def stage(self, tensor: Tensor) -> Staged | None:
        return None if tensor.is_meta else Staged(tensor.contiguous(), "cpu", None)


def valid_inputs() -> list[Input]:
    """Return one or more inputs for every way in, each of which arpc accepts."""
    return [*_tables(), *_whole_messages(), *_memory(), *_saved()]


def _messages() -> Iterable[list[Any]]:
    """Yield the slots of messages with tensors of all kinds."""
    base = torch.arange(24.0)
    grid = torch.arange(16.0).view(4, 4)
    yield [torch.ones(3)]
    yield [torch.ones(2, 3, dtype=torch.float64, requires_grad=True)]
    yield [torch.arange(5, dtype=torch.uint8), torch.tensor([True, False]), torch.tensor(7)]
    yield [torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float8_e5m2)]
    yield [torch.ones(16), torch.zeros(0, 3), torch.ones(2, 2, dtype=torch.complex64)]
    yield [base.view(4, 6).t()]
    yield [torch.arange(12, dtype=torch.uint8).view(3, 4).t()]
    yield [torch.arange(12, dtype=torch.int16).view(3, 4)[:, ::2]]
    yield [torch.ones(2).expand(3, 4, 2)]
    yield [torch.zeros(0, 3).t(), torch.ones(2, 1).t()]
    yield [base[2:8], base[4:10]]
    yield [base.view(torch.uint8)[8:24], base[3:9], base.view(torch.complex64)[2:4]]
    yield [torch.ones(2, dtype=torch.complex64).conj()]
    yield [torch.ones(2, dtype=torch.complex64).conj().imag]
    yield [torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta", dtype=torch.int8).t()]
    yield [grid.to_sparse()]
    yield [grid.to_sparse(1)]
    yield [torch.stack([grid, grid]).to_sparse(2).coalesce()]
    yield [grid.to_sparse_csr()]
    yield [grid.to_sparse_csc()]
    yield [grid.to_sparse_bsr((2, 2))]
    yield [grid.to_sparse_bsc((2, 2))]
    yield [torch.stack([grid, grid]).to_sparse_csr()]
    yield [torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)]
    yield [torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])]
    yield [pickle.PickleBuffer(np.arange(5).data)]
    yield [base.view(4, 6).t(), grid.to_sparse(), torch.ones(3), pickle.PickleBuffer(b"12345"), base[:2], base[1:3]]


def _tables() -> Iterable[Input]:
    """Yield the way ``table``: the table, the inline tensors, the bytes after them, and the buffers; then two flags."""
    for slots in _messages():
        for inline_limit, stager in ((1 << 12, None), (0, None), (1 << 12, _ToCpu())):
            try:
                packed = Packer(inline_limit).pack(slots, stager=stager)
            except RuntimeError:
                continue  # a quantized tensor cannot be staged
            assert packed.schema is not None
            table, inline = msgspec.msgpack.decode(packed.schema.table), b"".join(packed.inline)
            buffers = [bytes(buffer) for buffer in packed.buffers]
            yield Input("table", [table, inline, bytes(16), buffers, stager is not None, 0])
            if all(entry[0] != Kind.SAVED for entry in table[4]):
                yield Input("table", [table, inline, b"", buffers, stager is not None, 1])


def _whole_messages() -> Iterable[Input]:
    """Yield the way ``message``: a number, the table that is announced under it, and a message that refers to it.

    The message is given by the fields of its header, its body, the table at its end with its size, and its buffers.
    """
    for slots in _messages():
        for inline_limit, schema in ((1 << 12, 1), (1 << 12, ONE_OFF), (0, 7), (0, ONE_OFF)):
            packed = Packer(inline_limit).pack(slots)
            assert packed.schema is not None
            table = msgspec.msgpack.decode(packed.schema.table)
            sizes = [buffer.nbytes for buffer in packed.buffers]
            meta, content = b"\x80", b"pickle"
            body = b"".join((*packed.inline, *(size.to_bytes(8, "little") for size in sizes), meta, content))
            is_one_off = schema == ONE_OFF
            size = len(packed.schema.table)
            length = len(body) + (size + 4 if is_one_off else 0)
            header = [length, int(MessageType.REQUEST), 0, len(sizes), 1, 2, 3, len(meta), schema]
            one_off = [table, size] if is_one_off else []
            announced = [] if is_one_off else [schema, table]
            yield Input("message", [announced, header, body, one_off, [bytes(buffer) for buffer in packed.buffers]])


def _memory() -> Iterable[Input]:
    """Yield the ways ``lent``, ``offer``, ``lanes`` and ``frame``: lengths and places of memory."""
    yield Input("lent", [[HEADER_BYTES, HEADER_BYTES + 64], [64, 4096]])
    yield Input("lent", [[HEADER_BYTES], [ARENA_BYTES - HEADER_BYTES]])
    yield Input("offer", [0, 0, 0, b""])  # added to the fields of the true offer; another token, if not empty
    yield Input("lanes", [[CHUNK_BYTES + 5, 7], [[0, 0, 0, CHUNK_BYTES], [0, 0, 1, 5], [0, 1, 0, 7], [1, 0, 0, 9]]])
    for type_ in (MessageType.REQUEST, MessageType.REPLY, MessageType.ITEM):
        yield Input("frame", [[24, int(type_), 0, 0, 1, 2, 3, 0, 0], bytes(24)])
    yield Input(
        "frame", [[32, int(MessageType.REQUEST), 0, 2, 1, 2, 0, 4, 0], b"\x08" + bytes(7) + b"\x04" + bytes(23)]
    )


def _saved() -> Iterable[Input]:
    """Yield the ways ``nested``, ``quantized`` and ``archive``: tensors as torch.save writes them."""
    yield Input("nested", [[12.0] * 18, [[2, 3], [4, 3]], [[3, 1], [3, 1]], [0, 6]])
    yield Input("quantized", [[1, 2, 3, 4], [4], [1], 0, [0.1, 0]])
    yield Input("quantized", [[1, 2, 3, 4, 5, 6], [2, 3], [3, 1], 0, [[0.1, 0.2], [0, 0], 0]])
    file = io.BytesIO()
    torch.save(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), file)
    yield Input("archive", [file.getvalue()])
