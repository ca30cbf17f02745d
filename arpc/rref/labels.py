"""The label of a creation: which value it makes, for whom, and its number among the messages that may come twice."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from arpc.errors import ProtocolError

__all__ = ["KEY", "Label", "pack_label", "unpack_label"]

KEY: Final = "rref"
"""Under this key the metadata of a creation has its label."""
_LABEL: Final = Struct("<5Q")
_pack = _LABEL.pack


class Label(NamedTuple):
    """Incarnation, number and oldest are those of `delivery`."""

    incarnation: int
    number: int
    oldest: int
    rref: int
    fork: int
    made: str
    """Where in its code the caller has made it, if it tells; or what people call its function, if not by its name."""


def pack_label(incarnation: int, number: int, oldest: int, rref: int, fork: int, made: str) -> bytes:
    """What is in a `Label`, as it travels."""
    label = _pack(incarnation, number, oldest, rref, fork)
    return label + made.encode() if made else label


def unpack_label(data: bytes | None) -> Label:
    """Read a label. Raises `ProtocolError`."""
    if data is None or len(data) < _LABEL.size:
        raise ProtocolError("a creation without a label")
    incarnation, number, oldest, rref, fork = _LABEL.unpack_from(data)
    return Label(incarnation, number, oldest, rref, fork, data[_LABEL.size :].decode(errors="replace"))
