"""What the tests call on workers in other processes, and what these run."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import torch

import arpc
from arpc.runtime import current
from tests.integration.processes import Start

leaving = asyncio.Event()
events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
happenings: Counter[str] = Counter()


async def serve(start: Start, tell: Callable[[Any], None]) -> None:
    """Be a worker until somebody calls `leave`."""
    async with start.join() as worker:
        tell(worker.id)
        await leaving.wait()
    tell("left")


async def shut_down_at_once(start: Start, tell: Callable[[Any], None]) -> None:
    """Have nothing to do, but be there for the others until they have nothing to do either."""
    worker = await start.join()
    tell("shutting down")
    await worker.shutdown()
    tell("shut down")


async def tell_error(start: Start, tell: Callable[[Any], None]) -> None:
    """Fail to join, and tell why."""
    try:
        await start.join()
    except arpc.ArpcError as error:
        tell((type(error).__name__, str(error)))


async def join_three_times(start: Start, tell: Callable[[Any], None]) -> None:
    """Be in three groups, one after the other."""
    for number in range(3):
        async with replace(start, init_method=f"{start.init_method}-{number}").join():
            pass
        tell(number)


async def leave() -> None:
    leaving.set()


async def where() -> tuple[str, int]:
    """Which worker, in which process."""
    return arpc.get_worker_info().name, os.getpid()


async def echo(value: Any) -> Any:
    return value


def plain_echo(value: Any) -> Any:
    return value


kept: list[Any] = []


async def keep(value: Any) -> None:
    kept.append(value)


async def forget() -> None:
    kept.clear()


async def total_kept() -> float:
    return float(sum(tensor.sum() for tensor in kept))


async def fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


async def send_and_keep(to: str, count: int) -> None:
    """Have another worker keep some tensors of this one."""
    for number in range(count):
        await arpc.rpc_sync(to, keep, args=(torch.full((1 << 20,), float(number)),))


async def relay(names: list[str], value: Any) -> tuple[list[str], Any]:
    """Pass a value on along the names; who was there, and what came back."""
    name = arpc.get_worker_info().name
    if not names:
        return [name], value
    there, value = await arpc.rpc_sync(names[0], relay, args=(names[1:], value))
    return [name, *there], value


def note(what: str) -> None:
    happenings[what] += 1
    events[what].set()


async def wait_for(what: str) -> int:
    """Return once it has happened in this process."""
    await events[what].wait()
    return happenings[what]


async def hang(names: list[str]) -> None:
    """Call on along the names; the last one waits for ever. Each notes when it starts and when it is cancelled."""
    note("started")
    try:
        if names:
            await arpc.rpc_sync(names[0], hang, args=(names[1:],), timeout=0)
        else:
            await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        note("cancelled")
        raise


async def call_and_tell(name: str, function: Callable[..., Any]) -> None:
    await arpc.rpc_sync(name, function, args=([],), timeout=0)


async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


async def hang_up_on(name: str) -> None:
    """Break the connection to a worker, as a bad network would."""
    peer = current().agent.known_peer(name)
    if peer.connection is not None:
        connection = peer.connection
        connection.abort()
        await connection.wait_closed()


async def connections() -> dict[str, str]:
    """The address of each open connection, by the name of the worker at its other end."""
    return {connection.peer.name: connection.address for connection in current().agent.connector.open_connections()}


async def statistics() -> dict[str, Any]:
    return current().statistics()


def block_until(file: str) -> None:
    """What a coroutine must not do: keep the loop from running until a file is there."""
    while not os.path.exists(file):  # noqa: PTH110 - as little as can be while it blocks
        time.sleep(0.005)


async def block_loop(file: str) -> None:
    block_until(file)


async def make_tensor(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)


async def ask_for_much_and_block(name: str, calls: int, size_bytes: int, file: str) -> int:
    """Have many large replies sent here, and read few of them before a file is there; how many bytes came."""
    futures = [arpc.rpc_async(name, make_tensor, args=(size_bytes,)) for _ in range(calls)]
    await futures[0]  # they are under way
    block_until(file)
    return sum([(await future).numel() for future in futures])


async def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def receive(_: torch.Tensor) -> None:
    """Take a tensor, and let go of it."""


async def send(name: str, size_bytes: int) -> int:
    """Send a large tensor to another worker; how many bytes the peak of this process's memory has grown by."""
    tensor = await make_tensor(size_bytes)
    before = await peak_memory_bytes()
    await arpc.rpc_sync(name, receive, args=(tensor,))
    return await peak_memory_bytes() - before


async def count_up() -> AsyncIterator[int]:
    """Items without end."""
    number = 0
    try:
        while True:
            yield number
            number += 1
    finally:
        note("stream closed")


async def consume(name: str) -> None:
    """Take items from another worker without end."""
    async for _ in arpc.stream(name, count_up, timeout=0):
        note("item")
        await asyncio.sleep(0.001)


def shout(text: str) -> str:
    return text.upper()
