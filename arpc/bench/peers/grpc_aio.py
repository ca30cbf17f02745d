"""grpc.aio: unary methods without protobuf, which would only add to its cost; tensors are sent as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from arpc.bench.meeting import leave_address, read_address
from arpc.bench.peers.caller import PeerCaller

__all__ = ["GrpcAio", "system"]

SERVICE = "bench.Callee"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def noop(_request: bytes, _context: Any) -> bytes:
    """Do nothing."""
    return b""


async def drop(request: bytes, _context: Any) -> bytes:
    """Receive an array, which uses the bytes without a copy."""
    np.frombuffer(request, dtype=np.float32)
    return b""


class GrpcAio:
    """A server and a channel over a unix socket."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        server = grpc.aio.server(options=UNLIMITED)
        methods = {one.__name__: grpc.unary_unary_rpc_method_handler(one) for one in (noop, drop)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        address = f"unix:{place}/socket"
        server.add_insecure_port(address)
        await server.start()
        leave_address(place, address)
        try:
            yield
        finally:
            await server.stop(0)

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[PeerCaller]:
        async with grpc.aio.insecure_channel(await read_address(place), options=UNLIMITED) as channel:
            call_noop, call_drop = (channel.unary_unary(f"/{SERVICE}/{one.__name__}") for one in (noop, drop))
            yield PeerCaller(lambda: call_noop(b""), lambda array: call_drop(array.tobytes()))


def system() -> GrpcAio:
    """Make gRPC with its defaults, except for the limits that 64 MB would exceed."""
    return GrpcAio()
