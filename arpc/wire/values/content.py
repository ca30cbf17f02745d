"""The content of one message: what it says, apart from its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from arpc.wire.frames import HEADER_BYTES, ONE_OFF, frame

if TYPE_CHECKING:
    from arpc.wire.values.schemas import Schema

__all__ = ["Content"]


class Content(msgspec.Struct, gc=False):
    """The tensors, the metadata and the pickle of a message. It can be sent any number of times, to any peer."""

    body: bytes
    """The small tensors, the metadata and the pickle, one after the other."""
    meta_size: int = 0
    schema: Schema | None = None
    """How the tensors are laid out; None if there are none."""
    buffers: Sequence[memoryview] = ()
    """Large tensors, as flat bytes. They are sent from their own memory."""
    waits: Sequence[Callable[[], None]] = ()
    """To be called, in a thread, before the buffers are read: they are being filled from devices."""

    @property
    def table(self) -> bytes:
        """What describes the tensors, see `wire.values.table`; empty if there are none."""
        return b"" if self.schema is None else self.schema.table

    @property
    def inline(self) -> bytes:
        """The memory of the small tensors."""
        return self.body[: self._meta_start]

    @property
    def meta(self) -> bytes:
        """The metadata."""
        start = self._meta_start
        return self.body[start : start + self.meta_size]

    @property
    def pickle(self) -> bytes:
        """The pickle."""
        return self.body[self._meta_start + self.meta_size :]

    @property
    def _meta_start(self) -> int:
        return 0 if self.schema is None else self.schema.inline_bytes

    def size_bytes(self) -> int:
        """Bytes it takes on its way, those of the header included."""
        size = HEADER_BYTES + len(self.body)
        return size + sum(map(len, self.buffers)) if self.buffers else size

    def framed(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, number: int) -> bytes:
        """The frame of a message with this content, which the buffers follow in DATA frames.

        ``number`` is that of the schema; 0 if there is none, `ONE_OFF` if the frame is to have the table in it.
        """
        schema = self.table if number == ONE_OFF else number
        sizes = [*map(len, self.buffers)]
        return frame(type_, flags, id_, arg, timeout_ms, self.pickle, self.meta, schema, (self.inline,), sizes)
