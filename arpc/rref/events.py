"""What can happen to the RRefs of a worker: the events that `forks.Forks` is told of."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from arpc.ids import WorkerInfo

__all__ = [
    "ChildAccepted",
    "CreationAbandoned",
    "CreationArrived",
    "CreationConfirmed",
    "CreationDenied",
    "CreationEnded",
    "CreationFailed",
    "CreationStarted",
    "DeleteUndelivered",
    "Event",
    "FailureAcknowledged",
    "ForkConfirmed",
    "ForkId",
    "ForkOffered",
    "ForkReceived",
    "ForkRefused",
    "ForkRequested",
    "HandleDropped",
    "OfferKnown",
    "OfferQueried",
    "OfferRefused",
    "OwnerHandleDropped",
    "PeerConnected",
    "PeerLost",
    "RRefId",
    "UserDeleted",
    "ValueAwaited",
    "ValueShared",
    "WorkerName",
]

# Numbers, as they travel: `GloballyUniqueId.from_int` tells people what they mean
RRefId: TypeAlias = int
ForkId: TypeAlias = int
WorkerName: TypeAlias = str


# -- events: what happened to this worker's users


class CreationStarted(NamedTuple):
    """`remote` was called here: the owner will be asked to create the value."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo


class CreationConfirmed(NamedTuple):
    """The owner has run the creation."""

    fork: ForkId


class CreationFailed(NamedTuple):
    """The creation was given up here. The owner may have run it, or may still receive it."""

    fork: ForkId
    number: int
    """Of the creation, see `delivery`: the owner handles the creation or the news of its failure, never both."""
    reason: str


class FailureAcknowledged(NamedTuple):
    """The owner knows that the creation was given up."""

    fork: ForkId


class ForkReceived(NamedTuple):
    """An RRef was unpacked here."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo
    parent: WorkerInfo
    is_created: bool
    """The parent knew that the owner has the value."""


class ForkConfirmed(NamedTuple):
    """The owner counts a fork that asked for it."""

    fork: ForkId


class ForkRefused(NamedTuple):
    """The owner does not have the value any more, or cannot be asked."""

    fork: ForkId


class ForkOffered(NamedTuple):
    """An RRef was packed here for another worker. ``parent``: the fork it was made from; None on the owner."""

    rref: RRefId
    fork: ForkId
    to: WorkerInfo
    parent: ForkId | None


class ChildAccepted(NamedTuple):
    """The child is counted by the owner."""

    fork: ForkId


class OfferKnown(NamedTuple):
    """The worker that was offered a fork has it."""

    fork: ForkId


class OfferRefused(NamedTuple):
    """The worker that was offered a fork never got it, and will not take it."""

    fork: ForkId


class OfferQueried(NamedTuple):
    """A worker that offered a fork asks whether it is known here; the answer is `Forks.knows`, asked before."""

    fork: ForkId
    parent: WorkerInfo


class DeleteUndelivered(NamedTuple):
    """The owner could not be told that a user has ended."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class ForkCounted(NamedTuple):
    """By its answer, the owner counts a fork. That may have been given up here, since the owner was taken for lost."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class CountUnanswered(NamedTuple):
    """The owner was asked to count a fork, and did not answer: it may count it all the same."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class HandleDropped(NamedTuple):
    """A user's handle was dropped or released."""

    fork: ForkId


# -- events: what happened to this worker's own values


class ValueShared(NamedTuple):
    """A value of this worker got an id that others can hold; its handle here holds it too."""

    rref: RRefId


class CreationArrived(NamedTuple):
    """A worker wants a value created here. `RunCreation` follows, unless nobody wants it any more."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo


class CreationEnded(NamedTuple):
    """The value, or the error in its place, is there."""

    rref: RRefId


class ForkRequested(NamedTuple):
    """A user asks to be counted. Afterwards `Forks.counts` tells whether it is."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo
    is_created: bool


class CreationAbandoned(NamedTuple):
    """The creator gave a creation up that has not arrived here, and will not be taken any more."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo
    reason: str


class CreationDenied(NamedTuple):
    """The worker that would have created an expected value says that no creation of it is on its way here."""

    rref: RRefId


class UserDeleted(NamedTuple):
    """A user has ended."""

    rref: RRefId
    fork: ForkId


class ValueAwaited(NamedTuple):
    """Something here wants a value that may not have been created yet; it holds the RRef until `OwnerHandleDropped`."""

    rref: RRefId
    is_created: bool


class OwnerHandleDropped(NamedTuple):
    """A handle of the owner itself, or somebody who waited for the value, is gone."""

    rref: RRefId


# -- events: the others


class PeerLost(NamedTuple):
    """A worker died or left, and its time to come back is over."""

    worker: WorkerInfo


class PeerConnected(NamedTuple):
    """There is a connection to a worker: for the first time, again, or although it was taken for lost."""

    worker: WorkerInfo


Event: TypeAlias = (
    CreationStarted
    | CreationConfirmed
    | CreationFailed
    | FailureAcknowledged
    | ForkReceived
    | ForkConfirmed
    | ForkRefused
    | ForkOffered
    | ChildAccepted
    | OfferKnown
    | OfferRefused
    | OfferQueried
    | DeleteUndelivered
    | ForkCounted
    | CountUnanswered
    | HandleDropped
    | ValueShared
    | CreationArrived
    | CreationEnded
    | CreationAbandoned
    | CreationDenied
    | ForkRequested
    | UserDeleted
    | ValueAwaited
    | OwnerHandleDropped
    | PeerConnected
    | PeerLost
)
