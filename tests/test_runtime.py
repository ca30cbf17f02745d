"""The life of a worker: how it starts, how it ends, and what is listened on between."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest
from torch.distributed import HashStore

import arpc
from arpc import runtime
from arpc.agent.scope import current_scope
from arpc.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    NotInitializedError,
    RendezvousTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, leftovers
from tests.agent.stage import (
    Stage,
    call_on,
    echo,
    echo_in_thread,
    hold,
    hold_in_thread,
    setting_stages,
    the_stage,
)

QUICK = RpcOptions(gc_freeze=False)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Where a test and its handlers meet."""
    with setting_stages() as set_stage:
        yield set_stage()


def is_closed(worker: arpc.Worker) -> bool:
    return worker.is_shut_down and not worker.agent.connector._links and not leftovers(worker)


# -- a graceful end


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_a_graceful_shutdown_waits_for_handlers(stage, handler):
    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", handler, args=("held", "value"))
        await stage.wait_until("held begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.1)
        assert not any(shutdown.done() for shutdown in shutdowns)
        assert not future.done()
        stage.open()
        assert await future == "value"
        await asyncio.gather(*shutdowns)
        assert all(map(is_closed, group))


async def test_a_graceful_shutdown_waits_for_the_work_of_the_whole_group(stage):
    """Worker 0 has nothing to do itself, but is called in the end by the handler that the others wait for."""
    async with cluster(3) as group:
        future = group[1].rpc_async("worker2", call_when_opened, args=("worker0",))
        await stage.wait_until("begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.1)
        assert not shutdowns[0].done()
        stage.open()
        assert await future == "from worker0"
        await asyncio.gather(*shutdowns)
        assert all(map(is_closed, group))


async def call_when_opened(to: str) -> str:
    stage = the_stage()
    stage.reached("begun")
    await stage.pass_gate()
    for _ in range(10):
        await arpc.rpc_sync(to, echo)
    return f"from {(await arpc.rpc_sync(to, whoami)).name}"


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def test_a_worker_serves_until_the_others_come():
    """As a parameter server does, that has nothing to do but to be called."""
    async with cluster(2) as group:
        server = asyncio.create_task(group[0].shutdown())
        for number in range(20):
            assert await group[1].rpc_sync("worker0", echo_in_thread, args=(number,)) == number
        assert not server.done()
        await group[1].shutdown()
        await server


async def test_a_graceful_shutdown_waits_for_streams(stage):
    async with cluster(2) as group:
        stream = group[0].stream("worker1", one_and_another)
        assert await anext(stream) == 1
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in group]
        await asyncio.wait(shutdowns, timeout=0.05)
        assert not any(shutdown.done() for shutdown in shutdowns)
        stage.open()
        assert [item async for item in stream] == [2]
        await asyncio.gather(*shutdowns)


async def one_and_another():
    stage = the_stage()
    yield 1
    await stage.pass_gate()
    yield 2


async def test_time_may_run_out_before_all_have_come():
    async with cluster(2) as group:
        with pytest.raises(RendezvousTimeoutError, match="worker1"):
            await group[0].shutdown(timeout=0.1)
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


@pytest.mark.parametrize("elastic", [True, False])
async def test_time_may_run_out_with_calls_under_way(stage, elastic):
    async with cluster(2, elastic=elastic) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        with pytest.raises(RendezvousTimeoutError, match=r"calls under way.*within 0\.1 s"):
            await group[0].shutdown(timeout=0.1)
        with pytest.raises(ShutdownError):
            await future
        assert is_closed(group[0])
        await stage.wait_until("held cancelled")
        await group[1].shutdown(graceful=False)


async def test_the_options_say_how_long_at_most():
    async with cluster(2, options=RpcOptions(shutdown_timeout=0.1, gc_freeze=False)) as group:
        with pytest.raises(RendezvousTimeoutError):
            await group[0].shutdown()
        await group[1].shutdown(graceful=False)


async def test_a_worker_that_was_lost_is_not_waited_for():
    options = RpcOptions(heartbeat_interval=0.1, heartbeat_timeout=0.2, gc_freeze=False)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", echo)
        await group[1].shutdown(graceful=False)
        with pytest.raises(WorkerLostError, match=r"worker 'worker1' was lost.*gracefully") as caught:
            await group[0].shutdown()
        assert caught.value.worker == "worker1"
        assert is_closed(group[0])


# -- an end at once


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_an_end_at_once_waits_for_no_handler(stage, handler):
    async with cluster(2, elastic=True) as group:
        future = group[0].rpc_async("worker1", handler)
        await stage.wait_until("held begun")
        begin = time.monotonic()
        await group[1].shutdown(graceful=False)
        assert time.monotonic() - begin < 2
        assert is_closed(group[1]) or handler is hold_in_thread
        with pytest.raises((arpc.CallCancelledError, WorkerLostError)):
            await future
        stage.open()
        await assert_nothing_left(group)


async def test_an_end_at_once_gives_up_on_a_handler_that_goes_on(stage, monkeypatch):
    monkeypatch.setattr("arpc.agent.carriers._CLOSE_S", 0.05)
    async with cluster(2, elastic=True) as group:
        future = group[0].rpc_async("worker1", refuse_to_end)
        await stage.wait_until("begun")
        begin = time.monotonic()
        await group[1].shutdown(graceful=False)
        assert time.monotonic() - begin < 2
        with pytest.raises(WorkerLostError, match="has left"):
            await future
        stage.open()
        await stage.wait_until("ended")
        await assert_nothing_left(group)


async def refuse_to_end() -> None:
    stage = the_stage()
    stage.reached("begun")
    while True:
        try:
            await stage.pass_gate()
        except asyncio.CancelledError:
            continue
        stage.reached("ended")
        return


async def test_an_end_at_once_before_anything_was_done():
    async with cluster(3) as group:
        await asyncio.gather(*(worker.shutdown(graceful=False) for worker in group))
        assert all(map(is_closed, group))


async def test_requests_that_wait_do_not_begin_in_the_end(stage):
    async with cluster(2, options=RpcOptions(max_handlers_per_peer=1, gc_freeze=False), elastic=True) as group:
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(3)]
        await stage.wait_until("n0 begun")
        await group[1].shutdown(graceful=False)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, arpc.CallCancelledError | WorkerLostError) for result in results)
        assert not stage.was_reached("n1 begun")
        await assert_nothing_left(group)


