"""The limits of the machine, in Python: blocking sockets with a minimal protocol, and the memmove of libc.

A request is the size of the array that follows, 0 for an empty call; the reply is one byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from arpc.bench import payloads
from arpc.bench.asyncio_caller import bulk_figures, latency_figures
from arpc.bench.blocking_caller import one_by_one
from arpc.bench.meeting import leave_address, read_address
from arpc.bench.systems import BULK_MINIMUM_CALLS, WARM_UP_SHARE, Measurement, bulk_warm_up_calls

__all__ = ["RawSockets", "system"]

REQUEST = struct.Struct("<Q")  # bytes that follow
ANSWER = b"."


class RawCaller:
    """Measures round trips, transfers, and memory copies without a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        send, receive = self._connection.sendall, self._connection.recv
        request = REQUEST.pack(0)

        def call() -> None:
            send(request)
            receive(1)

        one_by_one(call, budget_s * WARM_UP_SHARE)
        return latency_figures(one_by_one(call, budget_s))

    async def bulk(self, *, function: str, size_bytes: int, budget_s: float) -> Measurement:
        request, content = REQUEST.pack(size_bytes), payloads.bulk_array(size_bytes).data.cast("B")

        def call() -> None:
            self._connection.sendall(request)
            self._connection.sendall(content)
            self._connection.recv(1)

        for _ in range(bulk_warm_up_calls(size_bytes)):
            call()
        return bulk_figures(one_by_one(call, budget_s, minimum=BULK_MINIMUM_CALLS), size_bytes)

    async def memory_copy(self, *, size_bytes: int, pages: str, budget_s: float) -> Measurement:
        """Measure the memmove of libc into memory of this process: the limit of any transfer through memory.

        The `pages` are ``private`` and warm, ``shared`` and warm, or ``fresh``: shared, and never touched before.
        """
        source = payloads.bulk_array(size_bytes).ctypes.data
        if pages == "fresh":
            samples: list[float] = []
            started = time.perf_counter()
            while len(samples) < BULK_MINIMUM_CALLS or time.perf_counter() - started < budget_s:
                with _mapping(size_bytes, shared=True) as target:
                    samples += one_by_one(_copy_into(target, source, size_bytes), 0)
            return bulk_figures(samples, size_bytes)
        with _mapping(size_bytes, shared=pages == "shared") as target:
            copy = _copy_into(target, source, size_bytes)
            copy()
            return bulk_figures(one_by_one(copy, budget_s, minimum=BULK_MINIMUM_CALLS), size_bytes)


def _mapping(size_bytes: int, *, shared: bool) -> mmap.mmap:
    if not shared:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    file = os.memfd_create("bench")
    try:
        os.ftruncate(file, size_bytes)
        return mmap.mmap(file, size_bytes)
    finally:
        os.close(file)


def _copy_into(target: mmap.mmap, source: int, size_bytes: int) -> Callable[[], object]:
    def copy() -> None:
        # The mapping cannot be closed while there is a reference to its memory, so each call makes its own.
        start = ctypes.addressof(ctypes.c_char.from_buffer(target))
        ctypes.memmove(start, source, size_bytes)

    return copy


def _serve(listening: socket.socket) -> None:
    """Serve one caller until it leaves, in a thread of its own: the loop of this process idles meanwhile."""
    with suppress(OSError), listening.accept()[0] as connection:
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receive, send = connection.recv_into, connection.sendall
        head = bytearray(REQUEST.size)
        landing = bytearray()
        while receive(head, REQUEST.size, socket.MSG_WAITALL) == REQUEST.size:
            size_bytes = REQUEST.unpack(head)[0]
            if size_bytes != len(landing) and size_bytes:
                landing = bytearray(size_bytes)
            view, taken = memoryview(landing), 0
            while taken < size_bytes:
                received = receive(view[taken:])
                if not received:
                    return  # the caller left in the middle of an array
                taken += received
            send(ANSWER)


class RawSockets:
    """Two processes and a blocking socket."""

    def __init__(self, transport: Literal["unix", "tcp"]) -> None:
        self._transport = transport

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        if self._transport == "unix":
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(place / "socket"))
        else:
            listening = socket.socket(socket.AF_INET)
            listening.bind(("127.0.0.1", 0))
        with listening:
            listening.listen()
            thread = threading.Thread(target=_serve, args=(listening,))
            thread.start()
            leave_address(place, str(listening.getsockname()[1]) if self._transport == "tcp" else "")
            yield
            listening.shutdown(socket.SHUT_RDWR)  # if no caller has connected, `accept` ends here
            thread.join()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[RawCaller]:
        address = await read_address(place)
        if address:
            connection = socket.create_connection(("127.0.0.1", int(address)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(place / "socket"))
        with connection:
            yield RawCaller(connection)


def system(transport: Literal["unix", "tcp"]) -> RawSockets:
    """Make blocking sockets of one kind, on loopback."""
    return RawSockets(transport)
