"""Creations at the owner: the messages that ask for one, and results that threads have answered."""

from __future__ import annotations

import asyncio
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.server.functions import Mode
from arpc.agent.server.run import Run
from arpc.errors import ProtocolError, RRefError
from arpc.ids import GloballyUniqueId
from arpc.rref.values import Value
from arpc.wire.messages import Message, RequestFlag

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["KEY", "CreationHandlers", "pack_label", "unpack_label"]

KEY: Final = "rref"
"""The key of a creation's label in its metadata."""
_LABEL: Final = Struct("<4Q")
_LABEL_BYTES: Final = _LABEL.size
_VALUE: Final = int(RequestFlag.VALUE)
_THREAD: Final = Mode.THREAD
# How long the end of a creation in a thread may wait until the loop looks, if nothing needs the value before
_LOOK_S: Final = 0.05
_text = GloballyUniqueId.from_int
_pack = _LABEL.pack
_unpack = _LABEL.unpack_from


def pack_label(number: int, oldest: int, rref: int, fork: int, made: str) -> bytes:
    """Pack what the owner must know of a creation: its number (see `exactly_once`), the RRef and its first fork.

    ``made`` says where the creator's code made the RRef, or what people call the function, if not by its name.
    """
    label = _pack(number, oldest, rref, fork)
    return label + made.encode() if made else label


def unpack_label(data: bytes | None) -> tuple[int, int, int, int, str]:
    """Unpack the arguments of `pack_label`. Raises `ProtocolError`."""
    if data is None or len(data) < _LABEL_BYTES:
        raise ProtocolError("a creation without a label")
    made = data[_LABEL_BYTES:].decode(errors="replace") if len(data) > _LABEL_BYTES else ""
    return *_unpack(data), made


class CreationHandlers:
    """Handles the creations that come to one worker: a `dispatcher.CreationService`.

    A thread sends the answer to a creation itself, like that to any call. The loop, to which values belong, keeps the
    result when it looks next: when a call needs the value, when users have ended, or after `_LOOK_S`. A thread wakes
    the loop only if something waits for the value already.
    """

    def __init__(self, context: RRefContext) -> None:
        self.context = context
        self.forks = context.forks
        self._windows = context.windows
        self.answered: deque[tuple[Run, Any]] = deque()
        """Results of creations that threads have answered."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def will_look(self) -> bool:
        """The loop looks for results before long. Asked in any thread."""
        return self._timer is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.context.agent.loop

    def admit(self, run: Run, message: Message) -> Value | None:
        """Prepare a creation; None if there is nothing to run. Raises `ProtocolError` if it has no label."""
        number, oldest, rref, fork, made = unpack_label(run.meta.pop(KEY, None) if run.meta else None)
        caller, function = run.inbound.caller, run.function
        if not self._windows[caller.id].admit(number, oldest):
            # It came twice, and the first is answered; or it was given up, and nobody waits for an answer
            if run.handling is not None:
                self.context.agent.observers.ended(run, 0, None)
            return None
        value = self.forks.creation_arrived(rref, fork, caller)
        if value is None:
            error = RRefError(f"the creation of RRef {_text(rref)} was given up by worker {caller.name!r}")
            self.context.agent.dispatcher.replies.refused(run, error)
            return None
        if not made and message.arg:  # a function that travels with its arguments has no name yet
            made = function.name
        value.made, value.creator, value.handlers = made, caller.name, self
        value.is_wanted = bool(message.flags & _VALUE)
        if function.mode is _THREAD and self._timer is None:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
        return value

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
