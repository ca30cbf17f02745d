"""arpc, through its public surface alone and with its defaults, as a user would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import arpc
from scripts.bench import payloads
from scripts.bench.asyncio_caller import AsyncioCaller, Call
from scripts.bench.functions import FUNCTIONS, Flavour

__all__ = ["Arpc", "system"]

CALLEE = "callee"


class ArpcCaller(AsyncioCaller):
    """The measurements, with arpc's calls."""

    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        called = FUNCTIONS[cast("Flavour", flavour)][function]
        return partial(arpc.rpc_sync, CALLEE, called, payloads.tensor_arguments(payload))

    def prepare_started(self, function: str, flavour: str, payload: str) -> Call:
        called = FUNCTIONS[cast("Flavour", flavour)][function]
        return partial(arpc.rpc_async, CALLEE, called, payloads.tensor_arguments(payload))

    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        return partial(arpc.rpc_sync, CALLEE, FUNCTIONS["async"][function], (payloads.bulk_tensor(size_bytes),))


class Arpc:
    """Two workers that meet through a file store."""

    def __init__(self, listen: str) -> None:
        self._options = arpc.RpcOptions(listen=(listen,))

    def run(self, main: Coroutine[object, object, None]) -> None:
        arpc.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        async with self._worker(CALLEE, 1, place):
            yield

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[ArpcCaller]:
        async with self._worker("caller", 0, place):
            yield ArpcCaller()

    def _worker(self, name: str, rank: int, place: Path) -> AbstractAsyncContextManager[object]:
        return arpc.init_rpc(
            name, rank=rank, world_size=2, init_method=f"file://{place}/rendezvous", options=self._options
        )


def system(listen: str) -> Arpc:
    """Arpc whose workers listen at the address `listen`."""
    return Arpc(listen)
