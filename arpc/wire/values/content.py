"""The content of one message: what it says, apart from its header."""

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
    """How the tensors are laid out; None if there are none."""
    inline: Sequence[bytes] = ()
    """The memory of the small tensors, in order, each padded: ``schema.inline_bytes`` in total."""
    buffers: Sequence[memoryview] = ()
    """Large tensors, as flat bytes. They are sent from their own memory."""
    waits: Sequence[Callable[[], None]] = ()
    """To be called, in a thread, before the buffers are read: they are being filled from devices."""

    def size_bytes(self) -> int:
        """Bytes it takes on its way, those of the header included."""
        size = HEADER_BYTES + len(self.pickle) + len(self.meta)
        if self.schema is not None:
            size += self.schema.inline_bytes + sum(map(len, self.buffers))
        return size

    def framed(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, number: int) -> bytes:
        """The frame of a message with this content, which the buffers follow in DATA frames.

        ``number`` is that of the schema; 0 if there is none, `ONE_OFF` if the frame is to have the table in it.
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
