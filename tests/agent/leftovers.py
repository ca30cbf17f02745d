"""Proof that nothing is left of any call: every table of every worker, looked at from the inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from arpc import Worker
from arpc.private.asyncio import ENTERS_TASKS
from tests.agent.stage import echo, echo_later


def leftovers(worker: Worker) -> dict[str, object]:
    """What a worker still keeps of calls that were made or are being answered, by where it keeps it."""
    agent = worker.agent
    kept: dict[str, object] = {"calls whose worker is being looked for": len(agent.caller.deferred)}
    for peer in agent.peers:
        kept[f"calls to {peer.info.name}"] = len(peer.calls)
        kept[f"backlog of {peer.info.name}"] = len(peer.backlog)
        kept[f"bytes in flight to {peer.info.name}"] = peer.in_flight_bytes
    for link in agent.connector._links.values():
        caller = link.peer.info.name
        kept[f"handlers for {caller}"] = list(link.running)
        kept[f"requests of {caller} that wait"] = list(link.waiting)
        kept[f"large tensors for {caller}"] = len(link.connection.bulk)
    kept["carriers with a handler"] = agent.dispatcher.tasks.statistics()["handlers_waiting"]
    kept["unfinished jobs of threads"] = agent.dispatcher.threads.statistics()["jobs_unfinished"]
    return {f"{worker.name}: {what}": value for what, value in kept.items() if value}


async def assert_nothing_left(workers: Iterable[Worker], *, within_s: float = 30.0) -> None:
    """All tables of all workers are empty, as soon as messages under way have arrived and threads have ended."""
    workers = list(workers)

    def left() -> dict[str, object]:
        return {key: value for worker in workers for key, value in leftovers(worker).items()}

    await until(lambda: not left(), left, within_s=within_s)


async def until(is_so: Callable[[], bool], tell: Callable[[], object] = str, *, within_s: float = 30.0) -> None:
    """Let the loop turn until something is so; fails with what ``tell`` says if that takes too long."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {within_s} s: {tell()}"
        await asyncio.sleep(0)


async def assert_both_alive(group: Sequence[Worker]) -> None:
    """The first two workers can call each other, now and the next time."""
    for caller, callee in [(0, 1), (1, 0)]:
        for _ in range(2):
            assert await group[caller].rpc_sync(f"worker{callee}", echo, args=("alive",)) == "alive"


async def warm_up(group: Sequence[Worker]) -> None:
    """Let worker1 take the first step of the next handler at once, where it can do that."""
    for _ in range(3):
        await group[0].rpc_sync("worker1", echo_later)
    await until_ready(group[1])


async def until_ready(worker: Worker) -> None:
    """Wait until a worker can take the first step of the next handler at once, if it ever can."""
    await until(lambda: bool(worker.agent.dispatcher.tasks.idle) or not ENTERS_TASKS)
