"""One use of an RRef by this worker: a fork, as its handle and the context share it, and who waits for its value."""

from __future__ import annotations

from typing import Any

from arpc.agent.functions import name_of
from arpc.agent.future import Future
from arpc.errors import CallCancelledError, OwnerLostError, WorkerLostError
from arpc.ids import GloballyUniqueId
from arpc.rref.states import UserFork, UserState
from arpc.user_errors import fresh

__all__ = ["FetchFuture", "OwnerFuture", "Use", "as_owner_lost"]


class OwnerFuture(Future[Any]):
    """The future of a call to an owner: a lost worker is a lost owner."""

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(as_owner_lost(exception) if isinstance(exception, Exception) else exception)


def as_owner_lost(error: Exception) -> Exception:
    """The same for one error."""
    if not isinstance(error, WorkerLostError) or isinstance(error, OwnerLostError):
        return error
    lost = OwnerLostError(str(error), error.worker, may_have_run=error.may_have_run)
    lost.__cause__ = error
    return lost


class FetchFuture(OwnerFuture):
    """The future of a fetch, which nobody cancels on the owner but the owner itself when it shuts down."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, CallCancelledError):
            lost = OwnerLostError(f"the owner has shut down: {exception}", self.owner)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)

    owner = ""


class Use(UserFork):
    """One fork of this worker, as its handle and the context share it: with what is to be done when it changes."""

    origin: Any = ""
    """Where it was made, or the function that made it."""
    failure: Exception | None = None
    """Why it cannot be used."""
    fetches: set[OwnerFuture] | None = None
    """Those who wait for a value that may never be created."""

    @property
    def made(self) -> str:
        """Where it was made, or by which function."""
        return self.origin if isinstance(self.origin, str) else name_of(self.origin)

    @property
    def is_confirmed(self) -> bool:
        return self.state is UserState.CONFIRMED

    def fail(self, failure: Exception) -> None:
        """It cannot be used any more. Those who wait for its value hear of it now."""
        self.failure = failure
        fetches, self.fetches = self.fetches, None
        for future in fetches or ():
            if not future.done():
                future.set_exception(fresh(failure))
                future.withdraw()

    def __str__(self) -> str:
        rref, fork = (GloballyUniqueId.from_int(number) for number in (self.rref, self.fork))
        return f"UserRRef(RRefId = {rref}, ForkId = {fork})"
