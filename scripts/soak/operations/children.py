"""Handlers that fork: the child may outlive its worker, whose death must be noticed at once nevertheless."""

from __future__ import annotations

import asyncio
import os
import time

from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here

__all__ = ["OPERATIONS"]


async def fork_child(token: str, seconds: float) -> int:
    """Fork a process that does nothing for a while, as the workers of a DataLoader do between batches."""
    client = here()
    client.ledger.ran(token)
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)  # noqa: ASYNC251 - in a process of its own, whose event loop never runs
        os._exit(0)
    client.ledger.forked(pid, seconds)
    reaped = asyncio.create_task(asyncio.to_thread(os.waitpid, pid, 0))
    client.children.add(reaped)
    reaped.add_done_callback(client.children.discard)
    return pid


async def _fork(client: Client) -> None:
    to, seconds = client.other(), client.random.uniform(2.0, 6.0)
    async with client.call("forks-child", to) as token:
        pid = await client.worker.rpc_sync(to, fork_child, args=(token, seconds), timeout=TIMEOUT_S)
    assert pid > 0, f"the child has the pid {pid}"


OPERATIONS = (Operation("forks-child", _fork, pause_s=6.0),)
