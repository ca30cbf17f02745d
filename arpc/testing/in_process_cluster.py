"""A group of workers in this process and on this loop: no sockets, no ports, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import overload

from torch.distributed import HashStore  # type: ignore[attr-defined]

from arpc.agent.scope import WorkerScope, current_scope
from arpc.errors import ConfigurationError
from arpc.options import RpcOptions
from arpc.runtime import Worker
from arpc.startup import start_worker
from arpc.transport.contract import Transport
from arpc.transport.in_process import MemoryNetwork

__all__ = ["Cluster", "cluster"]


class Cluster(Sequence[Worker]):
    """The workers of a group, by number or by name."""

    def __init__(self, options: RpcOptions, transports: Mapping[str, Transport] | None, *, elastic: bool) -> None:
        self.store = HashStore()
        self.network = MemoryNetwork()
        self._options = options
        self._transports = transports
        self._elastic = elastic
        self._workers: list[Worker] = []

    @overload
    def __getitem__(self, which: str | int) -> Worker: ...
    @overload
    def __getitem__(self, which: slice) -> list[Worker]: ...
    def __getitem__(self, which: str | int | slice) -> Worker | list[Worker]:
        if isinstance(which, str):
            for worker in self._workers:
                if worker.name == which:
                    return worker
            raise KeyError(which)
        return self._workers[which]

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    async def start(self, names: Sequence[str]) -> None:
        """Start the workers of a group of fixed size, or some more of an elastic one."""
        size = None if self._elastic else len(names)
        tasks: list[asyncio.Task[Worker]] = []
        try:
            # each in a task, and so in a context, of its own: every context has one worker
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._start(name, rank, size)) for rank, name in enumerate(names)]
        except BaseException:
            started = [task.result() for task in tasks if not (task.cancelled() or task.exception())]
            await asyncio.gather(*(worker.shutdown(graceful=False) for worker in started))
            raise
        self._workers.extend(task.result() for task in tasks)

    async def add(self, name: str) -> Worker:
        """Start one more worker in an elastic group; raise `ConfigurationError` if it is not elastic."""
        if not self._elastic:
            raise ConfigurationError("only an elastic cluster takes more workers: cluster(..., elastic=True)")
        await self.start([name])
        return self._workers[-1]

    async def _start(self, name: str, rank: int, size: int | None) -> Worker:
        current_scope.set(None)
        return await start_worker(
            name,
            rank=None if size is None else rank,
            world_size=size,
            init_method="",
            store=self.store,
            options=self._options,
            network=self.network,
            transports=self._transports,
        )

    async def shutdown(self, *, graceful: bool = True) -> None:
        """Shut all workers down at once."""
        alive = [worker for worker in self._workers if not worker.is_shut_down]
        results = await asyncio.gather(*(worker.shutdown(graceful) for worker in alive), return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors and graceful:
            raise ExceptionGroup("workers did not shut down gracefully", errors)


@asynccontextmanager
async def cluster(
    workers: int | Sequence[str] = 2,
    *,
    options: RpcOptions | None = None,
    transports: Mapping[str, Transport] | None = None,
    elastic: bool = False,
) -> AsyncIterator[Cluster]:
    """Run a group of workers in this process, named ``worker0``, ``worker1`` and so on, or as given.

    ::

        async with arpc.testing.cluster(3) as group:
            assert await group[0].rpc_sync("worker1", add, args=(1, 2)) == 3

    Inside, the first worker is the current one, so that ``arpc.rpc_sync("worker1", ...)`` works too. ``transports``
    replaces the network, for example by a `FaultyTransport`.
    """
    names = [f"worker{number}" for number in range(workers)] if isinstance(workers, int) else list(workers)
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"a cluster needs at least one worker, and names that differ, not {names}")
    group = Cluster(options or RpcOptions(gc_freeze=False, gc_backoff=1), transports, elastic=elastic)
    await group.start(names)
    before, scope = current_scope.get(), WorkerScope(group[0])
    current_scope.set(scope)
    try:
        yield group
    except BaseException:
        await group.shutdown(graceful=False)
        raise
    else:
        await group.shutdown()
    finally:
        if current_scope.get() is scope:  # a notebook exits in another cell, and so in another context
            current_scope.set(before)
