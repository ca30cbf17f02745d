"""The drop-in for torch.distributed.rpc: blocking calls on arpc, measured as torch's own are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from arpc.bench.blocking_caller import RpcCaller
from arpc.bench.systems import CALLEE
from arpc.compat import rpc

__all__ = ["DropInRpc", "system"]


class DropInCaller(RpcCaller):
    """The measurements with calls of the drop-in."""


class DropInRpc:
    """Two drop-ins that meet through a file store."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        _start_worker(CALLEE, 1, place)
        yield
        rpc.shutdown()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[DropInCaller]:
        _start_worker("caller", 0, place)
        yield DropInCaller(rpc)
        rpc.shutdown()


def _start_worker(name: str, rank: int, place: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/rendezvous")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def system() -> DropInRpc:
    """Make the drop-in with its defaults."""
    return DropInRpc()
