"""What a worker knows of one RRef, as its user and as its owner."""

from __future__ import annotations

from enum import Enum, auto
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

import msgspec

from arpc.ids import WorkerInfo

__all__ = ["UNANSWERED", "ForkId", "Offer", "Owned", "OwnerState", "RRefId", "UserFork", "UserState"]

# Numbers, as they travel: `GloballyUniqueId.from_int` tells people what they mean
RRefId: TypeAlias = int
ForkId: TypeAlias = int


class UserState(Enum):
    """What a user knows of its owner.

    ::

        CREATING -> CONFIRMED        CREATING -> FAILING -> FAILED        REQUESTED -> CONFIRMED

    Each of them may become `LOST`, which is the end.
    """

    CREATING = auto()
    """The owner was asked to create the value, and has not answered."""
    REQUESTED = auto()
    """The owner was asked to count this fork, and has not answered."""
    CONFIRMED = auto()
    FAILING = auto()
    """The creation was given up here, and the owner has not acknowledged that."""
    FAILED = auto()
    """The owner knows that the creation was given up. It may have happened all the same."""
    LOST = auto()
    """The owner, or the value, is gone."""

    __hash__ = object.__hash__  # every member is one object, and Enum's own hash is a function in Python


class OwnerState(Enum):
    """How far a value is: ``EXPECTED -> CREATING -> READY``, or ``EXPECTED -> ABANDONED``."""

    EXPECTED = auto()
    """Users know of it, but its creation has not arrived yet: their messages came over other connections."""
    CREATING = auto()
    READY = auto()
    ABANDONED = auto()
    """Its creation will not arrive, or will be refused if it does. Kept while it has users, which get an error."""


UNANSWERED: Final = frozenset((UserState.CREATING, UserState.REQUESTED, UserState.FAILING))


class UserFork(msgspec.Struct, eq=False):
    """One fork held by this worker. A Struct because there is one for each RRef: this is the cheapest kind to make."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo
    """Its id is unknown until there is a connection, if only the name was known when it was made."""
    parent: WorkerInfo
    """The worker that sent it; this worker itself if it was made here."""
    state: UserState
    is_created: bool
    """It is certain that the creation has reached the owner."""
    handles: int = 1
    children: int = 0
    """How many forks made from this one the owner may not count yet."""
    since: float = msgspec.field(default_factory=monotonic)
    """For reports; nothing is decided by it."""


class Offer(NamedTuple):
    """A fork that was sent to another worker."""

    rref: RRefId
    to: WorkerInfo
    parent: ForkId | None
    """What it was made from; None on the owner."""


class Owned(msgspec.Struct, eq=False):
    """One value of this worker that others can hold."""

    rref: RRefId
    state: OwnerState
    forks: dict[ForkId, WorkerInfo] = msgspec.field(default_factory=dict)
    """Users that are counted, and the workers that they belong to."""
    holds: int = 0
    """Handles on this worker, calls that wait for the value, and the creation while it runs."""
    since: float = msgspec.field(default_factory=monotonic)
    """For reports; nothing is decided by it."""

    def dropped(self) -> None:
        """Nobody holds it any more, and it is not there yet. If its creation comes after all, that makes another."""
