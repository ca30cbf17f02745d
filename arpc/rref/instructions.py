"""What is to be done about an event: the instructions that `forks.Forks` gives, and the context carries out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

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


class SendForkRequest(msgspec.Struct, frozen=True, gc=False):
    """Ask the owner to count a fork."""

    to: WorkerName
    rref: RRefId
    fork: ForkId
    is_created: bool


class SendChildAccept(msgspec.Struct, frozen=True, gc=False):
    """Tell the parent that its child is counted."""

    to: WorkerName
    fork: ForkId


class SendUserDelete(msgspec.Struct, frozen=True, gc=False):
    """Tell the owner that a user has ended."""

    to: WorkerName
    rref: RRefId
    fork: ForkId
    abandons: bool


class RunCreation(msgspec.Struct, frozen=True, gc=False):
    """Make the value."""

    rref: RRefId


class DropValue(msgspec.Struct, frozen=True, gc=False):
    """Nobody holds it any more."""

    rref: RRefId


class FailValue(msgspec.Struct, frozen=True, gc=False):
    """Nobody will create it: tell those who wait."""

    rref: RRefId


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
    | RunCreation
    | DropValue
    | FailValue
    | ForgetFork
    | MarkConfirmed
    | MarkLost
)
