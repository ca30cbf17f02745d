"""What a worker does when others speak to it about RRefs: creations, fetches, and the messages of the protocol."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.scope import current_scope
from arpc.agent.server.dispatcher import CreationService
from arpc.agent.server.functions import Mode
from arpc.agent.server.run import Run
from arpc.errors import ProtocolError, RRefError
from arpc.ids import GloballyUniqueId, WorkerInfo
from arpc.rref.values import Value
from arpc.wire.messages import (
    Message,
    RequestFlag,
    RRefChildAccept,
    RRefCreate,
    RRefCreationFailed,
    RRefCreationQuery,
    RRefFetch,
    RRefForkQuery,
    RRefForkRequest,
    RRefUserDelete,
)

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["KEY", "RRefService", "pack_label", "unpack_label"]

KEY: Final = "rref"
"""The key of a creation's label in its metadata."""
_LABEL: Final = Struct("<4Q")
_LABEL_BYTES: Final = _LABEL.size
_VALUE: Final = int(RequestFlag.VALUE)
_THREAD: Final = Mode.THREAD
# How long the end of a creation in a thread may wait until the loop looks, if nothing needs the value before
_LOOK_S: Final = 0.05
_LONGEST_REASON: Final = 1000
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


def _caller() -> WorkerInfo:
    scope = current_scope.get()
    assert scope is not None
    assert scope.caller is not None  # these are handlers
    return scope.caller


def _items(flat: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """The items of a message, each of which has so many parts."""
    return zip(*[iter(flat)] * size, strict=True)


class RRefService:
    """Handles the messages about RRefs that come to one worker. Every handler may be called twice with one message.

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
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {
            RRefFetch: self._on_fetch,
            RRefForkRequest: self._on_fork_request,
            RRefChildAccept: self._on_child_accept,
            RRefUserDelete: self._on_user_delete,
            RRefForkQuery: self._on_fork_query,
            RRefCreationFailed: self._on_creation_failed,
            RRefCreationQuery: self._on_creation_query,
        }

    @property
    def creations(self) -> Mapping[type[Message], CreationService]:
        """The service for messages that name a function."""
        return {RRefCreate: self}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.context.agent.loop

    # -- creations

    @property
    def will_look(self) -> bool:
        """The loop looks for results before long. Asked in any thread."""
        return self._timer is not None

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
        value.made, value.creator, value.service = made, caller.name, self
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

    # -- messages of the protocol

    async def _on_fetch(self, rref: int, is_created: bool) -> Any:
        value = await self.context.value(rref, is_created=is_created)
        held = self.forks.owned.get(rref)
        if held is not None and held.stays:
            raise RRefError(
                f"RRef {_text(rref)} is an RRef to a ScriptModule. It can't be sent through RPC from owner, "
                f"{self.context.info}, to user {_caller().name!r}: call its methods there, as in "
                f"`await rref.rpc_sync().forward(...)`"
            )
        return value

    async def _on_fork_request(self, number: int, oldest: int, items: list[int]) -> list[int]:
        """The answer: which forks are not counted, because their value is gone."""
        caller = _caller()
        if self._windows[caller.id].admit(number, oldest):
            for rref, id_, is_created in _items(items, 3):
                self.context.carry_out(self.forks.fork_requested(rref, id_, caller, bool(is_created)))
        # One that comes again is answered as before: a fork cannot end before this answer
        return [id_ for rref, id_, _ in _items(items, 3) if not self.forks.counts(rref, id_)]

    async def _on_child_accept(self, number: int, oldest: int, items: list[int]) -> None:
        for id_ in items:
            self.context.carry_out(self.forks.child_accepted(id_))

    async def _on_user_delete(self, number: int, oldest: int, items: list[int]) -> None:
        self.keep_answered()
        for rref, id_ in _items(items, 2):
            self.forks.user_deleted(rref, id_)

    async def _on_creation_failed(self, number: int, oldest: int, items: list[Any]) -> None:
        caller = _caller()
        for rref, id_, of_creation, reason in _items(items, 4):
            # A creation that has arrived goes on. One that has not is not taken any more: its number is used now
            if self._windows[caller.id].admit(of_creation, oldest):
                text = str(reason)[:_LONGEST_REASON]
                self.context.carry_out(self.forks.creation_abandoned(rref, id_, caller, text))

    async def _on_creation_query(self, number: int, oldest: int, items: list[int]) -> list[int]:
        """The answer: which values this worker has not asked the caller to create, or does not want any more."""
        under_way = self.forks.creations_under_way(_caller())
        return [rref for rref in items if rref not in under_way]

    async def _on_fork_query(self, number: int, oldest: int, items: list[int]) -> list[int] | None:
        """The answer: which forks are not known here, and never will be. None: ask again later."""
        caller = _caller()
        # what arrived before this message may have to be unpacked yet: it is, in the next turns of the loop
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        peer = self.context.agent.peer(caller.id)
        connection = peer.connection if peer is not None else None
        if connection is not None and (connection.owner.waiting or not connection.protocol.is_between_frames):
            return None
        unknown = [id_ for id_ in items if not self.forks.knows(id_)]
        for id_ in unknown:
            self.forks.offer_queried(id_, caller)
        return unknown
