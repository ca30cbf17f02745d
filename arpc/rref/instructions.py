"""What is to be done about an event: the instructions that `forks.Forks` gives, and the context carries out."""

from __future__ import annotations

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


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Something that is to be done."""


class SendForkRequest(Instruction, frozen=True):
    """Ask the owner to count a fork."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId
    is_created: bool


class SendChildAccept(Instruction, frozen=True):
    """Tell the parent that its child is counted."""

    to: WorkerInfo
    fork: ForkId


class SendUserDelete(Instruction, frozen=True):
    """Tell the owner that a user has ended."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId


class SendCreationFailed(Instruction, frozen=True):
    """Tell the owner that the creation of a value was given up."""

    to: WorkerInfo
    rref: RRefId
    fork: ForkId
    number: int
    reason: str


class AwaitCreation(Instruction, frozen=True):
    """A value is expected. If its creation does not arrive in time, ask its creator whether it is still on its way."""

    rref: RRefId


class RunCreation(Instruction, frozen=True):
    """Make the value."""

    rref: RRefId


class DropValue(Instruction, frozen=True):
    """Nobody holds it any more."""

    rref: RRefId


class FailValue(Instruction, frozen=True):
    """It will never be created: all that wait for it, or ask for it later, get an error with the reason."""

    rref: RRefId
    reason: str


class ForgetFork(Instruction, frozen=True):
    """A user has ended here, and its owner, which is gone, will not be told."""

    fork: ForkId


class MarkConfirmed(Instruction, frozen=True):
    """The owner counts a fork that asked for it: handlers that waited for that may start."""

    fork: ForkId


class MarkLost(Instruction, frozen=True):
    """It cannot be used any more."""

    fork: ForkId
