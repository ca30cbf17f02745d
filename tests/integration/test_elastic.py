"""Groups without a size: workers come, leave, crash, and come back under their names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from torch.distributed import TCPStore

import arpc
from tests.integration import functions
from tests.integration.processes import QUICK, Processes, Start, WorkerProcess


class Elastic:
    """An elastic group that this test is in, and processes join."""

    def __init__(self, processes: Processes, worker: arpc.Worker, init_method: str) -> None:
        self.worker = worker
        self._processes = processes
        self._init_method = init_method

    async def join(self, name: str) -> int:
        """Start a process; its id in the group."""
        return await self.start(name).told()

    def start(self, name: str, main=functions.serve) -> WorkerProcess:
        return self._processes.start(Start(name, self._init_method), main)

    async def call(self, name: str, function, *args):
        return await self.worker.rpc_sync(name, function, args=args, timeout=10)


@asynccontextmanager
async def elastic(processes: Processes, kind: str) -> AsyncIterator[Elastic]:
    if kind == "tcp":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        init_method = f"tcp://127.0.0.1:{store.port}"
        start = arpc.init_rpc("test", world_size=None, store=store, options=QUICK)
    else:
        init_method = processes.init_method
        start = arpc.init_rpc("test", world_size=None, init_method=init_method, options=QUICK)
    worker = await start
    try:
        yield Elastic(processes, worker, init_method)
    finally:
        await worker.shutdown(graceful=False)


@pytest.mark.parametrize("kind", ["file", "tcp"])
async def test_workers_come_and_go(processes: Processes, kind: str):
    async with elastic(processes, kind) as group:
        with pytest.raises(arpc.UnknownWorkerError, match="'a'"):
            await group.call("a", functions.where)
        first = await group.join("a")
        assert await group.call("a", functions.where) == ("a", processes["a"].pid)
        second = await group.join("b")
        assert len({group.worker.id, first, second}) == 3
        assert await group.call("a", functions.relay, ["b", "test"], 1) == (["a", "b", "test"], 1)
        assert await group.worker.rpc_sync(second, functions.where) == ("b", processes["b"].pid)
        await group.call("a", functions.leave)
        assert await processes["a"].told() == "left"
        assert await processes["a"].ended() == 0
        with pytest.raises((arpc.WorkerLostError, arpc.UnknownWorkerError), match="'a'"):
            await group.call("a", functions.where)
        with pytest.raises((arpc.WorkerLostError, arpc.UnknownWorkerError), match="'a'"):
            await group.call("b", functions.relay, ["a"], 2)
        assert {member.name for member in await group.worker.rendezvous.members()} == {"test", "b"}


async def test_a_worker_that_left_comes_back(processes: Processes):
    async with elastic(processes, "file") as group:
        await group.join("other")
        ids = set()
        for number in range(3):
            ids.add(await group.join("a"))
            assert await group.call("a", functions.where) == ("a", processes["a"].pid)
            assert await group.call("other", functions.relay, ["a", "test", "other"], number) == (
                ["other", "a", "test", "other"],
                number,
            )
            await group.call("a", functions.leave)
            assert await processes["a"].ended() == 0
        assert len(ids) == 3, "an id was given out twice"


async def test_a_worker_that_crashed_comes_back(processes: Processes):
    async with elastic(processes, "file") as group:
        await group.join("other")
        for number in range(3):
            await group.join("a")
            assert await group.call("a", functions.relay, ["other", "a"], number) == (["a", "other", "a"], number)
            pending = group.worker.rpc_async("a", functions.hang, args=([],), timeout=0)
            await group.call("a", functions.wait_for, "started")
            processes["a"].kill()
            with pytest.raises(arpc.WorkerLostError, match="'a' was lost"):
                await pending
            with pytest.raises(arpc.WorkerLostError, match="'a' cannot be reached"):
                await group.call("a", functions.where)
        await group.join("a")
        # also for one that has not heard of the end of the last one
        assert await group.call("other", functions.relay, ["a", "test"], 9) == (["other", "a", "test"], 9)
        assert {member.name for member in await group.worker.rendezvous.members()} == {"test", "other", "a"}


async def test_a_name_has_one_worker_at_a_time(processes: Processes):
    async with elastic(processes, "file") as group:
        await group.join("a")
        await group.join("b")
        impostor = Processes(processes.directory / "impostor", processes.runtime_directory)
        impostor.directory.mkdir()
        try:
            process = impostor.start(Start("a", processes.init_method), functions.tell_error)
            kind, text = await process.told()
            assert kind == "NameTakenError"
            assert "'a' is taken" in text
            assert await process.ended() == 0
        finally:
            impostor.close()
        assert await group.call("b", functions.relay, ["a"], 1) == (["b", "a"], 1)
        assert await group.call("a", functions.where) == ("a", processes["a"].pid)
