"""The events of `arpc.rref.forks.Forks` as objects, so that a story is a list of them.

Each is a function that tells a state machine of the event, and returns the instructions that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from arpc.ids import WorkerInfo
from arpc.rref.forks import Forks
from arpc.rref.instructions import Instruction, Send
from arpc.rref.states import Owned, OwnerState, UserFork, UserState
from arpc.wire.messages import Message, RRefChildAccept, RRefCreationFailed, RRefForkRequest, RRefUserDelete

Machine: TypeAlias = Forks[UserFork, Owned]


class RunCreation(NamedTuple):
    """A creation that arrived is to be run."""

    rref: int


class DropValue(NamedTuple):
    """A value is in no table any more."""

    rref: int


Following: TypeAlias = list[Instruction | RunCreation | DropValue]
Event: TypeAlias = Callable[[Machine], Sequence[Instruction | RunCreation] | None]


def machine(me: WorkerInfo) -> Machine:
    return Forks(me, UserFork, Owned)


def tell(forks: Machine, event: Event) -> Following:
    """What follows from an event: instructions, and values that are dropped."""
    held = set(forks.owned)
    following = event(forks) or ()
    return [*following, *(DropValue(rref) for rref in held - set(forks.owned))]


def _event(name: str) -> Callable[..., Event]:
    return lambda *args, **kwargs: lambda forks: getattr(forks, name)(*args, **kwargs)


def _send(message: type[Message]) -> Callable[..., Send]:
    return lambda to, *item, **named: Send(message, to, (*item, *named.values()))


def _creation_started(rref: int, fork: int, owner: WorkerInfo) -> Event:
    def start(forks: Machine) -> None:
        if owner == forks.me:
            forks.creation_on_oneself_started(rref)
        else:
            forks.creation_started(UserFork(rref, fork, owner, forks.me, UserState.CREATING, is_created=False))

    return start


def _creation_arrived(rref: int, fork: int, user: WorkerInfo) -> Event:
    return lambda forks: [RunCreation(rref)] if forks.creation_arrived(rref, fork, user) else []


def _user(forks: Machine, fork: int, rref: int = 0, owner: WorkerInfo | None = None) -> UserFork:
    """A user as its handles know it; one that has ended is in no table any more."""
    ended = UserFork(rref, fork, owner or forks.me, forks.me, UserState.LOST, is_created=False, handles=0)
    return forks.users.get(fork, ended)


def _creation_confirmed(owner: WorkerInfo, rref: int, fork: int) -> Event:
    return lambda forks: forks.creation_confirmed(_user(forks, fork, rref, owner))


def _creation_failed(fork: int, number: int, reason: str) -> Event:
    return lambda forks: forks.creation_failed(_user(forks, fork), number, reason)


def _handle_dropped(fork: int) -> Event:
    return lambda forks: forks.handle_dropped(_user(forks, fork))


def _creation_ended(rref: int) -> Event:
    return lambda forks: forks.creation_ended(forks.owned[rref])


def _value_shared(rref: int) -> Event:
    return lambda forks: forks.value_shared(Owned(rref, OwnerState.READY))


ChildAccepted = _event("child_accepted")
CreationArrived = _creation_arrived
CreationStarted = _creation_started
CreationAbandoned = _event("creation_abandoned")
CreationConfirmed = _creation_confirmed
CreationDenied = _event("creation_denied")
CreationEnded = _creation_ended
CreationFailed = _creation_failed
FailureAcknowledged = _event("failure_acknowledged")
ForkConfirmed = _event("fork_confirmed")
ForkOffered = _event("fork_offered")
ForkReceived = _event("fork_received")
ForkRefused = _event("fork_refused")
ForkRequested = _event("fork_requested")
HandleDropped = _handle_dropped
OfferKnown = _event("offer_known")
OfferQueried = _event("offer_queried")
OfferRefused = _event("offer_refused")
OwnerHandleDropped = _event("owner_handle_dropped")
OwnerUnreached = _event("owner_unreached")
PeerConnected = _event("peer_connected")
PeerLost = _event("peer_lost")
UserDeleted = _event("user_deleted")
ValueAwaited = _event("value_awaited")
ValueShared = _value_shared


SendForkRequest = _send(RRefForkRequest)
SendChildAccept = _send(RRefChildAccept)
SendUserDelete = _send(RRefUserDelete)
SendCreationFailed = _send(RRefCreationFailed)
