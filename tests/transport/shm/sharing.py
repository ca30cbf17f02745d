"""Two ends of a unix socket, each with an arena of its own, in one process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arpc.testing.endpoints import Endpoint, Endpoints, Pair, bulk_frame, turns_until
from arpc.transport.connection import Connection
from arpc.transport.contract import Accept, Listener, Receiver, Transport
from arpc.transport.shm import Arena
from arpc.transport.sockets import Resources, UnixTransport
from arpc.wire.protocol import Protocol

KIB = 1 << 10
MIB = 1 << 20


class SharingTransport(Transport):
    """Unix sockets; those who connect have one arena, those who listen another."""

    def __init__(
        self, *, capacity_bytes: int = 64 * MIB, from_bytes: int = 64 * KIB, window_bytes: int = 64 * MIB
    ) -> None:
        self.options = {"capacity_bytes": capacity_bytes, "from_bytes": from_bytes, "window_bytes": window_bytes}
        self._near: Arena | None = None
        self._far: Arena | None = None

    @property
    def near(self) -> Arena:
        self._near = self._near or Arena(**self.options)
        return self._near

    @property
    def far(self) -> Arena:
        self._far = self._far or Arena(**self.options)
        return self._far

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        return await UnixTransport(Resources(arena=self.near)).connect(address, protocol, receiver)

    async def listen(self, address: str, accept: Accept) -> Listener:
        return await UnixTransport(Resources(arena=self.far)).listen(address, accept)

    async def aclose(self) -> None:
        for arena in (self._near, self._far):
            if arena is not None:
                await arena.aclose()


class Sharing:
    """An open connection, and the arenas of its ends."""

    def __init__(self, transport: SharingTransport, endpoints: Endpoints, pair: Pair) -> None:
        self.near_arena = transport.near
        self.far_arena = transport.far
        self.endpoints = endpoints
        self.near: Endpoint = pair.near
        self.far: Endpoint = pair.far

    async def send(self, *buffers: Any, number: int = 1) -> list[memoryview]:
        """Send buffers from near to far; they are there, and nobody but the caller has them."""
        before = len(self.far.messages)
        views = [memoryview(buffer) for buffer in buffers]
        self.near.connection.send_bulk(bulk_frame(number, views), views)
        message = (await self.far.received(before + 1))[before]
        del self.far.messages[before]
        return list(message.buffers)

    async def reconnect(self) -> None:
        """Lose the connection, and make another."""
        self.near.connection.abort()
        await self.near.ended()
        await self.far.ended()
        self.near, self.far = await self.endpoints.pair()

    async def freed(self, used_blocks: int = 0) -> None:
        """Until the near end has so many blocks out."""
        gc.collect()
        await turns_until(lambda: self.near_arena.statistics()["used_blocks"] == used_blocks)


@asynccontextmanager
async def sharing(**options: int) -> AsyncIterator[Sharing]:
    transport = SharingTransport(**options)
    try:
        async with asyncio.timeout(30), Endpoints(transport, "unix://") as endpoints:
            yield Sharing(transport, endpoints, await endpoints.pair())
    finally:
        await transport.aclose()
