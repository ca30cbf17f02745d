"""The content of one message: all but its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from arpc.wire.frames import HEADER_BYTES, ONE_OFF, frame, pack_header

if TYPE_CHECKING:
    from arpc.wire.values.schemas import Schema

__all__ = ["Content"]


class Content(msgspec.Struct, gc=False):
    """The pickle, the metadata and the tensors of a message. It can be sent any number of times, to any peer."""

    pickle: bytes
    meta: bytes = b""
    schema: Schema | None = None
    """The description of the tensors; None if there are none."""
    inline: Sequence[bytes] = ()
    """The memory of the small tensors, in order, each padded: ``schema.inline_bytes`` in total."""
    buffers: Sequence[memoryview] = ()
    """Large tensors, as flat bytes. They are sent from their own memory."""
    waits: Sequence[Callable[[], None]] = ()
    """Functions to call, in a thread, before the buffers are read: each waits for a copy from a device."""

    def size_bytes(self) -> int:
        """Return the message's size on the wire, header included."""
        size = HEADER_BYTES + len(self.pickle) + len(self.meta)
        if self.schema is not None:
            size += self.schema.inline_bytes + sum(map(len, self.buffers))
        return size

    def framed(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, number: int) -> bytes:
        """Return the frame of a message with this content; the buffers follow it in DATA frames.

        ``number`` is the schema's; 0 if there is no schema, `ONE_OFF` to include the table in the frame.
        """
        pickle, meta, schema = self.pickle, self.meta, self.schema
        if schema is None:
            body = meta + pickle
            return pack_header(len(body), type_, flags, 0, id_, arg, timeout_ms, len(meta), 0) + body
        if number == ONE_OFF or self.buffers:
            layout, sizes = schema.table if number == ONE_OFF else number, [*map(len, self.buffers)]
            return frame(type_, flags, id_, arg, timeout_ms, pickle, meta, layout, self.inline, sizes)
        length = schema.inline_bytes + len(meta) + len(pickle)
        header = pack_header(length, type_, flags, 0, id_, arg, timeout_ms, len(meta), number)
        return b"".join((header, *self.inline, meta, pickle))
