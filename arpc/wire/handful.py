"""A few small tensors, with or without a pickle around them, and what rides on the message: all in one payload.

This is what most calls with tensors bring and return, what autograd records, and the gradients that come back. Such a
message needs no table, and is as plain as one with a number in it: it takes the same short way through the agents.

::

    0      1           2           4                    aligned
    +------+-----------+-----------+--------------------+----------------------------+------+---------+
    | kind | head_size | meta_size | a label per tensor | tensors, each to the next  | meta | content |
    +------+-----------+-----------+--------------------+----------------------------+------+---------+

A label is 8 bytes: the dtype's code as in `wire.table`, the number of dimensions, and up to three of them. All up to
the end of the labels is the *head*, of ``head_size`` bytes. ``meta`` is what interceptors add, or the *note* of one of
them, see `wire.noted`. ``content``, for kinds that have it, is all the rest: a pickle in which the tensors are holes
or, in a *parcel*, just bytes.

Tensors of the same kinds come again and again, so heads are made and read once. What is left to do for a message is to
look at each tensor, copy its memory, and build it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, prod
from operator import attrgetter
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class, whatever it is called
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import ProtocolError
from arpc.wire.frames import ALIGNMENT, PADDING
from arpc.wire.likeness import fits_like, fits_nothing
from arpc.wire.memory import MEMORY
from arpc.wire.rebuilding import finished
from arpc.wire.table import DTYPE_CODES, DTYPES, NUMPY_DTYPES, Code

__all__ = [
    "ARGUMENTS",
    "ARGUMENTS_AND_META",
    "ARGUMENTS_AND_NOTE",
    "LAST_KIND",
    "MAX_TENSORS",
    "NOTED",
    "NOTE_BYTES",
    "PARCEL_ARGUMENT",
    "PARCEL_RESULT",
    "PICKLED_ARGUMENTS",
    "PICKLED_RESULT",
    "RESULT",
    "RESULT_AND_META",
    "RESULT_AND_NOTE",
    "FreshParcel",
    "Handful",
    "builder_of",
    "handful_payload",
    "labels_in",
    "layout_of",
    "remember",
    "unpack_arguments",
    "unpack_handful",
    "unpack_head",
    "unpack_result",
]

# The first byte of a payload; no pickle begins with one this small
ARGUMENTS: Final = 1
"""The arguments of a call are the tensors, and nothing rides on it."""
RESULT: Final = 2
"""The object is the one tensor, and nothing rides on the message."""
ARGUMENTS_AND_META: Final = 3
RESULT_AND_META: Final = 4
"""The same if something does."""
PARCEL_ARGUMENT: Final = 5
"""The one argument of a call is a list of bytes and of tensors after it."""
PARCEL_RESULT: Final = 6
"""The object is such a list."""
PICKLED_ARGUMENTS: Final = 7
PICKLED_RESULT: Final = 8
"""There is a pickle. Something may ride on the message."""
ARGUMENTS_AND_NOTE: Final = 9
RESULT_AND_NOTE: Final = 10
"""The tensors are the arguments, or the result, and all that rides on the message is a note."""
LAST_KIND: Final = RESULT_AND_NOTE
NOTED: Final = frozenset((ARGUMENTS_AND_NOTE, RESULT_AND_NOTE))
NOTE_BYTES: Final = 16
"""The size of every note."""

MAX_TENSORS: Final = 8
"""For more of them a table is as fast."""

Handful: TypeAlias = "tuple[int, list[Any], bytes | bytearray, bytes | bytearray]"
"""What is in such a payload: its kind, the tensors, what rides on it, and its content."""


class FreshParcel(list[Any]):
    """A parcel as it came: bytes, and plain tensors after it, each of which nobody else has, nor its memory."""

    __slots__ = ()


_HEADER: Final = Struct("<BBH")
_LABEL: Final = Struct("<BB3H")
_MAX_META_BYTES: Final = (1 << 16) - 1
_MAX_DIMENSION: Final = (1 << 16) - 1
_MAX_DIMENSIONS: Final = 3
_REST: Final = ((0, 0, 0), (0, 0), (0,), ())
_UNALIGNED: Final = ALIGNMENT - 1
_REQUIRES_GRAD: Final = Code.REQUIRES_GRAD
_PARCELS: Final = frozenset((PARCEL_ARGUMENT, PARCEL_RESULT))
_ARE_A_RESULT: Final = frozenset((RESULT, RESULT_AND_META, RESULT_AND_NOTE))
_WITHOUT_CONTENT: Final = frozenset((ARGUMENTS, ARGUMENTS_AND_META, ARGUMENTS_AND_NOTE)) | _ARE_A_RESULT
# What was freed lies at its own offset. Where memory is really this low, a table does as well.
_LOWEST_ADDRESS: Final = 1 << 32
_PLAIN: Final = frozenset((Tensor, Parameter))
_from_numpy = torch.from_numpy
_ndarray = np.ndarray

_looks_of: Final = attrgetter("__class__", "is_cpu", "dtype", "shape", "requires_grad")
"""All of a tensor that is in its label, or keeps it from having one."""

_shape_of: Final = attrgetter("shape")
_address_of: Final[Callable[[Tensor], int]] = Tensor.data_ptr


class _Head(NamedTuple):
    """What is the same for all messages with tensors of the same looks."""

    head: bytes
    """Up to where the tensors begin."""
    kinds: tuple[tuple[int, int, bytes], ...]
    """Of each tensor its size, the size of an element, and what follows it."""
    largest: float
    """The size of the largest of them; infinite if they need a table."""
    fits: Callable[..., bool]
    """Whether other tensors look like these, and are plain memory: at a fifth of the price of a look at each."""


_Layout: TypeAlias = "tuple[int, tuple[Callable[[bytearray], Tensor], ...], int, int]"
"""What a head says: the kind, what builds the tensors out of a payload, where these end, and where the meta data do."""

_REMEMBERED: Final = 1024
_recent: Final[dict[tuple[Any, ...], _Head]] = {}
"""By kind, size of the meta data and shape of each tensor: the head of the last such message."""
_heads: Final[dict[tuple[Any, ...], _Head]] = {}
"""By kind, size of the meta data and `_looks_of` each tensor."""
_layouts: Final[dict[tuple[bytes], _Layout]] = {}
"""By the head, as it is unpacked."""
_NO_HEAD: Final = _Head(b"", (), inf, fits_nothing)
unpack_head: Final = {
    size: Struct(f"{size}s").unpack_from
    for size in range(_HEADER.size, _HEADER.size + MAX_TENSORS * _LABEL.size + 1, _LABEL.size)
}
"""By its size: takes the head from the beginning of a payload."""
_unpack_head_of_one: Final = unpack_head[_HEADER.size + _LABEL.size]


def handful_payload(
    limit_bytes: int, kind: int, slots: Sequence[Any], meta: bytes = b"", content: bytes = b""
) -> bytes | None:
    """The payload of a message with tensors of at most ``limit_bytes`` each; None if it needs a table.

    A parcel does not keep what its tensors have in common; anything else that has some needs a table. Of the kinds that
    have a note this is all but the note, which comes last.
    """
    # Each look at a tensor takes 20 to 150 ns, and three times that when other code has run since
    try:
        # What has no memory or no shape raises here, and must get no further, see `likeness.fits_like`
        addresses = [*map(_address_of, slots)]
        found = _recent.get((kind, len(meta), *map(_shape_of, slots)))
        if found is None or not found[3](*slots):
            found = _find_head(kind, meta, slots)
        head, kinds, largest, _ = found
        if largest > limit_bytes:
            return None
        if len(kinds) == 1:
            (address,) = addresses
            if address < _LOWEST_ADDRESS:
                return None
            # the one copy it makes on its way out
            memory = MEMORY[address : address + kinds[0][0]]
            return b"".join((head, memory, meta, content)) if kind > RESULT else head + memory
        parts = [head]
        storages = set()
        for slot, address, (size, item_bytes, padding) in zip(slots, addresses, kinds):  # noqa: B905 - which takes long
            if address < _LOWEST_ADDRESS:
                return None
            storages.add(address - slot.storage_offset() * item_bytes)
            parts.append(MEMORY[address : address + size])
            if padding:
                parts.append(padding)
    except (RuntimeError, AttributeError, TypeError):
        return None  # it hides its memory or its shape: a sparse, a nested one, one of vmap; or it is no tensor
    if len(storages) < len(kinds) and kind not in _PARCELS:
        return None
    if kind > RESULT:
        parts += (meta, content)
    return b"".join(parts)


def _find_head(kind: int, meta: bytes, slots: Sequence[Any]) -> _Head:
    """The head of a message with these tensors; `_NO_HEAD` if it needs a table."""
    are_apart = len(set(map(id, slots))) == len(slots)
    if len(slots) > MAX_TENSORS or len(meta) > _MAX_META_BYTES or not (are_apart or kind in _PARCELS):
        return _NO_HEAD
    looks = kind, len(meta), *map(_looks_of, slots)
    for slot in slots:
        if slot.is_neg() or not slot.is_contiguous() or (slot.is_complex() and slot.is_conj()):
            return _NO_HEAD
    found = _heads.get(looks)
    if found is None:
        found = _head_of(kind, meta, slots)
        remember(_heads, looks, found)
    elif found.fits is not fits_nothing and are_apart and not found.fits(*slots):
        # those before were made in another mode of torch's
        found = _heads[looks] = found._replace(fits=fits_like(slots))
    if found is not _NO_HEAD:
        remember(_recent, (kind, len(meta), *map(_shape_of, slots)), found)
    return found


def _head_of(kind: int, meta: bytes, slots: Sequence[Any]) -> _Head:
    labels = b""
    kinds: list[tuple[int, int, bytes]] = []
    for slot in slots:
        code = DTYPE_CODES.get(slot.dtype)
        shape = tuple(slot.shape)
        if (
            slot.__class__ not in _PLAIN
            or not slot.is_cpu
            or code is None
            or len(shape) > _MAX_DIMENSIONS
            or max(shape, default=0) > _MAX_DIMENSION
        ):
            return _NO_HEAD
        code |= _REQUIRES_GRAD if slot.requires_grad else 0
        labels += _LABEL.pack(code, len(shape), *shape, *_REST[len(shape)])
        kinds.append((slot.nbytes, slot.itemsize, PADDING[-slot.nbytes & _UNALIGNED]))
    if kinds:
        kinds[-1] = (*kinds[-1][:2], b"")  # nothing that is aligned comes after it
    head_size = _HEADER.size + len(labels)
    meta_size = NOTE_BYTES if kind in NOTED else len(meta)
    head = _HEADER.pack(kind, head_size, meta_size) + labels + PADDING[-head_size & _UNALIGNED]
    return _Head(head, tuple(kinds), max([size for size, _, _ in kinds], default=0), fits_like(slots))


def remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep what was made, among not too much else."""
    if len(memory) >= _REMEMBERED:
        memory.clear()
    memory[key] = value


