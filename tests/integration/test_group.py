"""How groups of fixed size begin and end."""

from __future__ import annotations

import asyncio
import time

import pytest
from torch.distributed import FileStore

import arpc
from arpc.group.static_group import StaticRendezvous
from tests.integration import functions
from tests.integration.processes import QUICK, Processes, Start


async def test_those_who_are_missing_are_named(processes: Processes):
    for rank, name in ((1, "a"), (3, "c")):
        processes.start(Start(name, processes.init_method, rank, 6), functions.tell_error)
    store = FileStore(processes.init_method.removeprefix("file://"), -1)
    while not store.check(["arpc/static/0/start/value/1", "arpc/static/0/start/value/3"]):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    texts = []
    # who loses patience tells those who would wait longer
    with pytest.raises(arpc.RendezvousTimeoutError) as missing:
        await Start("test", processes.init_method, 0, 6, QUICK.replace(init_timeout=0.3)).join()
    texts.append(str(missing.value))
    for name in ("a", "c"):
        kind, text = await processes[name].told()
        assert kind == "RendezvousTimeoutError"
        texts.append(text)
        assert await processes[name].ended() == 0
    for text in texts:
        assert "3 of 6 workers are missing, rank 2, 4-5" in text
        assert "'a' (rank 1), 'c' (rank 3)" in text
    assert processes.sockets() == []


@pytest.mark.usefixtures("runtime_directory")
async def test_a_call_waits_for_a_callee_that_is_about_to_join(tmp_path, monkeypatch):
    may_go_on = asyncio.Event()
    members = StaticRendezvous.members

    async def members_when_allowed(self: StaticRendezvous):
        if self.record.name == "slow":
            await may_go_on.wait()
        return await members(self)

    monkeypatch.setattr(StaticRendezvous, "members", members_when_allowed)
    starts = [Start(name, f"file://{tmp_path / 'store'}", rank, 2) for rank, name in enumerate(("quick", "slow"))]

    async def join(start: Start) -> arpc.Worker:
        return await start.join()

    quick, slow = (asyncio.create_task(join(start)) for start in starts)
    worker = await quick
    call = worker.rpc_async("slow", functions.relay, args=(["quick", "slow"], 1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(call), 0.1)
    may_go_on.set()
    assert await call == (["slow", "quick", "slow"], 1)
    await asyncio.gather(worker.shutdown(), (await slow).shutdown())


async def test_a_server_that_shuts_down_first_goes_on_serving(processes: Processes):
    size = 3
    processes.start(Start("server", processes.init_method, 1, size), functions.shut_down_at_once)
    processes.start(Start("trainer", processes.init_method, 2, size), functions.serve)
    worker = await Start("test", processes.init_method, 0, size).join()
    assert await processes["server"].told() == "shutting down"
    for number in range(30):
        there, value = await worker.rpc_sync("trainer", functions.relay, args=(["server", "test", "server"], number))
        assert (there, value) == (["trainer", "server", "test", "server"], number)
        await asyncio.sleep(0.01)
    slow = worker.rpc_async("server", functions.sleep, args=(0.5,))
    await worker.rpc_sync("trainer", functions.leave)
    assert processes["server"].is_alive
    await worker.shutdown()
    assert slow.done(), "the end is that of the last call"
    assert await slow == "slept"
    assert await processes["server"].told() == "shut down"
    for name in ("server", "trainer"):
        assert await processes[name].ended() == 0
        assert "ERROR" not in processes[name].output
    assert processes.sockets() == []


async def test_a_shutdown_that_is_not_graceful_waits_for_nobody(processes: Processes):
    async with processes.group("a", "b", main=functions.serve) as worker:
        from_here = worker.rpc_async("a", functions.hang, args=([],), timeout=0)
        through_here = worker.rpc_async("a", functions.hang, args=(["test"],), timeout=0)
        to_here = worker.rpc_async("b", functions.call_and_tell, args=("test", functions.hang), timeout=0)
        await functions.wait_for("started")
        assert await worker.rpc_sync("a", functions.wait_for, args=("started",)) == 2
        started = time.monotonic()
        await worker.shutdown(graceful=False)
        assert time.monotonic() - started < 10
        for call in (from_here, through_here, to_here):
            with pytest.raises(arpc.ShutdownError):
                await call
        with pytest.raises(arpc.ShutdownError):
            worker.rpc_async("a", functions.echo, args=(1,))
        assert all(processes[name].is_alive for name in ("a", "b"))


async def test_a_group_with_a_dead_worker_does_not_wait_for_it(processes: Processes):
    async with processes.group("victim", "other", main=functions.serve) as worker:
        await worker.rpc_sync("victim", functions.relay, args=(["other"], 1))
        processes["victim"].kill()
        await worker.rpc_sync("other", functions.leave)
        # It finds out soon, and tells the other, who would wait longer than the test has time
        worker.options = worker.options.replace(heartbeat_timeout=1.0)
        with pytest.raises(arpc.WorkerLostError, match="'victim' was lost"):
            await worker.shutdown()
        assert await processes["other"].ended() != 0
        assert "Error: worker 'victim' was lost" in processes["other"].output
        assert [name.partition("-")[0] for name in processes.sockets()] == [str(processes["victim"].pid)]


async def test_patience_has_a_limit(processes: Processes):
    async with processes.group("busy", main=functions.serve) as worker:
        await worker.rpc_sync("busy", functions.echo, args=(1,))
        started = time.monotonic()
        with pytest.raises(arpc.RendezvousTimeoutError, match=r"'busy' \(rank 1\)"):
            await worker.shutdown(timeout=0.3)
        assert time.monotonic() - started < 20
        assert worker.is_shut_down


async def test_groups_one_after_the_other_in_the_same_processes(processes: Processes):
    rounds = 3
    processes.start(Start("again", processes.init_method, 1, 2), functions.join_three_times)
    for number in range(rounds):
        start = Start("test", f"{processes.init_method}-{number}", 0, 2)
        async with start.join() as worker:
            assert await worker.rpc_sync("again", functions.where) == ("again", processes["again"].pid)
        assert await processes["again"].told() == number
    assert await processes["again"].ended() == 0
    assert processes.sockets() == []
