"""Handlers for all messages about RRefs: creations, fetches, and the messages of the reference-counting protocol."""

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
from arpc.rref.states import OwnerState
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
# The delay after which the loop stores the results of creations in threads, if nothing needs a value before
_LOOK_S: Final = 0.05
_LONGEST_REASON: Final = 1000
_text = GloballyUniqueId.from_int
_pack = _LABEL.pack
_unpack = _LABEL.unpack_from


def pack_label(number: int, oldest: int, rref: int, fork: int, made: str) -> bytes:
    """Pack the label of a creation: its number (see `exactly_once`), and the ids of the RRef and its first fork.

    ``made`` is the stack of the creator's code, or the name shown to users if that is not the function's; or empty.
    """
    label = _pack(number, oldest, rref, fork)
    return label + made.encode() if made else label


def unpack_label(data: bytes | None) -> tuple[int, int, int, int, str]:
    """Return the arguments of `pack_label`. Raises `ProtocolError` if the label is missing or too short."""
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
    """Iterate over the items of a message, each of ``size`` parts."""
    return zip(*[iter(flat)] * size, strict=True)


class RRefService:
    """Handles the messages about RRefs that one worker receives. Every handler may be called twice with one message.

    A thread sends the reply to a creation itself, as to any call. Only the loop stores values. It stores the result
    when it looks next: when a call needs the value, when users have ended, or after `_LOOK_S`. A thread wakes the loop
    only if a call waits for the value already.
    """

    def __init__(self, context: RRefContext) -> None:
        self.context = context
        self.forks = context.forks
        self._windows = context.windows
        self.answered: deque[tuple[Run, Any]] = deque()
        """Results whose replies threads have sent, and that the loop has not stored yet."""
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
        """The services for messages that name a function."""
        return {RRefCreate: self}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.context.agent.loop

    # -- creations

    @property
    def will_look(self) -> bool:
        """Whether the loop will store results soon. May be read in any thread."""
        return self._timer is not None

    def admit(self, run: Run, message: Message) -> Value | None:
        """Return the value that a creation makes; None if nothing is to run. Raises `ProtocolError` without a label."""
        number, oldest, rref, fork, made = unpack_label(run.meta.pop(KEY, None) if run.meta else None)
        caller, function = run.inbound.caller, run.function
        value: Value | None = None
        problem = f"was given up by worker {caller.name!r}"
        if self._windows[caller.id].admit(number, oldest):
            value = self.forks.creation_arrived(rref, fork, caller)
        elif (known := self.forks.owned.get(rref)) is None:
            problem = f"has a number that worker {caller.name!r} has used before"
        elif known.state is not OwnerState.ABANDONED:
            if run.handling is not None:  # a second copy: the first is answered
                self.context.agent.observers.ended(run, 0, None)
            return None
        if value is None:
            error = RRefError(f"the creation of RRef {_text(rref)} {problem}")
            self.context.agent.dispatcher.replies.refused(run, error)
            return None
        if not made and message.arg:  # a function that is sent with its arguments has no name yet
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
        """Store the result of a value that is about to be awaited; if its thread still runs, have it wake the loop."""
        if not value.is_ready:
            value.expect()  # first: a thread that ends after the next line sees it
            self.keep_answered()

    def keep_answered(self) -> None:
        """Store the results of creations whose replies threads have sent."""
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
        """Count forks; return those that are not counted, because their value is gone."""
        caller = _caller()
        if self._windows[caller.id].admit(number, oldest):
            for rref, id_, is_created in _items(items, 3):
                self.context.carry_out(self.forks.fork_requested(rref, id_, caller, bool(is_created)))
        # A second copy gets the same reply as the first: a fork cannot end before its request is answered
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
            # A creation that has arrived goes on. One that arrives later is refused: its number is used now
            if self._windows[caller.id].admit(of_creation, oldest):
                text = str(reason)[:_LONGEST_REASON]
                self.context.carry_out(self.forks.creation_abandoned(rref, id_, caller, text))

    async def _on_creation_query(self, number: int, oldest: int, items: list[int]) -> list[int]:
        """Return the values that this worker has not asked the caller to create, or has given up."""
        under_way = self.forks.creations_under_way(_caller())
        return [rref for rref in items if rref not in under_way]

    async def _on_fork_query(self, number: int, oldest: int, items: list[int]) -> list[int] | None:
        """Return the forks that are unknown here and refused from now on; None if the caller must ask again later."""
        caller = _caller()
        # messages that arrived before this one may not be unpacked yet: that happens in the next turns of the loop
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
