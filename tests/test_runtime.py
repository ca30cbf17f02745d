"""The start of a worker: one in each context, and undone if it fails."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest
from torch.distributed import HashStore

import arpc
from arpc import runtime, startup
from arpc.agent.scope import current_scope
from arpc.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    NotInitializedError,
)
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.leftovers import until
from tests.agent.stage import (
    call_on,
    echo_in_thread,
)

QUICK = RpcOptions(gc_freeze=False)


# -- the start


async def test_the_current_worker_is_that_of_the_context():
    with pytest.raises(NotInitializedError, match="init_rpc"):
        runtime.current()
    async with cluster(2) as group:
        assert runtime.current() is group[0]
        assert await group[0].rpc_sync("worker1", name_of_the_current) == "worker1"
    with pytest.raises(NotInitializedError):
        runtime.current()


async def test_a_thread_without_a_worker_is_told_how_to_have_one():
    async with cluster(1):
        loop = asyncio.get_running_loop()
        with pytest.raises(NotInitializedError, match=r"asyncio\.to_thread"):
            await loop.run_in_executor(None, runtime.current)  # which hands no context on
        assert (await asyncio.to_thread(runtime.current)).name == "worker0"


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def name_of_the_current() -> str:
    return runtime.current().name


async def start(name: str, store: HashStore, size: int | None, rank: int | None, **more: Any) -> arpc.Worker:
    return await startup.start_worker(
        name, rank=rank, world_size=size, init_method="", store=store, options=QUICK, **more
    )


async def test_a_context_has_one_worker_at_a_time():
    async with cluster(1):
        with pytest.raises(AlreadyInitializedError, match=r"worker 'worker0' already.*task of its own"):
            await start("second", HashStore(), 1, 0)
        second = await asyncio.create_task(start_in_own_context())
        assert runtime.current().name == "worker0"
        assert await second.rpc_sync("second", whoami) == second.info
        await second.shutdown()


async def start_in_own_context() -> arpc.Worker:
    current_scope.set(None)
    return await start("second", HashStore(), 1, 0)


async def test_a_worker_may_follow_one_that_was_shut_down():
    first = await start("first", HashStore(), 1, 0)
    await first.shutdown()
    second = await start("second", HashStore(), 1, 0)
    assert runtime.current() is second
    await second.shutdown()
    current_scope.set(None)


@pytest.mark.parametrize("name", ["", "with space", "x" * 128, "slash/ed", None, 3])
async def test_a_name_that_cannot_be(name):
    with pytest.raises(ConfigurationError, match="Worker name"):
        await start(name, HashStore(), 1, 0)


async def test_what_was_started_is_undone_when_the_rest_fails(monkeypatch):
    tasks = asyncio.all_tasks()
    store = HashStore()

    def fail(*_: Any) -> None:
        raise LookupError("no such door")

    with monkeypatch.context() as patch:
        patch.setattr(startup, "check_guarded", fail)
        with pytest.raises(LookupError, match="no such door"):
            await start("worker", store, 1, 0)
    assert current_scope.get() is None
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    worker = await start("worker", store, 1, 0)
    await worker.shutdown()
    current_scope.set(None)


async def test_a_start_that_is_cancelled_leaves_the_group_to_others():
    store = HashStore()
    waiting = asyncio.create_task(start("first", store, 2, 0))
    await asyncio.wait([waiting], timeout=0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_has_joined_and_fails_then_leaves(monkeypatch):
    async def fail(*_: Any) -> None:
        raise LookupError("nobody to meet")

    async with cluster(["first"], elastic=True) as group:
        with monkeypatch.context() as patch:
            patch.setattr(startup, "_meet_members", fail)
            with pytest.raises(ExceptionGroup) as failure:
                await group.add("second")
        assert failure.group_contains(LookupError, match="nobody to meet")
        assert [member.name for member in await group[0].rendezvous.members()] == ["first"]


async def test_those_who_left_an_elastic_group_are_not_listed():
    async with cluster(["first", "second"], elastic=True) as group:
        first, second = group
        assert await first.rpc_sync("second", echo_in_thread, args=(1,)) == 1
        assert {info.name for info in first.get_worker_infos()} == {"first", "second"}  # ids are given as they come
        await second.shutdown()
        await until(lambda: first.get_worker_infos() == [first.info])


async def test_two_workers_of_one_process_over_sockets():
    store = HashStore()
    tasks = [asyncio.create_task(start(f"worker{rank}", store, 2, rank)) for rank in range(2)]
    first, second = await asyncio.gather(*tasks)
    assert await first.rpc_sync("worker1", whoami) == second.info
    assert (
        await second.rpc_sync("worker0", call_on, args=("worker1", echo_in_thread, "there and back"))
        == "there and back"
    )
    await asyncio.gather(first.shutdown(), second.shutdown())


async def test_options_that_concern_the_process(monkeypatch):
    switch_interval = sys.getswitchinterval()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    frozen: list[bool] = []
    try:
        async with cluster(1, options=RpcOptions(switch_interval=0.001, gc_freeze=True)):
            assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        sys.setswitchinterval(switch_interval)
    assert frozen == [True]
