"""What workers really say of tensors, taken apart into plain values that can be changed one by one.

An `Input` names a way in, and has what a peer sends there as lists of integers, bytes and strings. `scripts.metadata.
trial` puts it together again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.wire import handful
from arpc.wire.frames import CHUNK_BYTES
from arpc.wire.messages import MessageType
from arpc.wire.staging import Staged
from arpc.wire.table import Kind
from arpc.wire.tensors import pack

__all__ = ["ARENA_BYTES", "Input", "valid_inputs"]

ARENA_BYTES: Final = HEADER_BYTES + (1 << 16)
_HEADER_BYTES: Final = 4
_LABEL_BYTES: Final = 8


class Input(NamedTuple):
    """One thing that a peer says."""

    way: str
    """The way in; see `scripts.metadata.trial`."""
    content: list[Any]


class _ToCpu:
    """Says of all tensors that they belong on a device, and the device is the CPU."""

    moves_host_memory = True

    def stage(self, tensor: Tensor) -> Staged | None:
        return None if tensor.is_meta else Staged(tensor.contiguous(), "cpu", None)


def valid_inputs() -> list[Input]:
    """One or more for every way in, each of which is taken as it is."""
    return [*_tables(), *_handfuls(), *_memory(), *_saved()]


def _messages() -> Iterable[list[Any]]:
    """The slots of messages with tensors of all kinds."""
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
    """Way ``table``: the table, what comes before the inline tensors, these, and the buffers; then two choices."""
    for slots in _messages():
        for inline_limit, stager in ((1 << 12, None), (0, None), (1 << 12, _ToCpu())):
            try:
                packed = pack(slots, inline_limit, stager)
            except RuntimeError:
                continue  # a quantized tensor cannot be staged
            table = msgspec.msgpack.decode(packed.table)
            buffers = [bytes(buffer) for buffer in packed.buffers]
            yield Input("table", [table, bytes(16), packed.inline, buffers, stager is not None, 0])
            if all(entry[0] != Kind.SAVED for entry in table[4]):
                yield Input("table", [table, b"", packed.inline, buffers, stager is not None, 1])


def _handfuls() -> Iterable[Input]:
    """Way ``handful``: header, labels, and the rest; then the number of the reader."""
    few: Sequence[Sequence[Tensor]] = (
        [torch.ones(3)],
        [torch.ones(2, 2, requires_grad=True)],
        [torch.ones(2, dtype=torch.bfloat16)],
        [torch.ones(2, 1, 2, dtype=torch.complex64)],
        [torch.tensor(5)],
        [torch.ones(3), torch.ones(2, 2), torch.ones(5, dtype=torch.bool)],
        [torch.ones(1) for _ in range(handful.MAX_TENSORS)],
    )
    for tensors in few:
        for kind in range(1, handful.LAST_KIND + 1):
            if len(tensors) > 1 and kind in {handful.RESULT, handful.RESULT_AND_META, handful.RESULT_AND_NOTE}:
                continue
            meta = b"\x80" if kind in {handful.ARGUMENTS_AND_META, handful.RESULT_AND_META} else b""
            made = handful.handful_payload(1 << 12, kind, tensors, meta, b"content" if kind in range(5, 9) else b"")
            assert made is not None
            made += bytes(handful.NOTE_BYTES) if kind in handful.NOTED else b""
            start = _HEADER_BYTES
            labels = []
            for _ in tensors:
                code, dimensions, *rest = made[start : start + _LABEL_BYTES]
                labels.append([code, dimensions, *[low | high << 8 for low, high in zip(rest[::2], rest[1::2])]])  # noqa: B905
                start += _LABEL_BYTES
            header = [made[0], made[1], made[2] | made[3] << 8]
            reader = {handful.RESULT: 1, handful.ARGUMENTS: 0}.get(kind, 3 if kind in handful.NOTED else 2)
            yield Input("handful", [header, labels, made[start:], reader])


def _memory() -> Iterable[Input]:
    """Ways ``lent``, ``offer``, ``lanes`` and ``frame``: lengths and places of memory."""
    yield Input("lent", [[HEADER_BYTES, HEADER_BYTES + 64], [64, 4096]])
    yield Input("lent", [[HEADER_BYTES], [ARENA_BYTES - HEADER_BYTES]])
    yield Input("offer", [0, 0, 0, b""])  # what is added to the true offer, and the token if it is another one
    yield Input("lanes", [[CHUNK_BYTES + 5, 7], [[0, 0, 0, CHUNK_BYTES], [0, 0, 1, 5], [0, 1, 0, 7], [1, 0, 0, 9]]])
    for type_ in (MessageType.REQUEST, MessageType.REPLY, MessageType.ITEM):
        yield Input("frame", [[24, int(type_), 0, 0, 1, 2, 3, 0, 0], bytes(24)])
    yield Input(
        "frame", [[32, int(MessageType.REQUEST), 0, 2, 1, 2, 0, 4, 6], b"\x08" + bytes(7) + b"\x04" + bytes(23)]
    )


def _saved() -> Iterable[Input]:
    """Ways ``nested`` and ``quantized``: what torch.save writes of such tensors."""
    yield Input("nested", [[12.0] * 18, [[2, 3], [4, 3]], [[3, 1], [3, 1]], [0, 6]])
    yield Input("quantized", [[1, 2, 3, 4], [4], [1], 0, [0.1, 0]])
    yield Input("quantized", [[1, 2, 3, 4, 5, 6], [2, 3], [3, 1], 0, [[0.1, 0.2], [0, 0], 0]])
    file = io.BytesIO()
    torch.save(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), file)
    yield Input("archive", [file.getvalue()])
