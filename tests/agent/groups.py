"""What the tests of the rendezvous share: several workers of one group in one loop, and stores that can be watched."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from torch.distributed import HashStore, Store

from arpc.group.rendezvous import MakeRecord, Rendezvous, WorkerRecord, create_rendezvous, open_store


def recorder(name: str) -> MakeRecord:
    """Makes the record of a worker that has just started."""

    def make_record(worker_id: int) -> WorkerRecord:
        return WorkerRecord(name, worker_id, secrets.randbits(63), (f"memory://{name}",), "machine", "script")

    return make_record


def store_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "arpc-store"}


async def until(happened: Callable[[], object]) -> None:
    """Wait for something that nobody announces."""
    while not happened():  # noqa: ASYNC110 - what happens in a store has no event
        await asyncio.sleep(0.001)


class Crew:
    """Makes workers, and closes them when the test is over, whatever became of them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def rendezvous(self, **where: Any) -> Rendezvous:
        rendezvous = create_rendezvous(await open_store(**where))
        self._stack.push_async_callback(rendezvous.aclose)
        return rendezvous

    async def join(self, name: str, *, timeout_s: float = 20.0, probe: Any = None, **where: Any) -> Rendezvous:
        rendezvous = await self.rendezvous(**where)
        await rendezvous.join(name, recorder(name), timeout_s=timeout_s, probe=probe)
        return rendezvous


@asynccontextmanager
async def crew() -> AsyncIterator[Crew]:
    before = store_threads()
    async with AsyncExitStack() as stack:
        yield Crew(stack)
    assert store_threads() <= before, "a store's thread outlives its rendezvous"


class CountingStore(Store):
    """A HashStore that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.store = HashStore()
        self.counts: Counter[str] = Counter()
        self.peeks: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["multi_get"] += 1
        self.counts["values in multi_get"] += len(keys)
        return self.store.multi_get(keys)

    def add(self, key: str, amount: int) -> int:
        self.counts["add"] += 1
        return self.store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if expected == desired:
            self.counts["peek"] += 1
            self.peeks[key] += 1
        else:
            self.counts["compare_set"] += 1
        return self.store.compare_set(key, expected, desired)
