"""What is to be done about an event: the instructions that `forks.Forks` gives, and the context carries out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from arpc.ids import WorkerInfo
from arpc.rref.events import ForkId, RRefId

__all__ = [
    "AwaitCreation",
    "DropValue",
    "FailValue",
    "ForgetFork",
    "Instruction",
    "MarkConfirmed",
    "MarkLost",
    "RunCreation",
    "SendChildAccept",
    "SendCreationFailed",
    "SendForkRequest",
    "SendUserDelete",
]


class SendForkRequest(msgspec.Struct, frozen=True, gc=False):
    """Ask the owner to count a fork."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId
    is_created: bool


class SendChildAccept(msgspec.Struct, frozen=True, gc=False):
    """Tell the parent that its child is counted."""

    to: WorkerInfo
    fork: ForkId


class SendUserDelete(msgspec.Struct, frozen=True, gc=False):
    """Tell the owner that a user has ended."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId


class SendCreationFailed(msgspec.Struct, frozen=True, gc=False):
    """Tell the owner that the creation of a value was given up."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId
    number: int
    reason: str


class AwaitCreation(msgspec.Struct, frozen=True, gc=False):
    """A value is expected. If its creation does not arrive in time, ask its creator whether it is still on its way."""

    rref: RRefId


class RunCreation(msgspec.Struct, frozen=True, gc=False):
    """Make the value."""

    rref: RRefId


class DropValue(msgspec.Struct, frozen=True, gc=False):
    """Nobody holds it any more."""

    rref: RRefId


class FailValue(msgspec.Struct, frozen=True, gc=False):
    """It will never be created: all that wait for it, or ask for it later, get an error with the reason."""

    rref: RRefId
    reason: str


class ForgetFork(msgspec.Struct, frozen=True, gc=False):
    """A user has ended here, and its owner, which is gone, will not be told."""

    fork: ForkId


class MarkConfirmed(msgspec.Struct, frozen=True, gc=False):
    """The owner counts a fork that asked for it: who waited for that may go on."""

    fork: ForkId


class MarkLost(msgspec.Struct, frozen=True, gc=False):
    """It cannot be used any more."""

    fork: ForkId


Instruction: TypeAlias = (
    SendForkRequest
    | SendChildAccept
    | SendUserDelete
    | SendCreationFailed
    | AwaitCreation
    | RunCreation
    | DropValue
    | FailValue
    | ForgetFork
    | MarkConfirmed
    | MarkLost
)
