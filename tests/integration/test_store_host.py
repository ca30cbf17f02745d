"""The worker that serves the store of an elastic group dies: the group goes on, and is found where it was."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

import arpc
from arpc.runtime import current
from tests.integration import functions
from tests.integration.processes import QUICK, Processes, Start, WorkerProcess


@pytest.fixture
def place() -> str:
    """An address that no store is at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def impostors(processes: Processes) -> Iterator[Processes]:
    """Processes that may have the names of others."""
    directory = processes.directory / "impostors"
    directory.mkdir(exist_ok=True)
    made = Processes(directory, processes.runtime_directory)
    try:
        yield made
    finally:
        made.close()


async def start(processes: Processes, place: str, *names: str) -> list[WorkerProcess]:
    """Workers that join one after the other: the first of a group serves its store."""
    started = []
    for name in names:
        process = processes.start(Start(name, place), functions.serve)
        await process.told()
        started.append(process)
    return started


async def names_of(worker: arpc.Worker) -> set[str]:
    return {record.name for record in await worker.rendezvous.members()}


async def serves_store() -> bool:
    return bool(current().statistics()["rendezvous"]["store_host"])


async def tell_names(start: Start, tell) -> None:
    """Join, and tell who is there; or why that cannot be."""
    try:
        worker = await start.join()
    except arpc.ArpcError as error:
        tell((type(error).__name__, str(error)))
        return
    tell(sorted(await names_of(worker)))
    await functions.leaving.wait()
    await worker.shutdown(graceful=False)


@asynccontextmanager
async def joined(place: str, name: str = "test") -> AsyncIterator[arpc.Worker]:
    worker = await Start(name, place).join()
    try:
        yield worker
    finally:
        await worker.shutdown(graceful=False)


async def until_back(worker: arpc.Worker, *names: str) -> None:
    """Return once a worker is in a store again, and finds others there."""
    while True:
        try:
            if set(names) <= await names_of(worker):
                return
        except arpc.RendezvousError:
            pass
        await asyncio.sleep(0.02)


async def test_survivors_and_newcomers_are_one_group(processes: Processes, place: str):
    (host,) = await start(processes, place, "host")
    async with joined(place) as worker:
        await start(processes, place, "a", "b")
        for name in ("a", "b"):
            await worker.rpc_sync(name, functions.echo, args=(0,))
        ids = {info.id for info in worker.get_worker_infos()}
        assert len(ids) == 4
        host.kill()
        # among themselves they go on as if nothing had happened
        assert await worker.rpc_sync("a", functions.relay, args=(["b", "test"], 1)) == (["a", "b", "test"], 1)
        process = processes.start(Start("c", place), tell_names)
        assert {"a", "b", "c", "test"} <= set(await process.told())
        assert await worker.rpc_sync("c", functions.relay, args=(["a", "b", "test"], 2)) == (["c", "a", "b", "test"], 2)
        assert await worker.rpc_sync("b", functions.relay, args=(["c"], 3)) == (["b", "c"], 3)
        assert worker.get_worker_info("c").id not in ids, "an id was given out twice"
        serving = [await worker.rpc_sync(name, serves_store) for name in ("a", "b", "c", "test")]
        assert serving.count(True) == 1


async def test_a_living_name_is_not_given_again(processes: Processes, place: str):
    (host,) = await start(processes, place, "host")
    async with joined(place) as worker:
        await start(processes, place, "a", "b")
        host.kill()
        with impostors(processes) as others:
            # at once: it may be the first to serve a store there
            kind, text = await others.start(Start("a", place), functions.tell_error).told()
        assert kind == "NameTakenError"
        assert "'a' is taken" in text
        await until_back(worker, "a", "b", "test")
        assert await worker.rpc_sync("b", functions.relay, args=(["a"], 1)) == (["b", "a"], 1)
        assert await worker.rpc_sync("a", functions.where) == ("a", processes["a"].pid)


