"""Metadata: what features of the runtime add to a message, as bytes under a key of their own.

Metadata travel as a msgpack map of text to bytes. Each feature encodes its own bytes; nobody else looks at them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from arpc.errors import ProtocolError

__all__ = ["WINDOW", "Metadata", "decode_metadata", "encode_metadata", "pack_window", "unpack_window"]

Metadata = dict[str, bytes]

WINDOW: Final = "window"
"""Under this key the caller of a stream says how many items may be sent at first."""

encode_metadata = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Metadata).decode
_WINDOW_BYTES: Final = 4


def decode_metadata(data: bytes | bytearray | memoryview) -> Metadata:
    """The metadata of a message. Raises `ProtocolError`."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error


def pack_window(items: int) -> bytes:
    """What the caller of a stream says under `WINDOW`."""
    return items.to_bytes(_WINDOW_BYTES, "little")


def unpack_window(data: bytes | None) -> int:
    """How many items of a stream its caller takes at first. Raises `ProtocolError`."""
    if data is None or len(data) != _WINDOW_BYTES:
        raise ProtocolError("a stream whose caller does not say how many items it takes")
    return int.from_bytes(data, "little")
