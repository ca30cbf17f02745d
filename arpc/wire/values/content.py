"""The content of one message: what it says, apart from its header."""

from __future__ import annotations

import msgspec

from arpc.wire.frames import HEADER_BYTES
from arpc.wire.values.schemas import PackedTensors

__all__ = ["Content"]


class Content(msgspec.Struct, gc=False):
    """The pickle, the metadata and the tensors of a message. It can be sent any number of times, to any peer."""

    pickle: bytes
    meta: bytes = b""
    tensors: PackedTensors | None = None

    def size_bytes(self) -> int:
        """Bytes it takes on its way, those of the header included."""
        size = HEADER_BYTES + len(self.pickle) + len(self.meta)
        return size if self.tensors is None else size + self.tensors.size_bytes
