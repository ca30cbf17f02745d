"""What can happen to the RRefs of a worker: the events that `forks.Forks` is told of."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

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
    "OwnerUnreached",
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


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened. A subclass `ForkOffered` is handled by the method `Forks.fork_offered`."""


# -- events: what happened to this worker's users


class CreationStarted(Event, frozen=True):
    """`remote` was called here: the owner will be asked to create the value."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo


class CreationConfirmed(Event, frozen=True):
    """The owner has run the creation, and counts its fork."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class CreationFailed(Event, frozen=True):
    """The creation was given up here. The owner may have run it, or may still receive it."""

    fork: ForkId
    number: int
    """Of the creation, see `exactly_once`: the owner handles the creation or the news of its failure, never both."""
    reason: str


class FailureAcknowledged(Event, frozen=True):
    """The owner knows that the creation was given up, and counts its fork."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class ForkReceived(Event, frozen=True):
    """An RRef was unpacked here."""

    rref: RRefId
    fork: ForkId
    owner: WorkerInfo
    parent: WorkerInfo
    is_created: bool
    """The parent knew that the owner has the value."""


class ForkConfirmed(Event, frozen=True):
    """The owner counts a fork that asked for it."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class ForkRefused(Event, frozen=True):
    """The owner does not have the value any more, or cannot be asked."""

    fork: ForkId


class ForkOffered(Event, frozen=True):
    """An RRef was packed here for another worker. ``parent``: the fork it was made from; None on the owner."""

    rref: RRefId
    fork: ForkId
    to: WorkerInfo
    parent: ForkId | None


class ChildAccepted(Event, frozen=True):
    """The child is counted by the owner."""

    fork: ForkId


class OfferKnown(Event, frozen=True):
    """The worker that was offered a fork has it."""

    fork: ForkId


class OfferRefused(Event, frozen=True):
    """The worker that was offered a fork never got it, and will not take it."""

    fork: ForkId


class OfferQueried(Event, frozen=True):
    """A worker that offered a fork asks whether it is known here; the answer is `Forks.knows`, asked before."""

    fork: ForkId
    parent: WorkerInfo


class OwnerUnreached(Event, frozen=True):
    """The owner did not answer a message about a fork: the message may have arrived all the same."""

    owner: WorkerInfo
    rref: RRefId
    fork: ForkId


class HandleDropped(Event, frozen=True):
    """A user's handle was dropped or released."""

    fork: ForkId


# -- events: what happened to this worker's own values


class ValueShared(Event, frozen=True):
    """A value of this worker got an id that others can hold; its handle here holds it too."""

    rref: RRefId


class CreationArrived(Event, frozen=True):
    """A worker wants a value created here. `RunCreation` follows, unless nobody wants it any more."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo


class CreationEnded(Event, frozen=True):
    """The value, or the error in its place, is there."""

    rref: RRefId


class ForkRequested(Event, frozen=True):
    """A user asks to be counted. Afterwards `Forks.counts` tells whether it is."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo
    is_created: bool


class CreationAbandoned(Event, frozen=True):
    """The creator gave a creation up that has not arrived here, and will not be taken any more."""

    rref: RRefId
    fork: ForkId
    user: WorkerInfo
    reason: str


class CreationDenied(Event, frozen=True):
    """The worker that would have created an expected value says that no creation of it is on its way here."""

    rref: RRefId


class UserDeleted(Event, frozen=True):
    """A user has ended."""

    rref: RRefId
    fork: ForkId


class ValueAwaited(Event, frozen=True):
    """Something here wants a value that may not have been created yet; it holds the RRef until `OwnerHandleDropped`."""

    rref: RRefId
    is_created: bool


class OwnerHandleDropped(Event, frozen=True):
    """A handle of the owner itself, or a call that waited for the value, is gone."""

    rref: RRefId


# -- events: the others


class PeerLost(Event, frozen=True):
    """A worker died or left, and its time to come back is over."""

    worker: WorkerInfo


class PeerConnected(Event, frozen=True):
    """There is a connection to a worker: for the first time, again, or although it was taken for lost."""

    worker: WorkerInfo
