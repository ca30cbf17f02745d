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

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from arpc.ids import WorkerId, creator_of
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
    Offer,
    Owned,
    OwnerState,
    UserFork,
    UserState,
)

__all__ = ["Forks"]


U = TypeVar("U", bound=UserFork)
_Instructions: TypeAlias = Sequence[Instruction]
_NOTHING: Final[_Instructions] = ()


class Forks(Generic[U]):
    """The RRefs of one worker: those it owns and those it uses. ``make_user`` makes what is kept of each of these."""

    def __init__(self, name: WorkerName, id: WorkerId, make_user: type[U]) -> None:  # noqa: A002 - as in WorkerInfo
        self.name = name
        self.id = id
        self._make_user = make_user
        self.users: dict[ForkId, U] = {}
        self.owned: dict[RRefId, Owned] = {}
        self.offers: dict[ForkId, Offer] = {}
        """Forks sent to others that have not been heard of since."""
        self._refused: dict[ForkId, WorkerName] = {}
        """Forks not to be taken any more, and who offered them."""
        self._abandoned: set[RRefId] = set()
        """Creations that were given up before they arrived."""
        self._lost: set[WorkerId] = set()
        self._ghosts: dict[WorkerName, list[tuple[RRefId, ForkId]]] = {}
        """Forks of owners taken for lost. Should one of them come back after all, it may count them still."""
        self._handlers: dict[type[Event], Callable[[Any], _Instructions]] = {
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
        return self._handlers[event.__class__](event)

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

    def concerns(self, name: WorkerName, id: WorkerId) -> bool:  # noqa: A002 - as in WorkerInfo
        """Whether there is anything between this worker and another."""
        return (
            any(user.owner == name for user in self.users.values())
            or any(offer.to == name for offer in self.offers.values())
            or any(
                name in owned.forks.values() or (owned.state is OwnerState.EXPECTED and creator_of(owned.rref) == id)
                for owned in self.owned.values()
            )
        )

    @property
    def is_idle(self) -> bool:
        """Nothing is held here in either role."""
        return not (self.users or self.owned or self.offers)

    # -- users

    def _creation_started(self, event: CreationStarted) -> _Instructions:
        if event.owner == self.name:
            # on oneself: no user, but a value that is held by its handle and waits for its creation
            owned = self.owned[event.rref] = Owned(event.rref, OwnerState.EXPECTED)
            owned.holds = 1
        else:
            self.users[event.fork] = self._make_user(event.rref, event.fork, event.owner, "", UserState.CREATING, False)
        return _NOTHING

    def _creation_settled(self, event: CreationConfirmed | CreationFailed) -> _Instructions:
        user = self.users.get(event.fork)
        if user is None or not self._advance(user, event):
            return _NOTHING
        user.is_created = user.state is UserState.CONFIRMED
        return self._end_if_unused(user)

    def _fork_received(self, event: ForkReceived) -> _Instructions:
        if event.fork in self._refused:
            return _NOTHING
        if event.owner == self.name:
            if self._find_or_expect(event.rref, is_created=event.is_created) is not None:
                self.owned[event.rref].holds += 1
            return self._accept(event.fork, event.parent)
        user = self.users.get(event.fork)
        if user is not None:
            user.handles += 1
            return _NOTHING
        # the owner has counted it when it sent it
        state = UserState.CONFIRMED if event.parent == event.owner else UserState.REQUESTED
        self.users[event.fork] = self._make_user(
            event.rref, event.fork, event.owner, event.parent, state, event.is_created
        )
        if state is UserState.REQUESTED:
            return (SendForkRequest(event.owner, event.rref, event.fork, event.is_created),)
        return _NOTHING

    def _fork_settled(self, event: ForkConfirmed | ForkRefused) -> _Instructions:
        user = self.users.get(event.fork)
        if user is None or not self._advance(user, event):
            return _NOTHING
        mark = MarkConfirmed if user.state is UserState.CONFIRMED else MarkLost
        return (mark(user.fork), *self._accept(user.fork, user.parent), *self._end_if_unused(user))

    def _accept(self, fork: ForkId, parent: WorkerName) -> _Instructions:
        """A fork needs its parent no more."""
        if parent == self.name:
            return self._child_accepted(ChildAccepted(fork))
        return (SendChildAccept(parent, fork),)

    def _handle_dropped(self, event: HandleDropped) -> _Instructions:
        user = self.users.get(event.fork)
        if user is None or not user.handles:
            return _NOTHING
        user.handles -= 1
        return self._end_if_unused(user)

    def _end_if_unused(self, user: UserFork) -> _Instructions:
        if user.handles or user.children or user.state in UNANSWERED:
            return _NOTHING
        del self.users[user.fork]
        if user.state is UserState.LOST:
            return (ForgetFork(user.fork),)
        return (SendUserDelete(user.owner, user.rref, user.fork, user.state is UserState.FAILED),)

    @staticmethod
    def _advance(user: UserFork, event: Event) -> bool:
        state = USER_TRANSITIONS.get((user.state, event.__class__))
        if state is None:
            return False
        user.state = state
        return True

    # -- offers

    def _fork_offered(self, event: ForkOffered) -> _Instructions:
        self.offers[event.fork] = Offer(event.rref, event.to, event.parent)
        if event.parent is None:
            self.owned[event.rref].forks[event.fork] = event.to
        else:
            self.users[event.parent].children += 1
        return _NOTHING

    def _child_accepted(self, event: ChildAccepted) -> _Instructions:
        offer = self.offers.pop(event.fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        if offer.to == self.name:
            # sent to itself: the handle that came of it holds the value now
            return self._forget_fork(offer.rref, event.fork)
        return _NOTHING

    def _offer_known(self, event: OfferKnown) -> _Instructions:
        offer = self.offers.get(event.fork)
        # a user's child still has to be accepted: known is not counted
        if offer is not None and offer.parent is None:
            del self.offers[event.fork]
        return _NOTHING

    def _offer_refused(self, event: OfferRefused) -> _Instructions:
        offer = self.offers.pop(event.fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        return self._forget_fork(offer.rref, event.fork)

    def _offer_queried(self, event: OfferQueried) -> _Instructions:
        if event.fork not in self.users:
            self._refused[event.fork] = event.parent
        return _NOTHING

    def _forget_child(self, parent: ForkId) -> _Instructions:
        """Called once for each child: when its offer is settled."""
        user = self.users[parent]
        user.children -= 1
        return self._end_if_unused(user)

    # -- the owner

    def _value_shared(self, event: ValueShared) -> _Instructions:
        if event.rref not in self.owned:
            owned = self.owned[event.rref] = Owned(event.rref, OwnerState.READY)
            owned.holds = 1
        return _NOTHING

    def _creation_arrived(self, event: CreationArrived) -> _Instructions:
        rref = event.rref
        if rref in self._abandoned:
            self._abandoned.discard(rref)
            return _NOTHING
        owned = self.owned.get(rref)
        if owned is None:
            owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
        state = OWNER_TRANSITIONS.get((owned.state, CreationArrived))
        if state is None:
            return _NOTHING
        owned.state = state
        owned.forks[event.fork] = event.user
        owned.holds += 1
        return (RunCreation(rref),)

    def _creation_ended(self, event: CreationEnded) -> _Instructions:
        owned = self.owned.get(event.rref)
        state = OWNER_TRANSITIONS.get((owned.state, CreationEnded)) if owned is not None else None
        if owned is None or state is None:
            return _NOTHING
        owned.state = state
        owned.holds -= 1
        return self._drop_if_unused(owned)

    def _fork_requested(self, event: ForkRequested) -> _Instructions:
        owned = self._find_or_expect(event.rref, is_created=event.is_created)
        if owned is not None:
            owned.forks[event.fork] = event.user
        return _NOTHING

    def _user_deleted(self, event: UserDeleted) -> _Instructions:
        self.offers.pop(event.fork, None)
        owned = self.owned.get(event.rref)
        if owned is None:
            if event.abandons:
                self._abandoned.add(event.rref)
            return _NOTHING
        if event.abandons and owned.state is OwnerState.EXPECTED:
            self._abandoned.add(event.rref)
            return self._abandon(owned, event)  # its fork would have come with the creation: it is not counted
        return self._forget_fork(event.rref, event.fork)

    def _abandon(self, owned: Owned, event: UserDeleted | PeerLost) -> _Instructions:
        owned.state = OWNER_TRANSITIONS[owned.state, event.__class__]
        return (FailValue(owned.rref),)

    def _value_awaited(self, event: ValueAwaited) -> _Instructions:
        owned = self._find_or_expect(event.rref, is_created=event.is_created)
        if owned is not None:
            owned.holds += 1
        return _NOTHING

    def _owner_handle_dropped(self, event: OwnerHandleDropped) -> _Instructions:
        owned = self.owned.get(event.rref)
        if owned is None or not owned.holds:
            return _NOTHING
        owned.holds -= 1
        return self._drop_if_unused(owned)

    def _find_or_expect(self, rref: RRefId, *, is_created: bool) -> Owned | None:
        """A value of this worker; one that is not here may still be on its way, unless that is known not to be so."""
        owned = self.owned.get(rref)
        if owned is not None:
            return owned
        if is_created or creator_of(rref) == self.id or creator_of(rref) in self._lost or rref in self._abandoned:
            return None
        owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
        return owned

    def _forget_fork(self, rref: RRefId, fork: ForkId) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None:
            return _NOTHING
        owned.forks.pop(fork, None)
        return self._drop_if_unused(owned)

    def _drop_if_unused(self, owned: Owned) -> _Instructions:
        if owned.forks or owned.holds:
            return _NOTHING
        del self.owned[owned.rref]
        return (DropValue(owned.rref),)

    # -- lost workers

    def _peer_lost(self, event: PeerLost) -> _Instructions:
        self._lost.add(event.id)
        self._refused = {fork: parent for fork, parent in self._refused.items() if parent != event.name}
        self._abandoned = {rref for rref in self._abandoned if creator_of(rref) != event.id}
        following: list[Instruction] = []
        for fork, offer in list(self.offers.items()):
            if offer.to == event.name:
                following += self._offer_refused(OfferRefused(fork))
        for user in list(self.users.values()):
            if user.owner == event.name:
                following += self._owner_lost(user, event)
        for owned in list(self.owned.values()):
            if owned.state is OwnerState.EXPECTED and creator_of(owned.rref) == event.id:
                following += self._abandon(owned, event)
            for fork, holder in list(owned.forks.items()):
                if holder == event.name:
                    del owned.forks[fork]
            following += self._drop_if_unused(owned)
        return following

    def _owner_lost(self, user: UserFork, event: PeerLost) -> _Instructions:
        was_requested = user.state is UserState.REQUESTED
        if not self._advance(user, event):
            return self._end_if_unused(user)
        self._ghosts.setdefault(event.name, []).append((user.rref, user.fork))
        accept = self._accept(user.fork, user.parent) if was_requested else _NOTHING
        return (MarkLost(user.fork), *accept, *self._end_if_unused(user))

    def _delete_undelivered(self, event: DeleteUndelivered) -> _Instructions:
        self._ghosts.setdefault(event.owner, []).append((event.rref, event.fork))
        return _NOTHING

    def _peer_returned(self, event: PeerReturned) -> _Instructions:
        self._lost.discard(event.id)
        return [SendUserDelete(event.name, rref, fork, False) for rref, fork in self._ghosts.pop(event.name, ())]
