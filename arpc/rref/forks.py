"""The reference count of RRefs over the whole group, as a state machine: events in, instructions out.

Each event is a method of `Forks`, and returns the instructions that follow from it, if there can be any. All decisions
are made here; nothing is sent or awaited here.

The value of an RRef lives on its **owner**. Every other worker that holds it is a **user** and has a **fork** of its
own, with an id that is unique over the group. A worker that sends an RRef makes a fork for the receiver, its **child**,
and keeps its own until the owner counts the child. So, whatever order messages arrive in:

- the owner keeps the value while any user lives, because every user is counted, or has a parent that is;
- the owner drops it when the last user has ended, because it learns of the end of every counted user: by a message, or
  because the user's worker was lost.

========================  ===========================================================================================
remote()                  the creation itself makes the first fork known to the owner
owner sends to a user     counted when it is sent
user sends to a user      the child asks the owner to count it (fork request), then notifies its parent (child accept)
user sends to the owner   the owner finds the value itself, and accepts the child at once
========================  ===========================================================================================

A fork that was *offered* in a message that never arrives would keep its parent for ever. So a worker that was offered a
fork, and does not acknowledge it, is queried. If it does not have the fork, it refuses the fork from then on, even if
the message arrives late.

A value may be *expected*: messages of its users arrived before its creation. If the creator gives the creation up, it
notifies the owner, which handles either the creation or this notification, whichever arrives first. Either counts the
creator's fork, so the owner remembers the failure until the creator and all users have released theirs. An owner that
expects a value for long queries the creator. A creator that is lost, or has no such creation, will not create it.

Workers are identified by name and id. A worker that comes back under its name has another id, and none of the values
and forks of its predecessor.

Events may come in any order. Fork requests and creations must be handled only once, which `exactly_once.Window`
ensures. All other events may be repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

from arpc.ids import UNKNOWN_ID, WorkerId, WorkerInfo, creator_of
from arpc.rref.instructions import (
    AwaitCreation,
    FailValue,
    ForgetFork,
    Instruction,
    MarkConfirmed,
    MarkLost,
    Send,
)
from arpc.rref.states import UNANSWERED, ForkId, Offer, Owned, OwnerState, RRefId, UserFork, UserState
from arpc.wire.messages import RRefChildAccept, RRefCreationFailed, RRefForkRequest, RRefUserDelete

__all__ = ["Forks"]


U = TypeVar("U", bound=UserFork)
V = TypeVar("V", bound=Owned)
_Instructions: TypeAlias = Sequence[Instruction]
_NOTHING: Final[_Instructions] = ()
# a global is looked up in a fraction of the time that an attribute of an Enum takes
_CREATING: Final = UserState.CREATING
_REQUESTED: Final = UserState.REQUESTED
_CONFIRMED: Final = UserState.CONFIRMED
_LOST: Final = UserState.LOST
_EXPECTED: Final = OwnerState.EXPECTED
_BEING_CREATED: Final = OwnerState.CREATING
_READY: Final = OwnerState.READY
_REMEMBERED_OWNERS: Final = 1024
"""The number of lost owners that are remembered, to notify them of ended forks should they come back."""


class Forks(Generic[U, V]):
    """The RRefs of one worker: those it owns and those it uses.

    ``make_user`` and ``make_owned`` make the entries of `users` and `owned`.
    """

    def __init__(self, me: WorkerInfo, make_user: Callable[..., U], make_owned: Callable[..., V]) -> None:
        self.me = me
        self._make_user = make_user
        self._make_owned = make_owned
        self.users: dict[ForkId, U] = {}
        self.owned: dict[RRefId, V] = {}
        """The values that are held, or that users are known to want: one that leaves this table is dropped."""
        self.offers: dict[ForkId, Offer] = {}
        """The forks sent to other workers and not acknowledged yet."""
        self._refused: dict[ForkId, WorkerInfo] = {}
        """The forks that this worker refuses, and the workers that offered them."""
        self._lost: set[WorkerId] = set()
        self._lost_forks: OrderedDict[WorkerInfo, list[tuple[RRefId, ForkId]]] = OrderedDict()
        """The forks of owners that were considered lost. An owner that comes back after all may still count them."""

    # -- lookups

    def refuses(self, fork: ForkId) -> bool:
        """Whether a fork arrives too late to be accepted."""
        return fork in self._refused

    def knows(self, fork: ForkId) -> bool:
        """Whether a user of this worker has the fork."""
        return fork in self.users

    def counts(self, rref: RRefId, fork: ForkId) -> bool:
        """Whether a fork is counted here."""
        owned = self.owned.get(rref)
        return owned is not None and fork in owned.forks

    def is_expected(self, rref: RRefId) -> bool:
        """Whether messages of a value's users have arrived, but its creation has not."""
        owned = self.owned.get(rref)
        return owned is not None and owned.state is _EXPECTED

    def creations_under_way(self, owner: WorkerInfo) -> frozenset[RRefId]:
        """Return the values that this worker has asked another one to create, and has not given up."""
        named = WorkerInfo(owner.name, UNKNOWN_ID)
        return frozenset(
            user.rref for user in self.users.values() if user.state is _CREATING and user.owner in (owner, named)
        )

    def forget(self, worker: WorkerInfo) -> None:
        """Forget a lost worker that will not come back: it need not be notified of ended forks."""
        self._lost_forks.pop(worker, None)

    def concerns(self, worker: WorkerInfo) -> bool:
        """Whether any fork, offer or expected creation involves another worker."""
        return (
            any(user.owner == worker for user in self.users.values())
            or any(offer.to == worker for offer in self.offers.values())
            or any(
                worker in owned.forks.values() or (owned.state is _EXPECTED and creator_of(owned.rref) == worker.id)
                for owned in self.owned.values()
            )
        )

    @property
    def is_idle(self) -> bool:
        """Whether this worker has no users, no values and no offers."""
        return not (self.users or self.owned or self.offers)

    # -- events about this worker's users

    def creation_started(self, user: U) -> None:
        """`remote` was called here: another worker will be asked to create the value."""
        self.users[user.fork] = user

    def creation_confirmed(self, user: U) -> _Instructions:
        """The owner has run the creation, and counts its fork."""
        if user.state is not _CREATING:
            return self._counted(user.owner, user.rref, user.fork)
        user.state = _CONFIRMED
        user.is_created = True
        return _NOTHING if user.handles else self._end_if_unused(user)

    def creation_failed(self, user: U, number: int, reason: str) -> _Instructions:
        """The creation was given up here. The owner may have run it, or may still receive it.

        ``number`` is that of the creation, see `exactly_once`: the owner handles either the creation or the message
        about its failure, never both.
        """
        if user.state is not _CREATING:
            return _NOTHING
        user.state = UserState.FAILING
        # At once, and not when the last handle is dropped: other workers may wait for the value. The fork ends only
        # after the reply: its end could otherwise overtake this message, which counts it.
        return (Send(RRefCreationFailed, user.owner, (user.rref, user.fork, number, reason)),)

    def failure_acknowledged(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        """The owner has acknowledged that the creation was given up, and counts its fork."""
        user = self.users.get(fork)
        if user is None or user.state is not UserState.FAILING:
            return self._counted(owner, rref, fork)
        user.state = UserState.FAILED
        return self._end_if_unused(user)

    def fork_received(
        self, rref: RRefId, fork: ForkId, owner: WorkerInfo, parent: WorkerInfo, is_created: bool
    ) -> _Instructions:
        """An RRef was unpacked here. ``is_created``: the parent knew that the creation had reached the owner."""
        if fork in self._refused:
            return _NOTHING
        if owner == self.me:
            return (*self.value_awaited(rref, is_created), *self._accept(fork, parent))
        user = self.users.get(fork)
        if user is not None:
            user.handles += 1
            return _NOTHING
        # an owner counts a fork when it sends it
        state = _CONFIRMED if parent == owner else _REQUESTED
        self.users[fork] = self._make_user(rref, fork, owner, parent, state, is_created)
        if state is _REQUESTED:
            return (Send(RRefForkRequest, owner, (rref, fork, is_created)),)
        return _NOTHING

    def fork_confirmed(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        """The owner counts a fork, as this worker has requested."""
        user = self.users.get(fork)
        if user is None or user.state is not _REQUESTED:
            return self._counted(owner, rref, fork)
        user.state = _CONFIRMED
        return (MarkConfirmed(fork), *self._accept(fork, user.parent), *self._end_if_unused(user))

    def fork_refused(self, fork: ForkId) -> _Instructions:
        """The owner does not count a fork, because it does not have the value any more."""
        user = self.users.get(fork)
        if user is None or user.state is not _REQUESTED:
            return _NOTHING
        user.state = _LOST
        return (MarkLost(fork, is_refused=True), *self._accept(fork, user.parent), *self._end_if_unused(user))

    def owner_unreached(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> None:
        """The owner did not answer a message about a fork: the message may have arrived all the same."""
        if self._is_given_up(fork):
            self._remember_lost_fork(owner, rref, fork)

    def handle_dropped(self, user: U) -> _Instructions:
        """A user's handle was dropped or released."""
        if not user.handles:
            return _NOTHING  # all handles were released before
        user.handles -= 1
        return self._end_if_unused(user)

    def _counted(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> _Instructions:
        """The owner's reply counts a fork that did not wait for it: end the fork if it was given up here."""
        return (Send(RRefUserDelete, owner, (rref, fork)),) if self._is_given_up(fork) else _NOTHING

    def _is_given_up(self, fork: ForkId) -> bool:
        """Whether a fork has ended, or its owner was considered lost."""
        user = self.users.get(fork)
        return user is None or user.state is _LOST

    def _accept(self, fork: ForkId, parent: WorkerInfo) -> _Instructions:
        """Notify the parent of a fork that the fork does not need it any more."""
        if parent == self.me:
            return self.child_accepted(fork)
        return (Send(RRefChildAccept, parent, (fork,)),)

    def _end_if_unused(self, user: UserFork) -> _Instructions:
        if user.handles or user.children or user.state in UNANSWERED:
            return _NOTHING
        del self.users[user.fork]
        if user.state is _LOST:
            return (ForgetFork(user.fork),)
        return (Send(RRefUserDelete, user.owner, (user.rref, user.fork)),)

    # -- events about forks that this worker offered, or was offered

    def fork_offered(self, rref: RRefId, fork: ForkId, to: WorkerInfo, parent: ForkId | None) -> None:
        """An RRef was packed here for another worker. ``parent``: the fork it was made from; None on the owner."""
        self.offers[fork] = Offer(rref, to, parent)
        if parent is None:
            self.owned[rref].forks[fork] = to
        else:
            self.users[parent].children += 1

    def child_accepted(self, fork: ForkId) -> _Instructions:
        """The owner counts a child that this worker has offered."""
        offer = self.offers.get(fork)
        if offer is not None and offer.parent is None and offer.to != self.me:
            del self.offers[fork]  # it was counted when it was sent
            return _NOTHING
        # if this worker sent it to itself, the handle made from it holds the value now
        return self._end_offer(fork)

    def offer_known(self, fork: ForkId) -> None:
        """The worker that was offered a fork has it."""
        offer = self.offers.get(fork)
        # a user's child still has to be accepted: its worker has it, but the owner may not count it yet
        if offer is not None and offer.parent is None:
            del self.offers[fork]

    def offer_refused(self, fork: ForkId) -> _Instructions:
        """The worker that was offered a fork never received it, and will refuse it."""
        return self._end_offer(fork)

    def _end_offer(self, fork: ForkId) -> _Instructions:
        """End an offer: the fork or the value that it was made from need not be kept for it any more."""
        offer = self.offers.pop(fork, None)
        if offer is None:
            return _NOTHING
        if offer.parent is None:
            self.user_deleted(offer.rref, fork)
            return _NOTHING
        user = self.users[offer.parent]
        user.children -= 1
        return self._end_if_unused(user)

    def offer_queried(self, fork: ForkId, parent: WorkerInfo) -> None:
        """A worker has asked about a fork that it offered: refuse the fork from now on if it is unknown here.

        The reply is that of `knows`, which the caller asks first.
        """
        if fork not in self.users:
            self._refused[fork] = parent

    # -- events about values that this worker owns

    def value_shared(self, owned: V) -> None:
        """The id of a value of this worker was passed on: it is kept in `owned` now, and its handle here is a hold."""
        if owned.rref not in self.owned:
            self.owned[owned.rref] = owned
            owned.holds = 1

    def creation_arrived(self, rref: RRefId, fork: ForkId, user: WorkerInfo) -> V | None:
        """A creation has arrived. Returns the value; None if it must not be created, because the creator gave it up."""
        owned = self.owned.get(rref)
        if owned is None:  # no message of a user has arrived before
            owned = self.owned[rref] = self._make_owned(rref, _BEING_CREATED, {fork: user}, 1)
            return owned
        if owned.state is not _EXPECTED:
            return None
        owned.state = _BEING_CREATED
        owned.forks[fork] = user
        owned.holds += 1
        return owned

    def creation_ended(self, owned: V) -> None:
        """The value was created, or its creation has failed."""
        if owned.state is _BEING_CREATED:
            owned.state = _READY
            owned.holds -= 1
            if not owned.forks:
                self._drop_if_unused(owned)

    def creation_abandoned(self, rref: RRefId, fork: ForkId, user: WorkerInfo, reason: str) -> _Instructions:
        """The creator has given up a creation that has not arrived here, and that is refused from now on."""
        owned = self.owned.get(rref)
        if owned is None:
            owned = self.owned[rref] = self._make_owned(rref, _EXPECTED)
        following = self._abandon(owned, reason)
        if owned.state is OwnerState.ABANDONED:
            owned.forks[fork] = user  # as the creation would have done: forks made from it may still be in flight
        return following

    def creation_denied(self, rref: RRefId) -> _Instructions:
        """The creator of an expected value has replied that no creation of it is in flight to this worker."""
        owned = self.owned.get(rref)
        if owned is None:
            return _NOTHING
        return self._abandon(owned, "the worker that was to create it knows of no such creation")

    def _abandon(self, owned: V, reason: str) -> _Instructions:
        if owned.state is not _EXPECTED:
            return _NOTHING
        owned.state = OwnerState.ABANDONED
        return (FailValue(owned, reason),)

    def fork_requested(self, rref: RRefId, fork: ForkId, user: WorkerInfo, is_created: bool) -> _Instructions:
        """A user has asked to be counted. Afterwards `counts` returns whether it is."""
        owned, following = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.forks[fork] = user
        return following

    def user_deleted(self, rref: RRefId, fork: ForkId) -> None:
        """A user has ended."""
        if self.offers:
            self.offers.pop(fork, None)
        owned = self.owned.get(rref)
        if owned is not None:
            owned.forks.pop(fork, None)
            self._drop_if_unused(owned)

    def value_awaited(self, rref: RRefId, is_created: bool) -> _Instructions:
        """Code on this worker needs a value that may not be created yet, and holds it until `owner_handle_dropped`."""
        owned, following = self._find_or_expect(rref, is_created)
        if owned is not None:
            owned.holds += 1
        return following

    def creation_on_oneself_started(self, rref: RRefId) -> V:
        """`remote` was called here for this worker itself: the handle holds a value that is still to be created."""
        owned = self.owned[rref] = self._make_owned(rref, _EXPECTED)
        owned.holds = 1
        return owned

    def owner_handle_dropped(self, rref: RRefId) -> None:
        """A handle of the owner itself, or a call that waited for the value, is gone."""
        owned = self.owned.get(rref)
        if owned is not None and owned.holds:
            owned.holds -= 1
            self._drop_if_unused(owned)

    def _find_or_expect(self, rref: RRefId, is_created: bool) -> tuple[V | None, _Instructions]:
        """Return a value of this worker, expected if it is not here; None if its creation can arrive no more."""
        owned = self.owned.get(rref)
        if owned is not None:
            return owned, _NOTHING
        if is_created or creator_of(rref) == self.me.id or creator_of(rref) in self._lost:
            return None, _NOTHING
        owned = self.owned[rref] = self._make_owned(rref, _EXPECTED)
        return owned, (AwaitCreation(rref),)

    def _drop_if_unused(self, owned: V) -> None:
        if not (owned.forks or owned.holds):
            del self.owned[owned.rref]
            if owned.state is not _READY:
                owned.dropped()

    # -- events: workers that are lost, and come back

    def peer_lost(self, worker: WorkerInfo) -> _Instructions:
        """A worker died or left, and its time to come back is over."""
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
                following += self._abandon(owned, "the worker that was to create it is lost")
            for fork, holder in list(owned.forks.items()):
                if holder == worker:
                    del owned.forks[fork]
            self._drop_if_unused(owned)
        return following

    def _owner_lost(self, user: UserFork) -> _Instructions:
        if user.state is _LOST:
            return self._end_if_unused(user)
        accept = self._accept(user.fork, user.parent) if user.state is _REQUESTED else _NOTHING
        user.state = _LOST
        self._remember_lost_fork(user.owner, user.rref, user.fork)
        return (MarkLost(user.fork), *accept, *self._end_if_unused(user))

    def _remember_lost_fork(self, owner: WorkerInfo, rref: RRefId, fork: ForkId) -> None:
        self._lost_forks.setdefault(owner, []).append((rref, fork))
        if len(self._lost_forks) > _REMEMBERED_OWNERS:
            self._lost_forks.popitem(last=False)

    def peer_connected(self, worker: WorkerInfo) -> _Instructions:
        """There is a connection to a worker: for the first time, again, or although it was considered lost."""
        self._lost.discard(worker.id)
        named = WorkerInfo(worker.name, UNKNOWN_ID)
        for user in self.users.values():
            if user.owner == named:
                user.owner = worker
        # the predecessors of a worker never come back
        lost = {owner: self._lost_forks.pop(owner) for owner in list(self._lost_forks) if owner.name == worker.name}
        return [
            Send(RRefUserDelete, worker, item)
            for owner, forks in lost.items()
            if owner in (worker, named)
            for item in forks
        ]
