"""What a worker does when others speak to it about RRefs. Every handler may be called twice with the same message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.scope import current_scope
from arpc.agent.server.dispatcher import CreationService
from arpc.errors import RRefError
from arpc.ids import GloballyUniqueId, WorkerInfo
from arpc.wire.messages import (
    Message,
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

__all__ = ["ControlService"]

_text = GloballyUniqueId.from_int
_LONGEST_REASON: Final = 1000


def _caller() -> WorkerInfo:
    scope = current_scope.get()
    assert scope is not None
    assert scope.caller is not None  # these are handlers
    return scope.caller


def _items(flat: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """The items of a message, each of which has so many parts."""
    return zip(*[iter(flat)] * size, strict=True)


class ControlService:
    """The handlers of the RRef messages of one worker."""

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._deliveries = context.deliveries
        self._forks = context.forks
        self._creations = context.creations

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
        return {RRefCreate: self._creations}

    async def _on_fetch(self, rref: int, is_created: bool) -> Any:
        value = await self._context.value(rref, is_created=is_created)
        held = self._forks.owned.get(rref)
        if held is not None and held.stays:
            raise RRefError(
                f"RRef {_text(rref)} is an RRef to a ScriptModule. It can't be sent through RPC from owner, "
                f"{self._context.info}, to user {_caller().name!r}: call its methods there, as in "
                f"`await rref.rpc_sync().forward(...)`"
            )
        return value

    async def _on_fork_request(self, incarnation: int, number: int, oldest: int, items: list[int]) -> list[int]:
        """The answer: which forks are not counted, because their value is gone."""
        caller = _caller()
        if self._deliveries.is_new(caller.id, incarnation, number, oldest):
            for rref, id_, is_created in _items(items, 3):
                self._context.carry_out(self._forks.fork_requested(rref, id_, caller, bool(is_created)))
        # One that comes again is answered as before: a fork cannot end before this answer
        return [id_ for rref, id_, _ in _items(items, 3) if not self._forks.counts(rref, id_)]

    async def _on_child_accept(self, incarnation: int, number: int, oldest: int, items: list[int]) -> None:
        for id_ in items:
            self._context.carry_out(self._forks.child_accepted(id_))

    async def _on_user_delete(self, incarnation: int, number: int, oldest: int, items: list[int]) -> None:
        self._creations.keep_answered()
        for rref, id_ in _items(items, 2):
            self._forks.user_deleted(rref, id_)

    async def _on_creation_failed(self, incarnation: int, number: int, oldest: int, items: list[Any]) -> None:
        caller = _caller()
        for rref, id_, of_creation, reason in _items(items, 4):
            # A creation that has arrived goes on. One that has not is not taken any more: its number is used now
            if self._deliveries.is_new(caller.id, incarnation, of_creation, oldest):
                text = str(reason)[:_LONGEST_REASON]
                self._context.carry_out(self._forks.creation_abandoned(rref, id_, caller, text))

    async def _on_creation_query(self, incarnation: int, number: int, oldest: int, items: list[int]) -> list[int]:
        """The answer: which values this worker has not asked the caller to create, or does not want any more."""
        under_way = self._forks.creations_under_way(_caller())
        return [rref for rref in items if rref not in under_way]

    async def _on_fork_query(self, incarnation: int, number: int, oldest: int, items: list[int]) -> list[int] | None:
        """The answer: which forks are not known here, and never will be. None: ask again later."""
        caller = _caller()
        # what arrived before this message may have to be unpacked yet: it is, in the next turns of the loop
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        peer = self._context.agent.peer(caller.id)
        connection = peer.connection if peer is not None else None
        if connection is not None and (connection.owner.waiting or not connection.protocol.is_between_frames):
            return None
        unknown = [id_ for id_ in items if not self._forks.knows(id_)]
        for id_ in unknown:
            self._forks.offer_queried(id_, caller)
        return unknown
