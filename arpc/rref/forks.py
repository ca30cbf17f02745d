"""Who holds which RRef: the reference count over the whole group, as a state machine. Events in, instructions out.

The value of an RRef lives on its **owner**. Every other worker that holds it is a **user** and has a **fork** of its
own, with an id that is unique over the group. Whoever sends an RRef makes a fork for the receiver, its **child**, and
keeps its own until the owner counts the child. So, whatever order messages arrive in:

- the owner keeps the value while any user lives, because every user is counted, or has a parent that is;
- the owner drops it when the last one has ended, because every counted user says when it ends, or is found dead.

========================  ===========================================================================================
remote()                  the creation itself makes the first fork known to the owner
owner sends to a user     counted when it is sent
user sends to a user      the child asks the owner to count it (fork request), then tells its parent (child accept)
user sends to the owner   the owner finds the value itself, and accepts the child at once
========================  ===========================================================================================

A fork that was *offered* in a message which never arrives would keep its parent for ever. Who was offered a fork and
does not answer is therefore asked; if it knows nothing of it, it will not take it any more, even if the message comes
late.

Each event may be handled at any time. Fork requests and creations must be handled once only: `delivery.Window` sees to
that. All else may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from arpc.ids import GloballyUniqueId, WorkerId

__all__ = [
    "ChildAccepted",
    "CreationArrived",
    "CreationConfirmed",
    "CreationEnded",
    "CreationFailed",
    "CreationStarted",
    "DeleteUndelivered",
    "DropValue",
    "Event",
    "FailValue",
    "ForgetFork",
    "ForkConfirmed",
    "ForkId",
    "ForkOffered",
    "ForkReceived",
    "ForkRefused",
    "ForkRequested",
    "Forks",
    "HandleDropped",
    "Instruction",
    "MarkConfirmed",
    "MarkLost",
    "OfferKnown",
    "OfferQueried",
    "OfferRefused",
    "Owned",
    "OwnerHandleDropped",
    "OwnerState",
    "PeerLost",
    "PeerReturned",
    "RRefId",
    "RunCreation",
    "SendChildAccept",
    "SendForkRequest",
    "SendUserDelete",
    "UserDeleted",
    "UserFork",
    "UserState",
    "ValueAwaited",
    "ValueShared",
    "WorkerName",
]

RRefId: TypeAlias = GloballyUniqueId
ForkId: TypeAlias = GloballyUniqueId
WorkerName: TypeAlias = str


# -- events: what happened to this worker's users


class CreationStarted(NamedTuple):
    """`remote` was called here: the owner will be asked to create the value."""

    rref: RRefId
    fork: ForkId
    owner: WorkerName


class CreationConfirmed(NamedTuple):
    """The owner has run the creation."""

    fork: ForkId


class CreationFailed(NamedTuple):
    """It is not known whether the owner has, or ever will."""

    fork: ForkId


class ForkReceived(NamedTuple):
    """An RRef was unpacked here."""

    rref: RRefId
    fork: ForkId
    owner: WorkerName
    parent: WorkerName
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
    to: WorkerName
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
    parent: WorkerName


class DeleteUndelivered(NamedTuple):
    """The owner could not be told that a user has ended."""

    owner: WorkerName
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
    user: WorkerName


class CreationEnded(NamedTuple):
    """The value, or the error in its place, is there."""

    rref: RRefId


class ForkRequested(NamedTuple):
    """A user asks to be counted. Afterwards `Forks.counts` tells whether it is."""

    rref: RRefId
    fork: ForkId
    user: WorkerName
    is_created: bool


class UserDeleted(NamedTuple):
    """A user has ended. ``abandons``: it was the creator's, who gave the creation up."""

    rref: RRefId
    fork: ForkId
    abandons: bool


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

    name: WorkerName
    id: WorkerId


class PeerReturned(NamedTuple):
    """A worker that was taken for lost has been heard of again."""

    name: WorkerName
    id: WorkerId


Event: TypeAlias = (
    CreationStarted
    | CreationConfirmed
    | CreationFailed
    | ForkReceived
    | ForkConfirmed
    | ForkRefused
    | ForkOffered
    | ChildAccepted
    | OfferKnown
    | OfferRefused
    | OfferQueried
    | DeleteUndelivered
    | HandleDropped
    | ValueShared
    | CreationArrived
    | CreationEnded
    | ForkRequested
    | UserDeleted
    | ValueAwaited
    | OwnerHandleDropped
    | PeerLost
    | PeerReturned
)


