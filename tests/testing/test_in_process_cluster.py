"""The group of workers in one process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import psutil
import pytest
import torch

import arpc
from arpc.errors import (
    ConfigurationError,
    NameTakenError,
    NotInitializedError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
    WorkerLostError,
)
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.transport.in_process import MemoryNetwork
from tests.agent.leftovers import until


async def where() -> str:
    return arpc.get_worker_info().name


async def relay(*names: str) -> list[str]:
    """Call on along the names; who was there."""
    here = [await where()]
    return here + (await arpc.rpc_sync(names[0], relay, args=names[1:]) if names else [])


def add(one, two):
    return one + two


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_workers_by_number_and_by_name():
    async with cluster(3) as group:
        assert len(group) == 3
        assert [worker.name for worker in group] == ["worker0", "worker1", "worker2"]
        assert [worker.id for worker in group] == [0, 1, 2]
        assert group["worker1"] is group[1]
        assert group[-1] is group[2]
        with pytest.raises(KeyError):
            group["nobody"]


async def test_workers_call_each_other():
    async with cluster(["a", "b", "c"]) as group:
        assert await group["a"].rpc_sync("b", add, args=(torch.ones(2), 1)) is not None
        assert await group["b"].rpc_sync("c", relay, args=("a", "b", "c")) == ["c", "a", "b", "c"]
        assert await group["c"].rpc_sync("c", where) == "c"


async def test_the_first_worker_is_the_current_one():
    async with cluster(2) as group:
        assert arpc.get_worker_info().name == "worker0"
        assert await arpc.rpc_sync("worker1", where) == "worker1"
        async with asyncio.timeout(30):
            await asyncio.create_task(group[1].rpc_sync("worker0", where))
    with pytest.raises(NotInitializedError):
        arpc.get_worker_info()


async def test_clusters_one_after_the_other_and_inside_each_other():
    for _ in range(2):
        async with cluster(2) as outer, cluster(["inner0", "inner1"]) as inner:
            assert arpc.get_worker_info().name == "inner0"
            assert await inner[0].rpc_sync("inner1", where) == "inner1"
            with pytest.raises(UnknownWorkerError):
                await inner[0].rpc_sync("worker1", where)
            assert await outer[0].rpc_sync("worker1", where) == "worker1"


async def test_nothing_is_left_behind():
    before_threads, before_fds = set(threading.enumerate()), psutil.Process().num_fds()
    async with cluster(3) as group:
        await asyncio.gather(*(worker.rpc_sync("worker0", os.getpid) for worker in group))
    assert all(worker.is_shut_down for worker in group)
    for thread in set(threading.enumerate()) - before_threads:
        thread.join(30)
        assert not thread.is_alive(), thread
    await until(lambda: psutil.Process().num_fds() <= before_fds)


async def test_an_error_inside_ends_the_cluster_at_once():
    pending: list[arpc.Future[None]] = []

    async def use_cluster() -> None:
        async with cluster(2) as group:
            pending.append(group[0].rpc_async("worker1", never))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use_cluster()
    with pytest.raises((ShutdownError, WorkerLostError)):
        await pending[0]


async def test_the_end_waits_for_calls_under_way():
    done = []

    async def slow() -> None:
        await asyncio.sleep(0.05)
        done.append(True)

    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", slow)
    await future
    assert future.done()


async def test_options_are_those_of_all_workers():
    options = RpcOptions(gc_freeze=False, rpc_timeout=0.05)
    async with cluster(2, options=options) as group:
        assert all(worker.options is options for worker in group)
        with pytest.raises(RpcTimeoutError):
            await group[1].rpc_sync("worker0", never)


async def test_another_transport():
    network = MemoryNetwork()
    async with cluster(2, transports={"memory": network}) as group:
        assert await group[0].rpc_sync("worker1", where) == "worker1"
        assert len(network._listeners) == 2
    assert not network._listeners


async def test_an_elastic_group_grows_and_shrinks():
    async with cluster(["a"], elastic=True) as group:
        newcomer = await group.add("b")
        assert await group["a"].rpc_sync("b", where) == "b"
        assert await newcomer.rpc_sync("a", where) == "a"
        await newcomer.shutdown()
        with pytest.raises((WorkerLostError, UnknownWorkerError)):
            await group["a"].rpc_sync("b", where)


async def test_a_worker_comes_back_under_its_name():
    async with cluster(["a", "b"], elastic=True) as group:
        for _ in range(3):
            assert await group["a"].rpc_sync("b", where) == "b"
            assert await group["b"].rpc_sync("a", where) == "a"
            await group["b"].shutdown()
            group._workers.remove(group["b"])
            await group.add("b")


async def test_only_an_elastic_group_grows():
    async with cluster(2) as group:
        with pytest.raises(ConfigurationError, match="elastic=True"):
            await group.add("one more")


@pytest.mark.parametrize("names", [0, [], ["same", "same"]])
async def test_a_group_that_cannot_be(names):
    with pytest.raises(ConfigurationError, match="names that differ"):
        async with cluster(names):
            pytest.fail("it could")


async def test_a_start_that_fails_undoes_what_was_started():
    gc.collect()  # what other tests of this process left to it
    before = psutil.Process().num_fds()
    async with cluster(["a"], elastic=True) as group:
        with pytest.raises(ExceptionGroup) as failure:
            await group.start(["b", "a", "c"])
        assert failure.group_contains(NameTakenError)
        assert [worker.name for worker in group] == ["a"]
        assert [member.name for member in await group["a"].rendezvous.members()] == ["a"]
        await group.add("b")
        assert await group["a"].rpc_sync("b", where) == "b"
    await until(lambda: psutil.Process().num_fds() <= before)  # threads that end have one each
