"""Large results beside small calls: the small ones keep to their timeout."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here

__all__ = ["OPERATIONS"]

_FLOATS: Final = 1 << 20
"""4 MiB in each large result."""
_SMALL_TIMEOUT_S: Final = 5.0


def make_large(token: str, number: float) -> torch.Tensor:
    here().ledger.ran(token)
    return torch.full((_FLOATS,), number)


def add_one(token: str, number: int) -> int:
    here().ledger.ran(token)
    return number + 1


async def _large_and_small(client: Client) -> None:
    """Request many large results from one worker, and make small calls to it until they have arrived."""
    to = client.other()

    async def large(number: float) -> None:
        async with client.call("large-result", to) as token:
            got = await client.worker.rpc_sync(to, make_large, args=(token, number), timeout=2 * TIMEOUT_S)
        assert got.shape == (_FLOATS,), f"a result has the shape {got.shape}"
        assert got[0] == got[-1] == number, "a large result has wrong content"

    tasks = [asyncio.ensure_future(large(float(number))) for number in range(client.random.randrange(4, 16))]
    try:
        number = 0
        while not all(task.done() for task in tasks):
            async with client.call("small-beside-large", to) as token:
                got = await client.worker.rpc_sync(to, add_one, args=(token, number), timeout=_SMALL_TIMEOUT_S)
            assert got == number + 1, f"{got} came back instead of {number + 1}"
            number += 1
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


OPERATIONS = (Operation("large-and-small", _large_and_small, pause_s=3.0),)
