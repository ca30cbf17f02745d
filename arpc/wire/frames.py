"""The byte layout of one frame.

::

    0        4     5      6           8        16    20            24          28           32
    +--------+-----+------+-----------+--------+-----+-------------+-----------+------------+
    | length | type| flags| n_buffers |   id   | arg | timeout_ms  | meta_size | table_size |  header, little endian
    +--------+-----+------+-----------+--------+-----+-------------+-----------+------------+
    | n_buffers sizes of 8 bytes | meta | table | payload | padding | inline tensors        |  body, `length` bytes
    +-------------------------------------------------------------------------------------+

``meta`` is msgpack (what interceptors add), ``table`` is msgpack (how to rebuild the tensors, see `wire.tensors`), ``payload``
a pickle. Small tensors lie at the end of the body, aligned, and are used where they lie.

Large tensors are not in the frame. Their sizes are, and their bytes follow in ``DATA`` frames of at most `CHUNK_BYTES`,
so that a small message never waits for more than one chunk of a large one. The n-th frame of a direction that has buffers
owns the ``DATA`` frames whose ``id`` is n.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from arpc.errors import ProtocolError

__all__ = ["ALIGNMENT", "CHUNK_BYTES", "HEADER", "HEADER_BYTES", "Header", "Limits", "frame"]

HEADER: Final = Struct("<IBBHQIIII")
HEADER_BYTES: Final = HEADER.size
SIZE: Final = Struct("<Q")
ALIGNMENT: Final = 16
CHUNK_BYTES: Final = 1 << 20
MAX_BUFFERS: Final = (1 << 16) - 1
MAX_TIMEOUT_MS: Final = (1 << 32) - 1

_pack_header = HEADER.pack
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))


class Header(NamedTuple):
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
    message_bytes: int


def check(header: Header, limits: Limits) -> None:
    """Raise `ProtocolError` unless the sizes of a header fit each other and the limits."""
    if header.length > limits.body_bytes:
        raise ProtocolError(f"a frame of {header.length} bytes is over the limit of {limits.body_bytes}")
    if 8 * header.n_buffers + header.meta_size + header.table_size > header.length:
        raise ProtocolError("the parts of a frame are longer than the frame")


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
    buffer_sizes: tuple[int, ...] = (),
) -> bytes:
    """One frame, up to and with its inline tensors. What belongs to ``buffer_sizes`` follows in DATA frames."""
    if not (table or meta):
        return _pack_header(len(payload), type_, flags, 0, id_, arg, timeout_ms, 0, 0) + payload
    sizes = b"".join(map(SIZE.pack, buffer_sizes))
    length = len(sizes) + len(meta) + len(table) + len(payload)
    padding = _PADDING[-length % ALIGNMENT] if inline else b""
    length += len(padding) + len(inline)
    header = _pack_header(length, type_, flags, len(buffer_sizes), id_, arg, timeout_ms, len(meta), len(table))
    return b"".join((header, sizes, meta, table, payload, padding, inline))
