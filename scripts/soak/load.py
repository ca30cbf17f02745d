"""The load of one worker: tasks that run operations again and again until they are stopped."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import arpc
from scripts.soak.ledger import HungCallError
from scripts.soak.operations import operations_of
from scripts.soak.operations.base import Client, Operation

__all__ = ["Load"]

_TICK_S: Final = 0.1
_STALL_S: Final = 0.5
"""A delay of the event loop by more than this is logged: calls that waited for it may fail, or be slow."""


class Load:
    """Runs the operations of some families."""

    def __init__(self, client: Client, families: tuple[str, ...]) -> None:
        self._client = client
        self._operations = operations_of(families)
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._is_over = False

    def start(self, each: int) -> None:
        """Begin, with `each` tasks for each operation."""
        self._watchers = [asyncio.create_task(self._follow_members()), asyncio.create_task(self._watch_loop())]
        self._tasks = [
            asyncio.create_task(self._repeat(operation)) for operation in self._operations for _ in range(each)
        ]

    async def stop(self) -> None:
        """Begin no new operation, and wait until all that were begun have ended, forked children included."""
        self._is_over = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._client.children, return_exceptions=True)
        for watcher in self._watchers:
            watcher.cancel()

    def cancel(self) -> None:
        """End at once."""
        self._is_over = True
        for task in [*self._tasks, *self._watchers]:
            task.cancel()

    async def _follow_members(self) -> None:
        """Keep the names that may be called: workers that left are removed, workers that were lost stay."""
        async for event in self._client.worker.membership():
            name = event.worker.name
            if isinstance(event, arpc.MemberLeft):
                self._client.others.discard(name)
            elif name.startswith("worker"):
                self._client.others.add(name)

    async def _watch_loop(self) -> None:
        while True:
            begin, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(_TICK_S)
            end = time.monotonic()
            if end - begin > _TICK_S + _STALL_S:
                self._client.ledger.stalled(begin, end, time.process_time() - cpu)

    async def _repeat(self, operation: Operation) -> None:
        client = self._client
        while not self._is_over:
            await asyncio.sleep(2 * operation.pause_s * client.random.random())
            if not client.others:
                continue
            try:
                await operation.run(client)
            except (arpc.ArpcError, OSError, HungCallError):
                pass  # the event log has it
            except Exception as error:  # noqa: BLE001 - any other error is a wrong result
                client.ledger.wrong(f"{client.ledger.process} in {operation.name}: {_text(error)}")


def _text(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - some of the soak's own errors cannot be formatted
        return type(error).__name__
