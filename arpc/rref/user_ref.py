"""One fork of this worker, shared by its handle and the context, and the futures of calls to its owner."""

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
    """The future of a call to an owner: it raises `OwnerLostError` if the called worker is lost."""

    anchor: RRef[Any] | None = None
    """The RRef whose value is called, kept alive until the call has ended; None for a creation."""

    @property
    def owner(self) -> str:
        """The name of the value's owner. Empty for a creation: the worker may never have the value."""
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
    """Return the error of a call to an owner, as an `OwnerLostError` if it means that the owner was lost.

    An owner that is known by its id, and is not in the group any more, is lost. An error that a handler on the owner
    raised is returned unchanged: it may be about a worker that the handler called.
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
    """The future of a fetch. The owner cancels a fetch only when it shuts down, which raises `OwnerLostError` here."""

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, CallCancelledError) and not is_of_handler(exception):
            lost = OwnerLostError(f"the owner has shut down: {exception}", self.owner)
            lost.__cause__ = exception
            exception = lost
        super().set_exception(exception)


class Use(UserFork):
    """One fork of this worker, shared by its handle and the context."""

    origin: str = ""
    """The code that made it or the worker that sent it, if known."""
    failure: Exception | None = None
    """The error that each use raises; None while it can be used."""
    fetches: set[OwnerFuture] | None = None
    """The fetches in flight of a value that may never be created."""

    @property
    def made(self) -> str:
        """The code, function or worker that it came from."""
        return self.origin

    @property
    def is_confirmed(self) -> bool:
        return self.state is UserState.CONFIRMED

    def fail(self, failure: Exception) -> None:
        """Let every use raise an error from now on. Fetches in flight fail now."""
        self.failure = failure
        fetches, self.fetches = self.fetches, None
        for future in fetches or ():
            if not future.done():
                future.set_exception(fresh(failure))
                future.withdraw()

    def __str__(self) -> str:
        rref, fork = (GloballyUniqueId.from_int(number) for number in (self.rref, self.fork))
        return f"UserRRef(RRefId = {rref}, ForkId = {fork})"
