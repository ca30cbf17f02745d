"""What a worker does when others speak to it about RRefs. Every handler may be called twice with the same message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.jit import ScriptModule

from arpc.agent.agent import Agent
from arpc.agent.codec import Packed
from arpc.agent.functions import Function
from arpc.agent.requests import Run
from arpc.agent.scope import current_scope
from arpc.errors import RRefCreationError, RRefError
from arpc.ids import GloballyUniqueId, WorkerInfo
from arpc.rref import events, instructions
from arpc.rref.delivery import Window
from arpc.rref.events import RRefId, WorkerName
from arpc.rref.forks import Forks
from arpc.rref.uses import Use
from arpc.rref.values import NOTHING, Value
from arpc.wire.messages import (
    Message,
    RequestFlag,
    RRefChildAccept,
    RRefCreate,
    RRefFetch,
    RRefForkQuery,
    RRefForkRequest,
    RRefUserDelete,
)

__all__ = ["ControlService"]

_text = GloballyUniqueId.from_int


def _caller() -> WorkerName:
    scope = current_scope.get()
    assert scope is not None
    assert scope.caller is not None  # these are handlers
    return scope.caller.name


def _in_threes(flat: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    parts = iter(flat)
    return zip(parts, parts, parts, strict=True)


class ControlService:
    """The handlers of the RRef messages; the rest of the context is in the class that inherits."""

    agent: Agent
    forks: Forks[Use]
    info: WorkerInfo
    values: dict[RRefId, Value]
    happened: Callable[[events.Event], Sequence[instructions.Instruction]]
    value: Callable[..., Awaitable[Any]]

    def __init__(self) -> None:
        self._windows: dict[tuple[WorkerName, int], Window] = {}

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {
            RRefFetch: self._on_fetch,
            RRefForkRequest: self._on_fork_request,
            RRefChildAccept: self._on_child_accept,
            RRefUserDelete: self._on_user_delete,
            RRefForkQuery: self._on_fork_query,
        }

    @property
    def wrappers(self) -> Mapping[type[Message], Callable[..., Any]]:
        """Handlers of messages that name a function, which they run."""
        return {RRefCreate: self._on_create}

    @property
    def shortcuts(self) -> Mapping[type[Message], Callable[..., Any]]:
        """Answers that need no handler, or NotImplemented."""
        return {RRefFetch: self._value_at_hand}

    def _value_at_hand(self, rref: int, _is_created: bool) -> Any:
        value = self.values.get(rref)
        if value is None or value.content is NOTHING or value.stays:
            return NotImplemented
        return value.content

    def _is_new(self, caller: WorkerName, incarnation: int, number: int, oldest: int) -> bool:
        window = self._windows.get((caller, incarnation))
        if window is None:
            window = self._windows[caller, incarnation] = Window()
        return window.admit(number, oldest)

    def forget_deliveries(self, name: WorkerName) -> None:
        """What a lost worker sent will not come again."""
        for key in [key for key in self._windows if key[0] == name]:
            del self._windows[key]

    async def _on_create(
        self,
        function: Function,
        flags: int,
        incarnation: int,
        number: int,
        oldest: int,
        rref: int,
        id_: int,
        made: str,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Packed | None:
        """Run the function that the message names, and keep what it returns, or raises. The answer says that it ended.

        ``made``: where in its code the caller has made it, if it tells.
        """
        run = current_scope.get()
        assert isinstance(run, Run)
        caller = run.inbound.caller.name
        if not self._is_new(caller, incarnation, number, oldest):
            await self._created_before(rref)
            return None
        if not self.forks.handle(events.CreationArrived(rref, id_, caller)):
            raise RRefError(f"the creation of RRef {_text(rref)} was given up by worker {caller!r}")
        value = self.values.get(rref)
        if value is None:
            value = self.values[rref] = Value()
        value.made = value.made or made or function.name
        value.creator = caller
        try:
            if function.is_simple:
                value.set(await function.call(*args, **kwargs))
            else:
                made_here = await self.agent.executor.call(function, args, kwargs)
                # before it is there for all to see
                value.stays = isinstance(made_here, ScriptModule) and getattr(function.call, "keeps_modules", False)
                value.set(made_here)
        except asyncio.CancelledError:
            value.fail(RRefCreationError(f"the creation of RRef {_text(rref)} was cancelled, or ran past its deadline"))
            raise
        except BaseException as error:  # noqa: BLE001 - it is for those who use the value
            value.fail(error)
        finally:
            self.happened(events.CreationEnded(rref))
        return self._packed(run, value.content) if flags & RequestFlag.VALUE and not value.stays else None

    def _packed(self, run: Run, content: Any) -> Packed | None:
        """The value for its creator, who wants it at once; None lets it ask for it, to be told what is wrong."""
        if content is NOTHING:
            return None
        try:
            inbound = run.inbound
            return Packed(
                *self.agent.codec.pickler.dumps_call(
                    None, (content,), None, main_by_value=inbound.main_by_value, to=inbound.caller
                )
            )
        except Exception:  # noqa: BLE001 - whatever a user's __reduce__ may raise
            return None

    async def _created_before(self, key: RRefId) -> None:
        """Answer a message that came twice, like the first."""
        value = self.values.get(key)
        if value is None:
            raise RRefError(f"RRef {_text(key)} was created before, and is gone")
        with suppress(Exception):
            await value.get()

    async def _on_fetch(self, rref: int, is_created: bool) -> Any:
        value = await self.value(rref, is_created=is_created)
        held = self.values.get(rref)
        if held is not None and held.stays:
            raise RRefError(
                f"RRef {_text(rref)} is an RRef to a ScriptModule. It can't be sent through RPC from owner, "
                f"{self.info}, to user {_caller()!r}: call its methods there, as in "
                f"`await rref.rpc_sync().forward(...)`"
            )
        return value

    async def _on_fork_request(self, incarnation: int, number: int, oldest: int, items: list[int]) -> list[int]:
        """The answer: which forks are not counted, because their value is gone."""
        caller = _caller()
        if self._is_new(caller, incarnation, number, oldest):
            for rref, id_, is_created in _in_threes(items):
                self.happened(events.ForkRequested(rref, id_, caller, bool(is_created)))
        # One that comes again is answered as before: a fork cannot end before this answer
        return [id_ for rref, id_, _ in _in_threes(items) if not self.forks.counts(rref, id_)]

    async def _on_child_accept(self, incarnation: int, number: int, oldest: int, items: list[int]) -> None:
        for id_ in items:
            self.happened(events.ChildAccepted(id_))

    async def _on_user_delete(self, incarnation: int, number: int, oldest: int, items: list[int]) -> None:
        for rref, id_, abandons in _in_threes(items):
            self.happened(events.UserDeleted(rref, id_, bool(abandons)))

    async def _on_fork_query(self, incarnation: int, number: int, oldest: int, items: list[int]) -> list[int] | None:
        """The answer: which forks are not known here, and never will be. None: ask again later."""
        caller = _caller()
        # what arrived before this message may have to be unpacked yet: it is, in the next turns of the loop
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        peer = self.agent.peer(caller)
        connection = peer.connection if peer is not None else None
        if connection is not None and (connection.owner.inbound.waiting or not connection.protocol.is_between_frames):
            return None
        unknown = [id_ for id_ in items if not self.forks.knows(id_)]
        for id_ in unknown:
            self.happened(events.OfferQueried(id_, caller))
        return unknown
