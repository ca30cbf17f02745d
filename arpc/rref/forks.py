"""The reference count of RRefs over the whole group, as a state machine: events in, instructions out.

The value of an RRef lives on its **owner**. Every other worker that holds it is a **user** and has a **fork** of its
own, with an id that is unique over the group. A worker that sends an RRef makes a fork for the receiver, its **child**,
and keeps its own until the owner counts the child. So, whatever order messages arrive in:

- the owner keeps the value while any user lives, because every user is counted, or has a parent that is;
- the owner drops it when the last one has ended, because every counted user says when it ends, or is found dead.

========================  ===========================================================================================
remote()                  the creation itself makes the first fork known to the owner
owner sends to a user     counted when it is sent
user sends to a user      the child asks the owner to count it (fork request), then tells its parent (child accept)
user sends to the owner   the owner finds the value itself, and accepts the child at once
========================  ===========================================================================================

A fork that was *offered* in a message which never arrives would keep its parent for ever. A worker that was offered
a fork and does not answer is therefore asked; if it knows nothing of it, it will not take it any more, even if the
message comes late.

A value may be *expected*: its users were heard of before its creation. If the creator gives the creation up, it tells
the owner, which handles either the creation or that news, whichever is first. Either counts the creator's fork, so the
owner remembers the failure until the creator and all users have let go. An owner that expects a value for long asks
the creator; one that is lost, or knows of no such creation, will not create it.

Workers are told apart by name and id. A worker that comes back under its name has another id and knows nothing of
what its predecessor owned or held.

Each event may be handled at any time. Fork requests and creations must be handled once only: `exactly_once.Window` sees
to that. All else may be repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from re import sub
from typing import Final, Generic, TypeAlias, TypeVar

from msgspec.structs import astuple

from arpc.ids import UNKNOWN_ID, WorkerId, WorkerInfo, creator_of
from arpc.rref.events import (
    CreationAbandoned,
    CreationArrived,
    CreationConfirmed,
    CreationDenied,
    CreationEnded,
    CreationFailed,
    Event,
    FailureAcknowledged,
    ForkConfirmed,
    ForkId,
    ForkRefused,
    PeerLost,
    RRefId,
)
from arpc.rref.instructions import (
    AwaitCreation,
    DropValue,
    FailValue,
    ForgetFork,
    Instruction,
    MarkConfirmed,
    MarkLost,
    RunCreation,
    SendChildAccept,
    SendCreationFailed,
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
_LOST: Final = UserState.LOST
_next_user_state = USER_TRANSITIONS.get
_next_owner_state = OWNER_TRANSITIONS.get
_REMEMBERED_OWNERS: Final = 1024
"""How many lost owners are told of forks that have ended, should they come back."""
_AFTER_ARRIVAL: Final = OWNER_TRANSITIONS[OwnerState.EXPECTED, CreationArrived]


@cache
def _method_of(event: type[Event]) -> str:
    """The name of the method that handles an event: ``fork_offered`` for `ForkOffered`."""
    return sub(r"(?<!^)([A-Z])", r"_\1", event.__name__).lower()


class Forks(Generic[U]):
    """The RRefs of one worker: those it owns and those it uses. ``make_user`` makes what is kept of each of these."""

    def __init__(self, me: WorkerInfo, make_user: type[U]) -> None:
        self.me = me
        self._make_user = make_user
        self.users: dict[ForkId, U] = {}
        self.owned: dict[RRefId, Owned] = {}
        self.offers: dict[ForkId, Offer] = {}
        """Forks sent to others that have not been heard of since."""
        self._refused: dict[ForkId, WorkerInfo] = {}
        """Forks not to be taken any more, and the workers that offered them."""
        self._lost: set[WorkerId] = set()
        self._ghosts: OrderedDict[WorkerInfo, list[tuple[RRefId, ForkId]]] = OrderedDict()
        """Forks of owners taken for lost. Should one of them come back after all, it may count them still."""

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Return the instructions that follow from an event.

        Each event is a method, too, which takes the fields of the event: this calls it. Nothing is decided elsewhere.
        """
        method: Callable[..., _Instructions] = getattr(self, _method_of(event.__class__))
        return method(*astuple(event))

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

    def is_expected(self, rref: RRefId) -> bool:
        """Whether users of a value were heard of here, and its creation was not."""
        owned = self.owned.get(rref)
        return owned is not None and owned.state is OwnerState.EXPECTED

    def creations_under_way(self, owner: WorkerInfo) -> frozenset[RRefId]:
        """The values that this worker has asked another one to create, and has not given up."""
        named = WorkerInfo(owner.name, UNKNOWN_ID)
        return frozenset(
            user.rref for user in self.users.values() if user.state is _CREATING and user.owner in (owner, named)
        )

    def forget(self, worker: WorkerInfo) -> None:
        """A worker that was lost will not return: it need not hear that its forks have ended."""
        self._ghosts.pop(worker, None)

    def concerns(self, worker: WorkerInfo) -> bool:
        """Whether there is anything between this worker and another."""
        return (
            any(user.owner == worker for user in self.users.values())
            or any(offer.to == worker for offer in self.offers.values())
            or any(
                worker in owned.forks.values()
                or (owned.state is OwnerState.EXPECTED and creator_of(owned.rref) == worker.id)
                for owned in self.owned.values()
            )
        )

    @property
    def is_idle(self) -> bool:
        """Nothing is held here in either role."""
        return not (self.users or self.owned or self.offers)

    # -- users

    def creation_started(self, rref: RRefId, fork: ForkId, owner: WorkerInfo, user: U | None = None) -> _Instructions:
        """``user`` is what is kept of it, if that has been made."""
        if owner == self.me:
            # on oneself: no user, but a value that is held by its handle and waits for its creation
            owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
            owned.holds = 1
        else:
            self.users[fork] = user or self._make_user(rref, fork, owner, self.me, _CREATING, False)
        return _NOTHING

    def creation_confirmed(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, CreationConfirmed))) is None:
            return self._counted(owner, rref, fork)
        user.state = state
        user.is_created = True
        return _NOTHING if user.handles else self._end_if_unused(user)

    def creation_failed(self, fork: ForkId, number: int, reason: str) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, CreationFailed))) is None:
            return _NOTHING
        user.state = state
        # At once, and not when the last handle is dropped: others may wait for the value. The fork ends only after the
        # answer, or its end could overtake the news, which counts it.
        return (SendCreationFailed(user.owner, user.rref, fork, number, reason),)

    def failure_acknowledged(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, FailureAcknowledged))) is None:
            return self._counted(owner, rref, fork)
        user.state = state
        return self._end_if_unused(user)

    def fork_received(
        self, rref: RRefId, fork: ForkId, owner: WorkerInfo, parent: WorkerInfo, is_created: bool
    ) -> _Instructions:
        if fork in self._refused:
            return _NOTHING
        if owner == self.me:
            return (*self.value_awaited(rref, is_created), *self._accept(fork, parent))
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

    def fork_confirmed(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        return self._fork_settled(fork, ForkConfirmed) or self._counted(owner, rref, fork)

    def fork_refused(self, fork: ForkId) -> _Instructions:
        return self._fork_settled(fork, ForkRefused)

    def _fork_settled(self, fork: ForkId, event: type[Event]) -> _Instructions:
        user = self.users.get(fork)
        if user is None or (state := _next_user_state((user.state, event))) is None:
            return _NOTHING
        user.state = state
        mark = MarkConfirmed if state is _CONFIRMED else MarkLost
        return (mark(fork), *self._accept(fork, user.parent), *self._end_if_unused(user))

    def _counted(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        """By its answer, the owner counts a fork that was not waiting for that: it may have been given up here."""
        return (SendUserDelete(owner, rref, fork),) if self._is_given_up(fork) else _NOTHING

    def _is_given_up(self, fork: ForkId) -> bool:
        """Whether a fork is of no use any more: it has ended, or its owner was taken for lost."""
        user = self.users.get(fork)
        return user is None or user.state is _LOST

    def _accept(self, fork: ForkId, parent: WorkerInfo) -> _Instructions:
        """A fork needs its parent no more."""
        if parent == self.me:
            return self.child_accepted(fork)
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
        return (SendUserDelete(user.owner, user.rref, user.fork),)

    # -- offers

    def fork_offered(self, rref: RRefId, fork: ForkId, to: WorkerInfo, parent: ForkId | None) -> _Instructions:
        self.offers[fork] = Offer(rref, to, parent)
        if parent is None:
            self.owned[rref].forks[fork] = to
        else:
            self.users[parent].children += 1
        return _NOTHING

    def child_accepted(self, fork: ForkId) -> _Instructions:
        offer = self.offers.pop(fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        if offer.to == self.me:
            # sent to itself: the handle that came of it holds the value now
            return self._forget_fork(offer.rref, fork)
        return _NOTHING

    def offer_known(self, fork: ForkId) -> _Instructions:
        offer = self.offers.get(fork)
        # a user's child still has to be accepted: known is not counted
        if offer is not None and offer.parent is None:
            del self.offers[fork]
        return _NOTHING

    def offer_refused(self, fork: ForkId) -> _Instructions:
        offer = self.offers.pop(fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is not None:
            return self._forget_child(offer.parent)
        return self._forget_fork(offer.rref, fork)

    def offer_queried(self, fork: ForkId, parent: WorkerInfo) -> _Instructions:
        if fork not in self.users:
            self._refused[fork] = parent
        return _NOTHING

    def _forget_child(self, parent: ForkId) -> _Instructions:
        """Called once for each child: when its offer is settled."""
        user = self.users[parent]
        user.children -= 1
        return self._end_if_unused(user)

    # -- the owner

    def value_shared(self, rref: RRefId) -> _Instructions:
        if rref not in self.owned:
            owned = self.owned[rref] = Owned(rref, OwnerState.READY)
            owned.holds = 1
        return _NOTHING

    def creation_arrived(self, rref: RRefId, fork: ForkId, user: WorkerInfo) -> _Instructions:
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

    def creation_abandoned(self, rref: RRefId, fork: ForkId, user: WorkerInfo, reason: str) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None:
            owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
        following = self._abandon(owned, CreationAbandoned, reason)
        if owned.state is OwnerState.ABANDONED:
            owned.forks[fork] = user  # as the creation would have done: users of it may be on their way still
        return following

    def creation_denied(self, rref: RRefId) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None:
            return _NOTHING
        return self._abandon(owned, CreationDenied, "the worker that was to create it knows of no such creation")

    def _abandon(self, owned: Owned, event: type[Event], reason: str) -> _Instructions:
        state = _next_owner_state((owned.state, event))
        if state is None:
            return _NOTHING
        owned.state = state
        return (FailValue(owned.rref, reason),)

    def fork_requested(self, rref: RRefId, fork: ForkId, user: WorkerInfo, is_created: bool) -> _Instructions:
        owned, following = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.forks[fork] = user
        return following

    def user_deleted(self, rref: RRefId, fork: ForkId) -> _Instructions:
        if self.offers:
            self.offers.pop(fork, None)
        return self._forget_fork(rref, fork)

    def value_awaited(self, rref: RRefId, is_created: bool) -> _Instructions:
        owned, following = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.holds += 1
        return following

    def owner_handle_dropped(self, rref: RRefId) -> _Instructions:
        owned = self.owned.get(rref)
        if owned is None or not owned.holds:
            return _NOTHING
        owned.holds -= 1
        return self._drop_if_unused(owned)

    def _find_or_expect(self, rref: RRefId, is_created: bool) -> tuple[Owned | None, _Instructions]:
        """A value of this worker; one that is not here may still be on its way, unless that is known not to be so."""
        owned = self.owned.get(rref)
        if owned is not None:
            return owned, _NOTHING
        if is_created or creator_of(rref) == self.me.id or creator_of(rref) in self._lost:
            return None, _NOTHING
        owned = self.owned[rref] = Owned(rref, OwnerState.EXPECTED)
        return owned, (AwaitCreation(rref),)

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

    def peer_lost(self, worker: WorkerInfo) -> _Instructions:
        if worker.id != UNKNOWN_ID:
            self._lost.add(worker.id)
        self._refused = {fork: parent for fork, parent in self._refused.items() if parent != worker}
        following: list[Instruction] = []
        for fork, offer in list(self.offers.items()):
            if offer.to == worker:
                following += self.offer_refused(fork)
        for user in list(self.users.values()):
            if user.owner == worker:
                following += self._owner_lost(user)
        for owned in list(self.owned.values()):
            if creator_of(owned.rref) == worker.id:
                following += self._abandon(owned, PeerLost, "the worker that was to create it is lost")
            for fork, holder in list(owned.forks.items()):
                if holder == worker:
                    del owned.forks[fork]
            following += self._drop_if_unused(owned)
        return following

    def _owner_lost(self, user: UserFork) -> _Instructions:
        was_requested = user.state is _REQUESTED
        state = _next_user_state((user.state, PeerLost))
        if state is None:
            return self._end_if_unused(user)
        user.state = state
        self._remember_ghost(user.owner, user.rref, user.fork)
        accept = self._accept(user.fork, user.parent) if was_requested else _NOTHING
        return (MarkLost(user.fork), *accept, *self._end_if_unused(user))

    def owner_unreached(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        if self._is_given_up(fork):
            self._remember_ghost(owner, rref, fork)
        return _NOTHING

    def _remember_ghost(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> None:
        self._ghosts.setdefault(owner, []).append((rref, fork))
        if len(self._ghosts) > _REMEMBERED_OWNERS:
            self._ghosts.popitem(last=False)

    def peer_connected(self, worker: WorkerInfo) -> _Instructions:
        self._lost.discard(worker.id)
        named = WorkerInfo(worker.name, UNKNOWN_ID)
        for user in self.users.values():
            if user.owner == named:
                user.owner = worker
        # the predecessors of a worker never come back
        ghosts = {owner: self._ghosts.pop(owner) for owner in list(self._ghosts) if owner.name == worker.name}
        return [
            SendUserDelete(worker, rref, fork)
            for owner, forks in ghosts.items()
            if owner in (worker, named)
            for rref, fork in forks
        ]
