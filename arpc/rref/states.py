"""The states of one RRef on a worker, as one of its users and as its owner."""

from __future__ import annotations

from enum import Enum, auto
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

import msgspec

from arpc.ids import WorkerInfo

__all__ = ["UNANSWERED", "ForkId", "Offer", "Owned", "OwnerState", "RRefId", "UserFork", "UserState"]

# Plain numbers, as they are sent: `GloballyUniqueId.from_int` makes them readable
RRefId: TypeAlias = int
ForkId: TypeAlias = int


class UserState(Enum):
    """The state of a fork, as far as its user knows.

    ::

        CREATING -> CONFIRMED        CREATING -> FAILING -> FAILED        REQUESTED -> CONFIRMED

    Each state may become `LOST`, which is final.
    """

    CREATING = auto()
    """The owner was asked to create the value, and has not answered."""
    REQUESTED = auto()
    """The owner was asked to count this fork, and has not answered."""
    CONFIRMED = auto()
    FAILING = auto()
    """This worker has given the creation up, and the owner has not acknowledged that."""
    FAILED = auto()
    """The owner has acknowledged that the creation was given up. The function may have run all the same."""
    LOST = auto()
    """The owner, or the value, is gone."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a slow Python function


class OwnerState(Enum):
    """The state of a value on its owner: ``EXPECTED -> CREATING -> READY``, or ``EXPECTED -> ABANDONED``."""

    EXPECTED = auto()
    """Messages of users have arrived over other connections, but the creation has not."""
    CREATING = auto()
    READY = auto()
    ABANDONED = auto()
    """The creation will not arrive, or is refused if it does. Kept while it has users, which get an error."""


UNANSWERED: Final = frozenset((UserState.CREATING, UserState.REQUESTED, UserState.FAILING))


class UserFork(msgspec.Struct, eq=False):
    """One fork held by this worker. Each RRef has one, so it is a Struct, the cheapest kind of object to make."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo
    """The owner. If only its name was known at first, its id is unknown until there is a connection."""
    parent: WorkerInfo
    """The worker that sent the fork; this worker itself if the fork was made here."""
    state: UserState
    is_created: bool
    """Whether the creation is known to have reached the owner."""
    handles: int = 1
    children: int = 0
    """The number of forks made from this one that the owner may not count yet."""
    since: float = msgspec.field(default_factory=monotonic)
    """The time when it was made, for reports only."""


class Offer(NamedTuple):
    """A fork that was sent to another worker."""

    rref: RRefId
    to: WorkerInfo
    parent: ForkId | None
    """The fork that it was made from; None on the owner."""


class Owned(msgspec.Struct, eq=False):
    """One value of this worker that other workers can hold."""

    rref: RRefId
    state: OwnerState
    forks: dict[ForkId, WorkerInfo] = msgspec.field(default_factory=dict)
    """The counted forks, and the workers that hold them."""
    holds: int = 0
    """The number of handles on this worker, plus calls that wait for the value, plus the creation while it runs."""
    since: float = msgspec.field(default_factory=monotonic)
    """The time when it was made, for reports only."""

    def dropped(self) -> None:
        """The last hold has ended before the value was ready. A creation that still arrives makes another object."""