# -- twice, and cancelled


async def test_a_second_shutdown_waits_for_the_first(stage):
    async with cluster(2) as group:
        future = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        shutdowns = [asyncio.create_task(worker.shutdown()) for worker in [*group, *group]]
        await asyncio.wait(shutdowns, timeout=0.05)
        assert not any(shutdown.done() for shutdown in shutdowns)
        stage.open()
        await asyncio.gather(future, *shutdowns)
        await group[0].shutdown()
        await group[0].shutdown(graceful=False)


async def test_one_at_once_makes_the_first_stop_waiting():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        await asyncio.wait([first], timeout=0.05)
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError, match="shut down without the group"):
            await first
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


async def test_a_cancelled_shutdown_closes_all_the_same():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        second = asyncio.create_task(group[0].shutdown())
        await asyncio.wait([first], timeout=0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert is_closed(group[0])
        with pytest.raises(ShutdownError, match="waiting for it was cancelled"):
            await second
        await group[1].shutdown(graceful=False)


async def test_a_shutdown_cancelled_in_its_first_step_closes_all_the_same():
    async with cluster(2) as group:
        first = asyncio.create_task(group[0].shutdown())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


async def test_a_shutdown_under_a_timeout():
    async with cluster(2) as group:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await group[0].shutdown()
        assert is_closed(group[0])
        await group[1].shutdown(graceful=False)


# -- afterwards


async def test_a_worker_that_was_shut_down_takes_no_calls():
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        await asyncio.gather(*(worker.shutdown() for worker in group))
        for to in ("worker0", "worker1", 1):
            with pytest.raises(ShutdownError, match="worker0"):
                await group[0].rpc_sync(to, echo)
            with pytest.raises(ShutdownError, match="worker0"):
                group[0].rpc_async(to, echo)
            with pytest.raises(ShutdownError, match="worker0"):
                group[0].stream(to, echo)
        future = await asyncio.to_thread(group[0].rpc_async, "worker1", echo)
        with pytest.raises(ShutdownError):
            await future
        assert group[0].statistics()["connector"]["connections"] == 0
        assert "worker0" in repr(group[0])


async def test_nothing_of_a_worker_is_left_on_its_loop():
    before = asyncio.all_tasks()
    async with cluster(3) as group:
        await group[0].rpc_sync("worker1", call_on, args=("worker2", echo_in_thread, 1))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert all(map(is_closed, group))


# -- the start


async def test_the_current_worker_is_that_of_the_context():
    with pytest.raises(NotInitializedError, match="init_rpc"):
        runtime.current()
    async with cluster(2) as group:
        assert runtime.current() is group[0]
        assert await group[0].rpc_sync("worker1", name_of_the_current) == "worker1"
    with pytest.raises(NotInitializedError):
        runtime.current()


async def name_of_the_current() -> str:
    return runtime.current().name


async def start(name: str, store: HashStore, size: int | None, rank: int | None, **more: Any) -> arpc.Worker:
    return await runtime.start_worker(
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
        patch.setattr(runtime, "refuse_open_doors", fail)
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


# -- where to listen


def test_the_host_of_the_group(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "master.example")
    assert runtime.store_host("env://", None) == "master.example"
    assert runtime.store_host("tcp://10.1.2.3:29500", None) == "10.1.2.3"
    assert runtime.store_host("file:///tmp/x", None) is None
    assert runtime.store_host("", HashStore()) is None
    monkeypatch.delenv("MASTER_ADDR")
    assert runtime.store_host("env://", None) is None


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::1"])
def test_a_group_of_one_host_listens_there_only(host):
    assert runtime.default_addresses(QUICK, host) == ("unix://", "tcp://127.0.0.1:0")


def test_a_group_of_many_hosts_listens_on_the_interface_that_leads_there(monkeypatch):
    class Probe:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: Any) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.5", 1

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.9.*ARPC_SECRET"):
        runtime.default_addresses(QUICK, "10.0.0.9")
    for options in (QUICK.replace(secret=b"s"), QUICK.replace(insecure=True)):
        assert runtime.default_addresses(options, "10.0.0.9") == ("unix://", "tcp://10.0.0.5:0")


def test_an_open_door_needs_a_secret(caplog):
    for address in ("tcp://0.0.0.0:0", "tcp://10.0.0.5:1234", "tcp://[::]:0"):
        with pytest.raises(ConfigurationError, match="refusing to listen on"):
            runtime.refuse_open_doors([address], QUICK)
        runtime.refuse_open_doors([address], QUICK.replace(secret=b"s"))
    for address in ("unix://", "tcp://127.0.0.1:0", "tcp://localhost:0", "memory://"):
        runtime.refuse_open_doors([address], QUICK)
    assert not caplog.records
    runtime.refuse_open_doors(["tcp://0.0.0.0:0"], QUICK.replace(insecure=True))
    assert "WITHOUT A SECRET" in caplog.text


def test_fingerprints(monkeypatch, tmp_path):
    assert runtime.host_fingerprint() == runtime.host_fingerprint() != ""
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    first = runtime.main_fingerprint()
    script.write_text("print(2)")
    assert runtime.main_fingerprint() != first
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "missing.py"), raising=False)
    assert runtime.main_fingerprint() == ""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert runtime.main_fingerprint() == "", "nobody can share a notebook"
