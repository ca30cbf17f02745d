"""The value of an RRef on its owner: there, on its way, or an error in its place."""

from __future__ import annotations

import asyncio
import traceback
from types import TracebackType
from typing import Any, Final

import msgspec

from arpc.errors import set_may_have_run
from arpc.user_errors import fresh, traceback_of, type_name_of, with_traceback

__all__ = ["NOTHING", "Value"]

NOTHING: Final = object()
"""The content of a value that is not there, or has an error in its place."""


class Value(msgspec.Struct, eq=False):
    """Set once; awaited by any number of coroutines, each of which may be cancelled without harm to the others."""

    made: str = ""
    """Where it was made, or by which function."""
    creator: str = ""
    """The worker that asked for it."""
    content: Any = NOTHING
    stays: bool = False
    """It is a ScriptModule by its type, not only in fact: it is used where it is, and never copied elsewhere."""
    error: BaseException | None = None
    """What is in its place."""
    _traceback: TracebackType | None = None
    _waiters: list[asyncio.Future[None]] | None = None

    @property
    def is_ready(self) -> bool:
        return self.content is not NOTHING or self.error is not None

    @property
    def type_name(self) -> str:
        """What kind of object it is, as far as that is known."""
        if self.error is not None:
            return f"raised {type_name_of(self.error)}"
        return "not there yet" if self.content is NOTHING else type_name_of(self.content)

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for it. Asked in any thread."""
        return self._waiters is not None

    def expect(self) -> None:
        """Let `is_awaited` be true from now on, until the value is there."""
        if self._waiters is None and not self.is_ready:
            self._waiters = []

    def set(self, content: Any) -> None:
        if self.content is NOTHING and self.error is None:
            self.content = content
            if self._waiters is not None:
                self._wake()

    def fail(self, error: BaseException) -> None:
        if not self.is_ready:
            # It may be kept for long: it must keep neither this worker's frames, which refer to this value, nor the
            # arguments of the function that raised it
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
        """The value, once it is there; raises the error in its place."""
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
        """The value of one that is there. Raises what its creation raised."""
        if self.error is not None:
            error = fresh(self.error)
            set_may_have_run(error, may_have_run=True)  # it may be that of a call which the function made
            raise with_traceback(error, self._traceback)
        return self.content
