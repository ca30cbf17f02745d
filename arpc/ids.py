"""Names for workers and for things that must be unique over the group."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from arpc.errors import ConfigurationError

__all__ = [
    "UNKNOWN_ID",
    "GloballyUniqueId",
    "IdAllocator",
    "WorkerId",
    "WorkerInfo",
    "address_of",
    "check_worker_name",
    "creator_of",
]

WorkerId = int
"""A worker's number in its group: 16 bits, the rank in a group of fixed size. A group gives each id to one worker only,
so an id tells a worker from its successor under the same name."""

UNKNOWN_ID = -1
"""In the place of an id as long as only the name of a worker is known."""

MAX_WORKER_ID = (1 << 16) - 1
LOCAL_BITS = 48
_LOCAL_MASK = (1 << LOCAL_BITS) - 1
_WORKER_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


class WorkerInfo(NamedTuple):
    """Name and id of a worker. Any parameter that takes a worker accepts this, the name or the id."""

    name: str
    id: WorkerId

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class GloballyUniqueId(NamedTuple):
    """An id no other worker makes: who made it, and a number counting up there."""

    created_on: WorkerId
    local_id: int

    def __repr__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"

    def to_int(self) -> int:
        """Both halves in 64 bits: 16 for the worker, 48 for the number."""
        return self.created_on << LOCAL_BITS | self.local_id

    @classmethod
    def from_int(cls, value: int) -> GloballyUniqueId:
        return cls(value >> LOCAL_BITS, value & _LOCAL_MASK)


class IdAllocator:
    """Hands out the ids of one worker."""

    def __init__(self, worker_id: WorkerId) -> None:
        # itertools.count is one C call: safe from any thread without a lock
        self.next_number: Callable[[], int] = count(worker_id << LOCAL_BITS).__next__
        """The next id as it travels, see `GloballyUniqueId.to_int`."""

    def next(self) -> GloballyUniqueId:
        return GloballyUniqueId.from_int(self.next_number())


def creator_of(number: int) -> WorkerId:
    """Which worker made the id that is this number."""
    return number >> LOCAL_BITS


def address_of(worker: WorkerInfo) -> WorkerId | str:
    """How a message names its receiver so that no successor under the same name gets it: by its id, once that is known.

    The agent sends to an id over a connection to that very incarnation, or raises `UnknownWorkerError`.
    """
    return worker.name if worker.id == UNKNOWN_ID else worker.id


def check_worker_name(name: str) -> str:
    """Return the name if a worker may have it, else raise `ConfigurationError`."""
    if not isinstance(name, str) or _WORKER_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, "
            f"but got {name!r}"
        )
    return name
