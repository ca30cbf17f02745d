"""What a peer may say of tensors that is not true, by the way in; each is tried in a process of its own.

``python -m tests.wire.lying_peers`` prints what came of each as JSON: "refused", "built", or what ended the process.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from arpc.errors import ProtocolError
from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.transport.shm.borrowing import BorrowedArena
from arpc.transport.shm.mapping import ArenaFile
from arpc.wire.frames import HEADER, Limits, buffer_sizes_of
from arpc.wire.messages import Data, MessageType
from arpc.wire.striping import Inbox
from arpc.wire.values.layouts import read_layout
from arpc.wire.values.table import DTYPE_CODES, Code, Entry, Flag, Kind, encode_table
from tests.wire.connections import feed, opened

__all__ = ["LIES", "exploit"]

BODY_BYTES: Final = 1024
FLOAT32, FLOAT64, UINT8, INT16, INT64, BOOL = (
    DTYPE_CODES[dtype] for dtype in (torch.float32, torch.float64, torch.uint8, torch.int16, torch.int64, torch.bool)
)
HUGE: Final = 1 << 62
Lie = Callable[[], Any]


def entry(kind: int = Kind.STRIDED, **fields: Any) -> Entry:
    given = {"dtype": FLOAT32, "flags": 0, "source": 0, "shape": (4,), "strides": (1,), "span_bytes": 64}
    return Entry(kind, **{**given, **fields})


def exploit(kind: int = Kind.STRIDED) -> Entry:
    """The last element is 2**64 bytes away from the first one: no distance at all in 64 bits."""
    return entry(kind, dtype=UINT8, shape=(HUGE + 1,), strides=(4,))


def table(code: int, source: int, shape: Sequence[int], *entries: Entry) -> bytes:
    return encode_table((512, bytes([code]), [source], [shape], entries))


def column(code: int, source: int, shape: Sequence[int], *, buffers: Sequence[Any] = ()) -> Lie:
    return lambda: read_layout(table(code, source, shape)).build(bytearray(BODY_BYTES), buffers)


def described(given: Entry, *, buffers: Sequence[Any] = ()) -> Lie:
    return lambda: read_layout(table(Code.ENTRY, 0, (), given)).build(bytearray(BODY_BYTES), buffers)


# -- strided


def strided(kind: Kind, **more: Any) -> dict[str, Lie]:
    shapes: dict[str, tuple[int, Sequence[int], Sequence[int]]] = {
        "wraps to nothing": (UINT8, (HUGE + 1,), (4,)),
        "wraps to nothing, bool": (BOOL, (HUGE + 1,), (4,)),
        "wraps to nothing, int16": (INT16, ((1 << 61) + 1,), (4,)),
        "wraps to nothing, float32": (FLOAT32, ((1 << 60) + 1,), (4,)),
        "wraps in one of two dimensions": (FLOAT32, ((1 << 53) + 1, 4), (512, 1)),
        "more elements than can be counted": (FLOAT32, (1 << 40, 1 << 40), (0, 0)),
        "more bytes than can be counted": (FLOAT64, (1 << 61,), (0,)),
        "none, of sizes that cannot be counted": (UINT8, (0, HUGE, HUGE), (1, 1, 1)),
        "a size of more than 63 bits": (UINT8, (1 << 63,), (0,)),
        "a stride of more than 63 bits": (UINT8, (1,), (1 << 63,)),
        "a stride in bytes of more than 63 bits": (FLOAT64, (1,), (1 << 61,)),
        "65 dimensions": (UINT8, (1,) * 65, (1,) * 65),
        "negative size": (UINT8, (-1,), (1,)),
        "negative stride": (UINT8, (2,), (-1,)),
        "one byte too far": (UINT8, (65,), (1,)),
        "no strides": (UINT8, (4,), ()),
        "sizes that are no integers": (UINT8, (True,), (1,)),
    }
    return {
        name: described(entry(kind, dtype=dtype, shape=shape, strides=strides, **more))
        for name, (dtype, shape, strides) in shapes.items()
    }


def placed(given: Entry) -> Lie:
    buffer = torch.zeros(64, dtype=torch.uint8)
    return described(Entry(Kind.PLACED, 0, 0, 0, (), layout="cuda:0", parts=(given,)), buffers=[buffer])


# -- sparse


def indices(*shape: int, strides: Sequence[int] = (), **fields: Any) -> Entry:
    return entry(**{"dtype": INT64, "shape": shape, "strides": strides or (1,) * len(shape), **fields})


def coo(first: Entry, second: Entry, shape: Sequence[int], flags: int = 0) -> Lie:
    return described(Entry(Kind.COO, 0, flags, 0, tuple(shape), parts=(first, second)))


def compressed(layout: str, parts: Sequence[Entry], shape: Sequence[int]) -> Lie:
    return described(Entry(Kind.COMPRESSED, 0, 0, 0, tuple(shape), layout=f"torch.sparse_{layout}", parts=tuple(parts)))


ONE_INDEX: Final = indices(1, 1)
ONE_VALUE: Final = entry(shape=(1,))
MANY: Final = 1 << 33

SPARSE: Final[dict[str, Lie]] = {
    "coo: one index many times": coo(indices(1, MANY, strides=(0, 0)), entry(shape=(MANY,), strides=(0,)), (5,)),
    "coo: one index many times, coalesced": coo(
        indices(1, 1 << 28, strides=(0, 0)), entry(shape=(1 << 28,), strides=(0,)), (5,), Flag.COALESCED
    ),
    "coo: no index for many values": coo(indices(0, MANY), entry(shape=(MANY,), strides=(0,)), ()),
    "coo: sizes that cannot be counted": coo(indices(2, 1), ONE_VALUE, (1 << 40, 1 << 40)),
    "coo: no size among those": coo(indices(3, 0), entry(shape=(0,)), (0, HUGE, HUGE)),
    "coo: not coalesced": coo(indices(1, 2), entry(shape=(2,)), (HUGE,), Flag.COALESCED),
    "coo: indices without memory": coo(indices(1, 1, kind=Kind.META), ONE_VALUE, (5,)),
    "coo: values without memory": coo(ONE_INDEX, entry(Kind.META, shape=(1,)), (5,)),
    "coo: sparse values": coo(ONE_INDEX, Entry(Kind.COO, 0, 0, 0, (5,), parts=(ONE_INDEX, ONE_VALUE)), (5,)),
    "coo: indices that are negated": coo(indices(1, 1, flags=Flag.NEGATIVE), ONE_VALUE, (5,)),
    "coo: indices that are no integers": coo(entry(shape=(1, 1), strides=(1, 1)), ONE_VALUE, (5,)),
    "coo: values that require grad": coo(ONE_INDEX, entry(shape=(1,), flags=Flag.REQUIRES_GRAD), (5,)),
    "coo: one value many times, negated": coo(
        ONE_INDEX, entry(shape=(1, MANY), strides=(0, 0), flags=Flag.NEGATIVE), (5, MANY)
    ),
    "coo: negated": coo(ONE_INDEX, ONE_VALUE, (5,), Flag.NEGATIVE),
    "coo: indices that wrap": coo(indices(HUGE + 1, 1, strides=(4, 1)), ONE_VALUE, (5,)),
    **{
        f"{layout}: one index many times": compressed(
            layout,
            [
                indices(1 << 31, 4, strides=(0, 1)),
                indices(1 << 31, 0, strides=(0, 1)),
                entry(shape=(1 << 31, 0, 1, 1), strides=(0, 1, 1, 1)),
            ],
            (1 << 31, 3, 3),
        )
        for layout in ("csr", "csc", "bsr", "bsc")
    },
    **{
        f"{layout}: blocks of no size": compressed(
            layout, [indices(4), indices(0), entry(shape=(0, 0, 0), strides=(1, 1, 1))], (3, 3)
        )
        for layout in ("bsr", "bsc")
    },
    "csr: sizes that cannot be counted": compressed("csr", [indices(4), indices(0), entry(shape=(0,))], (3, HUGE)),
    "csr: parts that are missing": compressed("csr", [indices(4)], (3, 3)),
    "csr: a layout that is none": compressed("coo", [indices(4), indices(0), entry(shape=(0,))], (3, 3)),
}


# -- saved


def saved(make: Callable[[], bytes], flags: int = 0) -> Lie:
    def read() -> Any:
        data = make()
        given = Entry(Kind.SAVED, 0, flags, -1, (), span_bytes=len(data))
        return described(given, buffers=[memoryview(bytearray(data))])()

    return read


def archive(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def squeezed(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name in given.namelist():
            made.writestr(name, given.read(name))
    return file.getvalue()


class Rebuilt:
    """Saved as a call of one of torch's functions."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def nested(sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], offsets: Sequence[int]) -> Lie:
    def make() -> bytes:
        parts = torch.ones(18), torch.tensor(sizes), torch.tensor(strides), torch.tensor(offsets)
        return archive(Rebuilt(torch._utils._rebuild_nested_tensor, *parts))

    return saved(make)


