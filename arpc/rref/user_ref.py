"""One use of an RRef by this worker: a fork, as its handle and the context share it, and the calls to its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arpc.agent.client.future import Future
from arpc.agent.server.remote_exceptions import is_of_handler
from arpc.errors import CallCancelledError, OwnerLostError, UnknownWorkerError, WorkerLostError
from arpc.ids import GloballyUniqueId
from arpc.rref.states import UserFork, UserState
from arpc.user_errors import fresh

if TYPE_CHECKING:
    from arpc.rref.handle import RRef

__all__ = ["FetchFuture", "OwnerFuture", "Use", "as_owner_lost"]


class OwnerFuture(Future[Any]):
    """The future of a call to an owner: if the worker that is called is lost, the owner is."""

    anchor: RRef[Any] | None = None
    """The RRef whose value is called, which lives until the call has ended; None if the value is to be created."""

    @property
    def owner(self) -> str:
        """The name of the worker that owns a value. Empty if it is about to be asked for one: it may never have it."""
        return "" if self.anchor is None else self.anchor.owner_name()

    def set_result(self, result: Any) -> None:
        self.anchor = None
        super().set_result(result)

    def withdraw(self) -> None:
        self.anchor = None
        super().withdraw()

    def set_exception(self, exception: type | BaseException) -> None:
        owner, self.anchor = self.owner, None
        super().set_exception(as_owner_lost(exception, owner) if isinstance(exception, Exception) else exception)


def as_owner_lost(error: Exception, owner: str = "") -> Exception:
    """The error of a call to an owner, which is `OwnerLostError` if it says that the owner was lost.

    An owner that is known by its id, and is not in the group any more, is lost. What a handler on the owner raised says
    nothing of the owner: it may be about a worker that the handler called.
    """
    if isinstance(error, OwnerLostError) or is_of_handler(error):
        return error
    if isinstance(error, WorkerLostError):
        lost = OwnerLostError(str(error), error.worker, may_have_run=error.may_have_run)
    elif owner and isinstance(error, UnknownWorkerError):
        lost = OwnerLostError(f"the owner {owner!r} is gone: {error}", owner, may_have_run=error.may_have_run)
    else:
        return error
    lost.__cause__ = error
    return lost


class FetchFuture(OwnerFuture):
    """The future of a fetch, which nobody cancels on the owner but the owner itself when it shuts down."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, CallCancelledError) and not is_of_handler(exception):
            lost = OwnerLostError(f"the owner has shut down: {exception}", self.owner)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)


class Use(UserFork):
    """One fork of this worker, as its handle and the context share it."""

    origin: str = ""
    """Where it was made, if that is known."""
    failure: Exception | None = None
    """Why it cannot be used."""
    fetches: set[OwnerFuture] | None = None
    """Fetches of a value that may never be created."""

    @property
    def made(self) -> str:
        """Where it was made, or by which function."""
        return self.origin

    @property
    def is_confirmed(self) -> bool:
        return self.state is UserState.CONFIRMED

    def fail(self, failure: Exception) -> None:
        """It cannot be used any more. Fetches under way fail now."""
        self.failure = failure
        fetches, self.fetches = self.fetches, None
        for future in fetches or ():
            if not future.done():
                future.set_exception(fresh(failure))
                future.withdraw()

    def __str__(self) -> str:
        rref, fork = (GloballyUniqueId.from_int(number) for number in (self.rref, self.fork))
        return f"UserRRef(RRefId = {rref}, ForkId = {fork})"
