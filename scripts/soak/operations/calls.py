"""Single calls: of each kind of handler, with tensors, cancelled, with short timeouts, many at once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import torch

import arpc
from scripts.soak.operations.base import HANG_S, TIMEOUT_S, Client, Operation, here

__all__ = ["OPERATIONS", "answer"]


async def answer(token: str, value: Any) -> Any:
    """Return the value."""
    here().ledger.ran(token)
    return value


def answer_in_thread(token: str, value: Any) -> Any:
    here().ledger.ran(token)
    return value


@arpc.inline
def answer_inline(token: str, value: Any) -> Any:
    here().ledger.ran(token)
    return value


async def answer_late(token: str, seconds: float) -> float:
    here().ledger.ran(token)
    await asyncio.sleep(seconds)
    return seconds


async def _call(client: Client) -> None:
    to, number = client.other(), client.random.randrange(1000)
    function = client.random.choice((answer, answer_in_thread, answer_inline))
    async with client.call("call", to) as token:
        got = await client.worker.rpc_sync(to, function, args=(token, number), timeout=TIMEOUT_S)
    assert got == number, f"{got} came back instead of {number}"


async def _call_tensor(client: Client) -> None:
    to = client.other()
    value = torch.full((client.random.choice((10, 20_000, 300_000)),), float(client.random.randrange(100)))
    async with client.call("call-tensor", to) as token:
        got = await client.worker.rpc_sync(to, answer, args=(token, value), timeout=TIMEOUT_S)
    assert torch.equal(got, value), "another tensor came back"


async def _call_cancelled(client: Client) -> None:
    to = client.other()
    async with client.call("call-cancelled", to) as token:
        call = asyncio.ensure_future(client.worker.rpc_sync(to, answer_late, args=(token, 0.05)))
        try:
            await asyncio.wait([call], timeout=0.06 * client.random.random())
        finally:
            call.cancel()
            await asyncio.wait([call])
        if call.cancelled():
            raise arpc.CallCancelledError("by its caller")
        call.result()


async def _call_long(client: Client) -> None:
    """Wait for a handler that takes seconds: it is in flight when its worker dies."""
    to, seconds = client.other(), client.random.uniform(0.5, 3.0)
    async with client.call("call-long", to) as token:
        await client.worker.rpc_sync(to, answer_late, args=(token, seconds), timeout=TIMEOUT_S)


async def _call_short(client: Client) -> None:
    to = client.other()
    timeout_s = 0.01 + 0.1 * client.random.random()
    async with client.call("call-short", to) as token:
        await client.worker.rpc_sync(to, answer_late, args=(token, 0.05), timeout=timeout_s)


async def _collect_all(client: Client) -> None:
    """Make several calls at once, some of them to the same worker, and wait for all of them together."""
    names = [client.other() for _ in range(client.random.randrange(2, 8))]
    tokens = [client.ledger.begin("call-collected", to) for to in names]
    futures = [
        client.worker.rpc_async(to, answer, args=(token, number), timeout=TIMEOUT_S)
        for number, (to, token) in enumerate(zip(names, tokens, strict=True))
    ]
    for token, future in zip(tokens, futures, strict=True):
        future.add_done_callback(partial(client.log_end, token))
    async with asyncio.timeout(HANG_S):
        ended = await arpc.futures.collect_all(futures)
    for number, future in enumerate(ended):
        if future.exception() is None:
            assert future.result() == number, f"{future.result()} came back instead of {number}"


OPERATIONS = (
    Operation("call", _call, pause_s=0.03),
    Operation("call-tensor", _call_tensor),
    Operation("call-cancelled", _call_cancelled),
    Operation("call-short", _call_short),
    Operation("call-long", _call_long),
    Operation("call-collected", _collect_all),
)
