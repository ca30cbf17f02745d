"""What is to be done about an event: the instructions that `forks.Forks` gives, and the context carries out."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from arpc.rref.events import ForkId, RRefId, WorkerName

__all__ = [
    "DropValue",
    "FailValue",
    "ForgetFork",
    "Instruction",
    "MarkConfirmed",
    "MarkLost",
    "RunCreation",
    "SendChildAccept",
    "SendForkRequest",
    "SendUserDelete",
]


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
    """A user has ended here, and its owner, which is gone, will not be told."""

    fork: ForkId


class MarkConfirmed(NamedTuple):
    """The owner counts a fork that asked for it: who waited for that may go on."""

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
