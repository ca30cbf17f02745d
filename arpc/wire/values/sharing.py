"""Finds the tensors of a message that share memory, so that they share it again at the receiver.

Views of one storage are sent as one *span* of it if they overlap, or lie so close to each other that the bytes between
them are worth sending. Views that lie far apart are sent alone: a few rows of an embedding must not bring all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pickle import PickleBuffer
from typing import Final

import numpy as np
from torch import Tensor

from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.raw_memory import view_of
from arpc.wire.values.table import DTYPE_CODES

__all__ = ["Span", "extent", "shared_spans"]

# Beyond these limits, views with overlapping extents count as overlapping: an exact test would cost more than it saves.
_MAX_MEMBERS: Final = 32
_MAX_WORK: Final = 10_000


@dataclass(slots=True, eq=False)
class Span:
    """Bytes ``start`` to ``end`` of a storage, for views of it that overlap or nearly touch."""

    start: int
    end: int
    covered_bytes: int = 0
    members: list[int] = field(default_factory=list)
    """The positions of the views in the message."""
    source: int | None = None
    """The source of the bytes, see `table.Entry`; None until they are in the message."""


def shared_spans(slots: Sequence[Tensor | PickleBuffer]) -> dict[int, Span]:
    """Return the span of each tensor that is to share one with other tensors, by its position in the message."""
    by_storage: dict[int, dict[int, Tensor]] = {}
    for position, slot in enumerate(slots):
        if isinstance(slot, Tensor) and slot.is_cpu and slot.dtype in DTYPE_CODES and not slot.is_nested:
            try:
                storage = slot.untyped_storage()._cdata
            except RuntimeError:  # a sparse tensor, or one of vmap
                continue
            by_storage.setdefault(storage, {})[position] = slot
    spans: dict[int, Span] = {}
    for members in by_storage.values():
        for span in _spans_of(members) if len(members) > 1 else ():
            if len(span.members) > 1 and _is_worth_sharing(span, members):
                span.start -= (
                    span.start % ALIGNMENT
                )  # so that views of any dtype begin at a multiple of their item size
                spans.update(dict.fromkeys(span.members, span))
    return spans


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first and one-past-last byte in its storage that a strided, non-empty tensor uses."""
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * item


def _spans_of(members: dict[int, Tensor]) -> list[Span]:
    extents = sorted((*extent(tensor), position) for position, tensor in members.items() if tensor.numel())
    spans: list[Span] = []
    for start, end, position in extents:
        # a gap no larger than the bytes covered before it at most doubles what is sent
        if not spans or start > spans[-1].end + spans[-1].covered_bytes:
            spans.append(Span(start, end))
        span = spans[-1]
        span.end = max(span.end, end)
        span.covered_bytes += min(end - start, members[position].nbytes)
        span.members.append(position)
    return spans


def _is_worth_sharing(span: Span, members: dict[int, Tensor]) -> bool:
    # The extents of views with gaps, such as two columns of a matrix, may overlap without a common element
    if span.end - span.start <= 2 * span.covered_bytes or len(span.members) > _MAX_MEMBERS:
        return True
    arrays = [_as_bytes(members[position]) for position in span.members]
    return any(_overlap(left, right) for left, right in combinations(arrays, 2))


def _as_bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    item = tensor.element_size()
    start, end = extent(tensor)
    memory = view_of(tensor.untyped_storage(), tensor.data_ptr(), end - start)
    strides = tuple(stride * item for stride in tensor.stride())
    return np.ndarray(tuple(tensor.shape), np.dtype((np.void, item)), memory, 0, strides)


def _overlap(
    left: np.ndarray[tuple[int, ...], np.dtype[np.void]], right: np.ndarray[tuple[int, ...], np.dtype[np.void]]
) -> bool:
    try:
        # numpy's stubs accept two values only
        return bool(np.shares_memory(left, right, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
