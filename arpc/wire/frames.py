"""The byte layout of one frame.

::

    0        4     5      6           8        16    20            24          28           32
    +--------+-----+------+-----------+--------+-----+-------------+-----------+------------+
    | length | type| flags| n_buffers |   id   | arg | timeout_ms  | meta_size | table_size |  header, little endian
    +--------+-----+------+-----------+--------+-----+-------------+-----------+------------+
    | n_buffers sizes of 8 bytes | meta | table | payload | padding | inline tensors        |  body, `length` bytes
    +---------------------------------------------------------------------------------------+

``meta`` is msgpack (what interceptors add), ``table`` is msgpack (how to rebuild the tensors, see `wire.table`),
``payload`` is a pickle. Small tensors lie at the end of the body, aligned, and are used where they lie.

Large tensors are not in the frame. Their sizes are, and their bytes follow in ``DATA`` frames of at most `CHUNK_BYTES`,
so that a small message never waits for more than one chunk of a large one. The n-th frame of a direction that has
buffers, counted from 0, owns the ``DATA`` frames whose ``id`` is n.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from arpc.errors import ProtocolError, SerializationError

__all__ = [
    "ALIGNMENT",
    "BARE_HEADER",
    "BRIEF_HEADER",
    "CHUNK_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "HEADER_WITH_TERMS",
    "MAX_BODY_BYTES",
    "MAX_BUFFERS",
    "MAX_TIMEOUT_MS",
    "NO_TERMS",
    "PADDING",
    "TERMS",
    "Header",
    "Limits",
    "bare_lead",
    "brief_kind",
    "buffer_sizes_of",
    "check",
    "frame",
]

HEADER: Final = Struct("<IBBHQIIII")
HEADER_BYTES: Final = HEADER.size
# The same bytes, read and written as fewer fields where most are 0: length; type, flags and n_buffers as one (see
# `brief_kind`); id; arg; timeout_ms; meta_size and table_size as one, 0 if the message has neither
BRIEF_HEADER: Final = Struct("<IIQIIQ")
# And as fewer still, where there is no body either. What such messages have in common is not taken apart, as that takes
# longer than to look it up: all before the id (see `bare_lead`); the id; arg and timeout_ms (see `TERMS`); 0
BARE_HEADER: Final = Struct("<8sQ8sQ")
# And as both: length; `brief_kind`; id; `TERMS`; 0
HEADER_WITH_TERMS: Final = Struct("<IIQ8sQ")
TERMS: Final = Struct("<II")
NO_TERMS: Final = TERMS.pack(0, 0)
_LEAD: Final = Struct("<II")
ALIGNMENT: Final = 16
CHUNK_BYTES: Final = 1 << 19
MAX_BODY_BYTES: Final = (1 << 32) - 1
MAX_BUFFERS: Final = (1 << 16) - 1
MAX_TIMEOUT_MS: Final = (1 << 32) - 1

_pack_header = HEADER.pack
PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))


def brief_kind(type_: int, flags: int = 0) -> int:
    """The second field of a `BRIEF_HEADER`, of a message without large tensors."""
    return type_ | flags << 8


def bare_lead(kind: int) -> bytes:
    """The first field of a `BARE_HEADER`, of a message of that `brief_kind`."""
    return _LEAD.pack(0, kind)


class Header(NamedTuple):
    """The fields of `HEADER`, in their order."""

    length: int
    type: int
    flags: int
    n_buffers: int
    id: int
    arg: int
    timeout_ms: int
    meta_size: int
    table_size: int


class Limits(NamedTuple):
    """What is accepted from a peer."""

    body_bytes: int
    """The body of one frame."""
    message_bytes: int
    """All the large tensors of one message together."""
    header_bytes: int = 1 << 25
    """What comes before the payload. It is small, and a lot of objects are made of it."""


def check(header: Header, limits: Limits) -> None:
    """Raise `ProtocolError` unless the sizes of a header fit each other and the limits."""
    if header.length > limits.body_bytes:
        raise ProtocolError(f"a frame of {header.length} bytes is over the limit of {limits.body_bytes}")
    if 8 * header.n_buffers + header.meta_size + header.table_size > header.length:
        raise ProtocolError("the parts of a frame are longer than the frame")
    if 8 * header.n_buffers + header.meta_size + header.table_size > limits.header_bytes:
        raise ProtocolError(f"what describes the content of a frame is over the limit of {limits.header_bytes} bytes")


def buffer_sizes_of(body: bytearray, n_buffers: int, limits: Limits) -> tuple[int, ...]:
    """The sizes of the large tensors that follow a frame. Raises `ProtocolError` if they cannot be."""
    sizes = struct.unpack_from(f"<{n_buffers}Q", body)
    total = sum(sizes)
    if total > limits.message_bytes:
        raise ProtocolError(f"a message of {total} bytes is over the limit of {limits.message_bytes}")
    if 0 in sizes:
        raise ProtocolError("an empty buffer was announced")
    return sizes


def frame(
    type_: int,
    flags: int,
    id_: int,
    arg: int,
    timeout_ms: int,
    payload: bytes,
    meta: bytes = b"",
    table: bytes = b"",
    inline: bytes = b"",
    buffer_sizes: Sequence[int] = (),
) -> bytes:
    """One frame, up to and with its inline tensors. What belongs to ``buffer_sizes`` follows in DATA frames.

    Raises `SerializationError` if it would be larger than a frame can be.
    """
    length = len(payload)
    try:
        if not (table or meta):
            return _pack_header(length, type_, flags, 0, id_, arg, timeout_ms, 0, 0) + payload
        n_buffers = len(buffer_sizes)
        meta_size = len(meta)
        table_size = len(table)
        length += 8 * n_buffers + meta_size + table_size
        sizes = struct.pack(f"<{n_buffers}Q", *buffer_sizes) if n_buffers else b""
        padding = b""
        if inline:
            padding = PADDING[-length % ALIGNMENT]
            length += len(padding) + len(inline)
        header = _pack_header(length, type_, flags, n_buffers, id_, arg, timeout_ms, meta_size, table_size)
        return b"".join((header, sizes, meta, table, payload, padding, inline))
    except struct.error:
        if length <= MAX_BODY_BYTES:
            raise
        raise SerializationError(
            f"a message of {length} bytes, its large tensors not counted, is over the limit of {MAX_BODY_BYTES}: "
            f"send tensors or numpy arrays instead of large objects, or send it in parts"
        ) from None
