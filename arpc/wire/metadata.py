"""Metadata: bytes that features of the runtime add to a message, each under a key of its own.

They are sent as a msgpack map of text to bytes. Each feature encodes its own bytes; no other code reads them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from arpc.errors import ProtocolError

__all__ = ["WINDOW", "Metadata", "decode_metadata", "encode_metadata", "pack_window", "unpack_window"]

Metadata = dict[str, bytes]

WINDOW: Final = "window"
"""The key under which the caller of a stream sends the number of items that it accepts at first."""

encode_metadata = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Metadata).decode
_WINDOW_BYTES: Final = 4


def decode_metadata(data: bytes | bytearray | memoryview) -> Metadata:
    """Decode the metadata of a message. Raises `ProtocolError`."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error


def pack_window(items: int) -> bytes:
    """Encode the number of items of a stream that its caller accepts at first, for the key `WINDOW`."""
    return items.to_bytes(_WINDOW_BYTES, "little")


def unpack_window(data: bytes | None) -> int:
    """Decode what `pack_window` returned. Raises `ProtocolError` if it is missing or malformed."""
    if data is None or len(data) != _WINDOW_BYTES:
        raise ProtocolError("a stream whose caller does not say how many items it takes")
    return int.from_bytes(data, "little")