async def test_the_dead_host_comes_back_under_its_name(processes: Processes, place: str):
    (host,) = await start(processes, place, "host")
    async with joined(place) as worker:
        await start(processes, place, "a")
        before = worker.get_worker_info("host").id
        for number in range(3):
            host.kill()
            (host,) = await start(processes, place, "host")
            assert await worker.rpc_sync("host", functions.where) == ("host", host.pid)
            assert await worker.rpc_sync("a", functions.relay, args=(["host", "test"], number)) == (
                ["a", "host", "test"],
                number,
            )
            after = worker.get_worker_info("host").id
            assert after != before
            before = after


async def test_one_host_after_the_other_dies(processes: Processes, place: str):
    names = ["a", "b", "c", "d"]
    await start(processes, place, *names)
    async with joined(place) as worker:
        while names:
            serving = [name for name in names if await worker.rpc_sync(name, serves_store)]
            victim = (serving or names)[0]
            processes[victim].kill()
            names.remove(victim)
            with impostors(processes) as others:
                found = await others.start(Start("guest", place), tell_names).told()
                assert {*names, "guest", "test"} <= set(found)


async def test_newcomers_race_for_the_address(processes: Processes, place: str):
    (host,) = await start(processes, place, "host")
    async with joined(place) as worker:
        await start(processes, place, "a")
        host.kill()
        newcomers = [f"n{number}" for number in range(4)]
        started = [processes.start(Start(name, place), tell_names) for name in newcomers]
        for process in started:
            assert isinstance(await process.told(), list)
        await until_back(worker, "a", *newcomers)
        for name in newcomers:
            assert await worker.rpc_sync(name, functions.relay, args=(["a", "test"], 1)) == ([name, "a", "test"], 1)


async def test_a_name_has_one_worker_though_two_want_it(processes: Processes, place: str):
    """Of two that come under one free name while the store is being found again, one is let in."""
    (host,) = await start(processes, place, "host")
    async with joined(place) as worker:
        host.kill()
        with impostors(processes) as others:
            told = [
                await process.told()
                for process in [
                    processes.start(Start("twin", place), tell_names),
                    others.start(Start("twin", place), tell_names),
                ]
            ]
            assert sorted(type(one).__name__ for one in told) == ["list", "tuple"]
            assert next(one for one in told if isinstance(one, tuple))[0] == "NameTakenError"
            await until_back(worker, "twin")
            name, pid = await worker.rpc_sync("twin", functions.where)
            assert (name, pid in {processes["twin"].pid, others["twin"].pid}) == ("twin", True)


async def test_a_host_that_leaves_hands_the_address_on(processes: Processes, place: str):
    await start(processes, place, "host")
    async with joined(place) as worker:
        await start(processes, place, "a")
        await worker.rpc_sync("host", functions.leave)
        assert await processes["host"].told() == "left"
        assert await processes["host"].ended() == 0
        (newcomer,) = await start(processes, place, "b")
        assert await worker.rpc_sync("a", functions.relay, args=(["b"], 1)) == (["a", "b"], 1)
        assert await worker.rpc_sync("b", functions.where) == ("b", newcomer.pid)


async def test_workers_with_ranks_serve_it_as_well(processes: Processes, place: str):
    """A rank is a wish for an id, and rank 0 serves the store if nobody does."""
    host = processes.start(Start("host", place, rank=0), functions.serve)
    assert await host.told() == 0
    worker = await Start("test", place, rank=1).join()
    try:
        assert worker.id == 1
        host.kill()
        host = processes.start(Start("host", place, rank=0), functions.serve)
        assert await host.told() > 1, "no id is used twice"
        assert await worker.rpc_sync("host", functions.where) == ("host", host.pid)
    finally:
        await worker.shutdown(graceful=False)


async def test_shutting_down_while_there_is_no_store(processes: Processes, place: str):
    (host,) = await start(processes, place, "host")
    worker = await Start("test", place, options=QUICK).join()
    host.kill()
    async with asyncio.timeout(10):
        await worker.shutdown()
