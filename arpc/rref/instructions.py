"""What is to be done about an event: the instructions that `forks.Forks` gives, and the context carries out."""

from __future__ import annotations

from typing import Any

import msgspec

from arpc.ids import WorkerInfo
from arpc.rref.states import ForkId, Owned, RRefId
from arpc.wire.messages import Message

__all__ = ["AwaitCreation", "FailValue", "ForgetFork", "Instruction", "MarkConfirmed", "MarkLost", "Send"]


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Something that is to be done."""


class Send(Instruction, frozen=True):
    """Tell another worker about one fork: ``item`` goes with the next message of that class."""

    message: type[Message]
    to: WorkerInfo
    item: tuple[Any, ...]


class AwaitCreation(Instruction, frozen=True):
    """A value is expected. If its creation does not arrive in time, ask its creator whether it is still on its way."""

    rref: RRefId


class FailValue(Instruction, frozen=True):
    """It will never be created: all that wait for it, or ask for it later, get an error with the reason.

    It may have been dropped since: then nobody asks for it later, but somebody may wait for it still.
    """

    owned: Owned
    reason: str


class ForgetFork(Instruction, frozen=True):
    """A user has ended here, and its owner, which is gone, will not be told."""

    fork: ForkId


class MarkConfirmed(Instruction, frozen=True):
    """The owner counts a fork that asked for it: handlers that waited for that may start."""

    fork: ForkId


class MarkLost(Instruction, frozen=True):
    """It cannot be used any more: its owner is lost, or does not have the value."""

    fork: ForkId
    is_refused: bool = False
    """The owner is there, and does not count the fork."""
