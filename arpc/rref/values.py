"""The value of an RRef on its owner: present, pending, or failed."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.server.remote_exceptions import raisable
from arpc.agent.server.run import TO_BE_FETCHED
from arpc.errors import RRefCreationError, RRefError, set_may_have_run
from arpc.ids import GloballyUniqueId
from arpc.rref.states import Owned, OwnerState
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh, is_a, traceback_of, type_name_of, with_traceback

if TYPE_CHECKING:
    from arpc.agent.server.run import Run
    from arpc.rref.service import RRefService

__all__ = ["NOTHING", "Value"]

NOTHING: Final = object()
"""The content of a value that is pending or failed."""


class Value(Owned, eq=False):
    """One value of this worker; also the `run.Creation` that makes it, if a request does.

    It is set once. Any number of coroutines may await it, and each may be cancelled without effect on the others.
    """

    made: str = ""
    """The function or the code that made it."""
    creator: str = ""
    """The name of the worker that requested it; empty if no request did."""
    content: Any = NOTHING
    stays: bool = False
    """Whether it is a ScriptModule that was declared as one: it is used on its owner, and never copied to others."""
    error: BaseException | None = None
    """The error of the creation, if it failed."""
    service: Any = None
    """The `RRefService` of the worker, for a value that a request makes; else None."""
    is_wanted: bool = False
    """Whether the creator waits for the value, so that the reply to its request carries it."""
    _traceback: TracebackType | None = None
    _waiters: list[asyncio.Future[None]] | None = None

    @property
    def is_ready(self) -> bool:
        return self.content is not NOTHING or self.error is not None

    @property
    def type_name(self) -> str:
        """The name of the value's type, for reports; or a note that it is pending or failed."""
        if self.error is not None:
            return f"raised {type_name_of(self.error)}"
        return "not there yet" if self.content is NOTHING else type_name_of(self.content)

    @property
    def is_awaited(self) -> bool:
        """Whether a call waits for the value. May be read in any thread."""
        return self._waiters is not None

    def expect(self) -> None:
        """Make `is_awaited` true from now on, until the value is ready."""
        if self._waiters is None and not self.is_ready:
            self._waiters = []

    def fail(self, error: BaseException) -> None:
        if not self.is_ready:
            # The error may be kept for long: it must keep alive neither arpc's frames, which refer to this value, nor
            # the arguments of the function that raised it
            trace = traceback_of(error)
            while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("arpc."):
                trace = trace.tb_next
            traceback.clear_frames(trace)
            self.error = with_traceback(error, trace)
            self._traceback = trace
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def get(self) -> Any:
        """Return the value, once it is ready. Raises the error of its creation."""
        if not self.is_ready:
            waiter = asyncio.get_running_loop().create_future()
            self.expect()
            assert self._waiters is not None
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if self._waiters is not None and waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise
        return self.get_nowait()

    def get_nowait(self) -> Any:
        """Return the value, which must be ready. Raises the error of its creation."""
        if self.error is not None:
            error = fresh(self.error)
            set_may_have_run(error, may_have_run=True)  # the error may be that of a call that the function made
            raise with_traceback(error, self._traceback)
        return self.content

    def dropped(self) -> None:
        if self.state is not OwnerState.ABANDONED:  # else `FailValue` gives the reason
            text = f"RRef {GloballyUniqueId.from_int(self.rref)} was released before its value was there"
            self.fail(RRefError(text))

    # -- as the `run.Creation` of a request

    def answer(self, run: Run, result: Any) -> Any:
        if run.function.keeps_modules and is_a(result, ScriptModule):
            self.stays = True  # before other code can see the value
            return TO_BE_FETCHED
        return (result,) if self.is_wanted else None

    def answered(self, run: Run, result: Any) -> None:
        service: RRefService = self.service
        service.answered.append((run, result))
        # Checked after the append: if the loop looks later, it finds the result
        if self.is_awaited or not service.will_look:
            with suppress(RuntimeError):  # the loop is closed
                service.loop.call_soon_threadsafe(service.keep_answered)

    def returned(self, run: Run, result: Any) -> None:
        if not self.made:
            self.made = run.name
        if self.error is None:
            self.content = result
            if self._waiters is not None:
                self._wake()
        self.service.forks.creation_ended(self)

    def failed(self, error: BaseException) -> None:
        """Keep the error for all users of the value. The reply to the creator only says that the function has ended."""
        self.fail(raisable(error, self.service.context.info.name))
        self.service.forks.creation_ended(self)

    def not_made(self, error: BaseException) -> None:
        """Keep the error of a function that was not called, or was cancelled: there will be no value."""
        if is_a(error, asyncio.CancelledError):
            text = (
                f"the creation of RRef {GloballyUniqueId.from_int(self.rref)} was cancelled, or ran past its deadline"
            )
            self.fail(RRefCreationError(text))
            self.service.forks.creation_ended(self)
        else:
            # a copy: the error itself is sent to the creator, and refers to frames that refer to the value
            self.failed(fresh(error))
