"""Shared code of peers with awaitable calls: three measurements, and a system that starts its own processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from arpc.bench import payloads
from arpc.bench.asyncio_caller import AsyncioCaller, Call

__all__ = ["ActorSystem", "PeerCaller"]


class PeerCaller(AsyncioCaller):
    """Measures a small call, a rate, and a large send, with two functions of a peer."""

    def __init__(
        self,
        noop: Call,
        drop: Callable[[Any], Awaitable[object]],
        make_payload: Callable[[int], object] = payloads.bulk_array,
    ) -> None:
        """``noop`` calls a function without arguments, ``drop`` sends it a payload that ``make_payload`` has made."""
        self._noop = noop
        self._drop = drop
        self._make_payload = make_payload

    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        return self._noop

    prepare_started = prepare

    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        return partial(self._drop, self._make_payload(size_bytes))


class ActorSystem:
    """A peer whose caller starts the process that it calls, so that the callee of the pair has nothing to do."""

    def __init__(self, open_caller: Callable[[Path], AbstractAsyncContextManager[PeerCaller]]) -> None:
        self._open_caller = open_caller

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        yield

    def caller(self, place: Path) -> AbstractAsyncContextManager[PeerCaller]:
        return self._open_caller(place)
