"""The functions people call, each for the worker of its context."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

import pytest
from torch.distributed import HashStore

import arpc
from arpc import api
from arpc.agent.scope import current_scope
from arpc.errors import AlreadyInitializedError, ConfigurationError, NotInitializedError, ShutdownError
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.stage import echo

QUICK = RpcOptions(gc_freeze=False)


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def count_up(stop: int):
    for number in range(stop):
        yield number


def alone(name: str = "solo", **more: Any) -> api.WorkerStart:
    """A group of one, over the usual sockets."""
    return arpc.init_rpc(name, rank=0, world_size=1, store=HashStore(), options=QUICK, **more)


# -- life cycle


async def test_a_worker_for_a_block():
    async with alone() as worker:
        assert isinstance(worker, arpc.Worker)
        assert arpc.get_worker_info() == worker.info == arpc.WorkerInfo("solo", 0)
        assert await arpc.rpc_sync("solo", echo, args=(1,)) == 1
    assert worker.is_shut_down
    with pytest.raises(NotInitializedError):
        await arpc.rpc_sync("solo", echo)
    with pytest.raises(ShutdownError):
        await worker.rpc_sync("solo", echo)


def test_options_are_options():
    with pytest.raises(ConfigurationError, match=r"options must be arpc.RpcOptions\(...\), not dict"):
        arpc.init_rpc("solo", rank=0, world_size=1, options={"rpc_timeout": 3})


async def test_a_worker_to_await():
    worker = await alone()
    assert await arpc.rpc_sync("solo", echo, args=(1,)) == 1
    await arpc.shutdown()
    assert worker.is_shut_down
    with pytest.raises(NotInitializedError, match="no worker to shut down"):
        await arpc.shutdown()


async def test_nothing_happens_before_it_is_awaited():
    start = alone("not a name")
    with pytest.raises(ConfigurationError):
        await start


async def test_one_start_after_the_other():
    for number in range(3):
        async with alone(f"number{number}"):
            assert arpc.get_worker_info().name == f"number{number}"


async def test_a_second_worker_in_the_same_context():
    async with alone():
        with pytest.raises(AlreadyInitializedError, match="'solo'"):
            await alone("another")
        assert await arpc.rpc_sync("solo", echo, args=("alive",)) == "alive"


async def test_a_second_worker_in_a_task_of_its_own():
    """The task inherits the context of the first, and says that it means another."""

    async def another() -> str:
        with pytest.raises(AlreadyInitializedError):
            await alone("another")
        return arpc.get_worker_info().name

    async with alone():
        assert await asyncio.create_task(another()) == "solo"


async def test_several_workers_of_one_process_started_side_by_side():
    async def work(store: HashStore, rank: int) -> list[str]:
        start = arpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, store=store, options=QUICK)
        async with start:
            assert arpc.get_worker_info().id == rank
            return [(await arpc.rpc_sync(to, whoami)).name for to in range(3)]

    store = HashStore()
    results = await asyncio.gather(*(work(store, rank) for rank in range(3)))
    assert results == [["worker0", "worker1", "worker2"]] * 3


async def test_an_exception_in_the_block_does_not_wait_for_the_others():
    """The other worker never shuts down: a graceful end would wait for it."""
    store = HashStore()

    async def other() -> arpc.Worker:
        return await arpc.init_rpc("other", rank=1, world_size=2, store=store, options=QUICK)

    async def fail() -> None:
        async with arpc.init_rpc("failing", rank=0, world_size=2, store=store, options=QUICK) as worker:
            started.append(worker)
            await worker.rpc_sync("other", echo)
            raise LookupError("in the block")

    started: list[arpc.Worker] = []
    task = asyncio.create_task(other())
    with pytest.raises(LookupError, match="in the block"):
        await fail()
    assert started[0].is_shut_down
    await (await task).shutdown(graceful=False)


async def test_a_cancelled_block_does_not_wait_for_the_others_either():
    async with cluster(2) as group:

        async def block() -> None:
            start = api.WorkerStart(lambda: asyncio.sleep(0, group[0]))
            async with start:
                entered.set()
                await asyncio.Event().wait()

        entered = asyncio.Event()
        task = asyncio.create_task(block())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert group[0].is_shut_down
        await group[1].shutdown(graceful=False)


async def test_rank_and_size_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    async with arpc.init_rpc("solo", store=HashStore(), options=QUICK) as worker:
        assert worker.id == 0


@pytest.mark.parametrize(("variable", "value"), [("RANK", "one"), ("WORLD_SIZE", "many"), ("WORLD_SIZE", "-1")])
async def test_an_environment_that_makes_no_sense(monkeypatch, variable, value):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=r"(?i)rank|world_size"):
        await arpc.init_rpc("solo", store=HashStore(), options=QUICK)


async def test_a_group_that_workers_join_at_any_time():
    store = HashStore()
    async with arpc.init_rpc("first", world_size=None, store=store, options=QUICK) as first:

        async def join() -> list[str]:
            from arpc.agent.scope import current_scope

            current_scope.set(None)
            async with arpc.init_rpc("second", world_size=None, store=store, options=QUICK):
                assert (await first.rpc_sync("second", whoami)).name == "second"
                return [(await arpc.rpc_sync(to, whoami)).name for to in ("first", "second")]

        assert await asyncio.create_task(join()) == ["first", "second"]
        assert await arpc.rpc_sync("first", echo, args=("still here",)) == "still here"


# -- calls


async def test_without_a_worker_every_function_says_so():
    for call in (
        lambda: arpc.rpc_async("w", echo),
        lambda: arpc.rpc_sync("w", echo),
        lambda: arpc.stream("w", count_up),
        arpc.get_worker_info,
    ):
        with pytest.raises(NotInitializedError, match="has not been initialized"):
            call()
    assert arpc.remaining_time() is None


async def test_the_functions_are_those_of_the_current_worker():
    async with cluster(2) as group:
        assert await arpc.rpc_sync("worker1", whoami) == group[1].info
        assert await arpc.rpc_async("worker1", whoami) == group[1].info
        assert [number async for number in arpc.stream("worker1", count_up, (3,), window=1)] == [0, 1, 2]
        assert arpc.get_worker_info("worker1") == arpc.get_worker_info(1) == group[1].info
        assert arpc.get_worker_info() == group[0].info
        assert arpc.get_worker_infos() == [worker.info for worker in group]


async def test_arguments_in_the_order_that_people_know():
    async with cluster(2):
        assert await arpc.rpc_sync("worker1", join, (1,), {"b": 2}, 5.0) == "1 2"
        assert await arpc.rpc_async("worker1", join, (1,), {"b": 2}, 5.0) == "1 2"
        assert await arpc.rpc_sync("worker1", join, [1], {"b": 2}) == "1 2"


def join(a: Any, b: Any) -> str:
    return f"{a} {b}"


async def test_arguments_that_are_no_sequence():
    async with cluster(2):
        for wrong in (3, "ab", object()):
            with pytest.raises(TypeError):
                await arpc.rpc_sync("worker1", join, wrong)


async def test_a_coroutine_in_the_place_of_a_function():
    async with cluster(2):
        coroutine = echo(1)
        with pytest.raises(TypeError, match="not its call"):
            await arpc.rpc_sync("worker1", coroutine)
        coroutine.close()


async def test_the_functions_and_the_methods_take_the_same():
    for name in ("rpc_async", "rpc_sync", "stream", "get_worker_info", "shutdown"):
        function = inspect.signature(getattr(arpc, name))
        method = inspect.signature(getattr(arpc.Worker, name))
        assert list(function.parameters.values()) == list(method.parameters.values())[1:], name


def test_every_public_name_is_there():
    assert len(set(arpc.__all__)) == len(arpc.__all__)
    for name in arpc.__all__:
        assert getattr(arpc, name, None) is not None, name
    from arpc import functions, futures

    for module in (functions, futures):
        for name in module.__all__:
            assert getattr(module, name)


async def test_a_context_without_a_worker_takes_the_only_one_of_its_loop():
    """As the cells of a notebook do, each of which runs in a context of its own."""
    start = arpc.init_rpc("solo", rank=0, world_size=1, store=HashStore())
    worker = await asyncio.create_task(worker_of(start))
    assert current_scope.get() is None
    assert arpc.get_worker_info() == worker.info
    assert await arpc.rpc_sync("solo", whoami) == worker.info
    assert arpc.RRef(1).owner() == worker.info
    async with arpc.autograd.context() as context_id:
        assert context_id >> 48 == worker.id
    await asyncio.create_task(arpc.shutdown())
    with pytest.raises(arpc.NotInitializedError):
        arpc.get_worker_info()


async def worker_of(start: Awaitable[arpc.Worker]) -> arpc.Worker:
    return await start


async def test_a_context_without_a_worker_has_none_if_there_are_several():
    group = cluster(2)
    await asyncio.create_task(group.__aenter__())
    with pytest.raises(arpc.NotInitializedError):
        arpc.get_worker_info()
    await asyncio.create_task(group.__aexit__(None, None, None))
