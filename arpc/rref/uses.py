"""One use of an RRef by this worker: a fork, as its handle and the context share it, and who waits for its value."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from arpc.agent.future import Future
from arpc.errors import CallCancelledError, OwnerLostError, WorkerLostError
from arpc.ids import GloballyUniqueId, WorkerInfo
from arpc.rref.states import UserFork, UserState
from arpc.rref.values import fresh

__all__ = ["FetchFuture", "OwnerFuture", "Use"]


class OwnerFuture(Future[Any]):
    """The future of a call to an owner: a lost worker is a lost owner."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, WorkerLostError) and not isinstance(exception, OwnerLostError):
            lost = OwnerLostError(str(exception), exception.worker, may_have_run=exception.may_have_run)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)


class FetchFuture(OwnerFuture):
    """The future of a fetch, which nobody cancels on the owner but the owner itself when it shuts down."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, CallCancelledError):
            lost = OwnerLostError(f"the owner has shut down: {exception}", self.owner)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)

    owner = ""


class Use:
    """One fork of this worker, as its handle and the context share it."""

    __slots__ = ("_answered", "failure", "fetches", "fork", "info", "made")

    def __init__(self, user: UserFork, info: WorkerInfo, made: str) -> None:
        self.fork = user
        self.info = info
        self.made = made
        self.failure: Exception | None = None
        """Why it cannot be used."""
        self.fetches: set[OwnerFuture] | None = None
        """Those who wait for a value that may never be created."""
        self._answered: asyncio.Future[None] | None = None

    @property
    def is_confirmed(self) -> bool:
        return self.fork.state is UserState.CONFIRMED

    def answered(self) -> Awaitable[None]:
        """Wait until the owner has confirmed it, or never will. Never raises."""
        if self._answered is None:
            self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def answer(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def fail(self, failure: Exception) -> None:
        """It cannot be used any more. Those who wait for its value hear of it now."""
        self.failure = failure
        fetches, self.fetches = self.fetches, None
        for future in fetches or ():
            stop = future.on_cancel
            if not future.done():
                future.set_exception(fresh(failure))
                if stop is not None:
                    stop()

    def __str__(self) -> str:
        rref, fork = (GloballyUniqueId.from_int(number) for number in (self.fork.rref, self.fork.fork))
        return f"UserRRef(RRefId = {rref}, ForkId = {fork})"