def quantized() -> bytes:
    return archive(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))


SAVED: Final[dict[str, Lie]] = {
    "compressed": saved(lambda: squeezed(archive(torch.nested.nested_tensor([torch.zeros(1 << 24)])))),
    "in the format of long ago": saved(lambda: archive(torch.ones(3), _use_new_zipfile_serialization=False)),
    "sparse, unchecked": saved(lambda: archive(torch.eye(3).to_sparse())),
    "no tensor": saved(lambda: archive([torch.ones(3)])),
    "cut off": saved(lambda: archive(torch.nested.nested_tensor([torch.ones(3)]))[:-10]),
    "negated": saved(quantized, Flag.NEGATIVE),
    "nested: too long": nested([[2, 3], [400, 3]], [[3, 1], [3, 1]], [0, 6]),
    "nested: beyond the memory": nested([[2, 3], [4, 3]], [[3, 1], [3, 1]], [0, 1 << 40]),
    "nested: before the memory": nested([[2, 3], [4, 3]], [[3, 1], [3, 1]], [-6, 6]),
    "nested: wraps": nested([[2, 3], [HUGE + 1, 1]], [[3, 1], [1, 4]], [0, 6]),
    "nested: sizes that cannot be counted": nested([[1 << 40, 1 << 40], [4, 3]], [[0, 0], [3, 1]], [0, 6]),
}


