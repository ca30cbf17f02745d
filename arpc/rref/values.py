"""The value of an RRef on its owner: there, on its way, or an error in its place."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final

__all__ = ["Value"]

_NOTHING: Final = object()


class Value:
    """Set once; awaited by any number of coroutines, each of which may be cancelled without harm to the others."""

    __slots__ = ("_error", "_traceback", "_value", "_waiters", "made")

    def __init__(self, made: str = "") -> None:
        self._value: Any = _NOTHING
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self.made = made
        """Where it was made, or by which function."""

    @classmethod
    def of(cls, value: Any, made: str = "") -> Value:
        ready = cls(made)
        ready._value = value
        return ready

    @property
    def is_ready(self) -> bool:
        return self._value is not _NOTHING or self._error is not None

    @property
    def type_name(self) -> str:
        """What kind of object it is, as far as that is known."""
        if self._error is not None:
            return f"raised {type(self._error).__qualname__}"
        return "not there yet" if self._value is _NOTHING else type(self._value).__qualname__

    def set(self, value: Any) -> None:
        if not self.is_ready:
            self._value = value
            self._wake()

    def fail(self, error: BaseException) -> None:
        if not self.is_ready:
            self._error = error
            self._traceback = error.__traceback__
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def get(self) -> Any:
        """The value, once it is there; raises the error in its place."""
        if not self.is_ready:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise
        return self.get_nowait()

    def get_nowait(self) -> Any:
        """The same for one that is there."""
        if self._error is not None:
            # as it was first raised: an exception collects the frames of everyone who raises it
            raise self._error.with_traceback(self._traceback)
        return self._value
