"""Names and ids of workers, and ids that are unique in the group."""

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
"""Stands for the id of a worker of which only the name is known."""

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
    """An id that is unique in the group: the worker that made it, and a number that counts up on that worker."""

    created_on: WorkerId
    local_id: int

    def __repr__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"

    def to_int(self) -> int:
        """Return both parts in 64 bits: 16 for the worker, 48 for the number."""
        return self.created_on << LOCAL_BITS | self.local_id

    @classmethod
    def from_int(cls, value: int) -> GloballyUniqueId:
        return cls(value >> LOCAL_BITS, value & _LOCAL_MASK)


class IdAllocator:
    """Allocates the ids that one worker makes."""

    def __init__(self, worker_id: WorkerId) -> None:
        # itertools.count is one C call: safe from any thread without a lock
        self.next_number: Callable[[], int] = count(worker_id << LOCAL_BITS).__next__
        """Returns the next id as an integer, as it is sent: see `GloballyUniqueId.to_int`."""

    def next(self) -> GloballyUniqueId:
        return GloballyUniqueId.from_int(self.next_number())


def creator_of(number: int) -> WorkerId:
    """Return the worker that made an id, given as an integer."""
    return number >> LOCAL_BITS


def address_of(worker: WorkerInfo) -> WorkerId | str:
    """Return the address of a worker for a message: its id once known, so that no successor under its name gets it.

    The agent sends to an id only over a connection to that incarnation, or raises `UnknownWorkerError`.
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
