"""A few small tensors, and the note of one interceptor: what autograd makes of most calls in one of its contexts.

What several interceptors add has names, and is encoded and decoded; most often there is only one of them, which adds a
few bytes to nearly every message. These are its *note*: 16 bytes at the end of a `wire.handful`, of a kind of its own.

Whoever gets a note gives tensors that require grad a history. So they are built without requiring it, which would only
have to be undone, and the note comes with the places of those that shall.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import error as StructError  # noqa: N812 - a class, whatever it is called
from typing import Final, TypeAlias

from torch import Tensor

from arpc.errors import ProtocolError
from arpc.wire.handful import ARGUMENTS, NOTED, builder_of, labels_in, layout_of, remember, unpack_head
from arpc.wire.table import Code

__all__ = ["Noted", "unpack_noted", "without_note"]

Noted: TypeAlias = "tuple[list[Tensor], tuple[int, ...], bytearray]"
"""The tensors, none of which requires grad yet, the places of those that shall, and the note."""

_Layout: TypeAlias = "tuple[tuple[Callable[[bytearray], Tensor], ...], tuple[int, ...], int, int]"
"""What a head says: what builds the tensors, which shall require grad, where they end, and where the payload does."""

_layouts: Final[dict[tuple[bytes], _Layout]] = {}
"""By the head, as it is unpacked."""
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD
_AFTER_SIZE: Final = 4


def without_note(payload: bytes) -> bytes:
    """The payload of a call whose note is not written after all: that of the same tensors with nothing on it."""
    return bytes((ARGUMENTS, payload[1], 0, 0)) + payload[_AFTER_SIZE:]


def unpack_noted(payload: bytes | bytearray) -> Noted:
    """What is in a payload of the kinds with a note. Raises `ProtocolError`.

    The tensors lie in the bytes given, if that is a bytearray: it must not be used for anything else.
    """
    body = payload if payload.__class__ is bytearray else bytearray(payload)
    try:
        head = unpack_head[body[1]](body)
        builders, requiring, end, size = _layouts.get(head) or _layout_of(head)
        if size != len(body):
            raise ProtocolError("tensors of another size than they say")
        tensors = []
        for build in builders:
            tensors.append(build(body))  # noqa: PERF401 - a comprehension takes longer for a few
    except (StructError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error
    return tensors, requiring, body[end:]


def _layout_of(unpacked_head: tuple[bytes]) -> _Layout:
    kind, _, end, size = layout_of(unpacked_head)
    if kind not in NOTED:
        raise ValueError("there is no note")
    builders: list[Callable[[bytearray], Tensor]] = []
    requiring: list[int] = []
    for place, (code, dtype, shape, position) in enumerate(labels_in(unpacked_head[0])):
        if code & _REQUIRES_GRAD:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise ValueError(f"{dtype} that requires grad")
            requiring.append(place)
        builders.append(builder_of(code & ~_REQUIRES_GRAD, dtype, shape, position))
    made = tuple(builders), tuple(requiring), end, size
    remember(_layouts, unpacked_head, made)
    return made
