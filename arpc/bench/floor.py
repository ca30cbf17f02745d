"""The floor: the cost of two processes and a socket in Python, without any feature.

A length-prefixed protocol on uvloop with C pickle, a dict from call id to Future on one side and a dict from name to
function on the other. The function is called at once, in the read callback; every message is one ``write``. There are
no deadlines, no cancellation, no exceptions and no tensors: arrays are numpy's, which C pickle handles well. A large
one is sent raw after its message, and is read into memory that is reused as soon as there is no reference to it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import uvloop

from arpc.bench import payloads
from arpc.bench.asyncio_caller import AsyncioCaller, Call, latency_figures
from arpc.bench.crowd import crowd
from arpc.bench.functions import FUNCTIONS
from arpc.bench.meeting import leave_address, read_address
from arpc.bench.shapes import BY_NAME, Shape
from arpc.bench.systems import WARM_UP_SHARE, Measurement

__all__ = ["Floor", "system"]

Array = np.ndarray[Any, Any]

HEADER = struct.Struct("<IIQ")  # bytes of the pickle, call id, bytes of the raw array after it
HEADER_BYTES = HEADER.size
RECEIVE_BYTES = 256 * 1024


_SHAPES: Final[Mapping[str, Callable[..., object]]] = {
    name: shape.called("def")().add if shape.use == "method" else shape.called("def")
    for name, shape in BY_NAME.items()
    if shape.has_floor
}
"""The function that is called for each shape; for a method, that of a single object."""


class Messages(asyncio.BufferedProtocol):
    """Turns bytes into messages, on both sides."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, which does not inherit asyncio's
        self._write = self._transport.write
        self._received = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._received)
        self._end = 0
        self._landing: memoryview | None = None  # where the rest of a raw array goes
        self._array: Array = np.empty(0, np.uint8)
        self._head: tuple[int, Any] = (0, None)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._landing is not None:
            return self._landing
        return self._view[self._end :] if self._end else self._view

    def buffer_updated(self, nbytes: int) -> None:
        if self._landing is not None:
            self._landing = self._landing[nbytes:]
            if not self._landing:
                self._landing = None
                self.message(*self._head, self._array)
            return
        start, end = 0, self._end + nbytes
        received, view = self._received, self._view
        while end - start >= HEADER_BYTES:
            body_bytes, call_id, raw_bytes = HEADER.unpack_from(received, start)
            body_end = start + HEADER_BYTES + body_bytes
            if body_end > end:
                break
            content = pickle.loads(view[start + HEADER_BYTES : body_end])
            start = body_end
            if raw_bytes:
                start += self._land(raw_bytes, call_id, content, view[start:end])
            else:
                self.message(call_id, content, None)
        if start and start < end:
            received[: end - start] = received[start:end]
        self._end = end - start

    def _land(self, raw_bytes: int, call_id: int, content: object, received: memoryview) -> int:
        """Prepare memory for a raw array, and copy the bytes that have arrived already; return their number."""
        # 2: the attribute and getrefcount's own argument. With any more references the array is still in use.
        if self._array.nbytes != raw_bytes or sys.getrefcount(self._array) > 2:
            self._array = np.empty(raw_bytes, np.uint8)
        landing = self._array.data
        taken = min(len(received), raw_bytes)
        landing[:taken] = received[:taken]
        if taken == raw_bytes:
            self.message(call_id, content, self._array)
        else:
            self._landing, self._head = landing[taken:], (call_id, content)
        return taken

    def send(self, call_id: int, content: object, array: Array | None = None) -> None:
        body = pickle.dumps(content, 5)
        if array is None:
            self._write(HEADER.pack(len(body), call_id, 0) + body)
        else:
            self._transport.writelines([HEADER.pack(len(body), call_id, array.nbytes) + body, array.data.cast("B")])

    def message(self, call_id: int, content: Any, array: Array | None) -> None:
        raise NotImplementedError


