"""What a creation says of itself, before anything in it is unpickled: who sends it, and what the value will be called.

So that whoever waits for a value hears of it even if its function or its arguments cannot be unpickled.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT
from arpc.wire.messages import Message

__all__ = ["LABEL_BYTES", "Label", "pack_label", "take_label", "unpack_label"]

_LABEL: Final = Struct("<6Q")
LABEL_BYTES: Final = _LABEL.size
unpack_label = _LABEL.unpack_from
"""The numbers of a label, in the order of `Label`, with the length of ``made`` at the end."""
_pack = _LABEL.pack


class Label(NamedTuple):
    """Incarnation, number and oldest are those of `delivery`."""

    incarnation: int
    number: int
    oldest: int
    rref: int
    fork: int
    made: str
    """Where in its code the caller has made it, if it tells."""


def pack_label(incarnation: int, number: int, oldest: int, rref: int, fork: int, made: str) -> bytes:
    """What is in a `Label`, as it travels."""
    if not made:
        return _pack(incarnation, number, oldest, rref, fork, 0)
    text = made.encode()
    return _pack(incarnation, number, oldest, rref, fork, len(text)) + text


def take_label(message: Message) -> Label:
    """Read the label of a message, and leave the message as if it had none. Raises `ProtocolError`."""
    body, start = message.body, message.table_end
    if len(body) < start + LABEL_BYTES:
        raise ProtocolError("a creation without a label")
    incarnation, number, oldest, rref, fork, size = unpack_label(body, start)
    end = start + LABEL_BYTES + size
    if len(body) < end:
        raise ProtocolError("the label of a creation is longer than the creation")
    made = body[start + LABEL_BYTES : end].decode(errors="replace")
    if start:
        message.label_bytes = end - start
    elif end % ALIGNMENT:
        message.body = body[end:]  # a copy: a tensor that follows at once is to be aligned
    else:
        del body[:end]
    return Label(incarnation, number, oldest, rref, fork, made)
