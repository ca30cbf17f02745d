"""The byte layout of one frame.

::

    0        4     5      6           8        16    20            24          28       32
    +--------+-----+------+-----------+--------+-----+-------------+-----------+--------+
    | length | type| flags| n_buffers |   id   | arg | timeout_ms  | meta_size | schema |  header, little endian
    +--------+-----+------+-----------+--------+-----+-------------+-----------+--------+
    | small tensors | n_buffers sizes of 8 bytes | metadata | pickle [| table | size]    |  body, `length` bytes
    +-----------------------------------------------------------------------------------+

``schema`` is the number of the layout of this message's tensors, which the sender has announced in a SCHEMA message
(see `wire.values.schemas`); 0 if there are no tensors. A layout that is not worth announcing is in the message itself:
then the number is `ONE_OFF`, and the body ends with the table and its size, in 4 bytes. Small tensors are the first
bytes of the body, aligned, and are used in place. ``metadata`` is msgpack, see `wire.metadata`.

Of large tensors (buffers), the frame has only the sizes. Their bytes follow in ``DATA`` frames of at most
`CHUNK_BYTES`, so that a small message never waits for more than one chunk of a large one. Each direction counts its
frames with buffers from 0; the ``DATA`` frames of the n-th have the ``id`` n.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from arpc.errors import ProtocolError, SerializationError

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "MAX_BODY_BYTES",
    "MAX_BUFFERS",
    "MAX_TIMEOUT_MS",
    "ONE_OFF",
    "Header",
    "Limits",
    "buffer_sizes_of",
    "frame",
    "pack_header",
    "split_table",
]

HEADER: Final = Struct("<IBBHQIIII")
HEADER_BYTES: Final = HEADER.size
ALIGNMENT: Final = 16
CHUNK_BYTES: Final = 1 << 19
MAX_BODY_BYTES: Final = (1 << 32) - 1
MAX_BUFFERS: Final = (1 << 16) - 1
MAX_TIMEOUT_MS: Final = (1 << 32) - 1
ONE_OFF: Final = (1 << 32) - 1
"""Stands in for a schema's number if the body ends with the table itself."""
_SIZE: Final = Struct("<I")

pack_header = HEADER.pack
"""Packs the fields of a `Header`, in their order."""


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
    schema: int


class Limits(NamedTuple):
    """The largest sizes that are accepted from a peer."""

    body_bytes: int
    """The size of one frame's body."""
    message_bytes: int
    """The total size of the large tensors of one message."""
    header_bytes: int = 1 << 25
    """The size of the metadata of one message: a few bytes of them make many objects."""


def buffer_sizes_of(
    body: bytes | bytearray | memoryview, start: int, n_buffers: int, limits: Limits
) -> tuple[int, ...]:
    """Return the sizes of the large tensors that follow a frame. Raises `ProtocolError` if they are out of bounds."""
    sizes = struct.unpack_from(f"<{n_buffers}Q", body, start)
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
    pickle: bytes,
    meta: bytes = b"",
    schema: int | bytes = 0,
    inline: Sequence[bytes] = (),
    buffer_sizes: Sequence[int] = (),
) -> bytes:
    """Return one frame. ``inline`` are the small tensors; the bytes for ``buffer_sizes`` follow in DATA frames.

    ``schema`` is the number under which the layout of the tensors was announced, or the table itself.

    Raises `SerializationError` if the frame would be too large.
    """
    table = b""
    if isinstance(schema, bytes):
        table, schema = schema + _SIZE.pack(len(schema)), ONE_OFF
    length = len(meta) + len(pickle)
    try:
        if not schema and not buffer_sizes:
            return pack_header(length, type_, flags, 0, id_, arg, timeout_ms, len(meta), 0) + meta + pickle
        n_buffers = len(buffer_sizes)
        length += 8 * n_buffers + sum(map(len, inline)) + len(table)
        sizes = struct.pack(f"<{n_buffers}Q", *buffer_sizes) if n_buffers else b""
        header = pack_header(length, type_, flags, n_buffers, id_, arg, timeout_ms, len(meta), schema)
        return b"".join((header, *inline, sizes, meta, pickle, table))
    except struct.error:
        if length <= MAX_BODY_BYTES:
            raise
        raise SerializationError(
            f"a message of {length} bytes, its large tensors not counted, is over the limit of {MAX_BODY_BYTES}: "
            f"send tensors or numpy arrays instead of large objects, or send it in parts"
        ) from None


def split_table(body: bytearray | memoryview) -> tuple[bytes, int]:
    """Return the table at the end of a body, and where it begins. Raises `ProtocolError` if it does not fit."""
    end = len(body) - _SIZE.size
    if end < 0 or (size := _SIZE.unpack_from(body, end)[0]) > end:
        raise ProtocolError("a message whose layout of tensors is longer than the message")
    start = end - size
    return bytes(body[start:end]), start
