"""Functions of `arpc.batched`: some callers of a batch get an error, or all of them do, or are cancelled."""

from __future__ import annotations

import asyncio

import arpc
from scripts.soak.operations.base import TIMEOUT_S, Client, DeliberateError, Operation, here, raises

__all__ = ["OPERATIONS"]


def _squares(tokens: list[str], numbers: list[int]) -> list[int | Exception]:
    for token in tokens:
        here().ledger.ran(token)
    return [number**2 if number >= 0 else DeliberateError(f"{number} is negative") for number in numbers]


@arpc.batched(max_size=8, max_wait_ms=4)
async def square(tokens: list[str], numbers: list[int]) -> list[int | Exception]:
    """Square each number; callers with a negative one get an error."""
    await asyncio.sleep(0.002)
    return _squares(tokens, numbers)


@arpc.batched(max_size=8, max_wait_ms=4, max_concurrent=2)
def square_in_thread(tokens: list[str], numbers: list[int]) -> list[int | Exception]:
    """Do what `square` does, in a thread."""
    return _squares(tokens, numbers)


@arpc.batched(max_size=8, max_wait_ms=4)
async def refuse(tokens: list[str], numbers: list[int]) -> list[int]:
    """Raise for the whole batch."""
    for token in tokens:
        here().ledger.ran(token)
    raise DeliberateError(f"asked to refuse {len(numbers)} calls")


async def _batched(client: Client) -> None:
    to = client.other()
    number = client.random.randrange(-20, 100)
    function = client.random.choice((square, square_in_thread))
    async with client.call("batched", to) as token:
        call = client.worker.rpc_sync(to, function, args=(token, number), timeout=TIMEOUT_S)
        if number < 0:
            await raises(call, DeliberateError)
            return
        got = await call
    assert got == number**2, f"{got} came back for the square of {number}"


async def _batched_together(client: Client) -> None:
    """Make calls that are likely to be in one batch, of which one is cancelled."""
    to = client.other()
    numbers = [client.random.randrange(100) for _ in range(4)]

    async def one(number: int) -> None:
        async with client.call("batched-together", to) as token:
            got = await client.worker.rpc_sync(to, square, args=(token, number), timeout=TIMEOUT_S)
        assert got == number**2, f"{got} came back for the square of {number}"

    tasks = [asyncio.ensure_future(one(number)) for number in numbers]
    try:
        await asyncio.sleep(0.004 * client.random.random())
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    for result in results:
        if isinstance(result, AssertionError):
            raise result


async def _batched_refused(client: Client) -> None:
    to = client.other()
    async with client.call("batched-refused", to) as token:
        await raises(client.worker.rpc_sync(to, refuse, args=(token, 1), timeout=TIMEOUT_S), DeliberateError)


OPERATIONS = (
    Operation("batched", _batched),
    Operation("batched-together", _batched_together),
    Operation("batched-refused", _batched_refused),
)
