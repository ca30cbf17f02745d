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
from typing import Final, Generic, TypeAlias, TypeVar

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
# each is found in a fraction of the time that an attribute of an Enum takes
_CREATING: Final = UserState.CREATING
_REQUESTED: Final = UserState.REQUESTED
_CONFIRMED: Final = UserState.CONFIRMED
_FAILED: Final = UserState.FAILED
_LOST: Final = UserState.LOST
_next_user_state = USER_TRANSITIONS.get
_next_owner_state = OWNER_TRANSITIONS.get
_AFTER_ARRIVAL: Final = OWNER_TRANSITIONS[OwnerState.EXPECTED, CreationArrived]


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
        self._handlers: dict[type[Event], Callable[..., _Instructions]] = {
            CreationStarted: self.creation_started,
            CreationConfirmed: self.creation_confirmed,
            CreationFailed: self._creation_failed,
            ForkReceived: self._fork_received,
            ForkConfirmed: self._fork_confirmed,
            ForkRefused: self._fork_refused,
            ForkOffered: self._fork_offered,
            ChildAccepted: self._child_accepted,
            OfferKnown: self._offer_known,
            OfferRefused: self._offer_refused,
            OfferQueried: self._offer_queried,
            DeleteUndelivered: self._delete_undelivered,
            HandleDropped: self.handle_dropped,
            ValueShared: self._value_shared,
            CreationArrived: self.creation_arrived,
            CreationEnded: self.creation_ended,
            ForkRequested: self._fork_requested,
            UserDeleted: self.user_deleted,
            ValueAwaited: self._value_awaited,
            OwnerHandleDropped: self._owner_handle_dropped,
            PeerLost: self._peer_lost,
            PeerReturned: self._peer_returned,
        }

    def handle(self, event: Event) -> Sequence[Instruction]:
        """What is to be done about an event.

        Those that happen to every RRef are methods, too, which take what is in the event.
        """
        return self._handlers[event.__class__](*event)

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

    def forget(self, name: WorkerName) -> None:
        """A worker that was lost will not return: nobody is left to be told that its forks have ended."""
        self._ghosts.pop(name, None)

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

    def creation_started(self, rref: RRefId, fork: ForkId, owner: WorkerName) -> _Instructions:
        if owner == self.name:
            # on oneself: no user, but a value that is held by its handle and waits for its creation
            owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
            owned.holds = 1
        else:
            self.users[fork] = self._make_user(rref, fork, owner, "", _CREATING, False)
        return _NOTHING

    def creation_confirmed(self, fork: ForkId) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, CreationConfirmed))) is None:
            return _NOTHING
        user.state = state
        user.is_created = True
        return _NOTHING if user.handles else self._end_if_unused(user)

    def _creation_failed(self, fork: ForkId) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, CreationFailed))) is None:
            return _NOTHING
        user.state = state
        return self._end_if_unused(user)

    def _fork_received(
        self, rref: RRefId, fork: ForkId, owner: WorkerName, parent: WorkerName, is_created: bool
    ) -> _Instructions:
        if fork in self._refused:
            return _NOTHING
        if owner == self.name:
            if (owned := self._find_or_expect(rref, is_created)) is not None:
                owned.holds += 1
            return self._accept(fork, parent)
        user = self.users.get(fork)
        if user is not None:
            user.handles += 1
            return _NOTHING
        # the owner has counted it when it sent it
        state = _CONFIRMED if parent == owner else _REQUESTED
        self.users[fork] = self._make_user(rref, fork, owner, parent, state, is_created)
        if state is _REQUESTED:
            return (SendForkRequest(owner, rref, fork, is_created),)
        return _NOTHING

    def _fork_confirmed(self, fork: ForkId) -> _Instructions:
        return self._fork_settled(fork, ForkConfirmed)

    def _fork_refused(self, fork: ForkId) -> _Instructions:
        return self._fork_settled(fork, ForkRefused)

    def _fork_settled(self, fork: ForkId, event: type[Event]) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, event))) is None:
            return _NOTHING
        user.state = state
        mark = MarkConfirmed if state is _CONFIRMED else MarkLost
        return (mark(fork), *self._accept(fork, user.parent), *self._end_if_unused(user))

    def _accept(self, fork: ForkId, parent: WorkerName) -> _Instructions:
        """A fork needs its parent no more."""
        if parent == self.name:
            return self._child_accepted(fork)
        return (SendChildAccept(parent, fork),)

    def handle_dropped(self, fork: ForkId) -> _Instructions:
        user = self.users.get(fork)
        if user is None or not user.handles:
            return _NOTHING
        user.handles -= 1
        return self._end_if_unused(user)

    def _end_if_unused(self, user: UserFork) -> _Instructions:
        if user.handles or user.children or user.state in UNANSWERED:
            return _NOTHING
        del self.users[user.fork]
        if user.state is _LOST:
            return (ForgetFork(user.fork),)
        return (SendUserDelete(user.owner, user.rref, user.fork, user.state is _FAILED),)

    # -- offers

    def _fork_offered(self, rref: RRefId, fork: ForkId, to: WorkerName, parent: ForkId | None) -> _Instructions:
        self.offers[fork] = Offer(rref, to, parent)
        if parent is None:
            self.owned[rref].forks[fork] = to
        else:
            self.users[parent].children += 1
        return _NOTHING

    def _child_accepted(self, fork: ForkId) -> _Instructions:
        offer = self.offers.pop(fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        if offer.to == self.name:
            # sent to itself: the handle that came of it holds the value now
            return self._forget_fork(offer.rref, fork)
        return _NOTHING

    def _offer_known(self, fork: ForkId) -> _Instructions:
        offer = self.offers.get(fork)
        # a user's child still has to be accepted: known is not counted
        if offer is not None and offer.parent is None:
            del self.offers[fork]
        return _NOTHING

    def _offer_refused(self, fork: ForkId) -> _Instructions:
        offer = self.offers.pop(fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        return self._forget_fork(offer.rref, fork)

    def _offer_queried(self, fork: ForkId, parent: WorkerName) -> _Instructions:
        if fork not in self.users:
            self._refused[fork] = parent
        return _NOTHING

    def _forget_child(self, parent: ForkId) -> _Instructions:
        """Called once for each child: when its offer is settled."""
        user = self.users[parent]
        user.children -= 1
        return self._end_if_unused(user)

    # -- the owner

    def _value_shared(self, rref: RRefId) -> _Instructions:
        if rref not in self.owned:
            owned = self.owned[rref] = Owned(rref, OwnerState.READY)
            owned.holds = 1
        return _NOTHING

    def creation_arrived(self, rref: RRefId, fork: ForkId, user: WorkerName) -> _Instructions:
        if rref in self._abandoned:
            self._abandoned.discard(rref)
            return _NOTHING
        owned = self.owned.get(rref)
        if owned is None:
            self.owned[rref] = Owned(rref, _AFTER_ARRIVAL, {fork: user}, 1)  # nobody has asked for it before
            return (RunCreation(rref),)
        state = _next_owner_state((owned.state, CreationArrived))
        if state is None:
            return _NOTHING
        owned.state = state
        owned.forks[fork] = user
        owned.holds += 1
        return (RunCreation(rref),)

    def creation_ended(self, rref: RRefId) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None or (state := _next_owner_state((owned.state, CreationEnded))) is None:
            return _NOTHING
        owned.state = state
        owned.holds -= 1
        return _NOTHING if owned.forks else self._drop_if_unused(owned)

    def _fork_requested(self, rref: RRefId, fork: ForkId, user: WorkerName, is_created: bool) -> _Instructions:
        owned = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.forks[fork] = user
        return _NOTHING

    def user_deleted(self, rref: RRefId, fork: ForkId, abandons: bool) -> _Instructions:
        self.offers.pop(fork, None)
        owned = self.owned.get(rref)
        if owned is None:
            if abandons:
                self._abandoned.add(rref)
            return _NOTHING
        if abandons and owned.state is OwnerState.EXPECTED:
            self._abandoned.add(rref)
            return self._abandon(owned, UserDeleted)  # its fork would have come with the creation: it is not counted
        owned.forks.pop(fork, None)
        return self._drop_if_unused(owned)

    def _abandon(self, owned: Owned, event: type[Event]) -> _Instructions:
        owned.state = OWNER_TRANSITIONS[owned.state, event]
        return (FailValue(owned.rref),)

    def _value_awaited(self, rref: RRefId, is_created: bool) -> _Instructions:
        owned = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.holds += 1
        return _NOTHING

    def _owner_handle_dropped(self, rref: RRefId) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None or not owned.holds:
            return _NOTHING
        owned.holds -= 1
        return self._drop_if_unused(owned)

    def _find_or_expect(self, rref: RRefId, is_created: bool) -> Owned | None:
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

    def _peer_lost(self, name: WorkerName, id: WorkerId) -> _Instructions:  # noqa: A002 - as in WorkerInfo
        self._lost.add(id)
        self._refused = {fork: parent for fork, parent in self._refused.items() if parent != name}
        self._abandoned = {rref for rref in self._abandoned if creator_of(rref) != id}
        following: list[Instruction] = []
        for fork, offer in list(self.offers.items()):
            if offer.to == name:
                following += self._offer_refused(fork)
        for user in list(self.users.values()):
            if user.owner == name:
                following += self._owner_lost(user)
        for owned in list(self.owned.values()):
            if owned.state is OwnerState.EXPECTED and creator_of(owned.rref) == id:
                following += self._abandon(owned, PeerLost)
            for fork, holder in list(owned.forks.items()):
                if holder == name:
                    del owned.forks[fork]
            following += self._drop_if_unused(owned)
        return following

    def _owner_lost(self, user: UserFork) -> _Instructions:
        was_requested = user.state is _REQUESTED
        state = _next_user_state((user.state, PeerLost))
        if state is None:
            return self._end_if_unused(user)
        user.state = state
        self._ghosts.setdefault(user.owner, []).append((user.rref, user.fork))
        accept = self._accept(user.fork, user.parent) if was_requested else _NOTHING
        return (MarkLost(user.fork), *accept, *self._end_if_unused(user))

    def _delete_undelivered(self, owner: WorkerName, rref: RRefId, fork: ForkId) -> _Instructions:
        self._ghosts.setdefault(owner, []).append((rref, fork))
        return _NOTHING

    def _peer_returned(self, name: WorkerName, id: WorkerId) -> _Instructions:  # noqa: A002 - as in WorkerInfo
        self._lost.discard(id)
        return [SendUserDelete(name, rref, fork, False) for rref, fork in self._ghosts.pop(name, ())]
