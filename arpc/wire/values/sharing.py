"""Which tensors of a message share memory, and shall share it again where they arrive.

Views of one storage travel as one *span* of it if they overlap, or lie so close to each other that what is between them
is worth sending. Views that lie far apart travel alone: a few rows of an embedding must not drag the whole of it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
from torch import Tensor, UntypedStorage

from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.raw_memory import view_of

__all__ = ["Span", "extent", "shared_spans"]

# Beyond these, views that reach over each other are taken to overlap: finding out would cost more than it may save.
_MAX_MEMBERS: Final = 32
_MAX_WORK: Final = 10_000


@dataclass(slots=True, eq=False)
class Span:
    """Bytes ``start`` to ``end`` of a storage. ``source`` says where they are in the message, once they are in it."""

    start: int
    end: int
    source: int | None = None


@dataclass(slots=True, eq=False)
class _Cluster:
    """Views of one storage that overlap, or nearly touch."""

    start: int
    end: int
    covered_bytes: int = 0
    members: list[int] = field(default_factory=list)


def shared_spans(tensors: Sequence[Tensor | None], storages: Sequence[UntypedStorage | None]) -> dict[int, Span]:
    """The span of each tensor that is to share one, by its position. None stands for what cannot share anything."""
    by_storage: dict[int, list[int]] = {}
    for position, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        if tensor is not None and storage is not None and tensor.numel():
            by_storage.setdefault(storage._cdata, []).append(position)
    spans: dict[int, Span] = {}
    for positions in by_storage.values():
        if len(positions) == 1:
            continue
        members = {position: tensor for position in positions if (tensor := tensors[position]) is not None}
        for cluster in _clusters(members):
            if len(cluster.members) > 1 and _is_worth_sharing(cluster, members):
                # aligned, so that views of any dtype begin at a multiple of their item size
                span = Span(cluster.start - cluster.start % ALIGNMENT, cluster.end)
                spans.update(dict.fromkeys(cluster.members, span))
    return spans


def extent(tensor: Tensor) -> tuple[int, int]:
    """First and one-past-last byte in its storage that a strided tensor, not an empty one, touches."""
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * item


def _clusters(members: dict[int, Tensor]) -> list[_Cluster]:
    extents = sorted((*extent(tensor), position) for position, tensor in members.items())
    clusters: list[_Cluster] = []
    for start, end, position in extents:
        # a gap no larger than what lies before it at most doubles what is sent
        if not clusters or start > clusters[-1].end + clusters[-1].covered_bytes:
            clusters.append(_Cluster(start, end))
        cluster = clusters[-1]
        cluster.end = max(cluster.end, end)
        cluster.covered_bytes += min(end - start, members[position].nbytes)
        cluster.members.append(position)
    return clusters


def _is_worth_sharing(cluster: _Cluster, members: dict[int, Tensor]) -> bool:
    if cluster.end - cluster.start <= 2 * cluster.covered_bytes:
        return True
    # Sparse views, like two columns of a matrix, reach over each other and need not have an element in common
    if len(cluster.members) > _MAX_MEMBERS:
        return True
    arrays = [_as_bytes(members[position]) for position in cluster.members]
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
        # numpy's stubs know of two kinds of work only
        return bool(np.shares_memory(left, right, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
