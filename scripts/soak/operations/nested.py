"""Chains of calls, a -> b -> c -> d: results and errors pass through the handlers in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import arpc
from scripts.soak.operations.base import HANG_S, TIMEOUT_S, Client, DeliberateError, Operation, here, raises

__all__ = ["OPERATIONS"]


async def pass_along(token: str, path: list[str], number: int, fails: bool) -> int:
    """Call the next worker of the path. The last one returns the number, or raises."""
    client = here()
    client.ledger.ran(token)
    if path:
        to, *rest = path
        async with client.call("nested-inner", to, *rest, depth=3 - len(rest)) as inner:
            result: int = await client.worker.rpc_sync(to, _relay(client), args=(inner, rest, number, fails))
        return result
    if fails:
        raise DeliberateError(f"asked to fail with {number}")
    return number


def pass_along_in_thread(token: str, path: list[str], number: int, fails: bool) -> int:
    """Do what `pass_along` does, in a thread that waits for the call."""
    client = here()
    ledger = client.ledger
    ledger.ran(token)
    if path:
        to, *rest = path
        inner = ledger.begin("nested-in-thread", to, tuple(rest))
        try:
            call = arpc.rpc_async(to, _relay(client), args=(inner, rest, number, fails))
            result: int = call.wait(HANG_S)
        except BaseException as error:
            ledger.end(inner, error)
            raise
        ledger.end(inner, None)
        return result
    if fails:
        raise DeliberateError(f"asked to fail with {number}")
    return number


def _relay(client: Client) -> Callable[..., Any]:
    return pass_along if client.random.random() < 0.7 else pass_along_in_thread


async def _chain(client: Client) -> None:
    to, *rest = client.path(3)
    number, fails = client.random.randrange(1000), client.random.random() < 0.25
    async with client.call("nested-outer", to, *rest) as token:
        call = client.worker.rpc_sync(to, _relay(client), args=(token, rest, number, fails), timeout=TIMEOUT_S)
        if fails:
            await raises(call, DeliberateError)
            return
        got = await call
    assert got == number, f"{got} came through the chain instead of {number}"


@arpc.functions.async_execution
def ask_another(token: str, third: str, number: int) -> arpc.Future[int]:
    """Return the future of a call to a third worker."""
    client = here()
    client.ledger.ran(token)
    inner = client.ledger.begin("nested-inner", third)
    call: arpc.Future[int] = client.worker.rpc_async(third, pass_along, args=(inner, [], number, False))
    # this is a thread, and callbacks are added on the loop
    call.get_loop().call_soon_threadsafe(call.add_done_callback, partial(client.log_end, inner))
    return call


async def _async_execution(client: Client) -> None:
    to, third = client.path(2)
    number = client.random.randrange(1000)
    async with client.call("async-execution", to, third) as token:
        got = await client.worker.rpc_sync(to, ask_another, args=(token, third, number), timeout=TIMEOUT_S)
    assert got == number, f"{got} came back instead of {number}"


OPERATIONS = (Operation("nested", _chain), Operation("async-execution", _async_execution))
