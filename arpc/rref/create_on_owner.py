"""Creations at the owner: the function that a creation names is run, and what it returns, or raises, is kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from arpc.agent.server.functions import Function
from arpc.agent.server.remote_exceptions import raisable
from arpc.agent.server.run import Run
from arpc.errors import RRefCreationError, RRefError
from arpc.ids import GloballyUniqueId
from arpc.rref.creation_label import KEY, unpack_label
from arpc.rref.events import RRefId, WorkerName
from arpc.rref.values import NOTHING, Value
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh, is_a
from arpc.wire.messages import Message, RequestFlag
from arpc.wire.values.content import Content

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["CreationHandlers"]

_VALUE: Final = RequestFlag.VALUE
_text = GloballyUniqueId.from_int


class OwnerCreation(msgspec.Struct, eq=False):
    """One creation while it is handled: a `run.Creation`."""

    arrivals: CreationHandlers
    rref: RRefId
    value: Value
    is_wanted: bool
    """The answer is to bring the value."""

    def returned(self, run: Run, result: Any) -> Content | None:
        """Keep the value. The answer brings it along if the creator wants it at once."""
        value = self.value
        value.made = value.made or run.name
        value.stays = run.function.keeps_modules and is_a(result, ScriptModule)  # before it is there for all to see
        value.set(result)
        self.arrivals.ended(self.rref)
        return self.arrivals.encoded(run, value.content) if self.is_wanted and not value.stays else None

    def failed(self, error: BaseException) -> None:
        """Keep the error for those who use the value. Its creator learns that the function has ended."""
        self.arrivals.fail(self.value, error)
        self.arrivals.ended(self.rref)

    def not_made(self, error: BaseException) -> None:
        """There is no value, and will be none."""
        if is_a(error, asyncio.CancelledError):
            self.value.fail(_cancelled(self.rref))
        else:
            # a copy: the error itself is sent to the creator, and refers to frames that refer to the value
            self.arrivals.fail(self.value, fresh(error))
        self.arrivals.ended(self.rref)


class CreationHandlers:
    """Takes the creations of one worker: a `dispatcher.CreationService`."""

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._forks = context.forks
        self._values = context.values

    def admit(self, run: Run, message: Message) -> OwnerCreation | None:
        """What is to run for a creation; None if it is answered so. Raises `ProtocolError` if it has no label."""
        label = unpack_label(run.meta.pop(KEY, None) if run.meta else None)
        caller = run.inbound.caller
        dispatcher = self._context.agent.dispatcher
        if not self._context.deliveries.is_new(caller.id, label.incarnation, label.number, label.oldest):
            run.message = None
            run.function = Function.of_coroutine(partial(self._created_before, label.rref), run.function.name)
            dispatcher.tasks.start(run)
            return None
        if not self._forks.creation_arrived(label.rref, label.fork, caller):
            error = RRefError(f"the creation of RRef {_text(label.rref)} was given up by worker {caller.name!r}")
            dispatcher.refused(run, error)
            return None
        # one that comes with its arguments has no name yet
        value = self._value(label.rref, caller.name, label.made or (run.function.name if message.arg else ""))
        return OwnerCreation(self, label.rref, value, bool(message.flags & _VALUE))

    def _value(self, rref: RRefId, creator: WorkerName, made: str) -> Value:
        value = self._values.get(rref)
        if value is None:
            value = self._values[rref] = Value()
        value.made = made
        value.creator = creator
        return value

    async def _created_before(self, rref: RRefId) -> None:
        """Answer a message that came twice, like the first."""
        value = self._values.get(rref)
        if value is None:
            raise RRefError(f"RRef {_text(rref)} was created before, and is gone")
        with suppress(Exception):
            await value.get()

    def fail(self, value: Value, error: BaseException) -> None:
        """Keep what a function raised, for those who use its value, here or elsewhere."""
        value.fail(raisable(error, self._context.info.name))

    def ended(self, rref: RRefId) -> None:
        """The value of a creation is there, or the error in its place."""
        following = self._forks.creation_ended(rref)
        if following:
            self._context.carry_out(following)

    def encoded(self, run: Run, content: Any) -> Content | None:
        """The value for its creator, who wants it at once; None lets it ask for it, to be told what is wrong."""
        if content is NOTHING:
            return None
        try:
            return run.context.run(self._context.agent.dispatcher.replies.encode, run, (content,), with_metadata=True)
        except BaseException:  # noqa: BLE001 - whatever a user's __reduce__ may raise
            return None


def _cancelled(rref: RRefId) -> RRefCreationError:
    return RRefCreationError(f"the creation of RRef {_text(rref)} was cancelled, or ran past its deadline")
