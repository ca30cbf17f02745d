"""Workers that join under a new name, make some calls and leave: the state that others keep of them must be bounded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import arpc
from scripts.soak.ledger import HungCallError
from scripts.soak.operations.base import TIMEOUT_S, Client
from scripts.soak.operations.calls import answer
from scripts.soak.remains import VISITOR

__all__ = ["visit"]

_AT_ONCE: Final = 3
_PAUSE_S: Final = 0.3


async def visit(client: Client, store: str, options: arpc.RpcOptions) -> None:
    """Let workers join and leave, several at a time, until the process receives a signal."""
    numbers = itertools.count()
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(_visit_again_and_again(client, numbers, store, options))


async def _visit_again_and_again(client: Client, numbers: Iterator[int], store: str, options: arpc.RpcOptions) -> None:
    for number in numbers:
        with suppress(arpc.ArpcError, OSError, HungCallError):
            worker = await arpc.init_rpc(f"{VISITOR}{number}", world_size=None, init_method=store, options=options)
            try:
                for info in worker.get_worker_infos():
                    if info.name.startswith("worker"):
                        await _call(client, info.name, number)
            finally:
                # half of them leave without a graceful shutdown
                await arpc.shutdown(graceful=number % 2 == 0)
        await asyncio.sleep(_PAUSE_S)


async def _call(client: Client, to: str, number: int) -> None:
    with suppress(arpc.ArpcError, OSError, HungCallError):
        async with client.call("visitor-call", to) as token:
            got = await client.worker.rpc_sync(to, answer, args=(token, number), timeout=TIMEOUT_S)
        if got != number:
            client.ledger.wrong(f"{got} came back to a visitor instead of {number}")
