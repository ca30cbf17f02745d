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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from arpc.ids import WorkerId, WorkerInfo
from arpc.rref.events import (
    ChildAccepted,
    CreationArrived,
    CreationConfirmed,
    CreationEnded,
    CreationFailed,
    CreationStarted,
    DeleteUndelivered,
    Event,
    ForkConfirmed,
    ForkId,
    ForkOffered,
    ForkReceived,
    ForkRefused,
    ForkRequested,
    HandleDropped,
    OfferKnown,
    OfferQueried,
    OfferRefused,
    OwnerHandleDropped,
    PeerLost,
    PeerReturned,
    RRefId,
    UserDeleted,
    ValueAwaited,
    ValueShared,
    WorkerName,
)
from arpc.rref.instructions import (
    DropValue,
    FailValue,
    ForgetFork,
    Instruction,
    MarkConfirmed,
    MarkLost,
    RunCreation,
    SendChildAccept,
    SendForkRequest,
    SendUserDelete,
)
from arpc.rref.states import (
    OWNER_TRANSITIONS,
    UNANSWERED,
    USER_TRANSITIONS,
    Owned,
    OwnerState,
    UserFork,
    UserState,
)

__all__ = ["Forks"]


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

    def concerns(self, peer: WorkerInfo) -> bool:
        """Whether there is anything between this worker and a peer."""
        return (
            any(user.owner == peer.name for user in self.users.values())
            or any(offer.to == peer.name for offer in self.offers.values())
            or any(
                peer.name in owned.forks.values()
                or (owned.state is OwnerState.EXPECTED and owned.rref.created_on == peer.id)
                for owned in self.owned.values()
            )
        )

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
        if user.handles or user.children or user.state in UNANSWERED:
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