class Server(Messages):
    """Calls the function at once and replies."""

    def message(self, call_id: int, content: Any, array: Array | None) -> None:
        name, arguments = content
        if array is None and name in _SHAPES:
            positional, keywords = arguments
            self.send(call_id, _SHAPES[name](*positional, **keywords))
        elif array is None:
            self.send(call_id, FUNCTIONS["def"][name](*arguments))
        else:
            result = FUNCTIONS["def"][name](array)
            self.send(call_id, None, result if isinstance(result, np.ndarray) else None)


class Client(Messages):
    """Numbers calls, and passes replies to their Futures."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._ids = itertools.count()
        self._create_future = asyncio.get_running_loop().create_future

    def call(self, name: str, arguments: tuple[object, ...], array: Array | None = None) -> asyncio.Future[object]:
        call_id = next(self._ids)
        future = self._pending[call_id] = self._create_future()
        self.send(call_id, (name, arguments), array)
        return future

    def message(self, call_id: int, content: Any, array: Array | None) -> None:
        self._pending.pop(call_id).set_result(content if array is None else array)


class FloorCaller(AsyncioCaller):
    """The measurements, with the floor's calls."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients
        self._client = clients[0]

    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        return partial(self._client.call, function, payloads.array_arguments(payload))

    prepare_started = prepare

    async def shape(self, *, name: str, flavour: str, budget_s: float) -> Measurement:
        """Measure one call with the payload of a shape after another: ``p50_us``. Tensors are sent as numpy arrays."""
        shape = BY_NAME[name]
        call = partial(self._client.call, name, floor_arguments(shape), None)
        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        return latency_figures(await self._one_by_one(call, budget_s))

    def prepare_to(self, peer: int) -> Call:
        return partial(self._clients[peer].call, "noop", ())

    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        return partial(self._client.call, function, (), payloads.bulk_array(size_bytes))


class Floor:
    """The floor over one kind of socket."""

    def __init__(self, transport: Literal["unix", "tcp"], peers: int) -> None:
        self._transport = transport
        self._peers = peers

    def run(self, main: Coroutine[object, object, None]) -> None:
        uvloop.run(main)

    def _other_sockets(self) -> list[str]:
        return [f"socket{peer}" for peer in range(1, self._peers)]

    @contextmanager
    def others(self, place: Path) -> Iterator[None]:
        with crowd(_run_member, [(place, name) for name in self._other_sockets()]):
            yield

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        if self._transport == "unix":
            server = await loop.create_unix_server(Server, str(place / "socket"))
            address = "unix"
        else:
            server = await loop.create_server(Server, "127.0.0.1", 0)
            address = str(server.sockets[0].getsockname()[1])
        freeze_imports()
        for name in self._other_sockets():
            await read_address(place, f"{name}.ready")
        leave_address(place, address)
        try:
            yield
        finally:
            server.close()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[FloorCaller]:
        loop = asyncio.get_running_loop()
        address = await read_address(place)
        if address == "unix":
            names = ["socket", *self._other_sockets()]
            made = [await loop.create_unix_connection(Client, str(place / name)) for name in names]
        else:
            made = [await loop.create_connection(Client, "127.0.0.1", int(address))]
        freeze_imports()
        try:
            yield FloorCaller([client for _, client in made])
        finally:
            for transport, _ in made:
                transport.close()


def _run_member(stay: Callable[[], None], place: Path, name: str) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Server, str(place / name))
        freeze_imports()
        leave_address(place, "", f"{name}.ready")
        await asyncio.to_thread(stay)
        server.close()

    uvloop.run(serve())


def floor_arguments(shape: Shape) -> tuple[object, ...]:
    """Return positional and keyword arguments of a shape, with a numpy array for each tensor."""
    return _as_arrays(shape.arguments()), dict(shape.keywords)


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_arrays(item) for item in value)
    return value.numpy() if hasattr(value, "numpy") else value


def freeze_imports() -> None:
    """Exclude imported objects from garbage collection, as arpc does: this process has imported all of torch too."""
    gc.collect()
    gc.freeze()


def system(transport: Literal["unix", "tcp"], peers: int = 1) -> Floor:
    """Make the floor over unix sockets or TCP on loopback; several callees only with unix sockets."""
    return Floor(transport, peers)
