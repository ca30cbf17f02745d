"""Locks on sets of parameters, so that one step at a time changes them. Each worker has one `ParameterLocks`."""

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
    """A request for a set of parameters that has to wait."""

    __slots__ = ("granted", "keys")

    def __init__(self, keys: _Keys) -> None:
        self.keys = keys
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ParameterLocks:
    """Exclusive use of sets of parameters, which may overlap.

    A set is held as a whole or waited for as a whole: no request holds a part while it waits for the rest, so there is
    no deadlock. Sets that do not overlap do not wait for each other; those that do are served in the order of the
    requests, so none starves.
    """

    def __init__(self) -> None:
        self._held: list[_Keys] = []
        self._waiting: list[_Request] = []

    @asynccontextmanager
    async def hold(self, parameters: Iterable[Tensor]) -> AsyncIterator[None]:
        """Hold some parameters exclusively for the length of a block. They must stay alive meanwhile."""
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
                continue  # its task is about to remove it from the queue
            if self._is_free(request.keys, passed_over):
                self._waiting.remove(request)
                self._held.append(request.keys)
                request.granted.set_result(None)
            else:
                passed_over.append(request.keys)

    @property
    def is_idle(self) -> bool:
        """Whether no set of parameters is held or waited for."""
        return not self._held and not self._waiting


async def run_alone(parameters: Iterable[Tensor], function: Callable[[], T]) -> T:
    """Run a function in a thread of the current worker, with exclusive use of some parameters.

    If this is cancelled while it waits for them, the function never runs. Once the function runs it is finished, and
    only then is the caller cancelled: no other step gets the parameters while a thread is still changing them.
    Raises `ShutdownError` if the worker has been shut down.
    """
    worker = current()
    if worker.is_shut_down:
        # its loop may be closed: the thread's result would never arrive, and the wait for it cannot be cancelled
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
            running.exception()  # retrieve it, or asyncio would log it
            raise cancelled
        return cast("T", running.result())