# -- memory


def lent(offset: int, size_bytes: int) -> Lie:
    def borrow() -> None:
        arena = ArenaFile(HEADER_BYTES * 2)
        BorrowedArena(arena.offer, asyncio.new_event_loop()).borrow([offset], [size_bytes])

    return borrow


def striped(*chunk: int, sizes: Sequence[int] = (8,)) -> Lie:
    def read() -> None:
        inbox = Inbox(lambda size_bytes: memoryview(bytearray(size_bytes)))
        inbox.begin(Data(0, 0, 0, 0, bytearray()), sizes)
        inbox.stripe(0, *chunk)

    return read


def framed(*header: int) -> Lie:
    return lambda: feed(opened(limits=Limits(1 << 16, 1 << 20)), HEADER.pack(*header) + bytes(64))


def announced(*sizes: int) -> Lie:
    body = bytearray(struct.pack(f"<{len(sizes)}Q", *sizes))
    return lambda: buffer_sizes_of(body, 0, len(sizes), Limits(1 << 16, 1 << 20))


_REQUEST: Final = int(MessageType.REQUEST)
_LARGEST_32: Final = (1 << 32) - 1
BUFFER: Final = memoryview(bytearray(64))

LIES: Final[dict[str, dict[str, Lie]]] = {
    "strided": strided(Kind.STRIDED),
    "shared": {
        **strided(Kind.SHARED),
        "offset of more than 63 bits": described(entry(Kind.SHARED, offset=1 << 63)),
        "offset that wraps": described(entry(Kind.SHARED, offset=(1 << 64) - 16)),
    },
    "meta": {name: lie for name, lie in strided(Kind.META).items() if name != "one byte too far"},
    "contiguous": {
        "sizes that cannot be counted": column(FLOAT32, 0, (1 << 40, 1 << 40)),
        "none, of sizes that cannot be counted": column(FLOAT32, 0, (0, HUGE, HUGE)),
        "wraps to nothing": column(FLOAT32, 0, (HUGE,)),
        "wraps to nothing, in a buffer": column(FLOAT32, -1, (HUGE,), buffers=[BUFFER]),
        "too long": column(FLOAT32, 0, (129,)),
        "too long for its buffer": column(FLOAT32, -1, (17,), buffers=[BUFFER]),
        "not aligned": column(FLOAT64, 4, (1,)),
        "far outside": column(UINT8, (1 << 64) - 16, (16,)),
        "no such buffer": column(UINT8, -(1 << 63), (1,), buffers=[BUFFER]),
        "a body that is too short": lambda: read_layout(table(FLOAT32, 0, (4,))).build(bytearray(511), ()),
        "an unknown dtype": column(31, 0, (1,)),
        "an unknown kind": column(Code.ENTRY + 1, 0, (1,)),
        "integers that require grad": column(INT64 | Code.REQUIRES_GRAD, 0, (1,)),
    },
    "bytes": {
        "too long": column(Code.BYTES, 0, (513,)),
        "far outside": column(Code.BYTES, (1 << 64) - 16, (16,)),
        "of more than 63 bits": column(Code.BYTES, 0, ((1 << 64) - 1,)),
        "another size than the buffer": column(Code.BYTES, -1, (65,), buffers=[BUFFER]),
    },
    "flags": {
        "the conjugate of real numbers": described(entry(flags=Flag.CONJUGATE)),
        "unknown": described(entry(flags=1 << 10)),
        "negative": described(entry(flags=-1)),
        "integers that require grad": described(entry(dtype=INT64, flags=Flag.REQUIRES_GRAD)),
    },
    "placed": {
        "wraps to nothing": placed(entry(dtype=UINT8, source=-1, shape=(HUGE + 1,), strides=(4,))),
        "too long": placed(entry(source=-1, shape=(17,))),
        "not in a buffer": placed(entry(source=0)),
        "of another size than came": placed(entry(source=-1, span_bytes=32)),
    },
    "sparse": SPARSE,
    "saved": SAVED,
    "lent": {
        "beyond the arena": lent(HEADER_BYTES, HEADER_BYTES + 1),
        "wraps": lent((1 << 64) - 16, 32),
        "of more than 63 bits": lent(HEADER_BYTES, (1 << 64) - HEADER_BYTES),
        "within the header": lent(0, 16),
        "not aligned": lent(HEADER_BYTES + 4, 16),
    },
    "lanes": {
        "no such chunk": striped(0, _LARGEST_32, 8),
        "no such buffer": striped(_LARGEST_32, 0, 8),
        "too long": striped(0, 0, 9),
    },
    "frames": {
        "longer than may be": framed(_LARGEST_32, _REQUEST, 0, 0, 0, 0, 0, 0, 0),
        "parts longer than the frame": framed(64, _REQUEST, 0, 0, 0, 0, 0, _LARGEST_32, _LARGEST_32),
        "more buffers than sizes": framed(64, _REQUEST, 0, 65535, 0, 0, 0, 0, 0),
        "buffers that wrap": announced((1 << 64) - 8, 16),
    },
}


def _tried(lie: Lie) -> int:
    """In a process that may die of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    signal.alarm(60)
    limit = 8 << 30  # of addresses, most of which nothing lies at
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        used = lie()
        repr(used)
    except ProtocolError:
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        return 1 if grown_kb < 1 << 18 else 2
    except BaseException:  # noqa: BLE001 - which one it is does not matter
        return 3
    return 0


def main() -> None:
    warnings.simplefilter("ignore")  # of torch, about layouts it still works on
    outcomes: dict[str, str] = {}
    for way, lies in LIES.items():
        for name, lie in lies.items():
            process = os.fork()
            if not process:
                os._exit(_tried(lie))
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            said = ("built", "refused", "took a lot of memory", "raised another error")
            outcomes[f"{way}: {name}"] = said[code] if code >= 0 else signal.Signals(-code).name
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
