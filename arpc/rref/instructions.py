"""The instructions that `forks.Forks` returns for an event, and that the context carries out."""

from __future__ import annotations

from typing import Any

import msgspec

from arpc.ids import WorkerInfo
from arpc.rref.states import ForkId, Owned, RRefId
from arpc.wire.messages import Message

__all__ = ["AwaitCreation", "FailValue", "ForgetFork", "Instruction", "MarkConfirmed", "MarkLost", "Send"]


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """The base of all instructions."""


class Send(Instruction, frozen=True):
    """Send ``item``, about one fork or value, to another worker with the next message of that class."""

    message: type[Message]
    to: WorkerInfo
    item: tuple[Any, ...]


class AwaitCreation(Instruction, frozen=True):
    """Expect the creation of a value. If it does not arrive in time, ask its creator whether it is still in flight."""

    rref: RRefId


class FailValue(Instruction, frozen=True):
    """Fail a value that will never be created: callers that wait for it, now or later, get an error with the reason.

    The value may have been dropped since: no later caller asks for it then, but some may still wait for it.
    """

    owned: Owned
    reason: str


class ForgetFork(Instruction, frozen=True):
    """Forget a user that has ended here. Its owner is gone, and is not notified."""

    fork: ForkId


class MarkConfirmed(Instruction, frozen=True):
    """Mark a fork that the owner counts now: handlers that waited for that may start."""

    fork: ForkId


class MarkLost(Instruction, frozen=True):
    """Mark a fork that cannot be used any more: its owner is lost, or does not have the value."""

    fork: ForkId
    is_refused: bool = False
    """Whether the owner is alive, but does not count the fork."""
