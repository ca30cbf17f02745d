"""Who may change which parameters now. One `ParameterLocks` for each worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import TypeVar, cast

from torch import Tensor

from arpc.errors import ShutdownError
from arpc.runtime import current

__all__ = ["ParameterLocks", "run_alone"]

T = TypeVar("T")

_Keys = frozenset[int]


class _Request:
    """Somebody who waits."""

    __slots__ = ("granted", "keys")

    def __init__(self, keys: _Keys) -> None:
        self.keys = keys
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ParameterLocks:
    """Exclusive use of sets of parameters, which may overlap.

    A set is had as a whole or waited for as a whole, so nobody ever holds a part while waiting for the rest, and
    there is no deadlock. Sets that do not overlap do not wait for each other; those that do are served in the order
    in which they were asked for, so nobody starves.
    """

    def __init__(self) -> None:
        self._held: list[_Keys] = []
        self._waiting: list[_Request] = []

    @asynccontextmanager
    async def hold(self, parameters: Iterable[Tensor]) -> AsyncIterator[None]:
        """Have some parameters alone for the length of a block. They must stay alive meanwhile."""
        keys = frozenset(map(id, parameters))
        if self._is_free(keys, (request.keys for request in self._waiting)):
            self._held.append(keys)
        else:
            await self._wait(keys)
        try:
            yield
        finally:
            self._held.remove(keys)
            self._grant()

    async def _wait(self, keys: _Keys) -> None:
        request = _Request(keys)
        self._waiting.append(request)
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._held.remove(keys)  # granted in the same turn of the loop
            self._grant()
            raise

    def _is_free(self, keys: _Keys, earlier: Iterable[_Keys]) -> bool:
        return all(keys.isdisjoint(other) for other in (*self._held, *earlier))

    def _grant(self) -> None:
        passed_over: list[_Keys] = []
        for request in list(self._waiting):
            if request.granted.cancelled():
                continue  # it is about to leave the queue by itself
            if self._is_free(request.keys, passed_over):
                self._waiting.remove(request)
                self._held.append(request.keys)
                request.granted.set_result(None)
            else:
                passed_over.append(request.keys)

    @property
    def is_idle(self) -> bool:
        """Nobody holds or waits for anything."""
        return not self._held and not self._waiting


async def run_alone(parameters: Iterable[Tensor], function: Callable[[], T]) -> T:
    """Run a function in a thread of the current worker, which has some parameters to itself meanwhile.

    Cancelled while it waits for them, it is never run. Once it runs it is finished, and only then is whoever waits
    cancelled: nobody else gets at the parameters while a thread is still changing them.
    """
    worker = current()
    if worker.is_shut_down:
        # its loop may be closed: nobody would ever hear from the thread, and waiting for one cannot be cancelled
        raise ShutdownError(f"worker {worker.name!r} has been shut down: it changes no parameters any more")
    async with worker.keep(ParameterLocks).hold(parameters):
        running = worker.agent.dispatcher.threads.call(copy_context().run, function)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            running.exception()  # looked at: it is nobody's any more
            raise cancelled
        return cast("T", running.result())
