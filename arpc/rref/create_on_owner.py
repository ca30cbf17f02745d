"""Creations at the owner: it runs the function that a creation names, and keeps the result or the error."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from arpc.agent.server.functions import Function, Mode
from arpc.agent.server.remote_exceptions import raisable
from arpc.agent.server.run import Run
from arpc.errors import ProtocolError, RRefCreationError, RRefError
from arpc.ids import GloballyUniqueId
from arpc.rref.events import RRefId
from arpc.rref.values import Value
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh, is_a
from arpc.wire.messages import Message, RequestFlag

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["KEY", "CreationHandlers", "pack_label", "unpack_label"]

KEY: Final = "rref"
"""The key of a creation's label in its metadata."""
_LABEL: Final = Struct("<5Q")
_LABEL_BYTES: Final = _LABEL.size
_VALUE: Final = int(RequestFlag.VALUE)
_THREAD: Final = Mode.THREAD
# How long the end of a creation in a thread may wait until the loop looks, if nothing needs the value before
_LOOK_S: Final = 0.05
_text = GloballyUniqueId.from_int
_pack = _LABEL.pack
_unpack = _LABEL.unpack_from


def pack_label(incarnation: int, number: int, oldest: int, rref: int, fork: int, made: str) -> bytes:
    """Pack what the owner must know of a creation: its number (see `exactly_once`), the RRef and its first fork.

    ``made`` says where the creator's code made the RRef, or what people call the function, if not by its name.
    """
    label = _pack(incarnation, number, oldest, rref, fork)
    return label + made.encode() if made else label


def unpack_label(data: bytes | None) -> tuple[int, int, int, int, int, str]:
    """Unpack the arguments of `pack_label`. Raises `ProtocolError`."""
    if data is None or len(data) < _LABEL_BYTES:
        raise ProtocolError("a creation without a label")
    made = data[_LABEL_BYTES:].decode(errors="replace") if len(data) > _LABEL_BYTES else ""
    return *_unpack(data), made


class OwnerCreation(msgspec.Struct, eq=False):
    """One creation while it is handled: a `run.Creation`."""

    handlers: CreationHandlers
    rref: RRefId
    value: Value
    is_wanted: bool
    """The creator waits for the value: the answer brings it along."""

    def answer(self, run: Run, result: Any) -> tuple[Any, ...] | None:
        return (result,) if self.is_wanted and not (run.function.keeps_modules and _is_module(result)) else None

    def answered(self, run: Run, result: Any) -> None:
        handlers = self.handlers
        handlers.answered.append((run, result))
        # Looked at after that: if the loop looks later, it finds the result
        if self.value.is_awaited or not handlers.will_look:
            with suppress(RuntimeError):  # the loop is closed
                handlers.loop.call_soon_threadsafe(handlers.keep_answered)

    def returned(self, run: Run, result: Any) -> None:
        value = self.value
        if not value.made:
            value.made = run.name
        if run.function.keeps_modules and _is_module(result):
            value.stays = True  # before anybody can see the value
        value.set(result)
        self.handlers.ended(self.rref)

    def failed(self, error: BaseException) -> None:
        """Keep the error for all users of the value. The creator is told that the function has ended."""
        self.handlers.fail(self.value, error)
        self.handlers.ended(self.rref)

    def not_made(self, error: BaseException) -> None:
        """There is no value, and will be none."""
        if is_a(error, asyncio.CancelledError):
            text = f"the creation of RRef {_text(self.rref)} was cancelled, or ran past its deadline"
            self.value.fail(RRefCreationError(text))
        else:
            # a copy: the error itself is sent to the creator, and refers to frames that refer to the value
            self.handlers.fail(self.value, fresh(error))
        self.handlers.ended(self.rref)


class CreationHandlers:
    """Handles the creations that come to one worker: a `dispatcher.CreationService`.

    A thread sends the answer to a creation itself, like that to any call. The loop, to which values belong, keeps the
    result when it looks next: when a call needs the value, when users have ended, or after `_LOOK_S`. A thread wakes
    the loop only if something waits for the value already.
    """

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._forks = context.forks
        self._values = context.values
        self._deliveries = context.deliveries
        self.answered: deque[tuple[Run, Any]] = deque()
        """Results of creations that threads have answered."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def will_look(self) -> bool:
        """The loop looks for results before long. Asked in any thread."""
        return self._timer is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._context.agent.loop

    def admit(self, run: Run, message: Message) -> OwnerCreation | None:
        """Prepare a creation; None if the request has been answered. Raises `ProtocolError` if it has no label."""
        incarnation, number, oldest, rref, fork, made = unpack_label(run.meta.pop(KEY, None) if run.meta else None)
        caller, function = run.inbound.caller, run.function
        if not self._deliveries.is_new(caller.id, incarnation, number, oldest):
            dispatcher = self._context.agent.dispatcher
            run.message = None
            run.function = Function.of_coroutine(partial(self._created_before, rref), function.name)
            dispatcher.tasks.start(run)
            return None
        if not self._forks.creation_arrived(rref, fork, caller):
            error = RRefError(f"the creation of RRef {_text(rref)} was given up by worker {caller.name!r}")
            self._context.agent.dispatcher.replies.refused(run, error)
            return None
        if not made and message.arg:  # a function that travels with its arguments has no name yet
            made = function.name
        value = self._values.get(rref)
        if value is None:
            value = self._values[rref] = Value(made, caller.name)
        else:
            value.made, value.creator = made, caller.name
        if function.mode is _THREAD and self._timer is None:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
        return OwnerCreation(self, rref, value, bool(message.flags & _VALUE))

    async def _created_before(self, rref: RRefId) -> None:
        """Answer a creation that came twice like the first."""
        value = self._values.get(rref)
        if value is None:
            raise RRefError(f"RRef {_text(rref)} was created before, and is gone")
        self.look_for(value)
        with suppress(Exception):
            await value.get()

    def _look(self) -> None:
        self._timer = None
        self.keep_answered()

    def look_for(self, value: Value) -> None:
        """Keep a value that is about to be awaited, if its thread has ended; else the thread wakes the loop."""
        if not value.is_ready:
            value.expect()  # before the look: a thread that ends after it sees that
            self.keep_answered()

    def keep_answered(self) -> None:
        """Keep the results of creations that threads have answered."""
        while self.answered:
            run, result = self.answered.popleft()
            run.keep(result)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, value: Value, error: BaseException) -> None:
        """Keep what a function raised, for all users of its value."""
        value.fail(raisable(error, self._context.info.name))

    def ended(self, rref: RRefId) -> None:
        """The value of a creation is there, or the error in its place."""
        following = self._forks.creation_ended(rref)
        if following:
            self._context.carry_out(following)


def _is_module(result: Any) -> bool:
    return is_a(result, ScriptModule)
