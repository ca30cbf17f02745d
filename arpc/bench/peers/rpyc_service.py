"""RPyC: a service in a thread, asynchronous proxies for a window of calls.

A large array is sent in pieces, as RPyC's own ``upload`` does: of one large message, RPyC would copy the rest after
each piece that the socket accepts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rpyc
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.utils.factory import connect_channel
from rpyc.utils.server import ThreadedServer

from arpc.bench import payloads
from arpc.bench.blocking_caller import BlockingCall, BlockingCaller, StartedCall
from arpc.bench.meeting import leave_address, read_address

__all__ = ["Rpyc", "system"]

CHUNK_BYTES = 256_000


class Callee(rpyc.Service):
    """The service that is called."""

    def __init__(self) -> None:
        super().__init__()
        self._array = bytearray()

    def exposed_noop(self) -> None:
        """Do nothing."""

    def exposed_write(self, start: int, content: bytes, size_bytes: int) -> None:
        """Receive a part of an array."""
        if len(self._array) != size_bytes:
            self._array = bytearray(size_bytes)
        self._array[start : start + len(content)] = content


class RpycCaller(BlockingCaller):
    """The measurements, with RPyC's calls."""

    def __init__(self, connection: Any) -> None:
        self._noop = connection.root.noop
        self._write = connection.root.write

    def prepare(self, function: str, payload: str) -> BlockingCall:
        return partial(self._noop)

    def prepare_started(self, function: str, payload: str) -> StartedCall:
        return partial(rpyc.async_(self._noop))

    def prepare_bulk(self, function: str, size_bytes: int) -> BlockingCall:
        content = payloads.bulk_array(size_bytes).data.cast("B")

        def call() -> None:
            for start in range(0, size_bytes, CHUNK_BYTES):
                self._write(start, content[start : start + CHUNK_BYTES].tobytes(), size_bytes)

        return call


class Rpyc:
    """A server and a connection over a unix socket."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        path = str(place / "socket")
        server = ThreadedServer(Callee, socket_path=path)
        thread = threading.Thread(target=server.start, daemon=True)
        thread.start()
        leave_address(place, path)
        yield
        server.close()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[RpycCaller]:
        # Compression, which is on by default, costs far more than it saves between processes of one host.
        channel = Channel(SocketStream.unix_connect(await read_address(place)), compress=False)
        connection = connect_channel(channel, config={"sync_request_timeout": None})
        try:
            yield RpycCaller(connection)
        finally:
            connection.close()


def system() -> Rpyc:
    """Make RPyC, without compression."""
    return Rpyc()