def unpack_arguments(payload: bytes | bytearray) -> tuple[Tensor, ...]:
    """The tensors of a payload of the kind `ARGUMENTS`. Raises `ProtocolError`.

    They lie in the bytes given, if that is a bytearray: it must not be used for anything else.
    """
    body = payload if payload.__class__ is bytearray else bytearray(payload)
    try:
        head = unpack_head[body[1]](body)
        _, builders, end, _ = _layouts.get(head) or layout_of(head)
        if end != len(body):
            raise ProtocolError("tensors of another size than they say")
        if len(builders) == 2:
            first, second = builders
            return first(body), second(body)
        return tuple([build(body) for build in builders])
    except (StructError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error


def unpack_result(payload: bytes | bytearray) -> Tensor:
    """The same for the one tensor of a payload of the kind `RESULT`."""
    body = payload if payload.__class__ is bytearray else bytearray(payload)
    try:
        head = _unpack_head_of_one(body)
        _, (build,), end, _ = _layouts.get(head) or layout_of(head)
        if end != len(body):
            raise ProtocolError("a tensor of another size than it says")
        return build(body)
    except (StructError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ProtocolError(f"a tensor that cannot be built: {error}") from error


def unpack_handful(payload: bytes | bytearray) -> Handful:
    """What is in a payload of any kind. Raises `ProtocolError`.

    The tensors lie in the bytes given, if that is a bytearray: it must not be used for anything else.
    """
    body = payload if payload.__class__ is bytearray else bytearray(payload)
    try:
        head = unpack_head[body[1]](body)
        kind, builders, meta_start, end = _layouts.get(head) or layout_of(head)
        size = len(body)
        if size < end or (size > end and kind in _WITHOUT_CONTENT):
            raise ProtocolError("tensors of another size than they say")
        slots: list[Any] = []
        for build in builders:
            slots.append(build(body))  # noqa: PERF401 - a comprehension takes longer for a few
    except (StructError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ProtocolError(f"tensors that cannot be built: {error}") from error
    return kind, slots, body[meta_start:end], body[end:]


def layout_of(unpacked_head: tuple[bytes]) -> _Layout:
    """What a head says."""
    (head,) = unpacked_head
    kind, head_size, meta_size = _HEADER.unpack_from(head)
    if head_size != len(head):
        raise ValueError(f"a head of {head_size} bytes")
    end = (len(head) + _UNALIGNED) & ~_UNALIGNED
    builders: list[Callable[[bytearray], Tensor]] = []
    for code, dtype, shape, position in labels_in(head):
        builders.append(builder_of(code, dtype, shape, position))
        end = position + prod(shape) * dtype.itemsize
    if kind <= RESULT and meta_size:
        raise ValueError("meta data where there are none")
    if kind in NOTED and meta_size != NOTE_BYTES:
        raise ValueError(f"a note of {meta_size} bytes")
    if kind in _ARE_A_RESULT and len(builders) != 1:
        raise ValueError(f"a result that is {len(builders)} tensors")
    made = kind, tuple(builders), end, end + meta_size
    remember(_layouts, unpacked_head, made)
    return made


def labels_in(head: bytes) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], int]]:
    """Of each tensor its code, dtype and shape, and where in the payload it begins."""
    position = (len(head) + _UNALIGNED) & ~_UNALIGNED
    for code, dimensions, *sizes in _LABEL.iter_unpack(head[_HEADER.size :]):
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{dimensions} dimensions")
        shape = tuple(sizes[:dimensions])
        dtype = DTYPES[code & ~_REQUIRES_GRAD]
        yield code, dtype, shape, position
        position = (position + prod(shape) * dtype.itemsize + _UNALIGNED) & ~_UNALIGNED


def builder_of(code: int, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Callable[[bytearray], Tensor]:
    """What builds a tensor out of a payload in which it lies there."""
    if len(shape) == 1:
        requires_grad = code & _REQUIRES_GRAD != 0
        return partial(torch.frombuffer, dtype=dtype, count=shape[0], offset=offset, requires_grad=requires_grad)
    array_dtype = NUMPY_DTYPES[code]
    if code < Code.FIRST_STAND_IN:
        return lambda body: _from_numpy(_ndarray(shape, array_dtype, body, offset))
    return lambda body: finished(_from_numpy(_ndarray(shape, array_dtype, body, offset)), code)