# -- instructions


class SendForkRequest(NamedTuple):
    """Ask the owner to count a fork."""

    to: WorkerName
    rref: RRefId
    fork: ForkId
    is_created: bool


class SendChildAccept(NamedTuple):
    """Tell the parent that its child is counted."""

    to: WorkerName
    fork: ForkId


class SendUserDelete(NamedTuple):
    """Tell the owner that a user has ended."""

    to: WorkerName
    rref: RRefId
    fork: ForkId
    abandons: bool


class RunCreation(NamedTuple):
    """Make the value."""

    rref: RRefId


class DropValue(NamedTuple):
    """Nobody holds it any more."""

    rref: RRefId


class FailValue(NamedTuple):
    """Nobody will create it: tell those who wait."""

    rref: RRefId


class ForgetFork(NamedTuple):
    """A user has ended here; the owner is told by another instruction, if it is to be told."""

    fork: ForkId


class MarkConfirmed(NamedTuple):
    """The owner counts it: who waited for that may go on."""

    fork: ForkId


class MarkLost(NamedTuple):
    """It cannot be used any more."""

    fork: ForkId


Instruction: TypeAlias = (
    SendForkRequest
    | SendChildAccept
    | SendUserDelete
    | RunCreation
    | DropValue
    | FailValue
    | ForgetFork
    | MarkConfirmed
    | MarkLost
)


# -- states


class UserState(Enum):
    """What a user knows of its owner."""

    CREATING = auto()
    """The owner was asked to create the value, and has not answered."""
    REQUESTED = auto()
    """The owner was asked to count this fork, and has not answered."""
    CONFIRMED = auto()
    FAILED = auto()
    """The creation may or may not have happened."""
    LOST = auto()
    """The owner, or the value, is gone."""


class OwnerState(Enum):
    """How far a value is."""

    EXPECTED = auto()
    """Users know of it, but its creation has not arrived yet: theirs came by another way."""
    CREATING = auto()
    READY = auto()
    ABANDONED = auto()
    """Its creation will not arrive."""


_UNANSWERED: Final = frozenset((UserState.CREATING, UserState.REQUESTED))

# An event that is not listed for a state does not concern it: it came twice, or too late to matter.
USER_TRANSITIONS: Final[Mapping[tuple[UserState, type[Event]], UserState]] = MappingProxyType(
    {
        (UserState.CREATING, CreationConfirmed): UserState.CONFIRMED,
        (UserState.CREATING, CreationFailed): UserState.FAILED,
        (UserState.CREATING, PeerLost): UserState.LOST,
        (UserState.REQUESTED, ForkConfirmed): UserState.CONFIRMED,
        (UserState.REQUESTED, ForkRefused): UserState.LOST,
        (UserState.REQUESTED, PeerLost): UserState.LOST,
        (UserState.CONFIRMED, PeerLost): UserState.LOST,
        (UserState.FAILED, PeerLost): UserState.LOST,
    }
)
OWNER_TRANSITIONS: Final[Mapping[tuple[OwnerState, type[Event]], OwnerState]] = MappingProxyType(
    {
        (OwnerState.EXPECTED, CreationArrived): OwnerState.CREATING,
        (OwnerState.EXPECTED, UserDeleted): OwnerState.ABANDONED,  # by its creator only
        (OwnerState.EXPECTED, PeerLost): OwnerState.ABANDONED,
        (OwnerState.CREATING, CreationEnded): OwnerState.READY,
    }
)


class UserFork:
    """One fork held by this worker."""

    __slots__ = ("children", "fork", "handles", "is_created", "owner", "parent", "rref", "state")

    def __init__(
        self, rref: RRefId, fork: ForkId, owner: WorkerName, parent: WorkerName, state: UserState, is_created: bool
    ) -> None:
        self.rref = rref
        self.fork = fork
        self.owner = owner
        self.parent = parent
        """Who sent it; empty if it was made here."""
        self.state = state
        self.is_created = is_created
        """It is certain that the creation has reached the owner."""
        self.handles = 1
        self.children: set[ForkId] = set()
        """Forks made from this one that the owner may not count yet."""


class Owned:
    """One value of this worker that others can hold."""

    __slots__ = ("forks", "holds", "rref", "state")

    def __init__(self, rref: RRefId, state: OwnerState) -> None:
        self.rref = rref
        self.state = state
        self.forks: dict[ForkId, WorkerName] = {}
        """Users that are counted, and who they belong to."""
        self.holds = 0
        """Handles on this worker, those who wait for the value, and the creation while it runs."""


class _Offer(NamedTuple):
    rref: RRefId
    to: WorkerName
    parent: ForkId | None


class Forks:
    """The RRefs of one worker: those it owns and those it uses."""

    def __init__(self, name: WorkerName, id: WorkerId) -> None:  # noqa: A002 - as in WorkerInfo
        self.name = name
        self.id = id
        self.users: dict[ForkId, UserFork] = {}
        self.owned: dict[RRefId, Owned] = {}
        self.offers: dict[ForkId, _Offer] = {}
        """Forks sent to others that have not been heard of since."""
        self._refused: dict[ForkId, WorkerName] = {}
        """Forks not to be taken any more, and who offered them."""
        self._abandoned: set[RRefId] = set()
        """Creations that were given up before they arrived."""
        self._lost: set[WorkerId] = set()
        self._ghosts: dict[WorkerName, list[tuple[RRefId, ForkId]]] = {}
        """Forks of owners taken for lost. Should one of them come back after all, it may count them still."""
        self._handlers = {
            CreationStarted: self._creation_started,
            CreationConfirmed: self._creation_settled,
            CreationFailed: self._creation_settled,
            ForkReceived: self._fork_received,
            ForkConfirmed: self._fork_settled,
            ForkRefused: self._fork_settled,
            ForkOffered: self._fork_offered,
            ChildAccepted: self._child_accepted,
            OfferKnown: self._offer_known,
            OfferRefused: self._offer_refused,
            OfferQueried: self._offer_queried,
            DeleteUndelivered: self._delete_undelivered,
            HandleDropped: self._handle_dropped,
            ValueShared: self._value_shared,
            CreationArrived: self._creation_arrived,
            CreationEnded: self._creation_ended,
            ForkRequested: self._fork_requested,
            UserDeleted: self._user_deleted,
            ValueAwaited: self._value_awaited,
            OwnerHandleDropped: self._owner_handle_dropped,
            PeerLost: self._peer_lost,
            PeerReturned: self._peer_returned,
        }

    def handle(self, event: Event) -> Sequence[Instruction]:
        """What is to be done about an event."""
        return tuple(self._handlers[type(event)](event))  # type: ignore[operator]

    # -- looking

    def refuses(self, fork: ForkId) -> bool:
        """Whether a fork comes too late to be taken."""
        return fork in self._refused

    def knows(self, fork: ForkId) -> bool:
        """Whether a user of this worker has the fork."""
        return fork in self.users

    def counts(self, rref: RRefId, fork: ForkId) -> bool:
        """Whether a fork is counted here."""
        owned = self.owned.get(rref)
        return owned is not None and fork in owned.forks

    @property
    def is_idle(self) -> bool:
        """Nothing is held here in either role."""
        return not (self.users or self.owned or self.offers)

    # -- users

    def _creation_started(self, event: CreationStarted) -> Iterator[Instruction]:
        if event.owner == self.name:
            # on oneself: no user, but a value that is held by its handle and waits for its creation
            owned = self.owned[event.rref] = Owned(event.rref, OwnerState.EXPECTED)
            owned.holds = 1
        else:
            self.users[event.fork] = UserFork(event.rref, event.fork, event.owner, "", UserState.CREATING, False)
        yield from ()

    def _creation_settled(self, event: CreationConfirmed | CreationFailed) -> Iterator[Instruction]:
        user = self.users.get(event.fork)
        if user is not None and self._advance(user, event):
            if user.state is UserState.CONFIRMED:
                user.is_created = True
                yield MarkConfirmed(user.fork)
            yield from self._end_if_unused(user)

    def _fork_received(self, event: ForkReceived) -> Iterator[Instruction]:
        if event.fork in self._refused:
            return
        if event.owner == self.name:
            if self._find_or_expect(event.rref, is_created=event.is_created) is not None:
                self.owned[event.rref].holds += 1
            if event.parent == self.name:
                yield from self._child_accepted(ChildAccepted(event.fork))
            else:
                yield SendChildAccept(event.parent, event.fork)
            return
        user = self.users.get(event.fork)
        if user is not None:
            user.handles += 1
            return
        # the owner has counted it when it sent it
        state = UserState.CONFIRMED if event.parent == event.owner else UserState.REQUESTED
        self.users[event.fork] = UserFork(event.rref, event.fork, event.owner, event.parent, state, event.is_created)
        if state is UserState.REQUESTED:
            yield SendForkRequest(event.owner, event.rref, event.fork, event.is_created)

    def _fork_settled(self, event: ForkConfirmed | ForkRefused) -> Iterator[Instruction]:
        user = self.users.get(event.fork)
        if user is None or not self._advance(user, event):
            return
        yield MarkConfirmed(user.fork) if user.state is UserState.CONFIRMED else MarkLost(user.fork)
        yield from self._release_parent(user)
        yield from self._end_if_unused(user)

    def _release_parent(self, user: UserFork) -> Iterator[Instruction]:
        if user.parent == self.name:
            yield from self._child_accepted(ChildAccepted(user.fork))
        elif user.parent != user.owner:
            yield SendChildAccept(user.parent, user.fork)

    def _handle_dropped(self, event: HandleDropped) -> Iterator[Instruction]:
        user = self.users.get(event.fork)
        if user is not None and user.handles:
            user.handles -= 1
            yield from self._end_if_unused(user)

    def _end_if_unused(self, user: UserFork) -> Iterator[Instruction]:
        if user.handles or user.children or user.state in _UNANSWERED:
            return
        del self.users[user.fork]
        yield ForgetFork(user.fork)
        if user.state is not UserState.LOST:
            yield SendUserDelete(user.owner, user.rref, user.fork, user.state is UserState.FAILED)

    @staticmethod
    def _advance(user: UserFork, event: Event) -> bool:
        state = USER_TRANSITIONS.get((user.state, type(event)))
        if state is None:
            return False
        user.state = state
        return True

    # -- offers

    def _fork_offered(self, event: ForkOffered) -> Iterator[Instruction]:
        self.offers[event.fork] = _Offer(event.rref, event.to, event.parent)
        if event.parent is None:
            self.owned[event.rref].forks[event.fork] = event.to
        else:
            self.users[event.parent].children.add(event.fork)
        yield from ()

    def _child_accepted(self, event: ChildAccepted) -> Iterator[Instruction]:
        offer = self.offers.pop(event.fork, None)
        if offer is None:
            return
        if offer.parent is not None:
            yield from self._forget_child(offer.parent, event.fork)
        elif offer.to == self.name:
            # sent to itself: the handle that came of it holds the value now
            yield from self._forget_fork(offer.rref, event.fork)

    def _offer_known(self, event: OfferKnown) -> Iterator[Instruction]:
        offer = self.offers.get(event.fork)
        # a user's child still has to be accepted: known is not counted
        if offer is not None and offer.parent is None:
            del self.offers[event.fork]
        yield from ()

    def _offer_refused(self, event: OfferRefused) -> Iterator[Instruction]:
        offer = self.offers.pop(event.fork, None)
        if offer is None:
            return
        if offer.parent is not None:
            yield from self._forget_child(offer.parent, event.fork)
        else:
            yield from self._forget_fork(offer.rref, event.fork)

    def _offer_queried(self, event: OfferQueried) -> Iterator[Instruction]:
        if event.fork not in self.users:
            self._refused[event.fork] = event.parent
        yield from ()

    def _forget_child(self, parent: ForkId, child: ForkId) -> Iterator[Instruction]:
        user = self.users.get(parent)
        if user is not None:
            user.children.discard(child)
            yield from self._end_if_unused(user)

    # -- the owner

    def _value_shared(self, event: ValueShared) -> Iterator[Instruction]:
        if event.rref not in self.owned:
            owned = self.owned[event.rref] = Owned(event.rref, OwnerState.READY)
            owned.holds = 1
        yield from ()

    def _creation_arrived(self, event: CreationArrived) -> Iterator[Instruction]:
        if event.rref in self._abandoned:
            self._abandoned.discard(event.rref)
            return
        owned = self.owned.get(event.rref)
        if owned is None:
            owned = self.owned[event.rref] = Owned(event.rref, OwnerState.EXPECTED)
        state = OWNER_TRANSITIONS.get((owned.state, CreationArrived))
        if state is None:
            return
        owned.state = state
        owned.forks[event.fork] = event.user
        owned.holds += 1
        yield RunCreation(event.rref)

    def _creation_ended(self, event: CreationEnded) -> Iterator[Instruction]:
        owned = self.owned.get(event.rref)
        state = OWNER_TRANSITIONS.get((owned.state, CreationEnded)) if owned is not None else None
        if owned is not None and state is not None:
            owned.state = state
            owned.holds -= 1
            yield from self._drop_if_unused(owned)

    def _fork_requested(self, event: ForkRequested) -> Iterator[Instruction]:
        owned = self._find_or_expect(event.rref, is_created=event.is_created)
        if owned is not None:
            owned.forks[event.fork] = event.user
        yield from ()

    def _user_deleted(self, event: UserDeleted) -> Iterator[Instruction]:
        self.offers.pop(event.fork, None)
        owned = self.owned.get(event.rref)
        if owned is None:
            if event.abandons:
                self._abandoned.add(event.rref)
            return
        if event.abandons and owned.state is OwnerState.EXPECTED:
            self._abandoned.add(event.rref)
            yield from self._abandon(owned, event)
        yield from self._forget_fork(event.rref, event.fork)

    def _abandon(self, owned: Owned, event: UserDeleted | PeerLost) -> Iterator[Instruction]:
        owned.state = OWNER_TRANSITIONS[owned.state, type(event)]
        yield FailValue(owned.rref)

    def _value_awaited(self, event: ValueAwaited) -> Iterator[Instruction]:
        owned = self._find_or_expect(event.rref, is_created=event.is_created)
        if owned is not None:
            owned.holds += 1
        yield from ()

    def _owner_handle_dropped(self, event: OwnerHandleDropped) -> Iterator[Instruction]:
        owned = self.owned.get(event.rref)
        if owned is not None and owned.holds:
            owned.holds -= 1
            yield from self._drop_if_unused(owned)

    def _find_or_expect(self, rref: RRefId, *, is_created: bool) -> Owned | None:
        """A value of this worker; one that is not here may still be on its way, unless that is known not to be so."""
        owned = self.owned.get(rref)
        if owned is not None:
            return owned
        if is_created or rref.created_on == self.id or rref.created_on in self._lost or rref in self._abandoned:
            return None
        owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
        return owned

    def _forget_fork(self, rref: RRefId, fork: ForkId) -> Iterator[Instruction]:
        owned = self.owned.get(rref)
        if owned is not None:
            owned.forks.pop(fork, None)
            yield from self._drop_if_unused(owned)

    def _drop_if_unused(self, owned: Owned) -> Iterator[Instruction]:
        if not owned.forks and not owned.holds:
            del self.owned[owned.rref]
            yield DropValue(owned.rref)

    # -- lost workers

    def _peer_lost(self, event: PeerLost) -> Iterator[Instruction]:
        self._lost.add(event.id)
        self._refused = {fork: parent for fork, parent in self._refused.items() if parent != event.name}
        self._abandoned = {rref for rref in self._abandoned if rref.created_on != event.id}
        for fork, offer in list(self.offers.items()):
            if offer.to == event.name:
                yield from self._offer_refused(OfferRefused(fork))
        for user in list(self.users.values()):
            if user.owner == event.name:
                yield from self._owner_lost(user, event)
        for owned in list(self.owned.values()):
            if owned.state is OwnerState.EXPECTED and owned.rref.created_on == event.id:
                yield from self._abandon(owned, event)
            for fork, holder in list(owned.forks.items()):
                if holder == event.name:
                    del owned.forks[fork]
            yield from self._drop_if_unused(owned)

    def _owner_lost(self, user: UserFork, event: PeerLost) -> Iterator[Instruction]:
        was_requested = user.state is UserState.REQUESTED
        if self._advance(user, event):
            self._ghosts.setdefault(event.name, []).append((user.rref, user.fork))
            yield MarkLost(user.fork)
            if was_requested:
                yield from self._release_parent(user)
        yield from self._end_if_unused(user)

    def _delete_undelivered(self, event: DeleteUndelivered) -> Iterator[Instruction]:
        self._ghosts.setdefault(event.owner, []).append((event.rref, event.fork))
        yield from ()

    def _peer_returned(self, event: PeerReturned) -> Iterator[Instruction]:
        self._lost.discard(event.id)
        for rref, fork in self._ghosts.pop(event.name, ()):
            yield SendUserDelete(event.name, rref, fork, False)
